/* Serves the admitted connections of a data port, on one thread, without Python.
 *
 * Owns    the descriptors that `take` was given: it closes them, or hands them back with a refusal.
 * Hears   requests (wire.py): it checks every length before it uses it.
 * Says    the bytes of slots, straight from pool memory, and after them their generation words.
 * Keeps   a page's word is loaded after the sendmsg that took the page's last byte has returned, and
 *         goes out in a later one; sends copy (no MSG_ZEROCOPY, no sendfile), so what was accepted
 *         cannot change any more. No send and no receive ever waits.
 * Limits  STEP_BYTES_MAX of one connection before the others have their turn; one request of
 *         count_max entries buffered each. The caller limits the number of connections.
 *
 * ctypes releases the GIL once for as long as `run` runs: serving delays neither the engine's thread
 * nor the node's loop.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the wire is little-endian, and this file does not convert"
#endif

/* About 0.3 ms of copying: what each of many readers waits for each other one. */
#define STEP_BYTES_MAX (1u << 20)
/* Words of one portion; more pages in a portion than this are refused by `open`. */
#define PORTION_PAGES_LIMIT 256
#define EVENTS_MAX 64
#define NEVER INT64_MAX

/* How a conversation ended; serving.py knows them by these numbers. */
enum end { GOES_ON = -1, GONE = 0, MALFORMED = 1, INCARNATION = 2, BOUNDS = 3 };

enum phase { HEAD, ENTRIES, SENDING };

struct head {
    char magic[4];
    uint32_t count;
    uint64_t incarnation;
    uint64_t total;
};

struct entry {
    uint64_t offset;
    uint64_t length;
};

_Static_assert(sizeof(struct head) == 24 && sizeof(struct entry) == 16, "as in wire.py");

/* A request in hand. lead: what goes out before the next page byte, the status or the words of the
 * portion before. Pages first to last are the portion being sent; `page` is the one begun. */
struct request {
    uint32_t count, first, last, page;
    uint64_t page_sent;
    uint64_t lead_bytes, lead_sent;
    uint64_t lead[PORTION_PAGES_LIMIT];
    struct entry entries[];
};

struct connection {
    struct connection *previous, *next;
    uint64_t name;
    int file, end;
    enum phase phase;
    uint32_t interest;
    int64_t idle_ns, request_ns, stall_ns, deadline_ns;
    uint64_t got;
    struct head head;
    struct request *request;
};

/* What the caller wants; serving.py declares the same. usable: called when a request goes beyond
 * what was usable last. between: for tests that act at the worst moment, or null. */
struct settings {
    const uint8_t *pages;
    const uint64_t *words;
    uint64_t granule, incarnation;
    uint64_t count_max, request_bytes_max, portion_bytes_max, portion_pages_max;
    uint64_t (*usable)(void);
    void (*between)(void);
};

struct server {
    struct settings settings;
    uint64_t usable;
    uint64_t served;
    int poll, bell, news;
    int64_t scan_at_ns;
    struct connection *all;
    /* Under the lock: what the caller's threads and this one hand each other. */
    pthread_mutex_t lock;
    struct connection *taken, *ended;
    int is_stopping;
};

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

static void wait_until(struct server *server, struct connection *connection, int64_t deadline_ns)
{
    connection->deadline_ns = deadline_ns;
    if (deadline_ns < server->scan_at_ns)
        server->scan_at_ns = deadline_ns;
}

static void forget(struct connection *connection)
{
    if (connection->file >= 0)
        close(connection->file);
    free(connection->request);
    free(connection);
}

