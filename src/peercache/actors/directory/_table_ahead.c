/* A thread that faults in a table's memory before its owner uses it.
 *
 * A page fault costs the owner's thread as much as forty records. The thread has the kernel make
 * the pages: rows after those in use, and the next index while it is made ready. It writes nothing
 * and knows no state of the table but what `ask` has passed to it, and the owner still allocates
 * all memory itself: without the thread, or if the thread is slow, only the timing differs.
 *
 * If the file system is full, a hole of the file gives it an error (MADV_POPULATE_WRITE), and kills
 * no process: it then waits to be asked again. What it loads of an index that is released in the
 * meantime, 64 KiB at most, is used by the next index. Private memory ahead of the owner is not
 * accessible yet, so the thread serves files only.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

#include "_table.h"

#ifndef MADV_POPULATE_WRITE
#define MADV_POPULATE_WRITE 23 /* Linux 5.14 */
#endif

#define AHEAD_BYTES (1ull << 21) /* of rows: eight batches, and 2 bytes an entry of a million */
#define LOADED_BYTES (1ull << 16) /* at a time, while the address space is locked: 40 us */
#define STACK_BYTES (1ull << 20) /* includes the thread-local memory of an engine's libraries */

/* The range to load, in bytes from the header. */
struct range {
    uint64_t next, end;
};

struct ahead {
    struct range rows, index; /* under the lock, like all of these */
    int is_waiting, is_ending;
    pthread_mutex_t lock;
    pthread_cond_t asked;
    /* Written once. */
    char *table;
    pthread_t thread;
    pid_t process;
};

static void *load(void *argument)
{
    struct ahead *ahead = argument;

    pthread_mutex_lock(&ahead->lock);
    while (!ahead->is_ending) {
        struct range *range = ahead->rows.next < ahead->rows.end ? &ahead->rows : &ahead->index;
        uint64_t at = range->next, bytes = range->end - at, before = at % table_kernel_page();

        if (at >= range->end) {
            ahead->is_waiting = 1;
            pthread_cond_wait(&ahead->asked, &ahead->lock);
            continue;
        }
        bytes = bytes < LOADED_BYTES ? bytes : LOADED_BYTES;
        range->next += bytes;
        pthread_mutex_unlock(&ahead->lock);
        if (madvise(ahead->table + at - before, before + bytes, MADV_POPULATE_WRITE) == 0)
            bytes = 0;
        pthread_mutex_lock(&ahead->lock);
        if (bytes) /* There is no memory, or the kernel is older. */
            range->next = range->end;
    }
    pthread_mutex_unlock(&ahead->lock);
    return NULL;
}

/* Request a range from `from` on; the part that was loaded already is not loaded again. */
static void want(struct range *range, uint64_t from, uint64_t end, int is_same)
{
    if (!is_same || range->next < from)
        range->next = from;
    range->end = end;
}

/* Report to the thread how far the owner is. */
void peercache_table_ahead_ask(struct ahead *ahead, const struct table *t)
{
    uint64_t rows = t->rows_at + t->rows_used * sizeof(struct row) / PAGE_BYTES * PAGE_BYTES;
    uint64_t rows_end = rows + AHEAD_BYTES < t->bytes ? rows + AHEAD_BYTES : t->bytes;
    uint64_t index = t->index[!t->current].at, index_end = index + t->next_capacity * 8;

    pthread_mutex_lock(&ahead->lock);
    want(&ahead->rows, rows, rows_end, 1);
    want(&ahead->index, index + (t->next_capacity ? t->moved * 8 : 0), index_end,
         index_end == ahead->index.end);
    /* Waking the thread costs as much as a page fault, so it is not done for every message of one
     * row. */
    if (ahead->is_waiting && (ahead->rows.next + LOADED_BYTES <= ahead->rows.end ||
                              ahead->index.next < ahead->index.end)) {
        ahead->is_waiting = 0;
        pthread_cond_signal(&ahead->asked);
    }
    pthread_mutex_unlock(&ahead->lock);
}

/* Start to load memory ahead of the owner of a table in a file; NULL if no thread could be started.
 * */
struct ahead *peercache_table_ahead_new(struct table *t)
{
    struct ahead *ahead = calloc(1, sizeof(*ahead));
    pthread_attr_t attributes;
    sigset_t all, before;
    int failed;

    if (!ahead)
        return NULL;
    ahead->table = (char *)t;
    ahead->process = getpid();
    pthread_mutex_init(&ahead->lock, NULL);
    pthread_cond_init(&ahead->asked, NULL);
    pthread_attr_init(&attributes);
    pthread_attr_setstacksize(&attributes, STACK_BYTES);
    /* Python's threads handle signals. */
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    failed = pthread_create(&ahead->thread, &attributes, load, ahead);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    pthread_attr_destroy(&attributes);
    if (failed) {
        free(ahead);
        return NULL;
    }
    pthread_setname_np(ahead->thread, "peercache-table");
    return ahead;
}

/* End the thread, before the table is freed. A forked process does not have it, and leaves the
 * memory alone. */
void peercache_table_ahead_end(struct ahead *ahead)
{
    if (ahead->process != getpid())
        return;
    pthread_mutex_lock(&ahead->lock);
    ahead->is_ending = 1;
    pthread_cond_signal(&ahead->asked);
    pthread_mutex_unlock(&ahead->lock);
    pthread_join(ahead->thread, NULL);
    pthread_cond_destroy(&ahead->asked);
    pthread_mutex_destroy(&ahead->lock);
    free(ahead);
}
