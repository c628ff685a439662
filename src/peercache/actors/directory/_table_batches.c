/* How a directory table adds, removes and returns records, in batches of packed records. */
#include <stdlib.h>
#include <string.h>

#include "_table.h"

/* Return the row of a holder's record as `find`.
 *
 * A free slot at the end of the first walk means that no row has this key: of an equal key earlier in
 * the batch the walk ended at the same slot, and its row, or one before it, has taken that. */
static uint32_t found(const struct table *t, const struct place *place, const uint8_t *key,
                      int64_t entry, uint32_t *born)
{
    if (place->free != NO_SLOT && !is_named(slots_of(t, (unsigned)t->current)[place->free]))
        return 0;
    return peercache_rows_find(t, place->tag, key, entry, born);
}

/* Hash the next keys and prefetch their slots: they arrive while the keys before them are
 * processed. */
static void load(const struct table *t, const char *packed, uint64_t count, uint64_t begin,
                 struct place (*both)[BATCH])
{
    const char *first = packed + begin * sizeof(struct record);

    if (begin < count)
        peercache_rows_load(t, (const uint8_t *)first, sizeof(struct record),
                            both[begin / BATCH % 2], count - begin < BATCH ? count - begin : BATCH);
}

/* Take the records that are newer than those held, or whose row is marked. */
static void take(struct table *t, int64_t entry, const char *packed, uint64_t count,
                 const uint8_t *named, struct change *change)
{
    struct place both[2][BATCH];

    load(t, packed, count, 0, both);
    for (uint64_t begin = 0; begin < count; begin += BATCH) {
        uint64_t part = count - begin < BATCH ? count - begin : BATCH;
        const char *first = packed + begin * sizeof(struct record);
        struct place *places = both[begin / BATCH % 2];

        load(t, packed, count, begin + BATCH, both);
        peercache_rows_place(t, places, part);
        for (uint64_t at = 0; at < part; at++) {
            struct record record;
            uint32_t number, born = t->born;
            struct row *row;

            memcpy(&record, first + at * sizeof(record), sizeof(record));
            if (named && !named[record.key[0]])
                continue;
            number = found(t, &places[at], record.key, entry, &born);
            if (!number) {
                t->born++;
                peercache_rows_add(t, entry, &record, &places[at], born);
                change->fresh++;
                continue;
            }
            row = row_at(t, number);
            if (row->generation >= record.generation && !(row->previous & MARKED))
                continue;
            peercache_rows_flip(holder_at(t, entry), row);
            peercache_rows_write(row, &record, entry, (uint32_t)(row->word >> 32));
            peercache_rows_flip(holder_at(t, entry), row);
            row->previous &= ~MARKED;
        }
    }
}

/* Add a holder's packed records that are newer than those held. `change` receives how many are new;
 * all are refused if there is no room. Returns whether a growth is under way; -1 for invalid
 * arguments. */
int peercache_table_put(struct table *t, int64_t entry, const char *packed, uint64_t bytes,
                        struct change *change)
{
    uint64_t count = bytes / sizeof(struct record);

    memset(change, 0, sizeof(*change));
    if (!used_holder(t, entry) || bytes % sizeof(struct record))
        return -1;
    if (peercache_rows_have_room(t, count))
        take(t, entry, packed, count, NULL, change);
    else
        change->refused = count;
    return peercache_table_is_growing(t);
}

/* Remove each record of a holder that is not newer than its drop. Returns as `put`. */
int peercache_table_drop(struct table *t, int64_t entry, const char *packed, uint64_t bytes,
                         struct change *change)
{
    uint64_t count = bytes / sizeof(struct drop);
    uint32_t tags[BATCH];

    memset(change, 0, sizeof(*change));
    if (!used_holder(t, entry) || bytes % sizeof(struct drop))
        return -1;
    peercache_table_tend(t, count * TENDED_PER_RECORD);
    for (uint64_t begin = 0; begin < count; begin += BATCH) {
        uint64_t part = count - begin < BATCH ? count - begin : BATCH;
        const char *first = packed + begin * sizeof(struct drop);

        peercache_rows_approach(t, (const uint8_t *)first, sizeof(struct drop), tags, part);
        for (uint64_t at = 0; at < part; at++) {
            struct drop drop;
            uint32_t number;

            memcpy(&drop, first + at * sizeof(drop), sizeof(drop));
            number = peercache_rows_find(t, tags[at], drop.key, entry, NULL);
            /* The page may have been committed again since: only the record of that commit may be
             * removed. */
            if (number && row_at(t, number)->generation <= drop.generation) {
                peercache_rows_remove(t, number, tags[at]);
                change->gone++;
            }
        }
    }
    peercache_rows_have_slots(t, 0);
    return peercache_table_is_growing(t);
}

