/* Reads the directory table of another process of this host, a batch of keys in one call.
 *
 * The file belongs to another process, so nothing in it is trusted: the header is copied and
 * checked once per batch, every access is within the file, every search and every retry has a
 * bound. Anything invalid makes the batch fail; the reader then asks the owner.
 *
 * A batch, and why it is right (docs/adr/0017-the-directory-beside-the-engine.md):
 *   begin   loads epoch, authority, tick, then the places of both indices.
 *   look    looks into the old index before the current one, copies a row between two loads of its
 *           word, and keeps it only if both are equal and not WRITING.
 *   looks up the holders of these rows, and then compares the epoch again: no index and no holder's
 *   entry changed its meaning in between.
 *
 * A file that another user may truncate is read by the kernel (`pread`): a load beyond its end
 * would be a bus error. Otherwise it is mapped, and a lock keeps the owner from releasing memory
 * during the batch.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "_table_layout.h"

#define CHUNK 8           /* slots that one pread loads */
#define BATCH 64          /* keys whose memory is fetched together */
#define LISTED_MAX 64     /* rows of one key that are examined */
#define ROW_TRIES 64      /* retries of a row that is being written: 64 stores take less */
#define BATCH_TRIES 4     /* retries of a batch with a changed epoch */
#define STEPS_BASE 4096   /* slots and rows that one batch may examine, */
#define STEPS_A_KEY 64    /* plus this for each of its keys: twenty times what a full table needs */
#define FILE_BYTES_MAX (1ull << 46) /* sums of offsets below it cannot overflow */

enum {
    CUT_SHORT = -1, /* the file is shorter than its header claims, or is gone */
    FOREIGN = -2,   /* it is not a table, or that of another node */
    OTHER_VERSION = -3,
    MALFORMED = -4, /* offsets outside the file */
    TORN = -5,      /* it keeps changing, or a search in it does not end */
    NO_ROOM = -6,   /* the caller's memory is too small: a bug of the caller */
};

struct found {
    struct record record; /* `holder` is the entry's number until `end` */
    uint32_t key;         /* the index of its key in the batch */
    uint32_t row;
};

/* One reader's state. The caller makes it, all zero but the first four fields. */
struct reading {
    const char *at;    /* the mapped file, or NULL to use pread */
    int64_t file;      /* -1: private memory of this process, which needs neither lock nor check */
    uint64_t bytes;    /* mapped */
    uint64_t incarnation;
    struct found *found;
    uint64_t found_max;
    /* State of the batch. */
    uint64_t count, steps, is_torn;
    uint64_t epoch, authority, tick_ns, seed[2], holders_at, rows_at, current;
    uint64_t rows_ready, holders_ready;
    struct index index[2];
};

static int read_at(const struct reading *r, uint64_t at, void *into, uint64_t bytes)
{
    ssize_t done;

    do
        done = pread((int)r->file, into, bytes, (off_t)at);
    while (done < 0 && errno == EINTR);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return done == (ssize_t)bytes;
}

/* Load one word of the file. Returns whether that succeeded. */
static inline int load(const struct reading *r, uint64_t at, uint64_t *into)
{
    if (!r->at)
        return read_at(r, at, into, sizeof(*into));
    *into = __atomic_load_n((const uint64_t *)(r->at + at), __ATOMIC_ACQUIRE);
    return 1;
}

static int is_area(const struct reading *r, uint64_t at, uint64_t count, uint64_t size)
{
    return at >= PAGE_BYTES && at % sizeof(uint64_t) == 0 && at <= r->bytes &&
           count <= (r->bytes - at) / size;
}

/* Load the header for a batch, and check it. Returns 0, or an error. */
int64_t peercache_reading_begin(struct reading *r)
{
    struct table header;
    struct stat found;

    r->count = r->steps = r->is_torn = 0;
    if (r->file >= 0 && (fstat((int)r->file, &found) || (uint64_t)found.st_size != r->bytes))
        return CUT_SHORT;
    if (r->bytes > FILE_BYTES_MAX)
        return MALFORMED;
    if (!load(r, offsetof(struct table, epoch), &r->epoch) ||
        !load(r, offsetof(struct table, authority), &r->authority) ||
        !load(r, offsetof(struct table, tick_ns), &r->tick_ns))
        return CUT_SHORT;
    if (!r->at) {
        if (!read_at(r, 0, &header, sizeof(header)))
            return CUT_SHORT;
    } else
        /* Its changes start a new epoch, and each of its words is copied atomically. */
        for (size_t word = 0; word < sizeof(header) / sizeof(uint64_t); word++) {
            uint64_t loaded = __atomic_load_n((const uint64_t *)r->at + word, __ATOMIC_ACQUIRE);

            memcpy((char *)&header + word * sizeof(loaded), &loaded, sizeof(loaded));
        }
    if (header.magic != TABLE_MAGIC)
        return FOREIGN;
    if (header.version != TABLE_VERSION)
        return OTHER_VERSION;
    if (header.incarnation != r->incarnation)
        return FOREIGN;
    if (header.bytes != r->bytes)
        return CUT_SHORT;
    if (header.current > 1 || header.rows_ready > ROWS_MAX + 1 ||
        header.holders_ready > HOLDERS_MAX ||
        !is_area(r, header.rows_at, header.rows_ready, sizeof(struct row)) ||
        !is_area(r, header.holders_at, header.holders_ready, sizeof(struct holder)))
        return MALFORMED;
    for (unsigned which = 0; which < 2; which++) {
        const struct index *index = &header.index[which];

        if (index->capacity > 1ull << 32 || index->capacity % CHUNK ||
            !is_area(r, index->at, index->capacity, sizeof(uint64_t)))
            return MALFORMED;
        r->index[which] = *index;
    }
    memcpy(r->seed, header.seed, sizeof(r->seed));
    r->holders_at = header.holders_at, r->rows_at = header.rows_at, r->current = header.current;
    r->rows_ready = header.rows_ready, r->holders_ready = header.holders_ready;
    return 0;
}

