/* How a directory table finds the rows of a batch's keys, and the slots for new ones.
 *
 * The memory that a batch needs is prefetched: one access takes as long as the work for about ten
 * keys, and many accesses can be in flight at a time.
 */
#include <stdint.h>
#include <string.h>

#include "_table.h"

/* Prefetch what the first look at a key needs. */
static void prefetch_slots(const struct table *t, uint32_t tag)
{
    for (unsigned which = 0; which < 2; which++)
        if (t->index[which].capacity) {
            const uint64_t *home = slots_of(t, which) + home_of(&t->index[which], tag);

            __builtin_prefetch(home);
            __builtin_prefetch(home + LOOKED_AT - 1); /* usually in the next cache line */
        }
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

/* Hash a batch's next keys, `stride` bytes apart, and prefetch what finding them needs. */
void peercache_rows_approach(const struct table *t, const uint8_t *keys, uint64_t stride,
                             uint32_t *tags, uint64_t count)
{
    for (uint64_t at = 0; at < count; at++) {
        tags[at] = tag_of(t->seed, keys + at * stride);
        prefetch_slots(t, tags[at]);
    }
    for (uint64_t at = 0; at < count; at++)
        prefetch_row(t, tags[at]);
}

typedef int32_t four __attribute__((vector_size(16)));

/* The next slots of a probe: one bit for each that is empty, free, or has the tag. A slot that
 * names no row has a tag, too, and a slot after the first empty one is not part of the probe: then
 * a row with the tag is looked for once more, which happens for one key in a thousand million. */
struct look {
    uint32_t count, empty, vacant, same;
};

/* Look at the next slots of a probe: LOOKED_AT of them, or one where the index ends; from there the
 * probe continues at its beginning, empty or not. There is no branch for each slot: the length of a
 * probe is as random as the hash, and each mispredicted branch costs the processor as much as all
 * of this. */
static inline struct look look_at(const struct index *index, const uint64_t *slots, uint64_t at,
                                  uint32_t tag)
{
    const four wanted = {0, (int32_t)tag, 0, (int32_t)tag}, zero = {0};
    four are_wanted = {0}, are_zero = {0};
    uint64_t halves[2];
    uint32_t bits, zeros;

    if (at + LOOKED_AT > index->capacity)
        return (struct look){
            .count = 1,
            .vacant = !is_named(slots[at]),
            .same = slots[at] >> 32 == tag,
        };
    /* A slot is two of four words: a row number at bit `each`, and a tag at bit 16 + `each`. */
    for (int32_t each = 0; each < LOOKED_AT; each += 2) {
        const four bit = {1 << each, 1 << (16 + each), 2 << each, 2 << (16 + each)};
        four two;

        memcpy(&two, &slots[at + (uint64_t)each], sizeof(two));
        are_wanted |= (two == wanted) & bit;
        are_zero |= (two == zero) & bit;
    }
    memcpy(halves, &are_wanted, sizeof(halves));
    bits = (uint32_t)((halves[0] | halves[1]) | (halves[0] | halves[1]) >> 32);
    memcpy(halves, &are_zero, sizeof(halves));
    zeros = (uint32_t)((halves[0] | halves[1]) | (halves[0] | halves[1]) >> 32);
    return (struct look){
        .count = LOOKED_AT,
        .empty = zeros & zeros >> 16,
        .vacant = bits & 0xffff,
        .same = bits >> 16,
    };
}

/* Look at the first slots from a tag's home on. Returns whether they show that no row of the index
 * has the tag; `free` is then the first slot that a new one may take. */
static inline int is_absent(const struct index *index, const uint64_t *slots, uint32_t tag,
                            uint64_t *free)
{
    uint64_t home = home_of(index, tag);
    struct look look = look_at(index, slots, home, tag);

    *free = home + (uint32_t)__builtin_ctz(look.vacant | 1u << LOOKED_AT);
    return look.empty && !look.same;
}

/* Return the first slot of the current index that a new row of this tag may take, NO_SLOT if an index
 * names a row of the tag; that row is loaded. */
static uint64_t free_for(const struct table *t, uint32_t tag)
{
    uint64_t free = NO_SLOT;

    for (unsigned turn = 0; turn < 2; turn++) {
        unsigned which = turn ? (unsigned)t->current : !t->current; /* the current index last */
        const struct index *index = &t->index[which];
        const uint64_t *slots = slots_of(t, which);
        struct look look;

        free = NO_SLOT;
        for (uint64_t at = home_of(index, tag); index->capacity; at += look.count) {
            at = at == index->capacity ? 0 : at;
            look = look_at(index, slots, at, tag);
            if (look.vacant && free == NO_SLOT)
                free = at + (uint32_t)__builtin_ctz(look.vacant);
            if (look.same) {
                at += (uint32_t)__builtin_ctz(look.same);
                __builtin_prefetch(row_at(t, (uint32_t)slots[at]));
                return NO_SLOT;
            }
            if (look.empty)
                break;
        }
    }
    return free;
}

/* Prefetch the slots after those of the first look: few probes are longer. */
static void prefetch_next(const struct table *t, uint32_t tag)
{
    for (unsigned which = 0; which < 2; which++)
        if (t->index[which].capacity) {
            const uint64_t *home = slots_of(t, which) + home_of(&t->index[which], tag);

            __builtin_prefetch(home + 2 * LOOKED_AT - 1);
            __builtin_prefetch(home + 3 * LOOKED_AT - 1);
        }
}

/* Hash the keys of a batch, and prefetch what `place` will look at. */
void peercache_rows_load(const struct table *t, const uint8_t *keys, uint64_t stride,
                         struct place *places, uint64_t count)
{
    for (uint64_t at = 0; at < count; at++) {
        places[at].tag = tag_of(t->seed, keys + at * stride);
        prefetch_slots(t, places[at].tag);
    }
}

/* Find for each key of a batch the slots where a row of it may be named. */
void peercache_rows_place(const struct table *t, struct place *places, uint64_t count)
{
    const struct index *index = &t->index[t->current], *old = &t->index[!t->current];
    const uint64_t *slots = slots_of(t, (unsigned)t->current), *old_slots = slots_of(t, !t->current);
    uint32_t others[BATCH], others_count = 0;

    for (uint64_t at = 0; at < count; at++) {
        struct place *place = &places[at];
        uint64_t nowhere;
        int is_sure = is_absent(index, slots, place->tag, &place->free);

        if (old->capacity)
            is_sure &= is_absent(old, old_slots, place->tag, &nowhere);
        others[others_count] = (uint32_t)at;
        others_count += !is_sure;
    }
    for (uint32_t each = 0; each < others_count; each++)
        prefetch_next(t, places[others[each]].tag);
    for (uint32_t each = 0; each < others_count; each++)
        places[others[each]].free = free_for(t, places[others[each]].tag);
}

/* Return the row of a holder's record, 0 if it has none. If `born` is not NULL and the holder has
 * an earlier entry that has ended and is not swept yet, `born` is set to that record's. */
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
