/* Bounds the memory that responses under way hold: of all of them, and of each owner's.
 *
 * Owns    what each owner of a certificate holds, and the connections that wait for their turn.
 * Keeps   a connection holds memory from its request's first byte behind the head until the response
 *         has gone out: the request, and with TLS the ciphertext that waits for the socket. One that
 *         would hold too much waits before it holds any, in the order of arrival, but for those
 *         whose owner holds its share.
 */
#define _GNU_SOURCE
#include "_serving.h"

#include <stdlib.h>

struct owner {
    struct owner *next;
    uint64_t name, held, connections;
};

int peercache_join_owner(struct server *server, struct connection *connection, uint64_t name)
{
    struct owner *owner = server->owners;

    while (owner && owner->name != name)
        owner = owner->next;
    if (!owner) {
        owner = calloc(1, sizeof(*owner));
        if (!owner)
            return 0;
        owner->name = name;
        owner->next = server->owners;
        server->owners = owner;
    }
    owner->connections++;
    connection->owner = owner;
    return 1;
}

static void stop_waiting(struct server *server, struct connection *connection)
{
    struct connection **place = &server->waiting, *last = NULL;

    while (*place && *place != connection) {
        last = *place;
        place = &last->next_waiting;
    }
    if (!*place)
        return;
    *place = connection->next_waiting;
    if (server->last_waiting == connection)
        server->last_waiting = last;
}

void peercache_leave_owner(struct server *server, struct connection *connection)
{
    struct owner **place = &server->owners, *owner = connection->owner;

    if (connection->phase == WAITING)
        stop_waiting(server, connection);
    peercache_release(server, connection);
    connection->owner = NULL;
    if (!owner || --owner->connections)
        return;
    while (*place != owner)
        place = &(*place)->next;
    *place = owner->next;
    free(owner);
}

int peercache_hold(struct server *server, struct connection *connection, uint64_t bytes)
{
    const struct settings *settings = &server->settings;
    struct owner *owner = connection->owner;
    /* Without a certificate owners cannot be distinguished. */
    uint64_t share = owner->name ? settings->owner_held_max : settings->held_max;

    /* The largest request is admitted if it is the only one. */
    if ((owner->held && owner->held + bytes > share) ||
        (server->held && server->held + bytes > settings->held_max))
        return 0;
    connection->held = bytes;
    owner->held += bytes;
    server->held += bytes;
    return 1;
}

void peercache_release(struct server *server, struct connection *connection)
{
    if (!connection->held)
        return;
    connection->owner->held -= connection->held;
    server->held -= connection->held;
    connection->held = 0;
    server->is_room_made = 1;
}

void peercache_wait_for_room(struct server *server, struct connection *connection)
{
    connection->phase = WAITING;
    connection->next_waiting = NULL;
    if (server->last_waiting)
        server->last_waiting->next_waiting = connection;
    else
        server->waiting = connection;
    server->last_waiting = connection;
}

struct connection *peercache_next_waiting(struct server *server,
                                          uint64_t (*wanted)(const struct connection *))
{
    for (struct connection *each = server->waiting; each; each = each->next_waiting)
        if (peercache_hold(server, each, wanted(each))) {
            stop_waiting(server, each);
            return each;
        }
    server->is_room_made = 0;
    return NULL;
}