/* Copy a complete row. Returns 1; 0 if it is free; TORN if it stays incomplete. */
static int copied(struct reading *r, uint32_t number, struct row *into)
{
    uint64_t at = r->rows_at + (uint64_t)number * sizeof(struct row), again;

    for (unsigned tries = 0; tries < ROW_TRIES; tries++) {
        if (r->at) {
            const uint64_t *words = (const uint64_t *)(r->at + at);
            uint64_t copy[sizeof(struct row) / sizeof(uint64_t) - 1];

            copy[0] = __atomic_load_n(&words[0], __ATOMIC_ACQUIRE);
            for (unsigned word = 1; word < sizeof(copy) / sizeof(*copy); word++)
                copy[word] = __atomic_load_n(&words[word], __ATOMIC_RELAXED);
            memcpy(into, copy, sizeof(copy));
            __atomic_thread_fence(__ATOMIC_ACQUIRE);
            again = __atomic_load_n(&words[0], __ATOMIC_RELAXED);
        } else if (!read_at(r, at, into, sizeof(*into)) || !read_at(r, at, &again, sizeof(again)))
            return CUT_SHORT;
        if (again != into->word || (again & STATE_BITS) == WRITING)
            continue;
        return (again & STATE_BITS) == WHOLE;
    }
    return TORN;
}

/* Add a row of a key to the result, once. Returns 0, or an error. */
static int take(struct reading *r, const uint8_t *key, uint32_t place, uint32_t number,
                uint64_t first)
{
    struct row row;
    struct found *found;
    int is_whole;

    if (number >= r->rows_ready || r->count - first >= LISTED_MAX)
        return 0; /* It is newer than the batch, or there are more copies than are returned. */
    for (uint64_t at = first; at < r->count; at++)
        if (r->found[at].row == number)
            return 0; /* It was moved into the other index in the meantime. */
    is_whole = copied(r, number, &row);
    if (is_whole == TORN) {
        r->is_torn = 1;
        return 0;
    }
    if (is_whole <= 0)
        return is_whole;
    if (memcmp(row.key, key, KEY_BYTES) != 0)
        return 0;
    if (r->count == r->found_max)
        return NO_ROOM;
    found = &r->found[r->count++];
    memcpy(found->record.key, row.key, KEY_BYTES);
    found->record.holder = row.word & HOLDER_BITS;
    found->record.offset = row.offset, found->record.generation = row.generation;
    found->record.length = row.length, found->record.flags = row.flags;
    found->record.checksum = row.checksum;
    found->key = place, found->row = number;
    return 0;
}

/* Add the rows that an index names for a key. Returns 0, or an error. */
static int probe(struct reading *r, unsigned which, const uint8_t *key, uint32_t tag,
                 uint32_t place, uint64_t first)
{
    const struct index *index = &r->index[which];
    uint64_t chunk[CHUNK], chunk_at = UINT64_MAX, begin = home_of(index, tag), at = begin;

    do {
        uint64_t slot;

        if (r->at)
            slot = __atomic_load_n((const uint64_t *)(r->at + index->at) + at, __ATOMIC_ACQUIRE);
        else {
            if (at / CHUNK != chunk_at) {
                chunk_at = at / CHUNK;
                if (!read_at(r, index->at + chunk_at * sizeof(chunk), chunk, sizeof(chunk)))
                    return CUT_SHORT;
            }
            slot = chunk[at % CHUNK];
        }
        if (slot == EMPTY)
            return 0;
        if (!r->steps--)
            return TORN;
        if (is_named(slot) && slot >> 32 == tag) {
            int problem = take(r, key, place, (uint32_t)slot, first);

            if (problem)
                return problem;
        }
        at = after(index, at);
    } while (at != begin);
    return 0;
}

