/* Many reads at once, by one thread: io_uring without a library of its own.
 *
 * A ring belongs to one thread. The kernel copies the vectors of a read when it is submitted; the
 * memory that they name is written to until the read has been waited for.
 */
#include <errno.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#if defined(__has_include)
#if __has_include(<linux/io_uring.h>)
#include <linux/io_uring.h>
#endif
#endif

#if defined(IORING_FEAT_SUBMIT_STABLE) && defined(__NR_io_uring_setup)
#include <sys/mman.h>

struct reads {
    int ring;
    uint32_t *submit_head, *submit_tail, submit_mask;
    uint32_t *done_head, *done_tail, done_mask;
    struct io_uring_sqe *entries;
    struct io_uring_cqe *done;
    void *queues;
    size_t queues_bytes, entries_bytes;
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

/* Make a ring for this many reads. Return NULL and set errno if the kernel has none for us. */
void *peercache_reads_open(uint32_t count)
{
    struct io_uring_params params;
    struct reads *reads = calloc(1, sizeof(*reads));
    const uint32_t needed = IORING_FEAT_SINGLE_MMAP | IORING_FEAT_SUBMIT_STABLE;
    size_t submit_bytes, done_bytes;
    uint32_t *array;
    int error;

    if (!reads)
        return NULL;
    reads->queues = reads->entries = MAP_FAILED;
    memset(&params, 0, sizeof(params));
    reads->ring = (int)syscall(__NR_io_uring_setup, count, &params);
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
    reads->submit_head = AT(params.sq_off.head);
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

/* Start a read into memory of several pieces. Return 0, or an error of the kernel as -errno: then
 * the read was not started. The caller starts at most as many reads as the ring is made for. */
int peercache_reads_start(void *ring, int file, uint64_t offset, const struct iovec *pieces,
                          uint32_t count, uint64_t name)
{
    struct reads *reads = ring;
    uint32_t tail = *reads->submit_tail; /* Only this thread changes it. */
    struct io_uring_sqe *entry = &reads->entries[tail & reads->submit_mask];
    long started;

    memset(entry, 0, sizeof(*entry));
    entry->opcode = IORING_OP_READV;
    entry->fd = file;
    entry->off = offset;
    entry->addr = (uint64_t)(uintptr_t)pieces;
    entry->len = count;
    entry->user_data = name;
    __atomic_store_n(reads->submit_tail, tail + 1, __ATOMIC_RELEASE);
    do
        started = syscall(__NR_io_uring_enter, reads->ring, 1, 0, 0, NULL, 0);
    while (started < 0 && errno == EINTR);
    if (started == 1)
        return 0;
    /* The kernel takes entries in this call only, so an entry that it left can be withdrawn. */
    __atomic_store_n(reads->submit_tail, tail, __ATOMIC_RELEASE);
    return started < 0 ? -errno : -EAGAIN;
}

/* Wait until a read has ended. Return its name, and its bytes or -errno in `result`. If the kernel
 * refuses to wait, this looks once in a millisecond: the mapping keeps the ring, and a read writes to
 * its memory until its result is here, so none is given up. */
uint64_t peercache_reads_wait(void *ring, int64_t *result)
{
    const struct timespec pause = {.tv_nsec = 1000000};
    struct reads *reads = ring;
    uint32_t head = *reads->done_head; /* Only this thread changes it. */
    struct io_uring_cqe *entry;
    uint64_t name;

    while (head == __atomic_load_n(reads->done_tail, __ATOMIC_ACQUIRE))
        if (syscall(__NR_io_uring_enter, reads->ring, 0, 1, IORING_ENTER_GETEVENTS, NULL, 0) < 0 &&
            errno != EINTR)
            nanosleep(&pause, NULL);
    entry = &reads->done[head & reads->done_mask];
    name = entry->user_data;
    *result = entry->res;
    __atomic_store_n(reads->done_head, head + 1, __ATOMIC_RELEASE);
    return name;
}

#else /* Headers older than io_uring. */

void *peercache_reads_open(uint32_t count)
{
    (void)count;
    errno = ENOSYS;
    return NULL;
}

void peercache_reads_close(void *reads)
{
    (void)reads;
}

int peercache_reads_start(void *ring, int file, uint64_t offset, const struct iovec *pieces,
                          uint32_t count, uint64_t name)
{
    (void)ring, (void)file, (void)offset, (void)pieces, (void)count, (void)name;
    return -ENOSYS;
}

uint64_t peercache_reads_wait(void *ring, int64_t *result)
{
    (void)ring;
    *result = -ENOSYS;
    return 0;
}

#endif
