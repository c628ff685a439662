/* Copies a whole batch in one call; ctypes releases the GIL once for all of it. */
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

/* The most pieces of which the first and last bytes are probed, with one system call. */
#define PROBED_MAX 512

/* Pieces of one system call: IOV_MAX of Linux. */
#define LISTED_MAX 1024

/* Return how many leading bytes of the pieces are mapped, so that a wrong address, or a truncated
 * file, causes a miss and not a crash. If there are more than PROBED_MAX pieces, only some are
 * probed.
 *
 * The kernel pins the remote side of the call, and cannot pin memory that a driver has mapped, such
 * as page-locked buffers of CUDA. So the engine's memory is the local side, and only a segment is
 * the remote one.
 */
static uint64_t reachable(const struct piece *pieces, uint64_t count, uint64_t total, int is_segment,
                          int is_target)
{
    struct iovec probed[2 * PROBED_MAX], scratch;
    char bytes[2 * PROBED_MAX] = {0};
    uint64_t stride = count / PROBED_MAX + 1, used = 0, good, found = 0;
    ssize_t moved;

    for (uint64_t at = 0; at < count; at += stride) {
        probed[used].iov_base = (void *)(uintptr_t)pieces[at].address;
        probed[used++].iov_len = 1;
        probed[used].iov_base = (void *)(uintptr_t)(pieces[at].address + pieces[at].size - 1);
        probed[used++].iov_len = 1;
    }
    scratch.iov_base = bytes;
    scratch.iov_len = used;
    /* The call that writes to a target also detects read-only memory. */
    if (is_segment && is_target)
        moved = process_vm_writev(getpid(), &scratch, 1, probed, used, 0);
    else if (is_segment)
        moved = process_vm_readv(getpid(), &scratch, 1, probed, used, 0);
    else if (is_target)
        moved = process_vm_readv(getpid(), probed, used, &scratch, 1, 0);
    else
        moved = process_vm_writev(getpid(), probed, used, &scratch, 1, 0);
    /* If a sandbox forbids the call, nothing is known, and the copy goes ahead. */
    if ((moved < 0 && errno != EFAULT) || (uint64_t)moved == used)
        return total;
    /* Up to the last piece that was probed successfully. */
    good = moved < 0 ? 0 : (uint64_t)moved / 2;
    for (uint64_t at = 0; good && at <= (good - 1) * stride; at++)
        found += pieces[at].size;
    return found;
}

/* Copy one run with stores that bypass the cache. A batch is evicted from the cache before it is
 * read again, and a store through the cache first reads the line that it overwrites: that is a
 * third of the memory traffic, which limits a copy. memcpy bypasses the cache only for copies of
 * megabytes.
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

/* Copy `total` bytes from one list of pieces to another, in order; return the leading bytes copied,
 * which are fewer if an address is not mapped. The lists may be divided differently; both have
 * `total` bytes, and no piece is empty. One list is in the engine's memory, the other in a segment.
 */
uint64_t peercache_scatter(const struct piece *to, uint64_t to_count, const struct piece *from,
                           uint64_t from_count, uint64_t total, int to_segment)
{
    uint64_t to_at = 0, from_at = 0, left, copied;

    copied = reachable(to, to_count, total, to_segment, 1);
    left = reachable(from, from_count, total, !to_segment, 0);
    if (copied > left)
        copied = left;
    left = copied;
    while (left > 0) {
        uint64_t step = to->size - to_at;

        if (step > from->size - from_at)
            step = from->size - from_at;
        if (step > left)
            step = left;
        copy_run((char *)(uintptr_t)(to->address + to_at),
                 (const char *)(uintptr_t)(from->address + from_at), step);
        left -= step;
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
    /* Stores that bypass the cache are not ordered before later stores: a reader that sees the
     * commit must see the bytes. And the generation word must be loaded after the bytes. */
#if defined(__SSE2__)
    _mm_sfence();
#endif
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return copied;
}

/* Fill a list for the kernel from byte `at` of the first piece on; return its bytes. */
static uint64_t listed(struct iovec *list, unsigned long *used, const struct piece *pieces,
                       uint64_t count, uint64_t at)
{
    uint64_t bytes = 0;

    for (*used = 0; *used < count && *used < LISTED_MAX; (*used)++, at = 0) {
        list[*used].iov_base = (void *)(uintptr_t)(pieces[*used].address + at);
        list[*used].iov_len = pieces[*used].size - at;
        bytes += list[*used].iov_len;
    }
    return bytes;
}

/* Advance by `moved` bytes in a list of pieces. */
static void advance(const struct piece **pieces, uint64_t *count, uint64_t *at, uint64_t moved)
{
    for (*at += moved; *count && *at >= (*pieces)->size; (*pieces)++, (*count)--)
        *at -= (*pieces)->size;
}

/* Copy like `peercache_scatter`, with the kernel's own copy, at half the speed: memory that is not
 * mapped, or is unmapped during the copy, ends the copy and raises no signal. For a segment with a
 * file that another user may truncate at any time. Returns the leading bytes copied.
 */
uint64_t peercache_scatter_by_kernel(const struct piece *ours, uint64_t ours_count,
                                     const struct piece *segment, uint64_t segment_count,
                                     int to_segment)
{
    uint64_t ours_at = 0, segment_at = 0, copied = 0;

    while (ours_count && segment_count) {
        struct iovec local[LISTED_MAX], remote[LISTED_MAX];
        unsigned long locals, remotes;
        uint64_t bytes = listed(local, &locals, ours, ours_count, ours_at);
        uint64_t room = listed(remote, &remotes, segment, segment_count, segment_at);
        ssize_t moved;

        /* The segment is the side that the kernel pins: see `reachable`. */
        if (to_segment)
            moved = process_vm_writev(getpid(), local, locals, remote, remotes, 0);
        else
            moved = process_vm_readv(getpid(), local, locals, remote, remotes, 0);
        if (moved <= 0)
            break;
        copied += (uint64_t)moved;
        if ((uint64_t)moved < (bytes < room ? bytes : room))
            break;
        advance(&ours, &ours_count, &ours_at, (uint64_t)moved);
        advance(&segment, &segment_count, &segment_at, (uint64_t)moved);
    }
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    return copied;
}
