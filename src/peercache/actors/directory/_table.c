/* The packed table of a directory shard's records, in one flat range of memory.
 *
 *   header | holders | index 0 | index 1 | rows
 *
 * All addresses in it are offsets or numbers, so the range can be mapped at any address: in a file
 * that other processes of the host read (memory/_table_reading.c), or in private memory. A row is
 * one record of one holder. An index is open addressing with linear probing over slots of 8 bytes:
 * the row's number, and 32 bits of a keyed hash. One probe sequence finds all holders of a key. The
 * range is reserved whole, without access; memory is allocated as rows and slots are used, before
 * it is touched: a full file system makes a batch fail, and kills no process.
 *
 * Rows never move. Only the index grows: a new one is filled step by step while lookups use both,
 * then the old one is released step by step. Each change of the indices in use starts a new epoch.
 *
 * One thread writes. The order is kept for readers in other processes:
 *   a row      its word says WRITING before a field changes, and has another version afterwards. A
 *              reader loads the word, the fields, and the word again: the row is whole if both
 *              words are equal and not WRITING.
 *   an index   names a row after the row is whole, and no longer before the row is free.
 *   growth     a row is named by the new index before the old one forgets it: a reader looks into
 *              the old one first, and looks at the epoch again after the batch.
 *   a holder   its entry is given to another one after all its rows are free, under a new epoch: a
 *              reader looks at the holders of its rows before it looks at the epoch again.
 *   memory     that a reader may look into is given back only while no reader is in a batch.
 */
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "_table.h"

/* --- slots ----------------------------------------------------------------------------------- */

/* Name a row in the current index, in the first free slot from `at` on: the tag's home, or a later
 * slot with no empty one between. The caller has checked that the index has room. */
static void name(struct table *t, uint32_t tag, uint32_t number, uint64_t at)
{
    struct index *index = &t->index[t->current];
    uint64_t *slots = slots_of(t, (unsigned)t->current);

    while (is_named(slots[at]))
        at = after(index, at);
    index->used += slots[at] == EMPTY;
    index->named++;
    __atomic_store_n(&slots[at], (uint64_t)tag << 32 | number, __ATOMIC_RELEASE);
}

/* Remove a row from an index; return whether the index named it. */
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
        /* No probe sequence continues past this slot, so none needs the tombstones before it. */
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
    return t->next_capacity || t->index[!t->current].capacity || t->index_ready[!t->current];
}

/* Start to fill the next index, and to move rows out of the current one. */
static void change_index(struct table *t)
{
    struct index *index = &t->index[!t->current];

    index->used = 0;
    __atomic_store_n(&index->capacity, t->next_capacity, __ATOMIC_RELEASE);
    t->next_capacity = t->moved = 0;
    __atomic_store_n(&t->current, !t->current, __ATOMIC_RELEASE);
    __atomic_store_n(&t->epoch, t->epoch + 1, __ATOMIC_RELEASE);
}

/* The old index names nothing any more. */
static void end_move(struct table *t, struct index *old)
{
    __atomic_store_n(&old->capacity, 0, __ATOMIC_RELEASE);
    __atomic_store_n(&t->epoch, t->epoch + 1, __ATOMIC_RELEASE);
}

/* Allocate memory for the next index, up to this many bytes; return whether that succeeded. */
static int has_slots_ready(struct table *t, uint64_t bytes)
{
    uint64_t *ready = &t->index_ready[!t->current];

    if (bytes <= *ready)
        return 1;
    if (!peercache_table_usable(t, t->index[!t->current].at + *ready, bytes - *ready))
        return 0;
    *ready = bytes;
    return 1;
}

/* Load and empty the next page of the next index. Returns 0 if there is no memory for it. */
static int ready_page(struct table *t)
{
    uint64_t *slots = slots_of(t, !t->current), end = t->next_capacity * 8;
    uint64_t piece = t->moved * 8 / PIECE_BYTES * PIECE_BYTES + PIECE_BYTES;

    if (!has_slots_ready(t, piece < end ? piece : end))
        return 0;
    /* Memory that could not be given back still has the slots of an earlier index. */
    memset(&slots[t->moved], 0, PAGE_BYTES);
    t->moved += PAGE_BYTES / 8;
    return 1;
}

/* Release a piece of the memory of the unused index. Returns whether it was released. */
static int release_piece(struct table *t)
{
    uint64_t *ready = &t->index_ready[!t->current];
    uint64_t bytes = *ready < PIECE_BYTES ? *ready : PIECE_BYTES;

    if (!peercache_table_give_back(t, t->index[!t->current].at + *ready - bytes, bytes))
        return 0;
    *ready -= bytes;
    return 1;
}

/* Move the rows that the next slots of the old index name, up to `most` slots of a batch. Returns
 * the number of slots. */
