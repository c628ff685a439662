/* The location cache's memory: records by page key, in sets of a few ways, least recently used out.
 *
 * Each key belongs to one set. The tags of a set are one cache line, so that an unknown key costs
 * one load. One thread at a time calls these functions.
 */
#include <stdint.h>
#include <string.h>

#define KEY_BYTES 16
#define WAYS 16
#define RESIDENT 1 /* as in model/records.py */

struct record {
    uint8_t key[KEY_BYTES];
    uint64_t holder, offset, generation;
    uint32_t length, flags;
    uint64_t checksum;
};

struct entry {
    struct record record;
    double stored_at;         /* seconds of the monotonic clock */
    uint64_t is_notified : 1; /* when its holder was last notified that the page will be read */
    uint64_t used : 63;       /* the cache's use counter at the last use */
};

struct set {
    uint32_t tags[WAYS]; /* 0: no record here */
    struct entry entries[WAYS];
};

struct cache {
    uint64_t sets, ways; /* of each set, WAYS or fewer */
    uint64_t count, uses;
    uint64_t padding[4];
    struct set set[];
};

_Static_assert(sizeof(struct record) == 56, "as in model/records.py");
_Static_assert(sizeof(struct cache) == 64, "as in location_cache.py");
_Static_assert(sizeof(struct set) == 64 + WAYS * 72, "as in location_cache.py");

static uint64_t mixed(const uint8_t *key)
{
    uint64_t halves[2], word;

    memcpy(halves, key, sizeof(halves));
    word = halves[0] ^ halves[1];
    /* The finaliser of splitmix64, as in model/records.py. */
    word = (word ^ word >> 30) * 0xbf58476d1ce4e5b9;
    word = (word ^ word >> 27) * 0x94d049bb133111eb;
    return word ^ word >> 31;
}

static struct set *set_of(struct cache *cache, uint64_t hash)
{
    return &cache->set[(uint64_t)((unsigned __int128)hash * cache->sets >> 64)];
}

static uint32_t tag_of(uint64_t hash)
{
    return (uint32_t)hash | 1;
}

/* Return the way in which a set has a key, -1 if it does not have it. */
static int way_of(const struct cache *cache, const struct set *set, uint32_t tag, const uint8_t *key)
{
    for (unsigned way = 0; way < cache->ways; way++)
        if (set->tags[way] == tag && !memcmp(set->entries[way].record.key, key, KEY_BYTES))
            return (int)way;
    return -1;
}

static struct entry *find(struct cache *cache, const uint8_t *key)
{
    uint64_t hash = mixed(key);
    struct set *set = set_of(cache, hash);
    int way = way_of(cache, set, tag_of(hash), key);

    return way < 0 ? NULL : &set->entries[way];
}

static void forget(struct cache *cache, struct set *set, int way)
{
    set->tags[way] = 0;
    cache->count--;
}

/* Copy the record of each key that was stored at or after `not_before` to its place in `into` and
 * mark it in `known`; every record found becomes the most recently used one. Returns how many are
 * known. */
int64_t peercache_locations_find(struct cache *cache, const uint8_t *keys, uint64_t count,
                                 double not_before, struct record *into, uint8_t *known)
{
    int64_t found = 0;

    for (uint64_t at = 0; at < count; at++) {
        struct entry *entry = find(cache, keys + at * KEY_BYTES);

        known[at] = entry && entry->stored_at >= not_before;
        if (entry)
            entry->used = ++cache->uses;
        if (known[at]) {
            into[at] = entry->record;
            found++;
        } else
            memset(&into[at], 0, sizeof(into[at]));
    }
    return found;
}

/* Write the holders of the keys, each once, if all keys have records of pages in memory that were
 * stored at or after `not_before`, and, with `must_be_notified`, their holders were notified.
 * Returns their number; -1 if a key has no such record, or if there are more than `most`. */
int64_t peercache_locations_holders(struct cache *cache, const uint8_t *keys, uint64_t count,
                                    double not_before, int must_be_notified, uint64_t *holders,
                                    uint64_t most)
{
    uint64_t found = 0, last = 0;

    for (uint64_t at = 0; at < count; at++) {
        const struct entry *entry = find(cache, keys + at * KEY_BYTES);
        uint64_t one;

        if (!entry || entry->stored_at < not_before || !(entry->record.flags & RESIDENT))
            return -1;
        if (must_be_notified && !entry->is_notified)
            return -1;
        if (found && entry->record.holder == last)
            continue;
        last = entry->record.holder;
        for (one = 0; one < found && holders[one] != last; one++)
            ;
        if (one < found)
            continue;
        if (found == most)
            return -1;
        holders[found++] = last;
    }
    return (int64_t)found;
}

/* Return whether any of the keys is known to be in the memory of a holder. */
int peercache_locations_any_at(struct cache *cache, uint64_t holder, const uint8_t *keys,
                               uint64_t count)
{
    for (uint64_t at = 0; at < count; at++) {
        const struct entry *entry = find(cache, keys + at * KEY_BYTES);

        if (entry && entry->record.holder == holder && entry->record.flags & RESIDENT)
            return 1;
    }
    return 0;
}

/* Store records, each in place of the earlier one of its key. */
void peercache_locations_store(struct cache *cache, const struct record *records, uint64_t count,
                               double now, int is_notified)
{
    for (uint64_t at = 0; at < count; at++) {
        uint64_t hash = mixed(records[at].key);
        struct set *set = set_of(cache, hash);
        int way = way_of(cache, set, tag_of(hash), records[at].key);
        struct entry *entry;

        if (way < 0) {
            /* A free way, or the least recently used one. */
            way = 0;
            for (unsigned other = 1; other < cache->ways && set->tags[way]; other++)
                if (!set->tags[other] || set->entries[other].used < set->entries[way].used)
                    way = (int)other;
            cache->count += !set->tags[way];
            set->tags[way] = tag_of(hash);
        }
        entry = &set->entries[way];
        entry->record = records[at];
        entry->stored_at = now;
        entry->is_notified = is_notified != 0;
        entry->used = ++cache->uses;
    }
}

/* Remove exactly these records; a different one of the same key stays. */
void peercache_locations_drop(struct cache *cache, const struct record *records, uint64_t count)
{
    for (uint64_t at = 0; at < count; at++) {
        uint64_t hash = mixed(records[at].key);
        struct set *set = set_of(cache, hash);
        int way = way_of(cache, set, tag_of(hash), records[at].key);

        if (way >= 0 && !memcmp(&set->entries[way].record, &records[at], sizeof(struct record)))
            forget(cache, set, way);
    }
}

/* Remove the records of these keys. */
void peercache_locations_forget(struct cache *cache, const uint8_t *keys, uint64_t count)
{
    for (uint64_t at = 0; at < count; at++) {
        uint64_t hash = mixed(keys + at * KEY_BYTES);
        struct set *set = set_of(cache, hash);
        int way = way_of(cache, set, tag_of(hash), keys + at * KEY_BYTES);

        if (way >= 0)
            forget(cache, set, way);
    }
}
