/* Page keys from hex digests: a batch in one call. SGLang's keys are such digests. */
#include <stdint.h>
#include <string.h>

#define HEX_BYTES 64 /* of a digest, as text */
#define KEY_BYTES 16 /* a page key has its first 16 bytes */

#define IS_DIGIT 16

/* By character: the value of a lower-case hex digit, with IS_DIGIT; 0: it is none. A table, because
 * the digits are random: a branch on them would be foretold wrongly half of the time. */
static const unsigned char DIGITS[256] = {
    ['0'] = 16, ['1'] = 17, ['2'] = 18, ['3'] = 19, ['4'] = 20, ['5'] = 21, ['6'] = 22, ['7'] = 23,
    ['8'] = 24, ['9'] = 25, ['a'] = 26, ['b'] = 27, ['c'] = 28, ['d'] = 29, ['e'] = 30, ['f'] = 31,
};

/* Write the page keys of `count` digests in each of `spaces` namespaces: (spaces, count, 16) bytes.
 *
 * hex:   count x 64 bytes of text; masks: (spaces, 16) bytes, which each key is XORed with.
 * Returns 1; 0 if some byte is no lower-case hex digit, and then what `into` has says nothing.
 */
int64_t peercache_keys_of_hex(const unsigned char *hex, uint64_t count, const unsigned char *masks,
                              uint64_t spaces, unsigned char *into)
{
    unsigned char all = IS_DIGIT;
    uint64_t i, space, part;

    for (i = 0; i < count; i++, hex += HEX_BYTES) {
        unsigned char *key = into + i * KEY_BYTES;
        int at;

        for (at = 0; at < KEY_BYTES; at++) {
            unsigned char high = DIGITS[hex[2 * at]], low = DIGITS[hex[2 * at + 1]];

            all &= high & low;
            key[at] = (unsigned char)(high << 4 | (low & 15));
        }
        /* The rest is no part of the key, but decides whether it is a digest at all. */
        for (at = 2 * KEY_BYTES; at < HEX_BYTES; at++)
            all &= DIGITS[hex[at]];
    }
    /* The first namespace last: the others are made from what lies in its place. */
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
    return (all & IS_DIGIT) != 0;
}