static uint64_t move_slots(struct table *t, uint64_t most)
{
    struct index *old = &t->index[!t->current], *index = &t->index[t->current];
    uint64_t *first = slots_of(t, !t->current) + t->moved, count = old->capacity - t->moved;
    uint64_t *slots = slots_of(t, (unsigned)t->current), used = 0;
    uint64_t *named[BATCH];
    uint32_t found = 0;

    count = count < most ? count : most;
    count = count < BATCH ? count : BATCH;
    /* No branch: which slots name a row is as random as the hash. */
    for (uint64_t at = 0; at < count; at++) {
        named[found] = &first[at];
        found += is_named(first[at]);
    }
    for (uint32_t each = 0; each < found; each++) {
        uint64_t slot = *named[each], at = home_of(index, (uint32_t)(slot >> 32));

        /* Every third or fourth home is taken, at random; the slot after it seldom is. */
        if (at + 1 < index->capacity)
            at += is_named(slots[at]);
        while (is_named(slots[at]))
            at = after(index, at);
        used += slots[at] == EMPTY;
        __atomic_store_n(&slots[at], slot, __ATOMIC_RELEASE);
        __atomic_store_n(named[each], TOMBSTONE, __ATOMIC_RELEASE);
    }
    index->used += used;
    index->named += found;
    old->named -= found;
    t->moved += count;
    return count;
}

/* Do a bounded part of a growth: load the memory of `budget` slots of the next index, move half as
 * many out of the old one, or give its memory back. Returns whether there is more to do. */
int peercache_table_tend(struct table *t, uint64_t budget)
{
    struct index *index = &t->index[!t->current];

    /* Rows are named all over an index: without this prefetch a batch would wait for one page fault
     * per row. */
    for (; t->next_capacity && budget >= PAGE_BYTES / 8; budget -= PAGE_BYTES / 8) {
        if (!ready_page(t)) {
            t->next_capacity = 0; /* It is planned again when it is next due. */
            return 0;
        }
        if (t->moved >= t->next_capacity) {
            change_index(t);
            return 1;
        }
    }
    while (index->capacity && budget > 1) {
        if (t->moved == index->capacity) {
            end_move(t, index);
            break;
        }
        budget -= 2 * move_slots(t, budget / 2);
    }
    while (!t->next_capacity && !index->capacity && t->index_ready[!t->current] && budget) {
        /* A page takes as long as the moves of 64 slots: 0.25 us, and 0.5 us of a file. */
        uint64_t cost = PIECE_BYTES / PAGE_BYTES * 128;

        if (!release_piece(t))
            return 0; /* A reader is active; a later step or batch tries again. */
        budget -= budget < cost ? budget : cost;
    }
    /* Removals in the meantime may make the next growth due. */
    if (!peercache_table_is_growing(t))
        peercache_rows_have_slots(t, 0);
    return peercache_table_is_growing(t);
}

/* Choose the size of the next index. Its reserved range is large enough: no table has more than
 * `rows_max` rows. */
static void plan_index(struct table *t, uint64_t rows)
{
    uint64_t capacity = peercache_table_slots_for(rows);

    t->next_capacity = capacity < t->slots_min ? t->slots_min : capacity;
    t->moved = 0;
}

/* Return whether the current index has room for this many more rows. A growth begins before the
 * index is full, so that its steps are done in time; for a batch that is large compared with the
 * table they are done here. */
int peercache_rows_have_slots(struct table *t, uint64_t more)
{
    const struct index *index = &t->index[t->current];
    uint64_t wanted = index->used + t->index[!t->current].named + more;
    uint64_t rows = t->rows_live + more;
    int is_sparse = index->capacity > t->slots_min && rows * 6 < index->capacity;
    /* Memory that is not given back yet is used again. */
    int is_moving = t->next_capacity || t->index[!t->current].capacity;

    if (!is_moving && (wanted * 25 > index->capacity * 18 || is_sparse))
        plan_index(t, rows);
    if (wanted * 5 <= index->capacity * 4)
        return 1;
    while (!t->next_capacity && t->index[!t->current].capacity)
        peercache_table_tend(t, UINT64_MAX / PAGE_BYTES);
    plan_index(t, rows);
    while (t->moved < t->next_capacity)
        if (!ready_page(t)) {
            t->next_capacity = 0;
            return 0;
        }
    change_index(t);
    return 1;
}

/* --- rows ------------------------------------------------------------------------------------ */

/* Make `more` rows usable; return whether they are. */
static int has_rows(struct table *t, uint64_t more)
{
    uint64_t wanted = t->rows_used + more, ready, from;

    if (t->rows_live + more > t->rows_max)
        return 0;
    /* The rest of the batch uses freed rows. */
    if (wanted > t->rows_max + 1)
        wanted = t->rows_max + 1;
    if (wanted <= t->rows_ready)
        return 1;
    from = table_rounded(t->rows_ready * sizeof(struct row));
    ready = table_rounded(wanted * sizeof(struct row)) / PIECE_BYTES * PIECE_BYTES + PIECE_BYTES;
    if (ready > table_rounded((t->rows_max + 1) * sizeof(struct row)))
        ready = table_rounded((t->rows_max + 1) * sizeof(struct row));
    if (!peercache_table_usable(t, t->rows_at + from, ready - from))
        return 0;
    if (ready / sizeof(struct row) > t->rows_max + 1)
        ready = (t->rows_max + 1) * sizeof(struct row);
    __atomic_store_n(&t->rows_ready, ready / sizeof(struct row), __ATOMIC_RELEASE);
    return 1;
}

