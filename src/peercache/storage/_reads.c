/* Many reads at once, by one thread: io_uring without a library of its own.
 *
 * A ring belongs to one thread. It is kept full, and what has been read is verified, without Python.
 * The memory of a read is written to until the read has been waited for.
 */
#include <errno.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define BLOCK_BYTES 4096
#define KEY_BYTES 16
#define DONE 0

/* The beginning of a slot, as in layout.py. */
struct slot {
    uint8_t format[12];
    uint32_t length;
    uint8_t key[KEY_BYTES];
    uint64_t space, place, sequence, checksum;
    uint32_t written, variant;
    uint64_t check;
};

/* A page to be read, as in ring.py. */
struct page {
    uint8_t key[KEY_BYTES];
    uint64_t space;
    uint32_t variant;
    int32_t file;    /* -1: not this page. */
    uint64_t length; /* It is read in whole blocks. */
    uint64_t place;
    uint64_t offset; /* In the pool. */
    uint64_t known;  /* The page's checksum: its header is not read. 0: it is. */
};

/* What is the same for all calls of a thread. */
struct setting {
    uint8_t *pool;
    uint8_t *blocks;       /* A block for the header of each page of a call. */
    const uint8_t *format; /* How each slot begins. */
    uint64_t (*checksum_of)(const void *, size_t);
    uint64_t pool_bytes, slab_bytes;
    uint32_t pages_max; /* Of a call. */
    uint32_t depth;     /* Reads in flight at most. */
};

#if defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif
#endif

#if defined(IORING_FEAT_SUBMIT_STABLE) && defined(__NR_io_uring_setup)
#include <sys/mman.h>

/* Return the bytes of a page in whole blocks. */
static uint64_t padded_bytes(const struct page *page)
{
    return (page->length + BLOCK_BYTES - 1) / BLOCK_BYTES * BLOCK_BYTES;
}

static int is_in_pool(const struct setting *setting, const struct page *page)
{
    return page->length <= setting->pool_bytes && page->offset <= setting->pool_bytes &&
           padded_bytes(page) <= setting->pool_bytes - page->offset;
}

/* Return whether a read of `bytes` (or -errno) brought the page, and what is in its slot is right. */
static int is_valid(const struct setting *setting, const struct page *page, const struct slot *slot,
                    int64_t bytes)
{
    if (page->known)
        return bytes == (int64_t)padded_bytes(page) &&
               setting->checksum_of(setting->pool + page->offset, page->length) == page->known;
    return bytes == (int64_t)(BLOCK_BYTES + padded_bytes(page)) &&
           memcmp(slot->format, setting->format, sizeof(slot->format)) == 0 &&
           memcmp(slot->key, page->key, KEY_BYTES) == 0 && slot->length == page->length &&
           slot->space == page->space && slot->variant == page->variant &&
           slot->place == page->place &&
           slot->check == setting->checksum_of(slot, offsetof(struct slot, check)) &&
           slot->checksum == setting->checksum_of(setting->pool + page->offset, page->length);
}

struct reads {
    struct setting setting;
    int ring;
    uint32_t *submit_tail, submit_mask;
    uint32_t *done_head, *done_tail, done_mask;
    struct io_uring_sqe *entries;
    struct io_uring_cqe *done;
    void *queues;
    size_t queues_bytes, entries_bytes;
    struct iovec pieces[];
};

static void close_reads(struct reads *reads)
{
    if (reads->queues != MAP_FAILED)
        munmap(reads->queues, reads->queues_bytes);
    if (reads->entries != MAP_FAILED)
        munmap(reads->entries, reads->entries_bytes);
    if (reads->ring >= 0)
        close(reads->ring);
    free(reads);
}

/* Make a ring. Return NULL and set errno if the kernel has none for us. */
void *peercache_reads_open(const struct setting *setting)
{
    struct io_uring_params params;
    struct reads *reads = calloc(1, sizeof(*reads) + 2 * setting->pages_max * sizeof(struct iovec));
    const uint32_t needed = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_SUBMIT_STABLE;
    size_t submit_bytes, done_bytes;
    uint32_t *array;
    int error;

    if (!reads)
        return NULL;
    reads->setting = *setting;
    reads->queues = reads->entries = MAP_FAILED;
    memset(&params, 0, sizeof(params));
    reads->ring = (int)syscall(__NR_io_uring_setup, setting->pages_max, &params);
    if (reads->ring < 0)
        goto failed;
    if ((params.features & needed) != needed) {
        errno = ENOSYS; /* Linux before 5.5. */
        goto failed;
    }
    submit_bytes = params.sq_off.array + params.sq_entries * sizeof(uint32_t);
    done_bytes = params.cq_off.cqes + params.cq_entries * sizeof(struct io_uring_cqe);
    reads->queues_bytes = submit_bytes > done_bytes ? submit_bytes : done_bytes;
    reads->entries_bytes = params.sq_entries * sizeof(struct io_uring_sqe);
    reads->queues = mmap(NULL, reads->queues_bytes, PROT_READ | PROT_WRITE,
                         MAP_SHARED | MAP_POPULATE, reads->ring, IORING_OFF_SQ_RING);
    if (reads->queues == MAP_FAILED)
        goto failed;
    reads->entries = mmap(NULL, reads->entries_bytes, PROT_READ | PROT_WRITE,
                          MAP_SHARED | MAP_POPULATE, reads->ring, IORING_OFF_SQES);
    if (reads->entries == MAP_FAILED)
        goto failed;
#define AT(offset) ((uint32_t *)((char *)reads->queues + (offset)))
    reads->submit_tail = AT(params.sq_off.tail);
    reads->submit_mask = *AT(params.sq_off.ring_mask);
    reads->done_head = AT(params.cq_off.head);
    reads->done_tail = AT(params.cq_off.tail);
    reads->done_mask = *AT(params.cq_off.ring_mask);
    reads->done = (struct io_uring_cqe *)AT(params.cq_off.cqes);
    array = AT(params.sq_off.array);
#undef AT
    for (uint32_t at = 0; at < params.sq_entries; at++)
        array[at] = at;
    return reads;

failed:
    error = errno;
    close_reads(reads);
    errno = error;
    return NULL;
}

