/* Records and seals of a batch of committed pages, in one call. */
#include <stdint.h>

#include "../../memory/_table_layout.h"

enum { RESIDENT = 1, HAS_CHECKSUM = 4 }; /* flags, as in model/records.py */

struct seal {
    uint64_t word;
    uint8_t key[KEY_BYTES];
    uint64_t space, length;
    uint8_t unused[24];
};

_Static_assert(sizeof(struct seal) == 64, "as in model/seal.py");

/* Return number `at` of packed ones, which may be at any address. */
static uint64_t number(const char *packed, uint64_t at)
{
    uint64_t number;

    memcpy(&number, packed + at * sizeof(number), sizeof(number));
    return number;
}

/* Make the records of pages, and what is stored in published memory so that they can be read, one
 * behind the other in `into`: records, seals, granules (int64), words. The words of these pages are
 * even in the table of words from now on: the first page's is `newest`, the next one's 2 less.
 * Returns whether each of them was odd: into the slot of any other no page could be written, and
 * nothing is made. */
int peercache_pool_publish(const char *keys, const char *offsets, const char *lengths,
                           const char *checksums, uint64_t count, uint64_t newest, uint64_t holder,
                           uint64_t granule, uint64_t space, uint64_t *words, uint64_t words_count,
                           struct record *into)
{
    struct seal *seals = (struct seal *)(into + count);
    int64_t *granules = (int64_t *)(seals + count);
    uint64_t *stored = (uint64_t *)(granules + count);

    for (uint64_t at = 0; at < count; at++) {
        uint64_t first = number(offsets, at) / granule;

        if (first >= words_count || !(words[first] & 1))
            return 0;
    }
    for (uint64_t at = 0; at < count; at++) {
        uint64_t offset = number(offsets, at), checksum = number(checksums, at);
        struct record *record = &into[at];
        struct seal *seal = &seals[at];

        memcpy(record->key, keys + at * KEY_BYTES, KEY_BYTES);
        record->holder = holder;
        record->offset = offset;
        record->generation = newest - 2 * at;
        record->length = (uint32_t)number(lengths, at);
        record->flags = checksum ? RESIDENT | HAS_CHECKSUM : RESIDENT;
        record->checksum = checksum;
        seal->word = record->generation;
        memcpy(seal->key, record->key, KEY_BYTES);
        seal->space = space;
        seal->length = record->length;
        granules[at] = (int64_t)(offset / granule);
        stored[at] = words[offset / granule] = record->generation;
    }
    return 1;
}