void peercache_rows_flip(struct holder *holder, const struct row *row)
{
    holder->digests[row->key[0]] ^= digest_of(row->key, row->generation, row->flags);
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
    copy_word(&row->length, &record->length); /* and the flags behind it */
    copy_word(&row->checksum, &record->checksum);
    __atomic_store_n(&row->word, (uint64_t)born << 32 | version | WHOLE | entry, __ATOMIC_RELEASE);
}

/* Add a record that the holder does not have yet; the caller has made room for it. */
void peercache_rows_add(struct table *t, int64_t entry, const struct record *record,
                        const struct place *place, uint32_t born)
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
    name(t, place->tag, number,
         place->free == NO_SLOT ? home_of(&t->index[t->current], place->tag) : place->free);
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
    __atomic_store_n(&row->word, (row->word & VERSION_BITS) | UNUSED, __ATOMIC_RELEASE);
    row->next = t->row_free;
    t->row_free = number;
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

    if (entry >= 0) {
        t->holder_free = holder_at(t, entry)->next_free;
        /* A reader may have read rows of the previous holder, and not yet have looked up which
         * holder that is. */
        __atomic_store_n(&t->epoch, t->epoch + 1, __ATOMIC_RELEASE);
        __atomic_thread_fence(__ATOMIC_RELEASE);
    } else {
        uint64_t from = table_rounded(t->holders_used * sizeof(struct holder));
        uint64_t end = table_rounded((t->holders_used + 1) * sizeof(struct holder));

        entry = t->holders_used;
        if (entry == HOLDERS_MAX || (end > from && !peercache_table_usable(t, t->holders_at + from, end - from)))
            return -1;
        t->holders_used++;
    }
    holder = holder_at(t, entry);
    /* A new entry is all zero, and the sweep of the last row has left the entry in that state. */
    __atomic_store_n(&holder->identity, identity, __ATOMIC_RELAXED);
    __atomic_store_n(&holder->state, is_served ? SERVED : KEPT, __ATOMIC_RELEASE);
    if (t->holders_used > t->holders_ready)
        __atomic_store_n(&t->holders_ready, t->holders_used, __ATOMIC_RELEASE);
    return entry;
}

/* Return whether answers name a holder; -1 if no holder has this number. */
int peercache_table_serve(struct table *t, int64_t entry, int is_served)
{
    struct holder *holder = used_holder(t, entry);

    if (!holder)
        return -1;
    __atomic_store_n(&holder->state, is_served ? SERVED : KEPT, __ATOMIC_RELEASE);
    return 0;
}

/* Remove up to `budget` records of a holder that ended; if it has fewer, its entry becomes free.
 * Returns how many were removed, -1 if no holder has this number. */
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
            peercache_rows_remove(t, row, tag_of(t->seed, row_at(t, row)->key));
        }
    if (removed < budget) {
        __atomic_store_n(&holder->state, UNUSED, __ATOMIC_RELEASE);
        holder->next_free = t->holder_free;
        t->holder_free = (uint32_t)entry + 1;
    }
    return removed;
}

/* --- authority ------------------------------------------------------------------------------- */

/* Publish the version of the ring for which this table lacks no record; 0: it may lack records. */
void peercache_table_authorise(struct table *t, uint64_t ring)
{
    __atomic_store_n(&t->authority, ring, __ATOMIC_RELEASE);
}

/* Publish that the owner was active at this time of CLOCK_MONOTONIC. */
void peercache_table_tick(struct table *t, uint64_t now_ns)
{
    __atomic_store_n(&t->tick_ns, now_ns, __ATOMIC_RELEASE);
}

/* Publish that pages were removed: readers drop the locations that they have cached. */
void peercache_table_count_removal(struct table *t)
{
    __atomic_fetch_add(&t->removals, 1, __ATOMIC_RELEASE);
}

/* Return the epoch, the number of rows in use, the slots of both indices, the bytes that may be in
 * use, and the last values of `authorise` and `tick`. */
void peercache_table_figures(const struct table *t, uint64_t *figures)
{
    uint64_t slots = t->index[0].capacity + t->index[1].capacity;

    figures[0] = t->epoch;
    figures[1] = t->rows_live;
    figures[2] = slots;
    figures[3] = t->rows_used * sizeof(struct row) + t->index_ready[0] + t->index_ready[1] +
                 t->holders_used * sizeof(struct holder);
    figures[4] = t->authority;
    figures[5] = t->tick_ns;
}
