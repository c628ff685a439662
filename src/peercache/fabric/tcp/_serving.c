/* Serves the admitted connections of a data port, on one thread, without Python.
 *
 * Owns    the descriptors and TLS sessions that `take` was given: it closes them, or hands them back
 *         with a refusal.
 * Takes   requests (wire.py): it checks every length before it uses it.
 * Sends   the bytes of slots, and after them their seals (_responding.c).
 * Keeps   no receive ever waits.
 * Limits  STEP_BYTES_MAX or RECEIVES_MAX of one connection before the others have their turn;
 *         requests and ciphertext of held_max bytes in all and owner_held_max of one certificate: what
 *         would be more waits (_holding.c). The caller limits the number of connections.
 *
 * ctypes releases the GIL once for as long as `run` runs: serving delays neither the engine's thread
 * nor the node's loop.
 */
#define _GNU_SOURCE
#include "_serving.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static int64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void ring(int bell)
{
    uint64_t one = 1;
    ssize_t done;

    do
        done = write(bell, &one, sizeof(one));
    while (done < 0 && errno == EINTR);
}

static void silence(int bell)
{
    uint64_t rings;
    ssize_t done;

    do
        done = read(bell, &rings, sizeof(rings));
    while (done < 0 && errno == EINTR);
}

static void forget(struct connection *connection)
{
    if (connection->tls)
        connection->tls->operations->free(connection->tls);
    if (connection->file >= 0)
        close(connection->file);
    free(connection->request);
    free(connection);
}

static void end(struct server *server, struct connection *connection, enum end how)
{
    peercache_leave_owner(server, connection);
    if (connection->previous)
        connection->previous->next = connection->next;
    else
        server->all = connection->next;
    if (connection->next)
        connection->next->previous = connection->previous;
    /* A forked child may keep the connection open: close() alone would leave it in the poll set. */
    epoll_ctl(server->poll, EPOLL_CTL_DEL, connection->file, NULL);
    if (how == GONE) {
        close(connection->file);
        connection->file = -1;
        if (connection->tls)
            connection->tls->operations->free(connection->tls);
        connection->tls = NULL;
    }
    free(connection->request);
    connection->request = NULL;
    connection->end = how;
    pthread_mutex_lock(&server->lock);
    connection->next = server->ended;
    server->ended = connection;
    pthread_mutex_unlock(&server->lock);
    ring(server->news);
}

/* Return the most memory that the request, of which the head has arrived, and its response hold. */
static uint64_t held_by(const struct connection *connection)
{
    uint64_t request = sizeof(struct request) + connection->head.count * sizeof(struct entry);

    return connection->tls
               ? request + PEERCACHE_TLS_UNSENT_BYTES + PEERCACHE_TLS_RECORD_BYTES
               : request;
}

/* Receive the entries into memory that the connection holds already. */
static enum end open_request(struct connection *connection)
{
    connection->request =
        malloc(sizeof(struct request) + connection->head.count * sizeof(struct entry));
    if (!connection->request)
        return GONE;
    memset(connection->request, 0, sizeof(struct request));
    connection->request->count = connection->head.count;
    connection->phase = ENTRIES;
    connection->got = 0;
    return GOES_ON;
}

static enum end begin_request(struct server *server, struct connection *connection)
{
    const struct settings *settings = &server->settings;
    const struct head *head = &connection->head;

    if (memcmp(head->magic, "PCtr", 4) != 0 || head->count == 0 ||
        head->count > settings->count_max)
        return MALFORMED;
    if (head->incarnation != settings->incarnation)
        return INCARNATION;
    if (head->total > settings->request_bytes_max)
        return BOUNDS;
    if (peercache_hold(server, connection, held_by(connection)))
        return open_request(connection);
    peercache_wait_for_room(server, connection);
    return GOES_ON;
}

static int is_inside(const struct request *request, uint64_t usable)
{
    for (uint32_t page = 0; page < request->count; page++) {
        const struct entry *entry = &request->entries[page];

        if (entry->length == 0 || entry->length > usable || entry->offset > usable - entry->length)
            return 0;
    }
    return 1;
}

static enum end begin_response(struct server *server, struct connection *connection)
{
    const struct settings *settings = &server->settings;
    struct request *request = connection->request;
    uint64_t total = 0;