/* Replace the content of some buckets of a holder by these records; records of other buckets are
 * ignored. Returns as `put`; without room nothing changes. */
int peercache_table_replace(struct table *t, int64_t entry, const uint8_t *buckets,
                            uint64_t buckets_count, const char *packed, uint64_t bytes,
                            struct change *change)
{
    uint64_t count = bytes / sizeof(struct record);
    struct holder *holder = used_holder(t, entry);
    uint8_t named[BUCKETS] = {0};

    memset(change, 0, sizeof(*change));
    if (!holder || bytes % sizeof(struct record))
        return -1;
    if (!peercache_rows_have_room(t, count)) {
        change->refused = count;
        return peercache_table_is_growing(t);
    }
    for (uint64_t at = 0; at < buckets_count; at++)
        named[buckets[at]] = 1;
    for (uint32_t bucket = 0; bucket < BUCKETS; bucket++)
        for (uint32_t row = named[bucket] ? holder->first[bucket] : 0, next; row; row = next) {
            next = row_at(t, row)->next;
            row_at(t, row)->previous |= MARKED;
        }
    take(t, entry, packed, count, named, change);
    for (uint32_t bucket = 0; bucket < BUCKETS; bucket++)
        for (uint32_t row = named[bucket] ? holder->first[bucket] : 0, next; row; row = next) {
            next = row_at(t, row)->next;
            if (row_at(t, row)->previous & MARKED) {
                peercache_rows_remove(t, row, tag_of(t->seed, row_at(t, row)->key));
                change->gone++;
            }
        }
    return peercache_table_is_growing(t);
}

static void write_record(const struct table *t, const struct row *row, char *into)
{
    struct record record = {
        .holder = holder_at(t, row->word & HOLDER_BITS)->identity,
        .offset = row->offset,
        .generation = row->generation,
        .length = row->length,
        .flags = row->flags,
        .checksum = row->checksum,
    };

    memcpy(record.key, row->key, KEY_BYTES);
    memcpy(into, &record, sizeof(record));
}

static int by_birth(const void *left, const void *right)
{
    const struct row *one = *(const struct row *const *)left;
    const struct row *other = *(const struct row *const *)right;
    /* They are distinguished, however often the counter has wrapped around. */
    int32_t later = (int32_t)((uint32_t)(one->word >> 32) - (uint32_t)(other->word >> 32));

    return (later > 0) - (later < 0);
}

/* Collect the served rows of a key, oldest first; return their number. */
static uint64_t listed(const struct table *t, uint32_t tag, const uint8_t *key,
                       const struct row **rows)
{
    uint64_t count = 0;
    int is_sorted = 1;

    for (unsigned which = 0; which < 2; which++) {
        const struct index *index = &t->index[which];
        const uint64_t *slots = slots_of(t, which);

        if (!index->capacity)
            continue;
        for (uint64_t at = home_of(index, tag); slots[at] != EMPTY; at = after(index, at)) {
            const struct row *row = row_at(t, (uint32_t)slots[at]);

            if (!is_named(slots[at]) || slots[at] >> 32 != tag || !has_key(row, key))
                continue;
            if (holder_at(t, row->word & HOLDER_BITS)->state != SERVED || count == LISTED_MAX)
                continue;
            rows[count++] = row;
            if (count > 1 && by_birth(&rows[count - 2], &rows[count - 1]) > 0)
                is_sorted = 0;
        }
    }
    if (!is_sorted)
        qsort(rows, count, sizeof(*rows), by_birth);
    return count;
}

/* Write the served records of some keys to `into`, in key order, of at most `holders_max` holders a
 * key: each asker begins at a different holder. Returns how many there are; at most `records_max`
 * were written; -1 for invalid arguments. */
