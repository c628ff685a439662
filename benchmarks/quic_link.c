// A link between two hosts: two taps, and what happens to each frame on its way.
//   quic_link LOSS DELAY_US RATE QUEUE
// LOSS: the fraction of frames that are lost. DELAY_US: of each direction. RATE: bytes a second of
// each direction. QUEUE: bytes that wait at most; further frames are lost. Ends with its input.
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <time.h>
#include <unistd.h>

enum { FRAME_BYTES = 2048, FRAMES = 65536, AT_ONCE = 64 };

struct way {
    int from, to;
    unsigned begin, end;
    int64_t free_at;
    struct {
        int64_t due;
        ssize_t size;
        uint8_t bytes[FRAME_BYTES];
    } * frames;
};

static int64_t now_ns(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000000000LL + now.tv_nsec;
}

static int open_tap(const char *name)
{
    struct ifreq request = {.ifr_flags = IFF_TAP | IFF_NO_PI};
    strcpy(request.ifr_name, name);
    int tap = open("/dev/net/tun", O_RDWR | O_NONBLOCK);
    if (tap < 0 || ioctl(tap, TUNSETIFF, &request) < 0) {
        perror(name);
        exit(1);
    }
    return tap;
}

static void take(struct way *way, double loss, int64_t delay_ns, double rate, double queue_bytes)
{
    int64_t now = now_ns();
    for (int count = 0; count < AT_ONCE && way->end - way->begin < FRAMES; count++) {
        ssize_t size = read(way->from, way->frames[way->end % FRAMES].bytes, FRAME_BYTES);
        if (size <= 0)
            return;
        if (way->free_at < now)
            way->free_at = now;
        if (drand48() < loss || (double)(way->free_at - now) * rate / 1e9 > queue_bytes)
            continue;
        way->free_at += (int64_t)((double)size * 1e9 / rate);
        way->frames[way->end % FRAMES].size = size;
        way->frames[way->end++ % FRAMES].due = way->free_at + delay_ns;
    }
}

int main(int count, char **given)
{
    if (count != 5)
        return 2;
    int taps[2] = {open_tap("tap0"), open_tap("tap1")};
    struct way ways[2];
    for (int i = 0; i < 2; i++)
        ways[i] = (struct way){taps[i], taps[!i], 0, 0, 0, malloc(FRAMES * sizeof *ways->frames)};
    prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0);
    srand48(1);
    puts("ready");
    fflush(stdout);
    struct pollfd polled[3] = {{taps[0], POLLIN, 0}, {taps[1], POLLIN, 0}, {0, POLLIN, 0}};
    while (!polled[2].revents) {
        int64_t wait_ns = 1000000000LL, now = now_ns();
        for (int i = 0; i < 2; i++) {
            if (ways[i].begin == ways[i].end)
                continue;
            int64_t left = ways[i].frames[ways[i].begin % FRAMES].due - now;
            wait_ns = left < 0 ? 0 : left < wait_ns ? left : wait_ns;
        }
        struct timespec wait = {wait_ns / 1000000000, wait_ns % 1000000000};
        ppoll(polled, 3, &wait, NULL);
        for (int i = 0; i < 2; i++)
            if (polled[i].revents)
                take(&ways[i], atof(given[1]), atoll(given[2]) * 1000, atof(given[3]),
                     atof(given[4]));
        now = now_ns();
        for (int i = 0; i < 2; i++)
            for (struct way *way = &ways[i];
                 way->begin != way->end && way->frames[way->begin % FRAMES].due <= now;
                 way->begin++)
                // A frame that the other host cannot take is lost, as with any switch.
                if (write(way->to, way->frames[way->begin % FRAMES].bytes,
                          (size_t)way->frames[way->begin % FRAMES].size) < 0)
                    continue;
    }
    return 0;
}