    if (!is_inside(request, server->usable)) {
        /* The pool may have grown; if not, the client is wrong, and the call costs little. */
        server->usable = settings->usable();
        if (!is_inside(request, server->usable))
            return BOUNDS;
    }
    for (uint32_t page = 0; page < request->count; page++) {
        /* An offset within a granule would be paired with the seal of another slot. */
        if (request->entries[page].offset % settings->granule)
            return BOUNDS;
        total += request->entries[page].length;
    }
    if (total != connection->head.total)
        return MALFORMED;
    memcpy(request->lead, "PCts\0\0\0\0", 8);
    request->lead_bytes = 8;
    request->last = peercache_cut(settings, request, 0);
    connection->phase = SENDING;
    return GOES_ON;
}

static int64_t receive_some(struct connection *connection, void *into, size_t size)
{
    if (connection->tls)
        return connection->tls->operations->receive(connection->tls, into, size);
    return recv(connection->file, into, size, MSG_DONTWAIT);
}

static enum end receive(struct server *server, struct connection *connection, int64_t now)
{
    int left = RECEIVES_MAX;

    while (connection->phase == HEAD || connection->phase == ENTRIES) {
        int is_head = connection->phase == HEAD;
        char *into = is_head ? (char *)&connection->head : (char *)connection->request->entries;
        uint64_t wanted =
            is_head ? sizeof(struct head) : connection->request->count * sizeof(struct entry);
        enum end how;

        while (connection->got < wanted) {
            int64_t got;

            if (!left--)
                return GOES_ON;
            got = receive_some(connection, into + connection->got, wanted - connection->got);
            if (got < 0 && errno == EINTR)
                continue;
            if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
                return GOES_ON;
            if (got <= 0)
                return GONE;
            if (is_head && connection->got == 0)
                peercache_wait_until(server, connection, now + connection->request_ns);
            connection->got += (uint64_t)got;
        }
        how = is_head ? begin_request(server, connection) : begin_response(server, connection);
        if (how != GOES_ON || connection->phase == WAITING)
            return how;
    }
    peercache_wait_until(server, connection, now + connection->stall_ns);
    return GOES_ON;
}

static uint32_t wanted_event(const struct connection *connection)
{
    const struct peercache_tls *tls = connection->tls;

    if (connection->phase == WAITING)
        return 0;
    if (connection->phase == SENDING || connection->phase == FLUSHING)
        return EPOLLOUT;
    /* A poll does not see what a session has read ahead: continue as soon as the socket is
     * writable. */
    if (tls && (tls->operations->has_pending(tls) || tls->operations->has_unsent(tls)))
        return EPOLLOUT;
    return EPOLLIN;
}

static void converse(struct server *server, struct connection *connection, int64_t now)
{
    enum end how = GOES_ON;
    struct epoll_event event = {.data.ptr = connection};

    if (connection->phase == WAITING)
        how = GONE; /* Only an error wakes the connection. */
    if (connection->phase == HEAD || connection->phase == ENTRIES)
        how = receive(server, connection, now);
    if (how == GOES_ON && (connection->phase == SENDING || connection->phase == FLUSHING))
        how = peercache_respond(server, connection, now);
    if (how != GOES_ON) {
        end(server, connection, how);
        return;
    }
    event.events = wanted_event(connection);
    if (event.events != connection->interest) {
        connection->interest = event.events;
        if (epoll_ctl(server->poll, EPOLL_CTL_MOD, connection->file, &event) < 0)
            end(server, connection, GONE);
    }
}

/* Continue with the waiting connections, as far as others have made room. */
static void let_in(struct server *server, int64_t now)
{
    struct connection *connection;

    while (server->is_room_made && (connection = peercache_next_waiting(server, held_by))) {
        enum end how = open_request(connection);

        if (how == GOES_ON)
            converse(server, connection, now);
        else
            end(server, connection, how);
    }
}

/* Close the connections whose deadline has passed, and note the next deadline. */
static void scan(struct server *server, int64_t now)
{
    struct connection *next;

    server->scan_at_ns = NEVER;
    for (struct connection *connection = server->all; connection; connection = next) {
        next = connection->next;
        if (connection->deadline_ns <= now)
            end(server, connection, GONE);
        else if (connection->deadline_ns < server->scan_at_ns)
            server->scan_at_ns = connection->deadline_ns;
    }
}

