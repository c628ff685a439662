/* Stores and loads the seals of published memory in the order that every processor must keep.
 *
 * Keeps   a word is one aligned 8-byte store or load. Key, space and length are stored before the
 *         word that vouches for them, and loaded before the word that is compared last. Nothing that
 *         the caller does after `store` comes before it, nothing that it did before `load` after it.
 */
#include <stdint.h>
#include <string.h>

struct seal {
    uint64_t word;
    uint8_t key[16];
    uint32_t space, length;
};

_Static_assert(sizeof(struct seal) == 32, "as in model/seal.py");

/* Store word `words[i]` at seal `indices[i]`, in order; with `named`, its key, space and length
 * first. The word that is replaced is odd then: no reader trusts what stands beside it. */
void peercache_seals_store(struct seal *table, const int64_t *indices, const uint64_t *words,
                           const struct seal *named, uint64_t count)
{
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
    /* A slot is granted, and written to, after its word is odd. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
}

/* Load the words of some seals: the look before the first byte. */
void peercache_seals_words(const struct seal *table, const int64_t *indices, uint64_t *words,
                           uint64_t count)
{
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    for (uint64_t at = 0; at < count; at++)
        words[at] = __atomic_load_n(&table[indices[at]].word, __ATOMIC_ACQUIRE);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
}

/* Load some seals: the look after the last byte. */
void peercache_seals_load(const struct seal *table, const int64_t *indices, struct seal *seals,
                          uint64_t count)
{
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    for (uint64_t at = 0; at < count; at++)
        memcpy(&seals[at], &table[indices[at]], sizeof(struct seal));
    /* The word last: it vouches for what was loaded before it. */
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    for (uint64_t at = 0; at < count; at++)
        seals[at].word = __atomic_load_n(&table[indices[at]].word, __ATOMIC_ACQUIRE);
}
