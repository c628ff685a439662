/* The layout of a directory table: what its writer and its readers see in the same way. */
#ifndef PEERCACHE_TABLE_H
#define PEERCACHE_TABLE_H

#include <stdint.h>
#include <string.h>

#define TABLE_MAGIC 0x454c424154434350 /* "PCCTABLE" */
#define TABLE_VERSION 2
#define PAGE_BYTES 4096
#define KEY_BYTES 16
#define BUCKETS 256
#define HOLDERS_MAX 16384         /* fits the bits of a row's word */
#define ROWS_MAX (1ull << 27)     /* fits a link beside its mark; 8.6 GB */
#define LISTED_MAX 1024           /* holders of one key that a lookup looks at */
#define BATCH 64                  /* keys whose memory is fetched together */
#define TENDED_PER_RECORD 24      /* slots: an index is ready before the one before it is full */

enum { UNUSED = 0, WHOLE = 1 << 16, WRITING = 2 << 16 }; /* a row, in its word */
enum { KEPT = 1, SERVED = 2 };                           /* a holder; or UNUSED */

/* A slot: from the lowest bit, a row's number 32, the key's tag 32. Row 0 is never used. */
#define EMPTY 0ull
#define TOMBSTONE (1ull << 32)

#define HOLDER_BITS 0xffffull
#define STATE_BITS (3 << 16)
#define VERSION_ONE (1ull << 18)
#define VERSION_BITS 0xfffc0000ull
#define MARKED (1u << 31)

struct row {
    uint64_t word; /* from the lowest bit: holder 16, state 2, version 14, born 32 */
    uint8_t key[KEY_BYTES];
    uint64_t offset, generation;
    uint32_t length, flags;
    uint64_t checksum;
    uint32_t next, previous; /* the owner's: rows of this holder and bucket, or free ones */
};

struct holder {
    uint64_t identity;
    uint32_t state, next_free;
    uint64_t count;
    uint64_t digests[BUCKETS];
    uint32_t counts[BUCKETS];
    uint32_t first[BUCKETS]; /* a row; 0 is none */
};

struct index {
    uint64_t at;       /* bytes from the header */
    uint64_t capacity; /* slots; 0: nothing is to be looked for here */
    uint64_t used;     /* slots that are not empty */
    uint64_t named;    /* slots that name a row */
};

struct table {
    uint64_t magic, version;
    uint64_t epoch; /* changes with each change of which indices count */
    uint64_t seed[2];
    uint64_t bytes, holders_at, rows_at;
    struct index index[2];
    uint64_t current; /* the index that is written; the other one is moved out of, if it counts */
    uint64_t authority; /* the ring of which this table lacks nothing; 0: it may lack records */
    uint64_t tick_ns;   /* CLOCK_MONOTONIC when its owner was last at work */
    /* The owner's own. */
    uint64_t slots_min, slots_max, rows_max;
    uint64_t rows_used, rows_ready, rows_live; /* ever used, usable, and held now; row 0 is none */
    uint64_t holders_used;
    uint64_t next_capacity;  /* of the index that is made ready; 0: none is */
    uint64_t moved;          /* slots of the next index that are loaded, or moved of the old one */
    uint64_t released_until; /* bytes of it that are not given back */
    uint32_t row_free, holder_free; /* the first of those that were used; holders count from 1 */
    uint32_t born;           /* the number of the next record: older ones are told first */
};

/* As model/records.py has them. */
struct record {
    uint8_t key[KEY_BYTES];
    uint64_t holder, offset, generation;
    uint32_t length, flags;
    uint64_t checksum;
};

struct drop {
    uint8_t key[KEY_BYTES];
    uint64_t generation;
};

struct change {
    uint64_t fresh, gone, refused;
};

_Static_assert(sizeof(struct row) == 64, "a line of the processor's cache");
_Static_assert(sizeof(struct record) == 56, "as in model/records.py");
_Static_assert(sizeof(struct drop) == 24, "as in model/records.py");

static inline uint64_t *slots_of(const struct table *t, unsigned which)
{
    return (uint64_t *)((char *)t + t->index[which].at);
}

static inline uint64_t home_of(const struct index *index, uint32_t tag)
{
    return (uint64_t)tag * index->capacity >> 32;
}

static inline uint64_t after(const struct index *index, uint64_t at)
{
    return at + 1 == index->capacity ? 0 : at + 1;
}

static inline int is_named(uint64_t slot)
{
    return (uint32_t)slot != 0;
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

/* --- what _table.c has for _table_batches.c --- */

/* Return 32 bits of a key's SipHash-1-3. All keys have one length, so it is not hashed. */
uint32_t peercache_rows_tag(const struct table *t, const uint8_t *key);
/* Begin a new index if that is due: one for `more` rows on top of those that are there. Returns
 * whether so many will find a place. */
int peercache_rows_have_slots(struct table *t, uint64_t more);
void peercache_rows_flip(struct holder *holder, const struct row *row);
/* Write a record into a row, in the order that readers rely on. */
void peercache_rows_write(struct row *row, const struct record *record, uint64_t entry,
                          uint32_t born);
/* Add a record that the holder has not; room for it has been made sure of. */
void peercache_rows_add(struct table *t, int64_t entry, const struct record *record, uint32_t tag,
                        uint32_t born);
void peercache_rows_remove(struct table *t, uint32_t number, uint32_t tag);
/* Hash a batch's next keys, `stride` bytes apart, and load what finding them will need. */
void peercache_rows_approach(const struct table *t, const uint8_t *keys, uint64_t stride,
                             uint32_t *tags, uint64_t count);
/* Return the row of a holder's record, 0 if there is none. `born`, if it is wanted and the holder
 * has an earlier entry that ended and is not swept yet, becomes that record's. */
uint32_t peercache_rows_find(const struct table *t, uint32_t tag, const uint8_t *key, int64_t entry,
                             uint32_t *born);
/* Make room for a batch, and do a part of a growth that is under way. */
int peercache_rows_have_room(struct table *t, uint64_t count);
int peercache_table_tend(struct table *t, uint64_t budget);
int peercache_table_is_growing(const struct table *t);

#endif
