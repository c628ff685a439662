/* Declarations for both halves of the page server: _serving.c receives, _responding.c sends. */
#ifndef PEERCACHE_SERVING_H
#define PEERCACHE_SERVING_H

#include "_tls.h"

#include <pthread.h>
#include <stddef.h>
#include <stdint.h>

#if __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "the wire is little-endian, and this code does not convert"
#endif

/* About 0.3 ms of copying: how long each of many readers waits for each other one. */
#define STEP_BYTES_MAX (1u << 20)
/* Receives of one connection before the others have their turn: with TLS each is a record. A request
 * for the most pages has seven whole ones; a peer may send one for each byte. */
#define RECEIVES_MAX 64
/* Seals of one portion; more pages in a portion than this are refused by `open`. */
#define PORTION_PAGES_LIMIT 256
#define EVENTS_MAX 64
#define NEVER INT64_MAX

/* How a conversation ended; serving.py uses the same numbers. */
enum end { GOES_ON = -1, GONE = 0, MALFORMED = 1, INCARNATION = 2, BOUNDS = 3 };

/* WAITING: for room to hold the request, of which the head has arrived. FLUSHING: the response is
 * encrypted, and a part of it waits for the socket. */
enum phase { HEAD, WAITING, ENTRIES, SENDING, FLUSHING };

struct head {
    char magic[4];
    uint32_t count;
    uint64_t incarnation;
    uint64_t total;
};

struct entry {
    uint64_t offset;
    uint64_t length;
    uint64_t generation;
};

/* As in model/seal.py. */
struct seal {
    uint64_t word;
    uint8_t key[16];
    uint64_t space, length;
    uint8_t unused[24];
};

_Static_assert(sizeof(struct head) == 24 && sizeof(struct entry) == 24, "as in wire.py");
_Static_assert(sizeof(struct seal) == 64, "as in model/seal.py");

/* The state of a page: not checked yet, its seal is the requested one, or another one. */
enum sight { UNSEEN, SHOWN, WITHHELD };

/* A request in progress. lead: what is sent before the next page byte: the status, or the seals of
 * the previous portion. Pages first to last are the portion being sent; `page` is the current one.
 * */
struct request {
    uint32_t count, first, last, page;
    uint64_t page_sent;
    uint64_t lead_bytes, lead_sent;
    struct seal lead[PORTION_PAGES_LIMIT];
    uint8_t sight[PORTION_PAGES_LIMIT];
    struct entry entries[];
};

/* A connection to close, by its name. */
struct closing {
    struct closing *next;
    uint64_t name;
};

/* An owner: its connections share one limit of held memory (_holding.c). */
struct owner;

struct connection {
    struct connection *previous, *next, *next_waiting;
    uint64_t name, owner_name, held;
    struct owner *owner;
    int file, end;
    enum phase phase;
    uint32_t interest;
    int64_t idle_ns, request_ns, stall_ns, deadline_ns;
    uint64_t got;
    struct head head;
    struct request *request;
    /* Null without TLS. */
    struct peercache_tls *tls;
    /* The spaces that it may read; none: all. */
    uint64_t spaces_count;
    uint64_t spaces[];
};

/* The caller's settings; serving.py declares the same. usable: called when a request exceeds the
 * last known usable size. between, before_send: for tests that act at the worst moment, after a
 * portion's bytes and before each send, or null. */
struct settings {
    const uint8_t *pages;
    const struct seal *seals;
    uint64_t granule, incarnation;
    uint64_t count_max, request_bytes_max, portion_bytes_max, portion_pages_max;
    /* Limits in bytes of requests and unsent ciphertext: of all, and of one certificate. */
    uint64_t held_max, owner_held_max;
    uint64_t (*usable)(void);
    void (*between)(void);
    void (*before_send)(void);
};

struct server {
    struct settings settings;
    uint64_t usable;
    uint64_t served, held;
    struct owner *owners;
    struct connection *waiting, *last_waiting;
    int is_room_made;
    /* STEP_BYTES_MAX each: what is sent instead of a withheld page, and the copy for a step. */
    uint8_t *zeros, *copy;
    int poll, bell, news;
    int64_t scan_at_ns;
    struct connection *all;
    /* Under the lock: what the caller's threads and this one pass to each other. */
    pthread_mutex_t lock;
    struct connection *taken, *ended;
    uint64_t idle_to_close;
    struct closing *closing;
    int is_stopping;
};

/* Set a connection's deadline, and make the loop check it in time. */
static inline void peercache_wait_until(struct server *server, struct connection *connection,
                                        int64_t deadline_ns)
{
    connection->deadline_ns = deadline_ns;
    if (deadline_ns < server->scan_at_ns)
        server->scan_at_ns = deadline_ns;
}

/* Count a connection as one of an owner's; return whether there was memory for it. */
int peercache_join_owner(struct server *, struct connection *, uint64_t name);
/* Release what the connection holds, and its place in the queue. */
void peercache_leave_owner(struct server *, struct connection *);
/* Let the connection hold this much, if there is room; return whether there was. */
int peercache_hold(struct server *, struct connection *, uint64_t bytes);
void peercache_release(struct server *, struct connection *);
/* Put the connection into the queue for room. */
void peercache_wait_for_room(struct server *, struct connection *);
/* Return the first queued connection for which there is room, after reserving it, or null. */
struct connection *peercache_next_waiting(struct server *,
                                          uint64_t (*wanted)(const struct connection *));
/* Return the end of the portion that begins at page `first`; must match wire.cuts. */
uint32_t peercache_cut(const struct settings *, const struct request *, uint32_t first);
/* Send one step of the current response; return how the conversation ended, or GOES_ON. */
enum end peercache_respond(struct server *, struct connection *, int64_t now);

#endif
