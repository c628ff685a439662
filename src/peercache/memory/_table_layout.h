/* The layout of a directory table, as its owner writes it and other processes read it. */
#ifndef PEERCACHE_TABLE_LAYOUT_H
#define PEERCACHE_TABLE_LAYOUT_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define TABLE_MAGIC 0x454c424154434350 /* "PCCTABLE" */
#define TABLE_VERSION 2
#define PAGE_BYTES 4096
#define KEY_BYTES 16
#define BUCKETS 256
#define HOLDERS_MAX 16384    /* fits the bits of a row's word */
#define ROWS_MAX (1ull << 27) /* fits a link beside its mark; 8.6 GB */

enum { UNUSED = 0, WHOLE = 1 << 16, WRITING = 2 << 16 }; /* a row, in its word */
enum { KEPT = 1, SERVED = 2 };                           /* a holder; or UNUSED */

/* A slot: from the lowest bit, a row's number 32, the key's tag 32. Row 0 is never used. */
#define EMPTY 0ull
#define TOMBSTONE (1ull << 32)

#define HOLDER_BITS 0xffffull
#define STATE_BITS (3 << 16)
#define VERSION_ONE (1ull << 18)
#define VERSION_BITS 0xfffc0000ull

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
    uint32_t first[BUCKETS]; /* a row; 0 for no row */
};

struct index {
    uint64_t at;       /* bytes from the header */
    uint64_t capacity; /* slots; 0: nothing is to be looked for here */
    uint64_t used;     /* slots that are not empty */
    uint64_t named;    /* slots that name a row */
};

struct table {
    uint64_t magic, version;
    uint64_t incarnation; /* the owner's */
    uint64_t bytes;       /* of the file */
    uint64_t epoch;       /* changes with which indices count, and before a holder's entry is reused */
    uint64_t authority;   /* the ring of which this table lacks nothing; 0: it may lack records */
    uint64_t tick_ns;     /* CLOCK_MONOTONIC when its owner was last at work */
    uint64_t seed[2];
    uint64_t holders_at, rows_at;
    struct index index[2];
    uint64_t current; /* the index that is written; the other one is moved out of, if it counts */
    uint64_t rows_ready, holders_ready; /* those with memory: no reader touches others */
    /* The owner's own. */
    uint64_t slots_min, slots_max, rows_max;
    uint64_t rows_used, rows_live; /* ever used, and held now; row 0 is never used */
    uint64_t holders_used;
    uint64_t index_ready[2];       /* bytes of each index that have memory */
    uint64_t next_capacity;        /* of the index that is made ready; 0: none is */
    uint64_t moved;                /* slots of the next index that are loaded, or moved of the old one */
    uint32_t row_free, holder_free; /* the first of those that were used; holders count from 1 */
    uint32_t born;                 /* the number of the next record: older ones are told first */
    int32_t file;                  /* the owner's descriptor; -1: the memory is private */
    /* Again for readers, behind what earlier builds have: there it is 0 forever. */
    uint64_t removals; /* how often pages were removed, here or by a client of this node */
};

/* As model/records.py has them. */
struct record {
    uint8_t key[KEY_BYTES];
    uint64_t holder, offset, generation;
    uint32_t length, flags;
    uint64_t checksum;
};

_Static_assert(sizeof(struct row) == 64, "a line of the processor's cache");
_Static_assert(sizeof(struct record) == 56, "as in model/records.py");
_Static_assert(sizeof(struct table) <= PAGE_BYTES, "a header is one page");
_Static_assert(offsetof(struct table, removals) == 272, "as in memory/table_reading.py");

static inline uint64_t mixed(uint64_t word)
{
    /* The finaliser of splitmix64 (Steele, Lea, Flood 2014), wrapping on purpose. */
    word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9;
    word = (word ^ word >> 27) * 0x94d049bb133111eb;
    return word ^ word >> 31;
}

/* Return what the digest of a stream's bucket XORs together, at holder and owner: see `Content` in
 * model/records.py. */
static inline uint64_t digest_of(const uint8_t *key, uint64_t generation, uint32_t flags)
{
    uint64_t halves[2];

    memcpy(halves, key, sizeof(halves));
    return mixed(halves[0] ^ mixed(halves[1] ^ mixed(generation)) ^ flags);
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

#define ROTATED(word, by) ((word) << (by) | (word) >> (64 - (by)))
#define ROUND                                                                                      \
    do {                                                                                           \
        v0 += v1, v1 = ROTATED(v1, 13), v1 ^= v0, v0 = ROTATED(v0, 32);                            \
        v2 += v3, v3 = ROTATED(v3, 16), v3 ^= v2;                                                  \
        v0 += v3, v3 = ROTATED(v3, 21), v3 ^= v0;                                                  \
        v2 += v1, v1 = ROTATED(v1, 17), v1 ^= v2, v2 = ROTATED(v2, 32);                            \
    } while (0)

/* Return 32 bits of a key's SipHash-1-3. All keys have one length, so it is not hashed. */
static inline uint32_t tag_of(const uint64_t *seed, const uint8_t *key)
{
    uint64_t v0 = seed[0] ^ 0x736f6d6570736575, v1 = seed[1] ^ 0x646f72616e646f6d;
    uint64_t v2 = seed[0] ^ 0x6c7967656e657261, v3 = seed[1] ^ 0x7465646279746573;
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

#endif