/* Free a ring without a read in flight. */
void peercache_reads_close(void *reads)
{
    close_reads(reads);
}

/* Queue the read of a page, behind so many others. */
static void queue(struct reads *reads, const struct page *page, uint32_t at, uint32_t queued)
{
    const struct setting *setting = &reads->setting;
    struct iovec *pieces = &reads->pieces[2 * at];
    struct io_uring_sqe *entry =
        &reads->entries[(*reads->submit_tail + queued) & reads->submit_mask];

    pieces[0].iov_base = setting->blocks + at * BLOCK_BYTES;
    pieces[0].iov_len = BLOCK_BYTES;
    pieces[1].iov_base = setting->pool + page->offset;
    pieces[1].iov_len = padded_bytes(page);
    memset(entry, 0, sizeof(*entry));
    entry->opcode = IORING_OP_READV;
    entry->fd = page->file;
    entry->off = page->place % setting->slab_bytes + (page->known ? BLOCK_BYTES : 0);
    entry->addr = (uint64_t)(uintptr_t)(page->known ? &pieces[1] : pieces);
    entry->len = page->known ? 1 : 2;
    entry->user_data = at;
}

/* Start the queued reads; return how many the kernel took. */
static uint32_t start(struct reads *reads, uint32_t queued)
{
    uint32_t tail = *reads->submit_tail; /* Only this thread changes it. */
    uint32_t started = 0;
    long some;

    __atomic_store_n(reads->submit_tail, tail + queued, __ATOMIC_RELEASE);
    while (started < queued) {
        some = syscall(__NR_io_uring_enter, reads->ring, queued - started, 0, 0, NULL, 0);
        if (some > 0)
            started += (uint32_t)some;
        else if (some == 0 || errno != EINTR)
            break;
    }
    /* The kernel takes entries in this call only, so those that it left can be withdrawn. */
    __atomic_store_n(reads->submit_tail, tail + started, __ATOMIC_RELEASE);
    return started;
}

/* Wait until a read has ended. If the kernel refuses to wait, look once in a millisecond: the mapping
 * keeps the ring, and a read writes to its memory until its result is here, so none is given up. */
static void wait_for_one(const struct reads *reads, uint32_t head)
{
    const struct timespec pause = {.tv_nsec = 1000000};

    while (head == __atomic_load_n(reads->done_tail, __ATOMIC_ACQUIRE))
        if (syscall(__NR_io_uring_enter, reads->ring, 0, 1, IORING_ENTER_GETEVENTS, NULL, 0) < 0 &&
            errno != EINTR)
            nanosleep(&pause, NULL);
}

/* Read pages, and note which are exactly what they should be; the others are left to the caller.
 * Return when no read is in flight. is_over: one byte; once it is set, no read is started. */
void peercache_reads_load(void *ring, const struct page *pages, uint32_t count, uint8_t *outcomes,
                          uint64_t *checksums, const uint8_t *is_over)
{
    struct reads *reads = ring;
    uint32_t head = *reads->done_head; /* Only this thread changes it. */
    uint32_t next = 0, not_verified = 0;
    int is_refused = 0;

    if (count > reads->setting.pages_max)
        count = reads->setting.pages_max;
    for (;;) {
        /* What has ended is replaced at once, so that the device is busy during the verification. */
        uint32_t ended = __atomic_load_n(reads->done_tail, __ATOMIC_ACQUIRE) - head;
        uint32_t queued = 0, started;

        for (; next < count && not_verified - ended + queued < reads->setting.depth &&
               !is_refused && !__atomic_load_n(is_over, __ATOMIC_RELAXED); next++)
            if (pages[next].file >= 0 && is_in_pool(&reads->setting, &pages[next]))
                queue(reads, &pages[next], next, queued++);
        started = start(reads, queued);
        is_refused |= started < queued;
        not_verified += started;
        if (!not_verified)
            return;
        if (!ended) {
            wait_for_one(reads, head);
        } else {
            const struct io_uring_cqe *entry = &reads->done[head & reads->done_mask];
            uint64_t at = entry->user_data;
            const struct slot *slot = (const void *)(reads->setting.blocks + at * BLOCK_BYTES);

            if (is_valid(&reads->setting, &pages[at], slot, entry->res)) {
                checksums[at] = pages[at].known ? pages[at].known : slot->checksum;
                __atomic_store_n(&outcomes[at], DONE, __ATOMIC_RELEASE);
            }
            __atomic_store_n(reads->done_head, ++head, __ATOMIC_RELEASE);
            not_verified--;
        }
    }
}

#else /* Headers older than io_uring. */

void *peercache_reads_open(const struct setting *setting)
{
    (void)setting;
    errno = ENOSYS;
    return NULL;
}

void peercache_reads_close(void *reads)
{
    (void)reads;
}

void peercache_reads_load(void *ring, const struct page *pages, uint32_t count, uint8_t *outcomes,
                          uint64_t *checksums, const uint8_t *is_over)
{
    (void)ring, (void)pages, (void)count, (void)outcomes, (void)checksums, (void)is_over;
}

#endif
