/* One copy of a whole batch, called through ctypes, which lets the GIL go once for all of it.
 *
 * Optional: where it could not be compiled, the kernel's process_vm_readv does the same, slower,
 * and 1024 runs a call.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

struct piece {
    uint64_t address;
    uint64_t size;
};

/* Pieces of which the first and the last byte are tried: what one call of the kernel takes. */
#define TRIED_MAX 512

/* Tell whether memory is there, at both ends of its pieces, so that an address which is wrong
 * altogether, or a file that was cut short, is a miss and not a crash.
 *
 * The engine's memory is the local side, which the kernel reads or writes as we would: as the remote
 * one it would be pinned, and memory that a driver mapped cannot be. A segment can always be.
 */
static int is_there(const struct piece *pieces, uint64_t count, int is_ours, int is_target)
{
    struct iovec tried[2 * TRIED_MAX], scratch;
    char bytes[2 * TRIED_MAX] = {0};
    uint64_t stride = count / TRIED_MAX + 1, at, used = 0;
    ssize_t moved;

    for (at = 0; at < count; at += stride) {
        tried[used].iov_base = (void *)(uintptr_t)pieces[at].address;
        tried[used++].iov_len = 1;
        tried[used].iov_base = (void *)(uintptr_t)(pieces[at].address + pieces[at].size - 1);
        tried[used++].iov_len = 1;
    }
    scratch.iov_base = bytes;
    scratch.iov_len = used;
    if (!is_ours)
        moved = process_vm_readv(getpid(), &scratch, 1, tried, used, 0);
    else if (is_target)
        moved = process_vm_readv(getpid(), tried, used, &scratch, 1, 0);
    else
        moved = process_vm_writev(getpid(), tried, used, &scratch, 1, 0);
    /* Where the call is forbidden there is nothing to learn. */
    return moved < 0 ? errno != EFAULT : (uint64_t)moved == used;
}

/* Copy one run past the cache: nothing of a batch is read again before it has left the cache anyway,
 * and a store that goes through it first reads what it overwrites. That is a third of the traffic,
 * and memory is what a copy waits for. memcpy does so too, but only from megabytes a call on.
 */
#if defined(__SSE2__)
#define STREAM_BYTES_MIN 4096
#define AHEAD 1024
#define LINE 64

static void copy_run(char *to, const char *from, uint64_t size)
{
    uint64_t head = -(uintptr_t)to & (LINE - 1);

    if (size < STREAM_BYTES_MIN) {
        memcpy(to, from, size);
        return;
    }
    memcpy(to, from, head);
    to += head;
    from += head;
    size -= head;
    for (; size >= LINE; to += LINE, from += LINE, size -= LINE) {
        const __m128i *source = (const __m128i *)(const void *)from;
        __m128i *target = (__m128i *)(void *)to;
        __m128i a, b, c, d;

        _mm_prefetch(from + AHEAD, _MM_HINT_NTA);
        a = _mm_loadu_si128(source);
        b = _mm_loadu_si128(source + 1);
        c = _mm_loadu_si128(source + 2);
        d = _mm_loadu_si128(source + 3);
        _mm_stream_si128(target, a);
        _mm_stream_si128(target + 1, b);
        _mm_stream_si128(target + 2, c);
        _mm_stream_si128(target + 3, d);
    }
    memcpy(to, from, size);
}
#else
static void copy_run(char *to, const char *from, uint64_t size)
{
    memcpy(to, from, size);
}
#endif

/* Copy `total` bytes from one list of pieces to another, in order; return whether it was done. The
 * lists may be cut differently; both hold `total` bytes, and no piece is empty. One of them is in
 * the engine's memory, the other in a segment.
 */
int peercache_scatter(const struct piece *to, uint64_t to_count, const struct piece *from,
                      uint64_t from_count, uint64_t total, int to_segment)
{
    uint64_t to_at = 0, from_at = 0;

    if (!is_there(to, to_count, !to_segment, 1) || !is_there(from, from_count, to_segment, 0))
        return 0;
    while (total > 0) {
        uint64_t step = to->size - to_at;

        if (step > from->size - from_at)
            step = from->size - from_at;
        copy_run((char *)(uintptr_t)(to->address + to_at),
                 (const char *)(uintptr_t)(from->address + from_at), step);
        total -= step;
        to_at += step;
        from_at += step;
        if (to_at == to->size) {
            to++;
            to_at = 0;
        }
        if (from_at == from->size) {
            from++;
            from_at = 0;
        }
    }
    /* What is stored past the cache is not waited for by a later store: whoever sees the commit must
     * see the bytes. And the word is loaded after the bytes, not before. */
#if defined(__SSE2__)
    _mm_sfence();
#endif
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return 1;
}
