/* Stands in for a disk that loses power: keeps, for each write to files of a folder that was not synced,
 * what was there before, so that a test can put it back. LD_PRELOAD; Linux, glibc.
 *
 * UNSYNCED_FOLDER: whose files count. UNSYNCED_UNDO: a folder for one file an inode, of records
 * {offset, length, size of the file before, bytes}. A sync empties the file. Names and allocations are
 * taken for durable, and SQLite's -shm file for no data at all.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static int counts(int file, struct stat *status, char *undo)
{
    const char *folder = getenv("UNSYNCED_FOLDER"), *log = getenv("UNSYNCED_UNDO");
    char link[64], path[PATH_MAX];
    ssize_t length;

    snprintf(link, sizeof(link), "/proc/self/fd/%d", file);
    length = readlink(link, path, sizeof(path) - 1);
    if (!folder || !log || length <= 0)
        return 0;
    path[length] = 0;
    if (strncmp(path, folder, strlen(folder)) || fstat(file, status) || !S_ISREG(status->st_mode))
        return 0;
    if (length > 4 && !strcmp(path + length - 4, "-shm"))
        return 0;
    snprintf(undo, PATH_MAX, "%s/%lu", log, (unsigned long)status->st_ino);
    return 1;
}

static void must(int holds, const char *what)
{
    if (!holds) {
        perror(what);
        abort();
    }
}

/* Note what `length` bytes at an offset are now; the lock is held. */
static void note(int file, uint64_t offset, uint64_t length)
{
    struct stat status;
    char undo[PATH_MAX];
    uint64_t there, head[3];
    void *bytes;
    int log;

    if (!counts(file, &status, undo))
        return;
    there = (uint64_t)status.st_size > offset ? (uint64_t)status.st_size - offset : 0;
    if (there > length)
        there = length;
    must(!posix_memalign(&bytes, 4096, length + 4096), "memory");
    if (there)
        must(syscall(SYS_pread64, file, bytes, length, offset) >= (ssize_t)there, "pread");
    head[0] = offset;
    head[1] = there;
    head[2] = (uint64_t)status.st_size;
    log = (int)syscall(SYS_openat, AT_FDCWD, undo, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    must(log >= 0, undo);
    must(syscall(SYS_write, log, head, sizeof(head)) == sizeof(head), "log");
    must(syscall(SYS_write, log, bytes, there) == (ssize_t)there, "log");
    syscall(SYS_close, log);
    free(bytes);
}

static uint64_t total(const struct iovec *pieces, int count)
{
    uint64_t sum = 0;

    for (int index = 0; index < count; index++)
        sum += pieces[index].iov_len;
    return sum;
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define NOTED(call, file, offset, length) \
    do { \
        __typeof__(call) done; \
        pthread_mutex_lock(&lock); \
        note(file, (uint64_t)(offset), length); \
        done = call; \
        pthread_mutex_unlock(&lock); \
        return done; \
    } while (0)

ssize_t pwrite(int file, const void *bytes, size_t length, off_t offset)
{
    NOTED(REAL(pwrite)(file, bytes, length, offset), file, offset, length);
}

ssize_t pwrite64(int file, const void *bytes, size_t length, off64_t offset)
{
    NOTED(REAL(pwrite64)(file, bytes, length, offset), file, offset, length);
}

ssize_t pwritev(int file, const struct iovec *pieces, int count, off_t offset)
{
    NOTED(REAL(pwritev)(file, pieces, count, offset), file, offset, total(pieces, count));
}

ssize_t pwritev64(int file, const struct iovec *pieces, int count, off64_t offset)
{
    NOTED(REAL(pwritev64)(file, pieces, count, offset), file, offset, total(pieces, count));
}

/* What Python's os.pwritev calls. */
ssize_t pwritev2(int file, const struct iovec *pieces, int count, off_t offset, int flags)
{
    NOTED(REAL(pwritev2)(file, pieces, count, offset, flags), file, offset, total(pieces, count));
}

ssize_t pwritev64v2(int file, const struct iovec *pieces, int count, off64_t offset, int flags)
{
    NOTED(REAL(pwritev64v2)(file, pieces, count, offset, flags), file, offset, total(pieces, count));
}

static int synced(int (*sync)(int), int file)
{
    struct stat status;
    char undo[PATH_MAX];
    int failed;

    pthread_mutex_lock(&lock);
    failed = sync(file);
    if (!failed && counts(file, &status, undo))
        unlink(undo);
    pthread_mutex_unlock(&lock);
    return failed;
}

int fsync(int file)
{
    return synced(REAL(fsync), file);
}

int fdatasync(int file)
{
    return synced(REAL(fdatasync), file);
}
