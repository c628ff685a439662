/* The operations of a TLS session, which the page server calls without knowing OpenSSL: the library
 * with OpenSSL makes the session, and libpeercache.so is built without it. */
#ifndef PEERCACHE_TLS_H
#define PEERCACHE_TLS_H

#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

/* The most that a session holds while a response is sent: ciphertext that waits for the socket, and
 * a record that is being collected. */
#define PEERCACHE_TLS_UNSENT_BYTES (512u << 10)
#define PEERCACHE_TLS_RECORD_BYTES 16384u

struct peercache_tls;

struct peercache_tls_operations {
    /* Encrypt the pieces and send what the socket accepts; return the number of encrypted bytes,
     * which the session owns from then on. -1 and EAGAIN: the socket accepts nothing now. Without
     * pieces it sends what is left, and returns 0 when nothing is left. */
    int64_t (*send)(struct peercache_tls *, const struct iovec *pieces, size_t count);
    /* Decrypt into the place; return the bytes, 0 when the peer has closed, or -1 and errno. */
    int64_t (*receive)(struct peercache_tls *, void *into, size_t size);
    /* Return whether ciphertext waits for the socket. */
    int (*has_unsent)(const struct peercache_tls *);
    /* Return whether received bytes may wait here, which a poll of the socket does not see. */
    int (*has_pending)(const struct peercache_tls *);
    /* Free the session; the socket still belongs to its owner. */
    void (*free)(struct peercache_tls *);
};

/* Each session begins with this struct. */
struct peercache_tls {
    const struct peercache_tls_operations *operations;
};

#endif
