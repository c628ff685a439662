/* A sample of pages in the order of their uses, and how far apart these were: reuse.py says why. */
#include <stdint.h>
#include <string.h>

/* A use of a page. previous: the row of its use before, or -1. A row of size 0 was used again. */
struct row {
    uint64_t hash, client;
    double at, count; /* When; how many uses of the page there were. */
    int64_t size, number, previous;
};

/* Pages that were used together. begin: the place of the first one; the next call begins after. */
struct call {
    uint64_t client;
    double at;
    int64_t size, begin;
};

_Static_assert(sizeof(struct row) == 56 && sizeof(struct call) == 32, "as in reuse.py");

/* As in reuse.py. */
struct sample {
    struct row *rows;
    int64_t *tree;    /* Of the sizes of the rows: a Fenwick tree, so that ranges are summed fast. */
    int32_t *row_of;  /* By hash, with open addressing: a row's number and 1, or 0. */
    double *counts;   /* Counted uses by distance; last, those of pages new to the sample. */
    double *weights;  /* The same, each use times the uses of its page so far. */
    const double *edges;
    uint64_t spread, threshold;
    double rate, one_use_s;
    int64_t rows_max, live_max, row_of_bits, edges_count, short_uses, pick_every;
    int64_t end, live, total; /* Rows; those with a size; their sizes. */
    int64_t number;           /* Of the use at place 0. */
    int64_t call, place;      /* What is taken next. */
    double uses, true_uses, picked, picked_short, picked_repeated, far;
};

/* The rows after `row`, without it, have this size. */
static int64_t size_after(const struct sample *sample, int64_t row)
{
    int64_t size = sample->total;

    for (int64_t at = row + 1; at > 0; at &= at - 1)
        size -= sample->tree[at];
    return size;
}

static void add_size(struct sample *sample, int64_t row, int64_t size)
{
    sample->total += size;
    for (int64_t at = row + 1; at <= sample->rows_max; at += at & -at)
        sample->tree[at] += size;
}

/* Return where the row of a page is noted: there are always more places than rows. */
static int32_t *noted(const struct sample *sample, uint64_t hash)
{
    uint64_t last = ((uint64_t)1 << sample->row_of_bits) - 1;
    uint64_t at = hash * sample->spread >> (64 - sample->row_of_bits);

    while (sample->row_of[at] && sample->rows[sample->row_of[at] - 1].hash != hash)
        at = (at + 1) & last;
    return &sample->row_of[at];
}

static int is_one_use(const struct sample *sample, uint64_t client, double before,
                      const struct call *call)
{
    return client == call->client && call->at - before <= sample->one_use_s;
}

/* Return how many edges are below a distance. */
static int64_t bucket_of(const struct sample *sample, double distance)
{
    int64_t low = 0, high = sample->edges_count;

    while (low < high) {
        int64_t middle = (low + high) / 2;

        if (sample->edges[middle] < distance)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* Append a use of a call. The sizes of rows are those before the call. */
static void add(struct sample *sample, uint64_t hash, const struct call *call, int64_t number)
{
    int32_t *place = noted(sample, hash);
    struct row *row = &sample->rows[sample->end];
    const struct row *old = *place ? &sample->rows[*place - 1] : 0;
    int is_repeated = old && is_one_use(sample, old->client, old->at, call);
    int is_far = !old || sample->number + call->begin - old->number > sample->short_uses;

    *row = (struct row){hash, call->client, call->at, 1, call->size, number, *place - 1};
    if (old)
        row->count += old->count;
    sample->true_uses -= is_repeated / sample->rate;
    sample->far += is_far;
    if (is_far && !is_repeated) {
        int64_t bucket = sample->edges_count;

        if (old)
            bucket = bucket_of(sample, (double)(row->size + size_after(sample, row->previous)) /
                                           sample->rate);
        sample->counts[bucket] += 1;
        sample->weights[bucket] += row->count;
    }
    *place = (int32_t)++sample->end;
}

/* Let the rows since `begin` have their sizes, and not the earlier ones of their pages. */
static void replace_since(struct sample *sample, int64_t begin)
{
    for (int64_t at = begin; at < sample->end; at++) {
        struct row *row = &sample->rows[at];

        add_size(sample, at, row->size);
        sample->live++;
        if (row->previous >= 0) {
            struct row *old = &sample->rows[row->previous];

            add_size(sample, row->previous, -old->size);
            sample->live--;
            old->size = 0;
        }
    }
}

/* Move the rows that have a size to the front. */
void peercache_reuse_keep(struct sample *sample)
{
    int64_t end = sample->end;

    memset(sample->row_of, 0, sizeof(*sample->row_of) << sample->row_of_bits);
    memset(sample->tree, 0, sizeof(*sample->tree) * (size_t)(sample->rows_max + 1));
    sample->end = sample->total = 0;
    for (int64_t at = 0; at < end; at++)
        if (sample->rows[at].size) {
            struct row *row = &sample->rows[sample->end];

            *row = sample->rows[at];
            sample->total += row->size;
            *noted(sample, row->hash) = (int32_t)++sample->end;
            sample->tree[sample->end] = row->size;
        }
    for (int64_t at = 1; at <= sample->rows_max; at++)
        if (at + (at & -at) <= sample->rows_max)
            sample->tree[at + (at & -at)] += sample->tree[at];
    sample->live = sample->end;
}

/* Take calls into the sample. Returns 1 if it is full before the last one: it goes on there. */
int peercache_reuse_take(struct sample *sample, const uint64_t *hashes, const struct call *calls,
                         int64_t calls_count)
{
    int64_t part = sample->rows_max - sample->live_max;

    while (sample->call < calls_count) {
        const struct call *call = &calls[sample->call];
        int64_t begin, left = call[1].begin - sample->place;

        if (sample->end + (left < part ? left : part) > sample->rows_max)
            peercache_reuse_keep(sample);
        begin = sample->end;
        for (; sample->place < call[1].begin && sample->end < begin + part; sample->place++)
            if (hashes[sample->place] <= sample->threshold)
                add(sample, hashes[sample->place], call, sample->number + sample->place);
        replace_since(sample, begin);
        if (sample->place == call[1].begin)
            sample->call++;
        if (sample->live > sample->live_max)
            return 1;
    }
    return 0;
}

/* Return the last place before `end`, of the last ones that count as short, of a page; or -1. */
static int64_t found_before(const struct sample *sample, const uint64_t *hashes, int64_t end,
                            uint64_t hash)
{
    int64_t begin = end > sample->short_uses ? end - sample->short_uses : 0;

    while (end > begin)
        if (hashes[--end] == hash)
            return end;
    return -1;
}

/* Pick uses of the calls from sample->call, and count those whose page was used shortly before. */
void peercache_reuse_pick(struct sample *sample, const uint64_t *hashes, const struct call *calls,
                          int64_t calls_count)
{
    int64_t every = sample->pick_every, place = sample->place;

    place += (every - (sample->number + place) % every) % every;
    for (int64_t at = sample->call; at < calls_count; at++)
        for (; place < calls[at + 1].begin; place += every) {
            const struct call *call = &calls[at], *old = call;
            int64_t found = found_before(sample, hashes, call->begin, hashes[place]);

            sample->picked++;
            if (found < 0)
                continue;
            while (old->begin > found)
                old--;
            sample->picked_short++;
            sample->picked_repeated += is_one_use(sample, old->client, old->at, call);
        }
}