static void end(struct server *server, struct connection *connection, enum end how)
{
    if (connection->previous)
        connection->previous->next = connection->next;
    else
        server->all = connection->next;
    if (connection->next)
        connection->next->previous = connection->previous;
    /* A forked child may keep the connection open: a close alone would leave it in the poll set. */
    epoll_ctl(server->poll, EPOLL_CTL_DEL, connection->file, NULL);
    if (how == GONE) {
        close(connection->file);
        connection->file = -1;
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

/* Return where the portion that begins at page `first` ends: the twin of wire.cuts. */
static uint32_t cut(const struct settings *settings, const struct request *request, uint32_t first)
{
    uint64_t bytes = 0;
    uint32_t last = first;

    while (last < request->count && last - first < settings->portion_pages_max) {
        bytes += request->entries[last].length;
        if (last > first && bytes > settings->portion_bytes_max)
            break;
        last++;
    }
    return last;
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
    connection->request =
        malloc(sizeof(struct request) + head->count * sizeof(struct entry));
    if (!connection->request)
        return GONE;
    memset(connection->request, 0, sizeof(struct request));
    connection->request->count = head->count;
    connection->phase = ENTRIES;
    connection->got = 0;
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
        /* Perhaps the pool has grown; else the client is wrong, and the call costs little. */
        server->usable = settings->usable();
        if (!is_inside(request, server->usable))
            return BOUNDS;
    }
    for (uint32_t page = 0; page < request->count; page++) {
        /* An offset within a granule would be paired with another slot's word. */
        if (request->entries[page].offset % settings->granule)
            return BOUNDS;
        total += request->entries[page].length;
    }
    if (total != connection->head.total)
        return MALFORMED;
    memcpy(request->lead, "PCts\0\0\0\0", 8);
    request->lead_bytes = 8;
    request->last = cut(settings, request, 0);
    connection->phase = SENDING;
    return GOES_ON;
}

static enum end receive(struct server *server, struct connection *connection, int64_t now)
{
    while (connection->phase != SENDING) {
        int is_head = connection->phase == HEAD;
        char *into = is_head ? (char *)&connection->head : (char *)connection->request->entries;
        uint64_t wanted =
            is_head ? sizeof(struct head) : connection->request->count * sizeof(struct entry);
        enum end how;

        while (connection->got < wanted) {
            ssize_t got = recv(connection->file, into + connection->got,
                               wanted - connection->got, MSG_DONTWAIT);

            if (got < 0 && errno == EINTR)
                continue;
            if (got < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
                return GOES_ON;
            if (got <= 0)
                return GONE;
            if (is_head && connection->got == 0)
                wait_until(server, connection, now + connection->request_ns);
            connection->got += (uint64_t)got;
        }
        how = is_head ? begin_request(server, connection) : begin_response(server, connection);
        if (how != GOES_ON)
            return how;
    }
    wait_until(server, connection, now + connection->stall_ns);
    return GOES_ON;
}

/* Load the words of the portion that was sent, and begin with the next one. */
static void vouch(struct server *server, struct request *request)
{
    const struct settings *settings = &server->settings;
    uint64_t bytes = 0;

    if (settings->between)
        settings->between();
    /* Only now: a word loaded before its page's last byte was taken could vouch for bytes that
     * changed after it was loaded. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    for (uint32_t page = request->first; page < request->last; page++) {
        const struct entry *entry = &request->entries[page];

        request->lead[page - request->first] =
            __atomic_load_n(&settings->words[entry->offset / settings->granule], __ATOMIC_ACQUIRE);
        bytes += entry->length;
    }
    request->lead_bytes = (request->last - request->first) * sizeof(uint64_t);
    request->lead_sent = 0;
    request->first = request->last;
    request->last = cut(settings, request, request->first);
    __atomic_fetch_add(&server->served, bytes, __ATOMIC_RELAXED);
}

/* Lay out what goes next, at most `room` bytes of pages; return how many bytes that is. */
static uint64_t lay_out(const struct server *server, struct request *request, uint64_t room,
                        struct iovec *pieces, size_t *used)
{
    uint64_t offered = request->lead_bytes - request->lead_sent, sent = request->page_sent;

    *used = 0;
    if (offered) {
        pieces[*used].iov_base = (char *)request->lead + request->lead_sent;
        pieces[(*used)++].iov_len = offered;
    }
    for (uint32_t page = request->page; page < request->last && room; page++, sent = 0) {
        const struct entry *entry = &request->entries[page];
        uint64_t size = entry->length - sent;

        if (size > room)
            size = room;
        pieces[*used].iov_base = (void *)(uintptr_t)(server->settings.pages + entry->offset + sent);
        pieces[(*used)++].iov_len = size;
        offered += size;
        room -= size;
    }
    return offered;
}

static void advance(struct request *request, uint64_t taken)
{
    uint64_t of_lead = request->lead_bytes - request->lead_sent;

    if (of_lead > taken)
        of_lead = taken;
    request->lead_sent += of_lead;
    taken -= of_lead;
    while (taken) {
        uint64_t left = request->entries[request->page].length - request->page_sent;

        if (taken < left) {
            request->page_sent += taken;
            return;
        }
        taken -= left;
        request->page++;
        request->page_sent = 0;
    }
}

static enum end respond(struct server *server, struct connection *connection, int64_t now)
{
    struct request *request = connection->request;
    struct iovec pieces[1 + PORTION_PAGES_LIMIT];
    uint64_t room = STEP_BYTES_MAX;

    while (room) {
        struct msghdr message = {.msg_iov = pieces};
        uint64_t offered = lay_out(server, request, room, pieces, &message.msg_iovlen);
        ssize_t taken = sendmsg(connection->file, &message, MSG_DONTWAIT | MSG_NOSIGNAL);

        if (taken < 0 && errno == EINTR)
            continue;
        if (taken < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return GOES_ON;
        if (taken < 0)
            return GONE;
        wait_until(server, connection, now + connection->stall_ns);
        advance(request, (uint64_t)taken);
        if (request->lead_sent == request->lead_bytes && request->page == request->last) {
            if (request->first == request->count) {
                free(request);
                connection->request = NULL;
                connection->phase = HEAD;
                connection->got = 0;
                wait_until(server, connection, now + connection->idle_ns);
                return GOES_ON;
            }
            vouch(server, request);
        }
        if ((uint64_t)taken < offered)
            return GOES_ON;
        room -= (uint64_t)taken < room ? (uint64_t)taken : room;
    }
    return GOES_ON;
}

static void converse(struct server *server, struct connection *connection, int64_t now)
{
    enum end how = GOES_ON;
    struct epoll_event event = {.data.ptr = connection};

    if (connection->phase != SENDING)
        how = receive(server, connection, now);
    if (how == GOES_ON && connection->phase == SENDING)
        how = respond(server, connection, now);
    if (how != GOES_ON) {
        end(server, connection, how);
        return;
    }
    event.events = connection->phase == SENDING ? EPOLLOUT : EPOLLIN;
    if (event.events != connection->interest) {
        connection->interest = event.events;
        if (epoll_ctl(server->poll, EPOLL_CTL_MOD, connection->file, &event) < 0)
            end(server, connection, GONE);
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

/* Begin with the connections that were handed over; return whether to go on. */
static int hear_caller(struct server *server, int64_t now)
{
    struct connection *taken, *next;
    int is_stopping;

    pthread_mutex_lock(&server->lock);
    taken = server->taken;
    server->taken = NULL;
    is_stopping = server->is_stopping;
    pthread_mutex_unlock(&server->lock);
    for (; taken; taken = next) {
        struct epoll_event event = {.events = EPOLLIN, .data.ptr = taken};

        next = taken->next;
        taken->previous = NULL;
        taken->next = server->all;
        if (server->all)
            server->all->previous = taken;
        server->all = taken;
        taken->interest = EPOLLIN;
        wait_until(server, taken, now + taken->idle_ns);
        if (epoll_ctl(server->poll, EPOLL_CTL_ADD, taken->file, &event) < 0)
            end(server, taken, GONE);
    }
    return !is_stopping;
}

static int patience_ms(const struct server *server, int64_t now)
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

    while (hear_caller(server, now_ns())) {
        int64_t now = now_ns();
        int count;

        if (now >= server->scan_at_ns)
            scan(server, now);
        count = epoll_wait(server->poll, events, EVENTS_MAX, patience_ms(server, now));
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

/* Take over an admitted connection and its descriptor; return whether that was done. */
int peercache_pages_take(struct server *server, int file, uint64_t name, int64_t idle_ns,
                         int64_t request_ns, int64_t stall_ns)
{
    struct connection *connection = calloc(1, sizeof(*connection));
    int is_stopping;

    if (!connection)
        return 0;
    connection->file = file;
    connection->name = name;
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

/* Tell of one conversation that ended; return whether there was one. file: -1, or the descriptor of
 * a refused client, which is the caller's again. */
int peercache_pages_ended(struct server *server, uint64_t *name, int *file, int *how)
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
    connection->file = -1;
    forget(connection);
    return 1;
}

/* Return how many page bytes were sent so far. */
uint64_t peercache_pages_served(struct server *server)
{
    return __atomic_load_n(&server->served, __ATOMIC_RELAXED);
}

/* Have `run` return soon: it finishes at most one step of each connection. */
void peercache_pages_stop(struct server *server)
{
    pthread_mutex_lock(&server->lock);
    server->is_stopping = 1;
    pthread_mutex_unlock(&server->lock);
    ring(server->bell);
}

/* Let go of everything, once `run` has returned or was never called. */
void peercache_pages_close(struct server *server)
{
    struct connection *lists[] = {server->taken, server->ended};

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
    pthread_mutex_destroy(&server->lock);
    free(server);
}

/* Return a server without connections, or null. news: readable while `ended` has something. */
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
    if (server->poll < 0 || server->bell < 0 || server->news < 0 ||
        epoll_ctl(server->poll, EPOLL_CTL_ADD, server->bell, &event) < 0) {
        int why = errno;

        peercache_pages_close(server);
        errno = why;
        return NULL;
    }
    *news = server->news;
    return server;
}