int64_t peercache_table_locate(const struct table *t, const uint8_t *keys, uint64_t bytes,
                               uint64_t asker, uint64_t holders_max, char *into,
                               uint64_t records_max)
{
    const struct row *rows[LISTED_MAX];
    uint64_t count = bytes / KEY_BYTES, found = 0;
    uint32_t tags[BATCH];

    if (bytes % KEY_BYTES)
        return -1;
    for (uint64_t begin = 0; begin < count; begin += BATCH) {
        uint64_t part = count - begin < BATCH ? count - begin : BATCH;

        peercache_rows_approach(t, keys + begin * KEY_BYTES, KEY_BYTES, tags, part);
        for (uint64_t at = 0; at < part; at++) {
            uint64_t holders = listed(t, tags[at], keys + (begin + at) * KEY_BYTES, rows);
            uint64_t first = holders > holders_max ? asker % holders : 0;
            uint64_t listed_max = holders > holders_max ? holders_max : holders;

            for (uint64_t next = 0; next < listed_max; next++, found++)
                if (found < records_max)
                    write_record(t, rows[(first + next) % holders], into + found * sizeof(struct record));
        }
    }
    return found;
}

/* Write the holders of some keys to `into`, at most `holders_max` a key as above; `into` has room
 * for that many of each key. Returns how many were written; -1 for invalid arguments. */
int64_t peercache_table_overlap(const struct table *t, const uint8_t *keys, uint64_t bytes,
                                uint64_t asker, uint64_t holders_max, struct held *into)
{
    const struct row *rows[LISTED_MAX];
    uint64_t count = bytes / KEY_BYTES, found = 0;
    uint32_t tags[BATCH];

    if (bytes % KEY_BYTES || count > UINT32_MAX)
        return -1;
    for (uint64_t begin = 0; begin < count; begin += BATCH) {
        uint64_t part = count - begin < BATCH ? count - begin : BATCH;

        peercache_rows_approach(t, keys + begin * KEY_BYTES, KEY_BYTES, tags, part);
        for (uint64_t at = 0; at < part; at++) {
            uint64_t holders = listed(t, tags[at], keys + (begin + at) * KEY_BYTES, rows);
            uint64_t first = holders > holders_max ? asker % holders : 0;
            uint64_t listed_max = holders > holders_max ? holders_max : holders;

            for (uint64_t next = 0; next < listed_max; next++) {
                const struct row *row = rows[(first + next) % holders];
                uint64_t entry = row->word & HOLDER_BITS;

                into[found++] = (struct held){
                    .holder = holder_at(t, entry)->identity,
                    .place = begin + at,
                    .entry = entry,
                    .flags = row->flags,
                };
            }
        }
    }
    return found;
}

/* Check for each packed record whether exactly this record of a holder is held: key, place,
 * generation. */
int peercache_table_has(const struct table *t, int64_t entry, const char *packed, uint64_t bytes,
                        uint8_t *held)
{
    struct holder *holder = used_holder(t, entry);

    if (!holder || bytes % sizeof(struct record))
        return -1;
    for (uint64_t at = 0; at < bytes / sizeof(struct record); at++) {
        struct record record;
        uint32_t number;

        memcpy(&record, packed + at * sizeof(record), sizeof(record));
        number = peercache_rows_find(t, tag_of(t->seed, record.key), record.key, entry, NULL);
        held[at] = number && holder->identity == record.holder &&
                   row_at(t, number)->offset == record.offset &&
                   row_at(t, number)->generation == record.generation;
    }
    return 0;
}

/* Write a holder's records of the buckets from `first` to `last`; returns how many there are, at
 * most `records_max` were written; -1 for invalid arguments. */
int64_t peercache_table_read(const struct table *t, int64_t entry, uint32_t first, uint32_t last,
                             char *into, uint64_t records_max)
{
    struct holder *holder = used_holder(t, entry);
    uint64_t found = 0;

    if (!holder || last >= BUCKETS)
        return -1;
    for (uint32_t bucket = first; bucket <= last; bucket++)
        for (uint32_t row = holder->first[bucket]; row; row = row_at(t, row)->next, found++)
            if (found < records_max)
                write_record(t, row_at(t, row), into + found * sizeof(struct record));
    return found;
}

/* Return how many records of a holder are held in each bucket, and the XOR of their digests. */
int64_t peercache_table_content(const struct table *t, int64_t entry, uint32_t *counts,
                                uint64_t *digests)
{
    struct holder *holder = used_holder(t, entry);

    if (!holder)
        return -1;
    if (counts)
        memcpy(counts, holder->counts, sizeof(holder->counts));
    if (digests)
        memcpy(digests, holder->digests, sizeof(holder->digests));
    return holder->count;
}
