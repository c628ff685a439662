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
#define HOLDERS_MAX 16384    /* limited by the bits in a row's word */
#define ROWS_MAX (1ull << 27) /* limited by the bits of a link without its mark; 8.6 GB */

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
    uint32_t next, previous; /* used by the owner: rows of this holder and bucket, or free ones */
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
    uint64_t capacity; /* slots; 0: this index is not in use */
    uint64_t used;     /* slots that are not empty */
    uint64_t named;    /* slots that name a row */
};

struct table {
    uint64_t magic, version;
    uint64_t incarnation; /* used by the owner */
    uint64_t bytes;       /* of the file */
    uint64_t epoch;       /* changes when the indices or a holder's entry change their meaning */
    uint64_t authority;   /* the ring for which this table is complete; 0: it may lack records */
    uint64_t tick_ns;     /* CLOCK_MONOTONIC when its owner was last active */
    uint64_t seed[2];
    uint64_t holders_at, rows_at;
    struct index index[2];
    uint64_t current; /* the index that is written; rows move out of the other one */
    uint64_t rows_ready, holders_ready; /* those with memory: readers access no others */
    /* Used only by the owner. */
    uint64_t slots_min, slots_max, rows_max;
    uint64_t rows_used, rows_live; /* ever used, and held now; row 0 is never used */
    uint64_t holders_used;
    uint64_t index_ready[2];       /* bytes of each index that have memory */
    uint64_t next_capacity;        /* of the index that is being prepared; 0: none */
    uint64_t moved;                /* slots of the next index loaded, or of the old one moved */
    uint32_t row_free, holder_free; /* the first of those that were used; holders count from 1 */
    uint32_t born;                 /* number of the next record; older ones are returned first */
    int32_t file;                  /* the owner's descriptor; -1: the memory is private */
    /* For readers again; after the fields of earlier builds, in which it is always 0. */
    uint64_t removals; /* how often pages were removed, here or by a client of this node */
};

/* As in model/records.py. */
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
    /* The finaliser of splitmix64 (Steele, Lea, Flood 2014), overflow is intended. */
    word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9;
    word = (word ^ word >> 27) * 0x94d049bb133111eb;
    return word ^ word >> 31;
}

/* Return what a record adds (XOR) to the digest of a stream's bucket, at holder and owner: see
 * `Content` in model/records.py. */
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
