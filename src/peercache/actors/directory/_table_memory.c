/* The memory of a directory table: a file of its own, or private memory if it has no file.
 *
 * It is allocated in pieces before it is touched: on a full file system a batch is refused, and no
 * bus error occurs. Memory that readers may access is released only while no reader is in a batch.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdint.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "_table.h"

/* Allocate whole pages of a part of an area. Returns whether that succeeded. Huge pages are not
 * used: a virtual machine may take 6 ms to find one, and the owner would wait for each. */
int peercache_table_usable(struct table *t, uint64_t at, uint64_t bytes)
{
    uint64_t before = at % table_kernel_page();
    int done;

    if (t->file < 0)
        return mprotect((char *)t + at - before, before + bytes, PROT_READ | PROT_WRITE) == 0;
    do
        done = fallocate(t->file, 0, (off_t)at, (off_t)bytes);
    while (done < 0 && errno == EINTR);
    return done == 0;
}

/* Return whether no reader of the table is in a batch; then none begins one before `let_readers`. A
 * paused reader keeps memory from being released: its next access would find no memory, which is a
 * bus error if the file system is full. */
static int keep_readers_out(const struct table *t)
{
    struct flock whole = {.l_type = F_WRLCK, .l_whence = SEEK_SET};

    return t->file < 0 || fcntl(t->file, F_OFD_SETLK, &whole) == 0;
}

static void let_readers(const struct table *t)
{
    struct flock whole = {.l_type = F_UNLCK, .l_whence = SEEK_SET};

    if (t->file >= 0)
        fcntl(t->file, F_OFD_SETLK, &whole);
}

/* Release pages, as if they had never been used. Returns whether that succeeded. */
int peercache_table_give_back(struct table *t, uint64_t at, uint64_t bytes)
{
    uint64_t begin = table_aligned(at), end = (at + bytes) / table_kernel_page() * table_kernel_page();
    int done;

    if (t->file < 0)
        /* The range is mapped again, not only emptied: a host that accounts for committed memory
         * then no longer counts it. A page of the kernel of which only a part is released stays. */
        return begin >= end ||
               mmap((char *)t + begin, end - begin, PROT_NONE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE | MAP_FIXED, -1, 0) != MAP_FAILED;
    if (!keep_readers_out(t))
        return 0;
    done = fallocate(t->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)at, (off_t)bytes);
    let_readers(t);
    return done == 0;
}

uint64_t peercache_table_slots_for(uint64_t rows)
{
    uint64_t slots = rows * 17 / 9 + 1; /* 53 % full: with the rows 79 bytes a record */

    return table_rounded(slots * 8) / 8;
}

/* Return an empty table of at most `rows_max` rows whose first index has `slots` slots; NULL with
 * errno if its memory cannot be allocated. `seed` must be secret: an attacker that knows it can
 * make keys collide. `file`: an empty file for the table, -1 for private memory. */
struct table *peercache_table_new(const uint64_t *seed, uint64_t rows_max, uint64_t slots, int file,
                                  uint64_t incarnation)
{
    struct table plan = {.magic = TABLE_MAGIC, .version = TABLE_VERSION, .epoch = 1};
    int flags = file < 0 ? MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE : MAP_SHARED;
    struct table *t;

    if (rows_max < 1 || rows_max > ROWS_MAX || slots < 1 || slots > ROWS_MAX) {
        errno = EINVAL;
        return NULL;
    }
    memcpy(plan.seed, seed, sizeof(plan.seed));
    plan.incarnation = incarnation;
    plan.rows_max = rows_max;
    plan.holders_at = table_aligned(PAGE_BYTES);
    plan.slots_max = peercache_table_slots_for(rows_max) + table_rounded(slots * 8) / 8;
    plan.index[0].at = table_aligned(plan.holders_at + HOLDERS_MAX * sizeof(struct holder));
    plan.index[1].at = table_aligned(plan.index[0].at + plan.slots_max * 8);
    plan.rows_at = table_aligned(plan.index[1].at + plan.slots_max * 8);
    plan.bytes = plan.rows_at + table_rounded((rows_max + 1) * sizeof(struct row));
    plan.slots_min = plan.index[0].capacity = table_rounded(slots * 8) / 8;
    plan.index_ready[0] = plan.slots_min * 8;
    plan.rows_used = 1;
    plan.file = -1;
    if (file >= 0 && ftruncate(file, (off_t)plan.bytes))
        return NULL;
    t = mmap(NULL, plan.bytes, file < 0 ? PROT_NONE : PROT_READ | PROT_WRITE, flags, file, 0);
    if (t == MAP_FAILED)
        return NULL;
    if (file >= 0)
        plan.file = fcntl(file, F_DUPFD_CLOEXEC, 0);
    /* The file comes from the plan: the header has no memory yet. */
    if ((file >= 0 && (plan.file < 0 || posix_fallocate(file, 0, PAGE_BYTES))) ||
        (file < 0 && mprotect(t, PAGE_BYTES, PROT_READ | PROT_WRITE))) {
        munmap(t, plan.bytes);
        if (plan.file >= 0)
            close(plan.file);
        errno = ENOMEM;
        return NULL;
    }
    *t = plan;
    if (!peercache_table_usable(t, plan.index[0].at, plan.index_ready[0])) {
        munmap(t, plan.bytes);
        if (plan.file >= 0)
            close(plan.file);
        errno = ENOMEM;
        return NULL;
    }
    return t;
}

/* Release all memory of a table; a reader keeps what it has mapped. */
void peercache_table_free(struct table *t)
{
    int file = t->file;

    munmap(t, t->bytes);
    if (file >= 0)
        close(file);
}