/* Close the connection that has been idle for longest, if one is idle. */
static void close_idle(struct server *server)
{
    struct connection *oldest = NULL;

    for (struct connection *each = server->all; each; each = each->next)
        if (each->phase == HEAD && each->got == 0 &&
            (!oldest || each->deadline_ns < oldest->deadline_ns))
            oldest = each;
    if (oldest)
        end(server, oldest, GONE);
}

static void close_named(struct server *server, uint64_t name)
{
    for (struct connection *each = server->all; each; each = each->next)
        if (each->name == name) {
            end(server, each, GONE);
            return;
        }
}

/* Start to serve the connections that were handed over; return whether to continue. */
static int take_handed_over(struct server *server, int64_t now)
{
    struct connection *taken, *next;
    struct closing *closing;
    uint64_t idle_to_close;
    int is_stopping;

    pthread_mutex_lock(&server->lock);
    taken = server->taken;
    server->taken = NULL;
    idle_to_close = server->idle_to_close;
    server->idle_to_close = 0;
    closing = server->closing;
    server->closing = NULL;
    is_stopping = server->is_stopping;
    pthread_mutex_unlock(&server->lock);
    for (; taken; taken = next) {
        struct epoll_event event = {.events = wanted_event(taken), .data.ptr = taken};

        next = taken->next;
        taken->previous = NULL;
        taken->next = server->all;
        if (server->all)
            server->all->previous = taken;
        server->all = taken;
        taken->interest = event.events;
        peercache_wait_until(server, taken, now + taken->idle_ns);
        if (!peercache_join_owner(server, taken, taken->owner_name) ||
            epoll_ctl(server->poll, EPOLL_CTL_ADD, taken->file, &event) < 0)
            end(server, taken, GONE);
    }
    for (; idle_to_close; idle_to_close--)
        close_idle(server);
    while (closing) {
        struct closing *first = closing;

        close_named(server, first->name);
        closing = first->next;
        free(first);
    }
    return !is_stopping;
}

static int timeout_ms(const struct server *server, int64_t now)
{
    int64_t left_ms;

    if (server->scan_at_ns == NEVER)
        return -1;
    left_ms = (server->scan_at_ns - now) / 1000000 + 1;
    return left_ms < 0 ? 0 : left_ms > 1000000 ? 1000000 : (int)left_ms;
}

/* Serve until `stop`; every connection is closed when this returns. */
void peercache_pages_run(struct server *server)
{
    struct epoll_event events[EVENTS_MAX];

    while (take_handed_over(server, now_ns())) {
        int64_t now = now_ns();
        int count;

        if (now >= server->scan_at_ns)
            scan(server, now);
        let_in(server, now);
        count = epoll_wait(server->poll, events, EVENTS_MAX, timeout_ms(server, now));
        now = now_ns();
        for (int index = 0; index < count; index++) {
            if (events[index].data.ptr)
                converse(server, events[index].data.ptr, now);
            else
                silence(server->bell);
        }
    }
    while (server->all)
        end(server, server->all, GONE);
}

/* Take over an admitted connection, its descriptor and its TLS session; return whether that
 * succeeded. tls: or null. spaces: those that it may read; none: all. owner: the owner of its
 * certificate, the same for all of its connections; 0: none. */
int peercache_pages_take(struct server *server, int file, uint64_t name, uint64_t owner,
                         int64_t idle_ns, int64_t request_ns, int64_t stall_ns,
                         struct peercache_tls *tls, const uint64_t *spaces, uint64_t spaces_count)
{
    struct connection *connection =
        calloc(1, sizeof(*connection) + spaces_count * sizeof(*spaces));
    int is_stopping;

    if (!connection)
        return 0;
    connection->tls = tls;
    connection->spaces_count = spaces_count;
    if (spaces_count)
        memcpy(connection->spaces, spaces, spaces_count * sizeof(*spaces));
    connection->file = file;
    connection->name = name;
    connection->owner_name = owner;
    connection->idle_ns = idle_ns;
    connection->request_ns = request_ns;
    connection->stall_ns = stall_ns;
    pthread_mutex_lock(&server->lock);
    is_stopping = server->is_stopping;
    if (!is_stopping) {
        connection->next = server->taken;
        server->taken = connection;
    }
    pthread_mutex_unlock(&server->lock);
    if (is_stopping)
        free(connection);
    else
        ring(server->bell);
    return !is_stopping;
}

