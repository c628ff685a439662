/* Preloaded into a test's process: makes reads and writes of slab files fail, or hang.
 *
 * The file named by PEERCACHE_FAULTS defines what happens, and is read before each call:
 * "KIND ERRNO", "KIND hang", "KIND slow" or "KIND flip", where KIND is r (reads), w (writes) or b
 * (both); empty: nothing. A call that hangs goes on once the file holds something else, a slow one
 * after 50 ms; `flip` changes one bit of what is read. io_uring is refused, so that all reads are calls.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#define FLIP -1

long syscall(long number, ...) {
    long given[6];
    va_list list;
    if (number == __NR_io_uring_setup) { errno = ENOSYS; return -1; }
    va_start(list, number);
    for (int at = 0; at < 6; at++) given[at] = va_arg(list, long);
    va_end(list);
    return ((long (*)(long, ...))dlsym(RTLD_NEXT, "syscall"))(
        number, given[0], given[1], given[2], given[3], given[4], given[5]);
}

typedef ssize_t (*vector_call)(int, const struct iovec *, int, off64_t, int);

static int fault_of(int file, char kind) {
    char name[4096], link[64], said[64] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, name, sizeof name - 1);
    if (length < 0) return 0;
    name[length] = 0;
    if (!strstr(name, "slab-")) return 0;
    for (;;) {
        const char *path = getenv("PEERCACHE_FAULTS");
        int control = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
        if (control < 0) return 0;
        length = read(control, said, sizeof said - 1);
        close(control);
        said[length > 0 ? length : 0] = 0;
        if (!said[0] || (said[0] != 'b' && said[0] != kind)) return 0;
        if (!strncmp(said + 2, "flip", 4)) return FLIP;
        int is_slow = !strncmp(said + 2, "slow", 4);
        if (!is_slow && strncmp(said + 2, "hang", 4)) return atoi(said + 2);
        struct timespec moment = {0, (is_slow ? 50 : 10) * 1000 * 1000};
        nanosleep(&moment, NULL);
        if (is_slow) return 0;
    }
}

ssize_t preadv64v2(int file, const struct iovec *parts, int count, off64_t offset, int flags) {
    int fault = fault_of(file, 'r');
    if (fault > 0) { errno = fault; return -1; }
    ssize_t length = ((vector_call)dlsym(RTLD_NEXT, "preadv64v2"))(file, parts, count, offset, flags);
    if (fault == FLIP && length > 0) ((char *)parts[0].iov_base)[parts[0].iov_len / 2] ^= 1;
    return length;
}

ssize_t pwritev64v2(int file, const struct iovec *parts, int count, off64_t offset, int flags) {
    int fault = fault_of(file, 'w');
    if (fault > 0) { errno = fault; return -1; }
    return ((vector_call)dlsym(RTLD_NEXT, "pwritev64v2"))(file, parts, count, offset, flags);
}
