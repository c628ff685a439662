/* Stores and loads the seals of published memory in the order that every processor must keep.
 *
 * Keeps   a word is one aligned 8-byte store or load. Key, space and length are stored before the
 *         word that validates them, and loaded before the word that is compared last. No access of
 *         the caller after `store` is moved before it, and none before `load` is moved after it.
 */
#define _GNU_SOURCE
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

struct seal {
    uint64_t word;
    uint8_t key[16];
    uint64_t space, length;
    uint8_t unused[24];
};

_Static_assert(sizeof(struct seal) == 64, "as in model/seal.py");

/* Store word `words[i]` at seal `indices[i]`, in order; with `named`, its key, space and length
 * first. The word that is replaced is odd then, so no reader trusts these fields. Returns whether
 * all indices are in the table: if one is not, nothing is stored. */
int peercache_seals_store(struct seal *table, uint64_t table_count, const int64_t *indices,
                          const uint64_t *words, const struct seal *named, uint64_t count)
{
    for (uint64_t at = 0; at < count; at++)
        if ((uint64_t)indices[at] >= table_count)
            return 0;
    if (named) {
        for (uint64_t at = 0; at < count; at++) {
            struct seal *seal = &table[indices[at]];

            memcpy(seal->key, named[at].key, sizeof(seal->key));
            seal->space = named[at].space;
            seal->length = named[at].length;
        }
    }
    for (uint64_t at = 0; at < count; at++)
        __atomic_store_n(&table[indices[at]].word, words[at], __ATOMIC_RELEASE);
    /* A slot is granted, and written to, only after its word is odd. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return 1;
}

/* Seals of one system call: IOV_MAX of Linux. */
#define LISTED_MAX 1024

/* Return whether every slot has a seal in the table. */
static int are_inside(uint64_t table_count, uint64_t granule, const uint64_t *offsets,
                      uint64_t count)
{
    for (uint64_t at = 0; at < count; at++)
        if (offsets[at] / granule >= table_count)
            return 0;
    return 1;
}

/* Copy the first `size` bytes of each slot's seal to `into`, `stride` bytes apart, with the
 * kernel's own copy: if the table is not mapped any more, that is no bus error. The kernel copies
 * upwards, so if it reads a word in parts, it starts with the lowest byte, in which an even word
 * and the following odd one differ: an old word proves that it was still there when the load began.
 * Returns whether all were copied.
 */
static int copied_by_kernel(const struct seal *table, uint64_t granule, const uint64_t *offsets,
                            char *into, uint64_t stride, uint64_t size, uint64_t count)
{
    struct iovec local[LISTED_MAX], remote[LISTED_MAX];

    while (count) {
        uint64_t part = count < LISTED_MAX ? count : LISTED_MAX;

        for (uint64_t at = 0; at < part; at++) {
            local[at].iov_base = into + at * stride;
            remote[at].iov_base = (void *)(uintptr_t)&table[offsets[at] / granule];
            local[at].iov_len = remote[at].iov_len = size;
        }
        if (process_vm_readv(getpid(), local, part, remote, part, 0) != (ssize_t)(part * size))
            return 0;
        offsets += part;
        into += part * stride;
        count -= part;
    }
    return 1;
}

/* Copy the seals of some slots, and then their words: a word validates what was loaded before it, and
 * a system call keeps no order of loads. Returns whether all were copied. */
static int loaded_by_kernel(const struct seal *table, uint64_t granule, const uint64_t *offsets,
                            struct seal *seals, uint64_t count)
{
    char *into = (char *)seals;

    if (!copied_by_kernel(table, granule, offsets, into, sizeof(*seals), sizeof(*seals), count))
        return 0;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return copied_by_kernel(table, granule, offsets, into, sizeof(*seals), 8, count);
}

/* Load the words of some slots' seals: the check before the first byte. Returns 1; 0 if the table
 * is not mapped any more (`by_kernel` only); -1 for a slot beyond the table. */
int peercache_seals_words(const struct seal *table, uint64_t table_count, uint64_t granule,
                          const uint64_t *offsets, uint64_t *words, uint64_t count, int by_kernel)
{
    int loaded = 1;

    if (!are_inside(table_count, granule, offsets, count))
        return -1;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (by_kernel)
        loaded = copied_by_kernel(table, granule, offsets, (char *)words, 8, 8, count);
    else
        for (uint64_t at = 0; at < count; at++)
            words[at] = __atomic_load_n(&table[offsets[at] / granule].word, __ATOMIC_ACQUIRE);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return loaded;
}

/* Load the seals of some slots: the check after the last byte. Returns as `words`. */
int peercache_seals_load(const struct seal *table, uint64_t table_count, uint64_t granule,
                         const uint64_t *offsets, struct seal *seals, uint64_t count, int by_kernel)
{
    if (!are_inside(table_count, granule, offsets, count))
        return -1;
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (by_kernel)
        return loaded_by_kernel(table, granule, offsets, seals, count);
    for (uint64_t at = 0; at < count; at++)
        memcpy(&seals[at], &table[offsets[at] / granule], sizeof(struct seal));
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    for (uint64_t at = 0; at < count; at++)
        seals[at].word = __atomic_load_n(&table[offsets[at] / granule].word, __ATOMIC_ACQUIRE);
    return 1;
}