/* Have `run` close the connection that has been idle for longest. */
void peercache_pages_close_idle(struct server *server)
{
    pthread_mutex_lock(&server->lock);
    server->idle_to_close++;
    pthread_mutex_unlock(&server->lock);
    ring(server->bell);
}

/* Have `run` close the connection with this name, as passed to `take`, if it still exists. */
void peercache_pages_close_named(struct server *server, uint64_t name)
{
    struct closing *closing = malloc(sizeof(*closing));

    if (!closing)
        return;
    closing->name = name;
    pthread_mutex_lock(&server->lock);
    closing->next = server->closing;
    server->closing = closing;
    pthread_mutex_unlock(&server->lock);
    ring(server->bell);
}

/* Report one conversation that has ended; return whether there was one. file: -1, or the descriptor
 * of a refused client, which belongs to the caller again, like its session. */
int peercache_pages_ended(struct server *server, uint64_t *name, int *file, int *how,
                          struct peercache_tls **tls)
{
    struct connection *connection;

    pthread_mutex_lock(&server->lock);
    connection = server->ended;
    if (connection)
        server->ended = connection->next;
    else
        silence(server->news);
    pthread_mutex_unlock(&server->lock);
    if (!connection)
        return 0;
    *name = connection->name;
    *file = connection->file;
    *how = connection->end;
    *tls = connection->tls;
    connection->file = -1;
    connection->tls = NULL;
    forget(connection);
    return 1;
}

/* Return how many page bytes were sent so far. */
uint64_t peercache_pages_served(struct server *server)
{
    return __atomic_load_n(&server->served, __ATOMIC_RELAXED);
}

/* Make `run` return soon: it finishes at most one step of each connection. */
void peercache_pages_stop(struct server *server)
{
    pthread_mutex_lock(&server->lock);
    server->is_stopping = 1;
    pthread_mutex_unlock(&server->lock);
    ring(server->bell);
}

/* Free everything, after `run` has returned or if it was never called. */
void peercache_pages_close(struct server *server)
{
    struct connection *lists[] = {server->taken, server->ended};

    for (struct closing *next, *closing = server->closing; closing; closing = next) {
        next = closing->next;
        free(closing);
    }
    for (int list = 0; list < 2; list++) {
        for (struct connection *next, *connection = lists[list]; connection; connection = next) {
            next = connection->next;
            forget(connection);
        }
    }
    if (server->poll >= 0)
        close(server->poll);
    if (server->bell >= 0)
        close(server->bell);
    if (server->news >= 0)
        close(server->news);
    if (server->zeros)
        munmap(server->zeros, 2 * STEP_BYTES_MAX);
    pthread_mutex_destroy(&server->lock);
    free(server);
}

/* Return a server without connections, or null. news: readable while `ended` is not empty. */
struct server *peercache_pages_open(const struct settings *settings, int *news)
{
    struct server *server;
    struct epoll_event event = {.events = EPOLLIN};

    if (settings->portion_pages_max == 0 || settings->portion_pages_max > PORTION_PAGES_LIMIT) {
        errno = EINVAL;
        return NULL;
    }
    server = calloc(1, sizeof(*server));
    if (!server)
        return NULL;
    server->settings = *settings;
    server->scan_at_ns = NEVER;
    pthread_mutex_init(&server->lock, NULL);
    server->poll = epoll_create1(EPOLL_CLOEXEC);
    server->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    server->news = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    /* The kernel's zero page until it is written to: it costs no memory. */
    server->zeros = mmap(NULL, 2 * STEP_BYTES_MAX, PROT_READ | PROT_WRITE,
                         MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (server->zeros == MAP_FAILED)
        server->zeros = NULL;
    server->copy = server->zeros + STEP_BYTES_MAX;
    if (!server->zeros || server->poll < 0 || server->bell < 0 || server->news < 0 ||
        epoll_ctl(server->poll, EPOLL_CTL_ADD, server->bell, &event) < 0) {
        int why = errno;

        peercache_pages_close(server);
        errno = why;
        return NULL;
    }
    *news = server->news;
    return server;
}
