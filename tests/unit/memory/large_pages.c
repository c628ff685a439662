/* A kernel with pages of 64 KiB, as on many aarch64 hosts: preloaded, it refuses what such a kernel
 * refuses, and rounds what it rounds. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdint.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#define PAGE 65536ul

static unsigned long rounded(unsigned long bytes)
{
    return (bytes + PAGE - 1) / PAGE * PAGE;
}

static int refused(void)
{
    errno = EINVAL;
    return -1;
}

void *mmap(void *at, size_t bytes, int access, int flags, int file, off_t offset)
{
    long reserved;

    if ((unsigned long)offset % PAGE || (flags & MAP_FIXED && (uintptr_t)at % PAGE)) {
        refused();
        return MAP_FAILED;
    }
    if (!(flags & MAP_FIXED)) {
        reserved = syscall(SYS_mmap, NULL, bytes + PAGE, PROT_NONE,
                           MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (reserved == -1)
            return MAP_FAILED;
        at = (void *)rounded((unsigned long)reserved);
    }
    return (void *)syscall(SYS_mmap, at, bytes, access, flags | MAP_FIXED, file, offset);
}

void *mmap64(void *at, size_t bytes, int access, int flags, int file, off_t offset)
{
    return mmap(at, bytes, access, flags, file, offset);
}

int munmap(void *at, size_t bytes)
{
    return (uintptr_t)at % PAGE ? refused() : (int)syscall(SYS_munmap, at, bytes);
}

int mprotect(void *at, size_t bytes, int access)
{
    return (uintptr_t)at % PAGE ? refused() : (int)syscall(SYS_mprotect, at, rounded(bytes), access);
}

int madvise(void *at, size_t bytes, int advice)
{
    return (uintptr_t)at % PAGE ? refused() : (int)syscall(SYS_madvise, at, bytes, advice);
}

int getpagesize(void)
{
    return PAGE;
}

long sysconf(int name)
{
    static long (*next)(int);

    if (name == _SC_PAGESIZE)
        return PAGE;
    if (!next)
        next = (long (*)(int))dlsym(RTLD_NEXT, "sysconf");
    return next(name);
}
