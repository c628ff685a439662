/* process_vm_readv and process_vm_writev of one process with itself, which qemu's user mode lacks.
 *
 * Bytes pass a pipe: its write and read check addresses as the kernel's copies do, so memory that is
 * not mapped, may not be written or is beyond the end of its file gives EFAULT.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <stdint.h>
#include <sys/uio.h>
#include <unistd.h>

#define PART 4096

/* Copy one part, which is in one page on both sides. Returns whether both sides are accessible. */
static int passed(const int *ends, char *to, const char *from, size_t size)
{
    char rest[PART];

    if (write(ends[1], from, size) != (ssize_t)size)
        return 0;
    if (read(ends[0], to, size) == (ssize_t)size)
        return 1;
    return read(ends[0], rest, size) && 0;
}

static size_t to_page_end(const char *at, size_t size)
{
    size_t left = PART - (uintptr_t)at % PART;

    return size < left ? size : left;
}

static ssize_t moved(pid_t process, const struct iovec *to, unsigned long to_count,
                     const struct iovec *from, unsigned long from_count, int *failed)
{
    size_t to_at = 0, from_at = 0;
    ssize_t total = 0;
    int ends[2];

    if (process != getpid()) {
        errno = EPERM;
        return -1;
    }
    if (pipe(ends))
        return -1;
    while (to_count && from_count) {
        char *into = (char *)to->iov_base + to_at;
        const char *source = (const char *)from->iov_base + from_at;
        size_t size = to_page_end(into, to->iov_len - to_at);

        size = to_page_end(source, size < from->iov_len - from_at ? size : from->iov_len - from_at);
        if (size && !passed(ends, into, source, size)) {
            *failed = 1;
            break;
        }
        total += (ssize_t)size;
        to_at += size;
        from_at += size;
        if (to_at == to->iov_len)
            to++, to_count--, to_at = 0;
        if (from_count && from_at == from->iov_len)
            from++, from_count--, from_at = 0;
    }
    close(ends[0]);
    close(ends[1]);
    if (*failed && !total) {
        errno = EFAULT;
        return -1;
    }
    return total;
}

ssize_t process_vm_readv(pid_t process, const struct iovec *local, unsigned long local_count,
                         const struct iovec *remote, unsigned long remote_count,
                         unsigned long flags)
{
    int failed = 0;

    (void)flags;
    return moved(process, local, local_count, remote, remote_count, &failed);
}

ssize_t process_vm_writev(pid_t process, const struct iovec *local, unsigned long local_count,
                          const struct iovec *remote, unsigned long remote_count,
                          unsigned long flags)
{
    int failed = 0;

    (void)flags;
    return moved(process, remote, remote_count, local, local_count, &failed);
}
