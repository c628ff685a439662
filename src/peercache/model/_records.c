/* Packed records: a check of a whole batch in one call. */
#include <stdint.h>

#include "../memory/_table_layout.h"

/* Return whether all records name this holder. They may be at any address. */
int peercache_records_are_of(const char *packed, uint64_t count, uint64_t holder)
{
    for (uint64_t at = 0; at < count; at++) {
        struct record record;

        memcpy(&record, packed + at * sizeof(record), sizeof(record));
        if (record.holder != holder)
            return 0;
    }
    return 1;
}
