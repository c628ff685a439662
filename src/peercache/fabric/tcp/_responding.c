/* Sends the responses of the page server: bytes of slots, and after them their seals.
 *
 * Keeps   no byte of a page is sent before its seal was checked: the word is the requested
 *         generation, and the length and the space fit. Otherwise zeros are sent. The word is
 *         checked again before each step, and for a connection that may read some spaces only,
 *         after the step's bytes were copied into private memory and before they are sent. A page's
 *         seal is loaded after the sendmsg that took the page's last byte has returned, and is sent
 *         by a later one; sends copy (no MSG_ZEROCOPY, no sendfile), so accepted bytes cannot
 *         change any more. No send ever blocks.
 */
#define _GNU_SOURCE
#include "_serving.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/uio.h>

uint32_t peercache_cut(const struct settings *settings, const struct request *request,
                       uint32_t first)
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

static int may_read(const struct connection *connection, uint64_t space)
{
    for (uint64_t index = 0; index < connection->spaces_count; index++)
        if (connection->spaces[index] == space)
            return 1;
    return connection->spaces_count == 0;
}

static const struct seal *seal_of(const struct settings *settings, const struct entry *entry)
{
    return &settings->seals[entry->offset / settings->granule];
}

/* Load the slot's word; every load before this call is done before its load. */
static uint64_t word_of(const struct settings *settings, const struct entry *entry)
{
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    return __atomic_load_n(&seal_of(settings, entry)->word, __ATOMIC_ACQUIRE);
}

/* Return whether the slot holds the requested commit, all of these bytes belong to it, and this
 * connection may read it. */
static int is_shown(const struct settings *settings, const struct connection *connection,
                    const struct entry *entry)
{
    const struct seal *seal = seal_of(settings, entry);
    uint64_t length, space;

    if (entry->generation == 0 || entry->generation & 1 ||
        word_of(settings, entry) != entry->generation)
        return 0;
    length = __atomic_load_n(&seal->length, __ATOMIC_RELAXED);
    space = __atomic_load_n(&seal->space, __ATOMIC_RELAXED);
    return word_of(settings, entry) == entry->generation && entry->length <= length &&
           may_read(connection, space);
}

/* Load the seals of the portion that was sent, and start the next one. */
static void load_seals(struct server *server, struct request *request)
{
    const struct settings *settings = &server->settings;
    uint64_t bytes = 0;

    if (settings->between)
        settings->between();
    /* Only now: a seal that was loaded before the last byte of its page was sent could validate
     * bytes that changed afterwards. */
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    for (uint32_t page = request->first; page < request->last; page++) {
        const struct entry *entry = &request->entries[page];
        const struct seal *seal = seal_of(settings, entry);
        struct seal *lead = &request->lead[page - request->first];

        bytes += entry->length;
        memset(lead, 0, sizeof(*lead));
        if (request->sight[page - request->first] != SHOWN)
            continue;
        memcpy(lead->key, seal->key, sizeof(lead->key));
        lead->space = seal->space;
        lead->length = seal->length;
        /* The word last: if it is the generation that was seen before the first byte, the bytes and
         * the fields above belong to that commit. */
        lead->word = word_of(settings, entry);
        if (lead->word != entry->generation)
            *lead = (struct seal){.word = lead->word};
    }
    request->lead_bytes = (request->last - request->first) * sizeof(struct seal);
    request->lead_sent = 0;
    request->first = request->last;
    request->last = peercache_cut(settings, request, request->first);
    memset(request->sight, UNSEEN, sizeof(request->sight));
    __atomic_fetch_add(&server->served, bytes, __ATOMIC_RELAXED);
}

/* Return where `size` bytes of a page come from: the pool, a copy of them, or zeros.
 *
 * used: bytes of the copy that are in use already. */
