/* The bookkeeping of the publisher, a batch of rows in one call: its table of records, and which of
 * them each stream has sent. `rows` are row numbers in the table; the caller guarantees that they
 * are valid. */
#include <stdint.h>

#include "../../memory/_table_layout.h"

enum state { ABSENT, SENT, CONFIRMED }; /* as in streams.py */

/* Put records into rows of the table. */
void peercache_streams_store(struct record *table, uint64_t *digests, uint8_t *live,
                             const int64_t *rows, const struct record *records, uint64_t count)
{
    for (uint64_t at = 0; at < count; at++) {
        table[rows[at]] = records[at];
        digests[rows[at]] =
            digest_of(records[at].key, records[at].generation, records[at].flags);
        live[rows[at]] = 1;
    }
}

/* Add the rows to a stream that are not in it yet, or remove those that are. `buckets` has the XOR
 * of their digests. Returns the number of rows added or removed. */
uint64_t peercache_streams_hold(const struct record *table, const uint64_t *digests,
                                const int64_t *rows, uint64_t count, uint64_t *buckets,
                                uint8_t *states, int is_held)
{
    uint64_t changed = 0;

    for (uint64_t at = 0; at < count; at++) {
        int64_t row = rows[at];

        if ((states[row] != ABSENT) == is_held)
            continue;
        states[row] = is_held ? SENT : ABSENT;
        buckets[table[row].key[0]] ^= digests[row];
        changed++;
    }
    return changed;
}

/* Mark these rows as acknowledged by the owner, if they were sent with the same generation. */
void peercache_streams_confirm(const struct record *table, const int64_t *rows,
                               const uint64_t *generations, uint64_t count, uint8_t *states)
{
    for (uint64_t at = 0; at < count; at++)
        if (table[rows[at]].generation == generations[at] && states[rows[at]] == SENT)
            states[rows[at]] = CONFIRMED;
}
