/* Kills its process before the n-th call that changes something: LD_PRELOAD; Linux, glibc.
 *
 * KILL_AT: n, or 0 to count only. KILL_COUNT: a file of 8 bytes that has the count. KILL_KIND: "files"
 * counts calls that change files and folders below one of KILL_FOLDERS (separated by colons),
 * "messages" those that send on a socket.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/sendfile.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static _Atomic uint64_t *count;
static uint64_t at;
static int of_messages;
static const char *folders = "";

__attribute__((constructor)) static void begin(void)
{
    const char *path = getenv("KILL_COUNT"), *n = getenv("KILL_AT"), *kind = getenv("KILL_KIND");
    int file = path ? (int)syscall(SYS_openat, AT_FDCWD, path, O_RDWR | O_CLOEXEC, 0) : -1;

    if (file < 0 || !n || !kind)
        return;
    count = mmap(NULL, sizeof(*count), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    syscall(SYS_close, file);
    if (count == MAP_FAILED)
        abort();
    at = strtoull(n, NULL, 10);
    of_messages = !strcmp(kind, "messages");
    if (getenv("KILL_FOLDERS"))
        folders = getenv("KILL_FOLDERS");
}

static void step(void)
{
    if (atomic_fetch_add(count, 1) + 1 == at) {
        syscall(SYS_kill, getpid(), SIGKILL);
        for (;;)
            pause();
    }
}

static int is_below(const char *path)
{
    for (const char *folder = folders; *folder;) {
        size_t length = strcspn(folder, ":");

        if (length && !strncmp(path, folder, length))
            return 1;
        folder += length + (folder[length] == ':');
    }
    return 0;
}

static int named(int file, char *path)
{
    char link[64];
    ssize_t length;

    snprintf(link, sizeof(link), "/proc/self/fd/%d", file);
    length = readlink(link, path, PATH_MAX - 1);
    path[length > 0 ? length : 0] = 0;
    return length > 0;
}

static void changes(int file)
{
    char path[PATH_MAX];

    if (count && !of_messages && named(file, path) && is_below(path))
        step();
}

static void names(int folder, const char *path)
{
    char of_folder[PATH_MAX], whole[2 * PATH_MAX];

    if (!count || of_messages)
        return;
    if (*path == '/' || folder == AT_FDCWD || !named(folder, of_folder))
        snprintf(whole, sizeof(whole), "%s", path);
    else
        snprintf(whole, sizeof(whole), "%s/%s", of_folder, path);
    if (is_below(whole))
        step();
}

static void sends(int file)
{
    struct stat status;

    if (count && of_messages && !fstat(file, &status) && S_ISSOCK(status.st_mode))
        step();
}

#define REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define ON_FILE(result, name, file, parameters, arguments) \
    result name parameters \
    { \
        changes(file); \
        return REAL(name) arguments; \
    }
#define ON_EITHER(result, name, file, parameters, arguments) \
    result name parameters \
    { \
        changes(file); \
        sends(file); \
        return REAL(name) arguments; \
    }
#define ON_SOCKET(result, name, file, parameters, arguments) \
    result name parameters \
    { \
        sends(file); \
        return REAL(name) arguments; \
    }
#define ON_NAME(result, name, folder, path, parameters, arguments) \
    result name parameters \
    { \
        names(folder, path); \
        return REAL(name) arguments; \
    }

ON_EITHER(ssize_t, write, f, (int f, const void *b, size_t n), (f, b, n))
ON_EITHER(ssize_t, writev, f, (int f, const struct iovec *p, int n), (f, p, n))
ON_FILE(ssize_t, pwrite, f, (int f, const void *b, size_t n, off_t o), (f, b, n, o))
ON_FILE(ssize_t, pwrite64, f, (int f, const void *b, size_t n, off64_t o), (f, b, n, o))
ON_FILE(ssize_t, pwritev, f, (int f, const struct iovec *p, int n, off_t o), (f, p, n, o))
ON_FILE(ssize_t, pwritev64, f, (int f, const struct iovec *p, int n, off64_t o), (f, p, n, o))
ON_FILE(ssize_t, pwritev2, f, (int f, const struct iovec *p, int n, off_t o, int x), (f, p, n, o, x))
ON_FILE(ssize_t, pwritev64v2, f, (int f, const struct iovec *p, int n, off64_t o, int x),
        (f, p, n, o, x))
ON_FILE(int, fsync, f, (int f), (f))
ON_FILE(int, fdatasync, f, (int f), (f))
ON_FILE(int, ftruncate, f, (int f, off_t n), (f, n))
ON_FILE(int, ftruncate64, f, (int f, off64_t n), (f, n))
ON_FILE(int, fallocate, f, (int f, int m, off_t o, off_t n), (f, m, o, n))
ON_FILE(int, fallocate64, f, (int f, int m, off64_t o, off64_t n), (f, m, o, n))
ON_FILE(int, posix_fallocate, f, (int f, off_t o, off_t n), (f, o, n))
ON_FILE(int, posix_fallocate64, f, (int f, off64_t o, off64_t n), (f, o, n))
ON_NAME(int, rename, AT_FDCWD, old, (const char *old, const char *to), (old, to))
ON_NAME(int, renameat, d, old, (int d, const char *old, int e, const char *to), (d, old, e, to))
ON_NAME(int, unlink, AT_FDCWD, path, (const char *path), (path))
ON_NAME(int, unlinkat, d, path, (int d, const char *path, int x), (d, path, x))
ON_NAME(int, rmdir, AT_FDCWD, path, (const char *path), (path))
ON_NAME(int, mkdir, AT_FDCWD, path, (const char *path, mode_t m), (path, m))
ON_NAME(int, mkdirat, d, path, (int d, const char *path, mode_t m), (d, path, m))
ON_SOCKET(ssize_t, send, f, (int f, const void *b, size_t n, int x), (f, b, n, x))
ON_SOCKET(ssize_t, sendto, f,
          (int f, const void *b, size_t n, int x, const struct sockaddr *a, socklen_t l),
          (f, b, n, x, a, l))
ON_SOCKET(ssize_t, sendmsg, f, (int f, const struct msghdr *m, int x), (f, m, x))
ON_SOCKET(ssize_t, sendfile, f, (int f, int i, off_t *o, size_t n), (f, i, o, n))
ON_SOCKET(ssize_t, sendfile64, f, (int f, int i, off64_t *o, size_t n), (f, i, o, n))

#define ON_OPEN(name, folder, parameters, arguments) \
    int name parameters \
    { \
        mode_t mode = 0; \
        va_list more; \
\
        if (flags & (O_CREAT | O_TMPFILE)) { \
            va_start(more, flags); \
            mode = va_arg(more, mode_t); \
            va_end(more); \
        } \
        if (flags & (O_CREAT | O_TRUNC)) \
            names(folder, path); \
        return REAL(name) arguments; \
    }

ON_OPEN(open, AT_FDCWD, (const char *path, int flags, ...), (path, flags, mode))
ON_OPEN(open64, AT_FDCWD, (const char *path, int flags, ...), (path, flags, mode))
ON_OPEN(openat, d, (int d, const char *path, int flags, ...), (d, path, flags, mode))
ON_OPEN(openat64, d, (int d, const char *path, int flags, ...), (d, path, flags, mode))