static const uint8_t *source_of(const struct server *server, const struct connection *connection,
                                struct request *request, uint32_t page, uint64_t sent,
                                uint64_t size, uint64_t *used)
{
    const struct settings *settings = &server->settings;
    const struct entry *entry = &request->entries[page];
    const uint8_t *bytes = settings->pages + entry->offset + sent;
    uint8_t *sight = &request->sight[page - request->first];

    if (*sight == UNSEEN)
        *sight = is_shown(settings, connection, entry) ? SHOWN : WITHHELD;
    if (*sight == SHOWN && connection->spaces_count) {
        uint8_t *copy = server->copy + *used;

        memcpy(copy, bytes, size);
        *used += size;
        bytes = copy;
    }
    /* The slot may hold another page by now: no byte of that page is sent. */
    if (*sight == SHOWN && word_of(settings, entry) != entry->generation)
        *sight = WITHHELD;
    return *sight == SHOWN ? bytes : server->zeros;
}

/* Lay out what is sent next, at most `room` bytes of pages; return the number of bytes. */
static uint64_t lay_out(const struct server *server, const struct connection *connection,
                        uint64_t room, struct iovec *pieces, size_t *used)
{
    struct request *request = connection->request;
    uint64_t offered = request->lead_bytes - request->lead_sent, sent = request->page_sent;
    uint64_t copied = 0;

    *used = 0;
    if (offered) {
        pieces[*used].iov_base = (char *)request->lead + request->lead_sent;
        pieces[(*used)++].iov_len = offered;
    }
    for (uint32_t page = request->page; page < request->last && room; page++, sent = 0) {
        uint64_t size = request->entries[page].length - sent;
        const uint8_t *source;

        if (size > room)
            size = room;
        source = source_of(server, connection, request, page, sent, size, &copied);
        pieces[*used].iov_base = (void *)(uintptr_t)source;
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

/* Send pieces without blocking; return the number of bytes sent, or -1 and errno. */
static int64_t send_pieces(struct connection *connection, struct iovec *pieces, size_t count)
{
    struct msghdr message = {.msg_iov = pieces, .msg_iovlen = count};

    if (connection->tls)
        return connection->tls->operations->send(connection->tls, pieces, count);
    return sendmsg(connection->file, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
}

/* Wait for the next request, after the last byte of the response was sent. */
static enum end finish(struct server *server, struct connection *connection, int64_t now)
{
    struct peercache_tls *tls = connection->tls;

    if (tls && tls->operations->send(tls, NULL, 0) < 0) {
        connection->phase = FLUSHING;
        return errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR ? GOES_ON : GONE;
    }
    connection->phase = HEAD;
    connection->got = 0;
    peercache_release(server, connection);
    peercache_wait_until(server, connection, now + connection->idle_ns);
    return GOES_ON;
}

enum end peercache_respond(struct server *server, struct connection *connection, int64_t now)
{
    struct request *request = connection->request;
    struct iovec pieces[1 + PORTION_PAGES_LIMIT];
    uint64_t room = STEP_BYTES_MAX;

    if (connection->phase == FLUSHING)
        return finish(server, connection, now);
    while (room) {
        size_t count;
        uint64_t offered = lay_out(server, connection, room, pieces, &count);
        int64_t taken;

        if (server->settings.before_send)
            server->settings.before_send();
        taken = send_pieces(connection, pieces, count);

        if (taken < 0 && errno == EINTR)
            continue;
        if (taken < 0 && (errno == EAGAIN || errno == EWOULDBLOCK))
            return GOES_ON;
        if (taken < 0)
            return GONE;
        if (taken)
            peercache_wait_until(server, connection, now + connection->stall_ns);
        advance(request, (uint64_t)taken);
        if (request->lead_sent == request->lead_bytes && request->page == request->last) {
            if (request->first == request->count) {
                free(request);
                connection->request = NULL;
                return finish(server, connection, now);
            }
            load_seals(server, request);
        }
        if ((uint64_t)taken < offered)
            return GOES_ON;
        room -= (uint64_t)taken < room ? (uint64_t)taken : room;
    }
    return GOES_ON;
}
