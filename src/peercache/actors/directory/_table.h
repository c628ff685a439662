/* Declarations that the C files of a directory table's owner share. */
#ifndef PEERCACHE_TABLE_H
#define PEERCACHE_TABLE_H

#include <unistd.h>

#include "../../memory/_table_layout.h"

#define LISTED_MAX 1024      /* holders of one key that a lookup looks at */
#define BATCH 64             /* keys whose memory is fetched together */
#define LOOKED_AT 8          /* slots of a first look: one cache line, or parts of two */
#define TENDED_PER_RECORD 24 /* slots: the new index is ready before the old one is full */
#define NO_SLOT UINT64_MAX
#define MARKED (1u << 31)    /* in a row's `previous`: the repair has not named the row yet */

struct drop {
    uint8_t key[KEY_BYTES];
    uint64_t generation;
};

/* A holder of one key of a batch. */
struct held {
    uint64_t holder; /* its identity */
    uint32_t place;  /* index of the key in the batch */
    uint16_t entry, flags;
};

/* What one walk through the indices has found of a key of a batch. */
struct place {
    uint64_t free; /* the slot for its row if none has its tag yet, or NO_SLOT */
    uint32_t tag;
};

struct change {
    uint64_t fresh, gone, refused;
};

_Static_assert(sizeof(struct drop) == 24, "as in model/records.py");
_Static_assert(sizeof(struct held) == 16, "as in table.py");

static inline uint64_t *slots_of(const struct table *t, unsigned which)
{
    return (uint64_t *)((char *)t + t->index[which].at);
}

static inline int has_key(const struct row *row, const uint8_t *key)
{
    return memcmp(row->key, key, KEY_BYTES) == 0;
}

static inline struct row *row_at(const struct table *t, uint32_t number)
{
    return (struct row *)((char *)t + t->rows_at) + number;
}

static inline struct holder *holder_at(const struct table *t, int64_t entry)
{
    return (struct holder *)((char *)t + t->holders_at) + entry;
}

/* Return a holder that is in use; NULL for any other number. */
static inline struct holder *used_holder(const struct table *t, int64_t entry)
{
    if (entry < 0 || entry >= (int64_t)t->holders_used || holder_at(t, entry)->state == UNUSED)
        return NULL;
    return holder_at(t, entry);
}

/* --- functions of _table_memory.c for _table.c --- */

#define PIECE_BYTES (1ull << 18) /* bytes that are allocated or released at a time: 0.1 ms */

static inline uint64_t table_rounded(uint64_t bytes)
{
    return (bytes + PAGE_BYTES - 1) / PAGE_BYTES * PAGE_BYTES;
}

/* Pages of the kernel: on aarch64 they may have 16 or 64 KiB, and it maps no parts of one. */
static inline uint64_t table_kernel_page(void)
{
    return (uint64_t)sysconf(_SC_PAGESIZE);
}

static inline uint64_t table_aligned(uint64_t at)
{
    return (at + table_kernel_page() - 1) / table_kernel_page() * table_kernel_page();
}

/* Allocate whole pages of a part of an area. Returns whether that succeeded. */
int peercache_table_usable(struct table *t, uint64_t at, uint64_t bytes);
/* Release whole pages, as if they had never been used. Returns whether that succeeded. */
int peercache_table_give_back(struct table *t, uint64_t at, uint64_t bytes);
/* Return how many slots a new index for this many rows has. */
uint64_t peercache_table_slots_for(uint64_t rows);

/* --- functions of _table.c for _table_batches.c --- */

/* Begin a new index if one is due, for `more` rows in addition to the current ones. Returns whether
 * there will be room for all of them. */
int peercache_rows_have_slots(struct table *t, uint64_t more);
void peercache_rows_flip(struct holder *holder, const struct row *row);
/* Write a record into a row, in the order that readers rely on. */
void peercache_rows_write(struct row *row, const struct record *record, uint64_t entry,
                          uint32_t born);
/* Add a record that the holder does not have yet; the caller has made room for it. */
void peercache_rows_add(struct table *t, int64_t entry, const struct record *record,
                        const struct place *place, uint32_t born);
void peercache_rows_remove(struct table *t, uint32_t number, uint32_t tag);
/* Make room for a batch, and do a part of a growth that is under way. */
int peercache_rows_have_room(struct table *t, uint64_t count);
int peercache_table_tend(struct table *t, uint64_t budget);
int peercache_table_is_growing(const struct table *t);

/* --- functions of _table_finding.c for _table_batches.c --- */

/* Hash a batch's next keys, `stride` bytes apart, and load what finding them will need. */
void peercache_rows_approach(const struct table *t, const uint8_t *keys, uint64_t stride,
                             uint32_t *tags, uint64_t count);
/* Hash the keys of a batch, `stride` bytes apart, and load what `place` will look at. */
void peercache_rows_load(const struct table *t, const uint8_t *keys, uint64_t stride,
                         struct place *places, uint64_t count);
/* Find for each key of a batch the slots where a row of it may be named. */
void peercache_rows_place(const struct table *t, struct place *places, uint64_t count);
/* Return the row of a holder's record, 0 if it has none. If `born` is not NULL and the holder has
 * an earlier entry that has ended and is not swept yet, `born` is set to that record's. */
uint32_t peercache_rows_find(const struct table *t, uint32_t tag, const uint8_t *key, int64_t entry,
                             uint32_t *born);

#endif
