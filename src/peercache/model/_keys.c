/* Page keys from hex digests: a batch in one call. SGLang's keys are such digests. */
#include <stdint.h>
#include <string.h>

#define HEX_BYTES 64 /* of a digest, as text */
#define KEY_BYTES 16 /* a page key has its first 16 bytes */

#define EACH(byte) (0x0101010101010101ull * (byte)) /* in each of a word's eight bytes */

/* Return eight characters of text, the first in the lowest byte. All are ASCII. */
static uint64_t word_at(const unsigned char *text)
{
    uint64_t word;

    memcpy(&word, text, sizeof(word));
    return word;
}

/* Return a word whose bytes have their highest bit where a character is a lower-case hex digit. The
 * digits are random: a branch on them would be mispredicted half of the time. */
static uint64_t are_digits(uint64_t word)
{
    uint64_t from_0 = word + EACH(0x80 - '0'), above_9 = word + EACH(0x7f - '9');
    uint64_t from_a = word + EACH(0x80 - 'a'), above_f = word + EACH(0x7f - 'f');

    return (from_0 & ~above_9) | (from_a & ~above_f);
}

/* Return the four bytes that eight hex digits encode. */
static uint32_t value_of(uint64_t word)
{
    uint64_t digits = (word & EACH(0x0f)) + 9 * (word >> 6 & EACH(1));

    digits = (digits << 4 | digits >> 8) & 0x00ff00ff00ff00ff;
    digits = (digits | digits >> 8) & 0x0000ffff0000ffff;
    return (uint32_t)(digits | digits >> 16);
}

/* Write the page keys of `count` digests in each of `spaces` namespaces: (spaces, count, 16) bytes.
 *
 * hex:   count x 64 bytes of ASCII; masks: (spaces, 16) bytes, which each key is XORed with.
 * Returns 1; 0 if some byte is not a lower-case hex digit, and then the content of `into` is
 * undefined.
 */
int64_t peercache_keys_of_hex(const unsigned char *hex, uint64_t count, const unsigned char *masks,
                              uint64_t spaces, unsigned char *into)
{
    uint64_t all = EACH(0x80);
    uint64_t i, space, part;

    for (i = 0; i < count; i++, hex += HEX_BYTES) {
        for (part = 0; part < KEY_BYTES; part += 4) {
            uint32_t value = value_of(word_at(hex + 2 * part));

            memcpy(into + i * KEY_BYTES + part, &value, sizeof(value));
        }
        /* The rest is not part of the key, but decides whether the text is a digest at all. */
        for (part = 0; part < HEX_BYTES; part += 8)
            all &= are_digits(word_at(hex + part));
    }
    /* The first namespace last: the others are computed from the bytes in its place. */
    for (space = spaces; space-- > 0;) {
        unsigned char *to = into + space * count * KEY_BYTES;

        for (i = 0; i < count; i++) {
            for (part = 0; part < KEY_BYTES; part += 8) {
                uint64_t word, mask;

                memcpy(&word, into + i * KEY_BYTES + part, 8);
                memcpy(&mask, masks + space * KEY_BYTES + part, 8);
                word ^= mask;
                memcpy(to + i * KEY_BYTES + part, &word, 8);
            }
        }
    }
    return all == EACH(0x80);
}