/* Prefetch what a batch's next keys need. */
static void approach(const struct reading *r, const uint32_t *tags, uint64_t count)
{
    for (uint64_t at = 0; at < count; at++)
        for (unsigned which = 0; which < 2; which++)
            if (r->index[which].capacity)
                __builtin_prefetch(r->at + r->index[which].at +
                                   home_of(&r->index[which], tags[at]) * sizeof(uint64_t));
    for (uint64_t at = 0; at < count; at++) {
        const struct index *index = &r->index[r->current];
        const uint64_t *slots = (const uint64_t *)(r->at + index->at);
        uint64_t next = home_of(index, tags[at]);

        for (unsigned tries = 0; index->capacity && tries < CHUNK; tries++) {
            uint64_t slot = __atomic_load_n(&slots[next], __ATOMIC_RELAXED);

            if (slot == EMPTY)
                break;
            if (is_named(slot) && slot >> 32 == tags[at] && (uint32_t)slot < r->rows_ready) {
                __builtin_prefetch(r->at + r->rows_at + (uint32_t)slot * sizeof(struct row));
                break;
            }
            next = after(index, next);
        }
    }
}

/* Find the rows of a batch's next keys, at most `holders_max` a key: each asker begins at a
 * different holder. `place`: the number of keys before these. Returns 0, or an error. */
int64_t peercache_reading_look(struct reading *r, const uint8_t *keys, uint64_t count,
                               uint64_t place, uint64_t asker, uint64_t holders_max)
{
    uint32_t tags[BATCH];

    r->steps += STEPS_BASE + count * STEPS_A_KEY;
    for (uint64_t begin = 0; begin < count; begin += BATCH) {
        uint64_t part = count - begin < BATCH ? count - begin : BATCH;

        for (uint64_t at = 0; at < part; at++)
            tags[at] = tag_of(r->seed, keys + (begin + at) * KEY_BYTES);
        if (r->at)
            approach(r, tags, part);
        for (uint64_t at = 0; at < part; at++) {
            uint64_t first = r->count, listed;

            /* A row is in the new index before it is removed from the old one. */
            for (unsigned which = !r->current, looks = 0; looks < 2; which = !which, looks++) {
                const uint8_t *key = keys + (begin + at) * KEY_BYTES;
                int problem = !r->index[which].capacity
                                  ? 0
                                  : probe(r, which, key, tags[at], (uint32_t)(place + begin + at),
                                          first);

                if (problem)
                    return problem;
            }
            listed = r->count - first;
            if (listed > holders_max) {
                struct found turned[LISTED_MAX];

                for (uint64_t next = 0; next < holders_max; next++)
                    turned[next] = r->found[first + (asker + next) % listed];
                memcpy(r->found + first, turned, holders_max * sizeof(*turned));
                r->count = first + holders_max;
            }
        }
    }
    return 0;
}

/* Look up the holders of the rows found, drop rows of holders that are not served, and compare the
 * epoch again. `places` receives the indices of the records' keys in the batch. Returns how many
 * records are left, or TORN if the batch must be repeated. */
int64_t peercache_reading_end(struct reading *r, struct record *into, uint32_t *places)
{
    uint64_t left = 0, epoch, last = UINT64_MAX, identity = 0, state = UNUSED;

    for (uint64_t at = 0; at < r->count; at++) {
        uint64_t entry = r->found[at].record.holder;
        uint64_t holder_at = r->holders_at + entry * sizeof(struct holder);

        if (entry >= r->holders_ready)
            continue; /* It is newer than the batch. */
        if (entry != last &&
            (!load(r, holder_at + offsetof(struct holder, identity), &identity) ||
             !load(r, holder_at + offsetof(struct holder, state), &state)))
            return CUT_SHORT;
        last = entry;
        if ((uint32_t)state != SERVED || !identity)
            continue;
        into[left] = r->found[at].record;
        into[left].holder = identity;
        places[left++] = r->found[at].key;
    }
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (!load(r, offsetof(struct table, epoch), &epoch))
        return CUT_SHORT;
    return epoch == r->epoch ? (int64_t)left : TORN;
}

/* Forbid the owner to release memory, or allow it again. Returns whether that succeeded. */
static int hold(const struct reading *r, short type)
{
    struct flock whole = {.l_type = type, .l_whence = SEEK_SET};

    return !r->at || r->file < 0 || fcntl((int)r->file, F_OFD_SETLK, &whole) == 0;
}

/* Look up a batch of keys: all of the above, repeated if the epoch changes. Writes the records to
 * `into`, and the indices of their keys to `places`; returns the number of records, or an error.
 * Two threads must not use one `reading` at the same time. */
int64_t peercache_reading_batch(struct reading *r, const uint8_t *keys, uint64_t count,
                                uint64_t asker, uint64_t holders_max, struct record *into,
                                uint32_t *places)
{
    int64_t done = TORN;

    if (!hold(r, F_RDLCK))
        return TORN; /* The owner is releasing memory, for less than a millisecond. */
    for (unsigned tries = 0; tries < BATCH_TRIES && done == TORN; tries++) {
        done = peercache_reading_begin(r);
        if (!done)
            done = peercache_reading_look(r, keys, count, 0, asker, holders_max);
        if (!done)
            done = peercache_reading_end(r, into, places);
    }
    hold(r, F_UNLCK);
    return done;
}
