/* Receives one stream of bytes into many places; ctypes releases the GIL once for the whole call.
 * */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <sys/socket.h>
#include <sys/uio.h>

struct place {
    uint64_t address;
    uint64_t size;
};

/* Places of one recvmsg; the kernel accepts 1024. */
#define PLACES_MAX 256

/* Fill the places, from `skip` bytes into the first, in order; `skip` is less than its size. Return
 * the bytes received: fewer than all when the other side closed, when the socket's time-out passed,
 * or for a signal; 0 if it closed before any came, -1 and errno if nothing came for another reason.
 *
 * It returns from the kernel after every `step` bytes. Most servers' kernels do not preempt a
 * thread in a system call, and a receive of a whole batch takes 10 ms: another thread on the same
 * processor, such as a node's loop with a request to answer, would wait as long.
 */
int64_t peercache_receive(int file, const struct place *places, uint64_t count, uint64_t skip,
                          uint64_t step)
{
    uint64_t at = 0, total = 0;

    while (at < count) {
        struct iovec pieces[PLACES_MAX];
        struct msghdr message = {.msg_iov = pieces};
        uint64_t wanted = 0, place = at, skipped = skip;
        ssize_t taken;

        while (place < count && message.msg_iovlen < PLACES_MAX && wanted < step) {
            uint64_t size = places[place].size - skipped;

            if (size > step - wanted)
                size = step - wanted;
            if (size) {
                pieces[message.msg_iovlen].iov_base =
                    (void *)(uintptr_t)(places[place].address + skipped);
                pieces[message.msg_iovlen++].iov_len = size;
            }
            wanted += size;
            place++;
            skipped = 0;
        }
        if (!wanted)
            return (int64_t)total; /* Only empty places are left. */
        taken = recvmsg(file, &message, MSG_WAITALL);
        if (taken < 0)
            return total ? (int64_t)total : -1;
        total += (uint64_t)taken;
        if ((uint64_t)taken < wanted)
            return (int64_t)total;
        while (at < count && (uint64_t)taken >= places[at].size - skip) {
            taken -= (ssize_t)(places[at].size - skip);
            skip = 0;
            at++;
        }
        skip += (uint64_t)taken;
    }
    return (int64_t)total;
}
