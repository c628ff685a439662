/* Preloaded into the processes of one host: moves its wall clock.
 *
 * The file named by FAULTS_CLOCK holds the seconds by which the clock is ahead, as text; it is read
 * again after 10 ms. The monotonic clock stays: a time namespace sets it for the whole host.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

typedef int (*clock_call)(clockid_t, struct timespec *);

static int real(clockid_t clock, struct timespec *now) {
    static _Atomic(clock_call) found;
    if (!found) found = (clock_call)dlsym(RTLD_NEXT, "clock_gettime");
    return found(clock, now);
}

static long ahead_s(void) {
    static _Atomic long ahead, looked_ms = -1000000;
    struct timespec now;
    real(CLOCK_MONOTONIC_COARSE, &now);
    long now_ms = now.tv_sec * 1000 + now.tv_nsec / 1000000;
    const char *path = getenv("FAULTS_CLOCK");
    if (path && now_ms - looked_ms > 10) {
        char text[32] = "";
        int before = errno, file = open(path, O_RDONLY | O_CLOEXEC);
        looked_ms = now_ms;
        if (file >= 0) {
            if (read(file, text, sizeof text - 1) >= 0) ahead = atol(text);
            close(file);
        }
        errno = before;
    }
    return ahead;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = real(clock, now);
    if (!failed && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE))
        now->tv_sec += ahead_s();
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    struct timespec exact;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &exact)) return -1;
    now->tv_sec = exact.tv_sec;
    now->tv_usec = exact.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *kept) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (kept) *kept = now.tv_sec;
    return now.tv_sec;
}
