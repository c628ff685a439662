/* The packed table of a directory shard's records, in one flat range of memory.
 *
 *   header | holders | index 0 | index 1 | rows
 *
 * All addresses in it are offsets or numbers, so it may lie anywhere. A row is one record of one
 * holder. An index is open addressing with linear probing over slots of 8 bytes: the row's number,
 * and 32 bits of a keyed hash. All holders of a key are found by one probe sequence. The range is
 * reserved whole, without access; memory comes as rows and slots are used.
 *
 * Rows never move. What grows is the index: a new one is filled in pieces while both are looked
 * into, and the old one is given back in pieces. Each change of which indices count is a new epoch.
 *
 * One thread writes. The order is kept for readers in other processes:
 *   a row      its word says WRITING before a field changes, and has another version afterwards. A
 *              reader loads the word, the fields, and the word again: the row is whole if both
 *              words are equal and not WRITING.
 *   an index   names a row after the row is whole, and no longer before the row is free.
 *   growth     a row is named by the new index before the old one forgets it: a reader looks into
 *              the old one first, and looks at the epoch again after the batch.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "_table.h"

#define PIECE_BYTES (1ull << 18) /* of an index that is given back, at a time */

static uint64_t rounded(uint64_t bytes)
{
    return (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

/* --- memory ---------------------------------------------------------------------------------- */

/* Make the first `bytes` of an area usable. Returns whether they are. Not with huge pages: a virtual
 * machine may take 6 ms to find one, and each would be a stop. */
static int usable(struct table *t, uint64_t at, uint64_t bytes)
{
    return mprotect((char *)t + at, bytes, PROT_READ | PROT_WRITE) == 0;
}

/* Give pages back: they are as if never used. */
static void give_back(struct table *t, uint64_t at, uint64_t bytes)
{
    /* Mapped anew, not only emptied: hosts that count promised memory count it no longer. */
    mmap((char *)t + at, bytes, PROT_NONE,
         MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0);
}

static uint64_t slots_for(uint64_t rows)
{
    uint64_t slots = rows * 17 / 9 + 1; /* 53 % full: with the rows 79 bytes a record */

    return rounded(slots * 8) / 8;
}

/* Return an empty table of at most `rows_max` rows whose first index has `slots` slots; NULL with
 * errno if its memory cannot be had. `seed` must be secret: who knows it can make keys collide. */
struct table *peercache_table_new(const uint64_t *seed, uint64_t rows_max, uint64_t slots)
{
    struct table plan = {.magic = TABLE_MAGIC, .version = TABLE_VERSION, .epoch = 1};
    struct table *t;

    if (rows_max < 1 || rows_max > ROWS_MAX || slots < 1 || slots > ROWS_MAX) {
        errno = EINVAL;
        return NULL;
    }
    memcpy(plan.seed, seed, sizeof(plan.seed));
    plan.rows_max = rows_max;
    plan.holders_at = rounded(sizeof(plan));
    plan.slots_max = slots_for(rows_max) + rounded(slots * 8) / 8;
    plan.index[0].at = plan.holders_at + rounded(HOLDERS_MAX * sizeof(struct holder));
    plan.index[1].at = plan.index[0].at + plan.slots_max * 8;
    plan.rows_at = plan.index[1].at + plan.slots_max * 8;
    plan.bytes = plan.rows_at + rounded((rows_max + 1) * sizeof(struct row));
    plan.slots_min = plan.index[0].capacity = rounded(slots * 8) / 8;
    plan.rows_used = 1;
    t = mmap(NULL, plan.bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (t == MAP_FAILED)
        return NULL;
    if (!usable(t, 0, plan.holders_at) || !usable(t, plan.index[0].at, plan.slots_min * 8)) {
        munmap(t, plan.bytes);
        errno = ENOMEM;
        return NULL;
    }
    *t = plan;
    return t;
}

/* Give all memory of a table back. */
void peercache_table_free(struct table *t)
{
    munmap(t, t->bytes);
}

/* --- keys and slots -------------------------------------------------------------------------- */

#define ROTATED(word, by) ((word) << (by) | (word) >> (64 - (by)))
#define ROUND                                                                                      \
    do {                                                                                           \
        v0 += v1, v1 = ROTATED(v1, 13), v1 ^= v0, v0 = ROTATED(v0, 32);                            \
        v2 += v3, v3 = ROTATED(v3, 16), v3 ^= v2;                                                  \
        v0 += v3, v3 = ROTATED(v3, 21), v3 ^= v0;                                                  \
        v2 += v1, v1 = ROTATED(v1, 17), v1 ^= v2, v2 = ROTATED(v2, 32);                            \
    } while (0)

/* Return 32 bits of a key's SipHash-1-3. All keys have one length, so it is not hashed. */
uint32_t peercache_rows_tag(const struct table *t, const uint8_t *key)
{
    uint64_t v0 = t->seed[0] ^ 0x736f6d6570736575, v1 = t->seed[1] ^ 0x646f72616e646f6d;
    uint64_t v2 = t->seed[0] ^ 0x6c7967656e657261, v3 = t->seed[1] ^ 0x7465646279746573;
    uint64_t halves[2];

    memcpy(halves, key, sizeof(halves));
    v3 ^= halves[0];
    ROUND;
    v0 ^= halves[0], v3 ^= halves[1];
    ROUND;
    v0 ^= halves[1], v2 ^= 0xff;
    ROUND;
    ROUND;
    ROUND;
    return (uint32_t)((v0 ^ v1 ^ v2 ^ v3) >> 32);
}

/* Name a row in the current index. Its capacity has been made sure of. */
static void name(struct table *t, uint32_t tag, uint32_t number)
{
    struct index *index = &t->index[t->current];
    uint64_t *slots = slots_of(t, (unsigned)t->current), at = home_of(index, tag);

    while (is_named(slots[at]))
        at = after(index, at);
    index->used += slots[at] == EMPTY;
    index->named++;
    __atomic_store_n(&slots[at], (uint64_t)tag << 32 | number, __ATOMIC_RELEASE);
}

/* Let an index forget a row; return whether it named it. */
static int forget_in(struct table *t, unsigned which, uint32_t tag, uint32_t number)
{
    struct index *index = &t->index[which];
    uint64_t *slots = slots_of(t, which), wanted = (uint64_t)tag << 32 | number, at;

    if (!index->capacity)
        return 0;
    for (at = home_of(index, tag); slots[at] != wanted; at = after(index, at))
        if (slots[at] == EMPTY)
            return 0;
    index->named--;
    __atomic_store_n(&slots[at], TOMBSTONE, __ATOMIC_RELEASE);
    if (slots[after(index, at)] == EMPTY)
        /* No probe sequence leads on from here, so none needs the tombstones before it. */
        while (slots[at] == TOMBSTONE) {
            __atomic_store_n(&slots[at], EMPTY, __ATOMIC_RELEASE);
            index->used--;
            at = at ? at - 1 : index->capacity - 1;
        }
    return 1;
}

/* Return whether a growth is under way: `tend` has work. */
int peercache_table_is_growing(const struct table *t)
{
    return t->next_capacity || t->index[!t->current].capacity || t->released_until;
}

/* Begin to write the next index, and to move out of the other one. */
static void change_index(struct table *t)
{
    struct index *index = &t->index[!t->current];

    index->used = index->named = 0;
    index->capacity = t->next_capacity;
    t->next_capacity = t->moved = 0;
    __atomic_store_n(&t->current, !t->current, __ATOMIC_RELEASE);
    __atomic_store_n(&t->epoch, t->epoch + 1, __ATOMIC_RELEASE);
}

/* The old index names nothing any more. */
static void end_move(struct table *t, struct index *old)
{
    t->released_until = old->capacity * 8;
    old->used = 0;
    __atomic_store_n(&old->capacity, 0, __ATOMIC_RELEASE);
    __atomic_store_n(&t->epoch, t->epoch + 1, __ATOMIC_RELEASE);
}

/* Do a bounded part of a growth: load the memory of `budget` slots of the next index, move half as
 * many out of the old one, or give its memory back. Returns whether there is more to do. */
int peercache_table_tend(struct table *t, uint64_t budget)
{
    unsigned other = !t->current;
    struct index *index = &t->index[other];
    uint64_t *slots = slots_of(t, other);

    /* Rows are named all over an index: without this a batch would wait for a page a row. */
    for (; t->next_capacity && budget >= PAGE_BYTES / 8; budget -= PAGE_BYTES / 8) {
        __atomic_store_n(&slots[t->moved], EMPTY, __ATOMIC_RELAXED);
        t->moved += PAGE_BYTES / 8;
        if (t->moved >= t->next_capacity) {
            change_index(t);
            return 1;
        }
    }
    for (; index->capacity && budget > 1; budget -= 2, t->moved++) {
        if (t->moved == index->capacity) {
            end_move(t, index);
            break;
        }
        uint64_t slot = slots[t->moved];

        if (is_named(slot)) {
            name(t, (uint32_t)(slot >> 32), (uint32_t)slot);
            index->named--;
            __atomic_store_n(&slots[t->moved], TOMBSTONE, __ATOMIC_RELEASE);
        }
    }
    while (!index->capacity && t->released_until && budget) {
        /* A page is given back as fast as four of its slots are moved. */
        uint64_t bytes = budget < PIECE_BYTES ? budget * (PAGE_BYTES / 4) : PIECE_BYTES;

        bytes = bytes < PIECE_BYTES ? rounded(bytes) : PIECE_BYTES;
        bytes = bytes < t->released_until ? bytes : t->released_until;
        t->released_until -= bytes;
        give_back(t, index->at + t->released_until, bytes);
        budget -= budget < bytes / (PAGE_BYTES / 4) ? budget : bytes / (PAGE_BYTES / 4);
    }
    /* What was removed meanwhile may make the next one due. */
    if (!peercache_table_is_growing(t))
        peercache_rows_have_slots(t, 0);
    return peercache_table_is_growing(t);
}

/* Choose the size of the next index, and make it usable. Returns whether there is one. */
static int plan_index(struct table *t, uint64_t rows)
{
    uint64_t capacity = slots_for(rows);

    if (capacity < t->slots_min)
        capacity = t->slots_min;
    if (capacity > t->slots_max || !usable(t, t->index[!t->current].at, capacity * 8))
        return 0;
    t->next_capacity = capacity;
    t->moved = 0;
    return 1;
}

/* Return whether so many more rows find a place in the current index. A growth begins before that
 * is full, so that its parts are done in time; for a batch that is large for the table they are
 * done here. */
int peercache_rows_have_slots(struct table *t, uint64_t more)
{
    const struct index *index = &t->index[t->current];
    uint64_t wanted = index->used + t->index[!t->current].named + more;
    uint64_t rows = t->rows_live + more;
    int is_sparse = index->capacity > t->slots_min && rows * 6 < index->capacity;

    if (!peercache_table_is_growing(t) && (wanted * 25 > index->capacity * 18 || is_sparse) &&
        !plan_index(t, rows))
        return wanted * 5 <= index->capacity * 4;
    if (wanted * 5 <= index->capacity * 4)
        return 1;
    while (!t->next_capacity && peercache_table_tend(t, UINT64_MAX / PAGE_BYTES))
        ;
    if (!plan_index(t, rows))
        return 0;
    change_index(t);
    return 1;
}

/* --- rows ------------------------------------------------------------------------------------ */

/* Make `more` rows usable; return whether they are. */
static int has_rows(struct table *t, uint64_t more)
{
    uint64_t wanted = t->rows_used + more, ready;

    if (t->rows_live + more > t->rows_max)
        return 0;
    /* The rest of a batch finds freed rows. */
    if (wanted > t->rows_max + 1)
        wanted = t->rows_max + 1;
    if (wanted <= t->rows_ready)
        return 1;
    ready = rounded((wanted + wanted / 8) * sizeof(struct row)) / sizeof(struct row);
    if (ready > t->rows_max + 1)
        ready = t->rows_max + 1;
    if (!usable(t, t->rows_at, rounded(ready * sizeof(struct row))))
        return 0;
    t->rows_ready = ready;
    return 1;
}

static uint64_t mixed(uint64_t word)
{
    /* The finaliser of splitmix64, as in model/records.py. */
    word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9;
    word = (word ^ word >> 27) * 0x94d049bb133111eb;
    return word ^ word >> 31;
}

void peercache_rows_flip(struct holder *holder, const struct row *row)
{
    uint64_t halves[2];

    memcpy(halves, row->key, sizeof(halves));
    halves[0] ^= mixed(halves[1] ^ mixed(row->generation));
    holder->digests[row->key[0]] ^= mixed(halves[0] ^ row->flags);
}

static void copy_word(void *into, const void *from)
{
    uint64_t word;

    memcpy(&word, from, sizeof(word));
    __atomic_store_n((uint64_t *)into, word, __ATOMIC_RELAXED);
}

/* Write a record into a row, in the order that readers rely on. */
void peercache_rows_write(struct row *row, const struct record *record, uint64_t entry,
                          uint32_t born)
{
    uint64_t version = (row->word + VERSION_ONE) & VERSION_BITS;

    __atomic_store_n(&row->word, (row->word & ~(uint64_t)STATE_BITS) | WRITING, __ATOMIC_RELAXED);
    __atomic_thread_fence(__ATOMIC_RELEASE);
    copy_word(row->key, record->key);
    copy_word(row->key + 8, record->key + 8);
    copy_word(&row->offset, &record->offset);
    copy_word(&row->generation, &record->generation);
    copy_word(&row->length, &record->length); /* and the flags after it */
    copy_word(&row->checksum, &record->checksum);
    __atomic_store_n(&row->word, (uint64_t)born << 32 | version | WHOLE | entry, __ATOMIC_RELEASE);
}

/* Add a record that the holder has not; room for it has been made sure of. */
void peercache_rows_add(struct table *t, int64_t entry, const struct record *record, uint32_t tag,
                        uint32_t born)
{
    struct holder *holder = holder_at(t, entry);
    uint32_t number = t->row_free, bucket = record->key[0];
    struct row *row;

    if (number) {
        t->row_free = row_at(t, number)->next;
        __builtin_prefetch(row_at(t, t->row_free), 1);
    } else
        /* The first access to new memory is a store: after a load it would be two faults. */
        row_at(t, number = (uint32_t)t->rows_used++)->word = UNUSED;
    row = row_at(t, number);
    peercache_rows_write(row, record, entry, born);
    row->previous = 0;
    row->next = holder->first[bucket];
    if (row->next)
        row_at(t, row->next)->previous = number | (row_at(t, row->next)->previous & MARKED);
    holder->first[bucket] = number;
    holder->counts[bucket]++;
    holder->count++;
    t->rows_live++;
    peercache_rows_flip(holder, row);
    name(t, tag, number);
}

void peercache_rows_remove(struct table *t, uint32_t number, uint32_t tag)
{
    struct row *row = row_at(t, number);
    struct holder *holder = holder_at(t, row->word & HOLDER_BITS);
    uint32_t bucket = row->key[0], previous = row->previous & ~MARKED;

    if (!forget_in(t, (unsigned)t->current, tag, number))
        forget_in(t, !t->current, tag, number);
    peercache_rows_flip(holder, row);
    if (previous)
        row_at(t, previous)->next = row->next;
    else
        holder->first[bucket] = row->next;
    if (row->next)
        row_at(t, row->next)->previous = previous | (row_at(t, row->next)->previous & MARKED);
    holder->counts[bucket]--;
    holder->count--;
    t->rows_live--;
    __atomic_store_n(&row->word, ((row->word + VERSION_ONE) & VERSION_BITS) | UNUSED,
                     __ATOMIC_RELEASE);
    row->next = t->row_free;
    t->row_free = number;
}

/* --- finding --------------------------------------------------------------------------------- */

/* Load what the first look at a key will need. */
static void prefetch_slots(const struct table *t, uint32_t tag)
{
    for (unsigned which = 0; which < 2; which++)
        if (t->index[which].capacity)
            __builtin_prefetch(slots_of(t, which) + home_of(&t->index[which], tag));
}

static void prefetch_row(const struct table *t, uint32_t tag)
{
    for (unsigned which = 0; which < 2; which++) {
        const struct index *index = &t->index[which];
        const uint64_t *slots = slots_of(t, which);

        if (!index->capacity)
            continue;
        for (uint64_t at = home_of(index, tag); slots[at] != EMPTY; at = after(index, at))
            if (is_named(slots[at]) && slots[at] >> 32 == tag) {
                __builtin_prefetch(row_at(t, (uint32_t)slots[at]));
                break;
            }
    }
}

/* Hash a batch's next keys, `stride` bytes apart, and load what finding them will need. */
void peercache_rows_approach(const struct table *t, const uint8_t *keys, uint64_t stride,
                             uint32_t *tags, uint64_t count)
{
    for (uint64_t at = 0; at < count; at++) {
        tags[at] = peercache_rows_tag(t, keys + at * stride);
        prefetch_slots(t, tags[at]);
    }
    for (uint64_t at = 0; at < count; at++)
        prefetch_row(t, tags[at]);
}

/* Return the row of a holder's record, 0 if there is none. `born`, if it is wanted and the holder
 * has an earlier entry that ended and is not swept yet, becomes that record's. */
uint32_t peercache_rows_find(const struct table *t, uint32_t tag, const uint8_t *key, int64_t entry,
                             uint32_t *born)
{
    uint64_t identity = holder_at(t, entry)->identity;

    for (unsigned which = 0; which < 2; which++) {
        const struct index *index = &t->index[which];
        const uint64_t *slots = slots_of(t, which);

        if (!index->capacity)
            continue;
        for (uint64_t at = home_of(index, tag); slots[at] != EMPTY; at = after(index, at)) {
            const struct row *row = row_at(t, (uint32_t)slots[at]);

            if (!is_named(slots[at]) || slots[at] >> 32 != tag || !has_key(row, key))
                continue;
            if ((int64_t)(row->word & HOLDER_BITS) == entry)
                return (uint32_t)slots[at];
            if (born && holder_at(t, row->word & HOLDER_BITS)->identity == identity)
                *born = (uint32_t)(row->word >> 32);
        }
    }
    return 0;
}

/* Make room for a batch, and do a part of a growth that is under way. */
int peercache_rows_have_room(struct table *t, uint64_t count)
{
    peercache_table_tend(t, count * TENDED_PER_RECORD);
    return has_rows(t, count) && peercache_rows_have_slots(t, count);
}

/* --- holders --------------------------------------------------------------------------------- */

/* Give a holder an entry; return its number, -1 if there is no more room for holders. */
int64_t peercache_table_begin(struct table *t, uint64_t identity, int is_served)
{
    int64_t entry = (int64_t)t->holder_free - 1;
    struct holder *holder;

    if (entry >= 0)
        t->holder_free = holder_at(t, entry)->next_free;
    else {
        entry = t->holders_used;
        if (entry == HOLDERS_MAX)
            return -1;
        if (!usable(t, t->holders_at, rounded((entry + 1) * sizeof(struct holder))))
            return -1;
        t->holders_used++;
    }
    holder = holder_at(t, entry);
    memset(holder, 0, sizeof(*holder));
    holder->identity = identity;
    __atomic_store_n(&holder->state, is_served ? SERVED : KEPT, __ATOMIC_RELEASE);
    return entry;
}

/* Say whether answers name a holder; returns -1 if there is none of this number. */
int peercache_table_serve(struct table *t, int64_t entry, int is_served)
{
    struct holder *holder = used_holder(t, entry);

    if (!holder)
        return -1;
    __atomic_store_n(&holder->state, is_served ? SERVED : KEPT, __ATOMIC_RELEASE);
    return 0;
}

/* Remove up to `budget` records of a holder that ended; if there are fewer, its entry is free again.
 * Returns how many were removed, -1 if there is no holder of this number. */
int64_t peercache_table_sweep(struct table *t, int64_t entry, uint64_t budget)
{
    struct holder *holder = used_holder(t, entry);
    uint64_t removed = 0;

    if (!holder)
        return -1;
    __atomic_store_n(&holder->state, KEPT, __ATOMIC_RELEASE);
    for (uint32_t bucket = 0; bucket < BUCKETS && removed < budget; bucket++)
        for (uint32_t row; removed < budget && (row = holder->first[bucket]); removed++) {
            __builtin_prefetch(row_at(t, row_at(t, row)->next));
            peercache_rows_remove(t, row, peercache_rows_tag(t, row_at(t, row)->key));
        }
    if (removed < budget) {
        __atomic_store_n(&holder->state, UNUSED, __ATOMIC_RELEASE);
        holder->next_free = t->holder_free;
        t->holder_free = (uint32_t)entry + 1;
    }
    peercache_rows_have_slots(t, 0);
    return removed;
}

/* --- authority ------------------------------------------------------------------------------- */

/* Say of which ring this table lacks nothing, by the ring's version; 0: it may lack records. */
void peercache_table_authorise(struct table *t, uint64_t ring)
{
    __atomic_store_n(&t->authority, ring, __ATOMIC_RELEASE);
}

/* Say that the owner is at work, at this time of CLOCK_MONOTONIC. */
void peercache_table_tick(struct table *t, uint64_t now_ns)
{
    __atomic_store_n(&t->tick_ns, now_ns, __ATOMIC_RELEASE);
}

/* What there is: epoch, rows that are held, slots of both indices, bytes that may be in use, and
 * what `authorise` and `tick` have said last. */
void peercache_table_figures(const struct table *t, uint64_t *figures)
{
    uint64_t slots = t->index[0].capacity + t->index[1].capacity;

    figures[0] = t->epoch;
    figures[1] = t->rows_live;
    figures[2] = slots;
    figures[3] = t->rows_used * sizeof(struct row) + slots * 8 + t->released_until +
                 t->holders_used * sizeof(struct holder);
    figures[4] = t->authority;
    figures[5] = t->tick_ns;
}
