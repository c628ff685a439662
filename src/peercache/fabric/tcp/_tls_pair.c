/* A bare pair of OpenSSL, with OpenSSL's own buffers of the sizes that the fabric uses: the limit
 * that the benchmark compares the fabric with. Nothing else calls it.
 */
#define _GNU_SOURCE
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <stdint.h>
#include <sys/socket.h>
#include <time.h>

#define WRITE_BUFFER_BYTES (512 << 10)

static double now_s(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec * 1e-9;
}

/* Return a session over a connected, blocking socket after its handshake, or null. */
static SSL *shake_hands(SSL_CTX *context, int is_server, int file)
{
    SSL *ssl = SSL_new(context);
    BIO *socket = BIO_new_socket(file, BIO_NOCLOSE), *buffer = NULL;

    if (ssl && socket) {
        SSL_set_bio(ssl, socket, socket);
        if ((is_server ? SSL_accept(ssl) : SSL_connect(ssl)) == 1) {
            if (!is_server)
                return ssl;
            buffer = BIO_new(BIO_f_buffer());
            if (buffer && BIO_set_write_buffer_size(buffer, WRITE_BUFFER_BYTES) == 1) {
                BIO_up_ref(socket);
                SSL_set0_wbio(ssl, BIO_push(buffer, socket));
                return ssl;
            }
        }
    }
    ERR_clear_error();
    SSL_free(ssl);
    return NULL;
}

/* Serve `total` bytes in writes of `step`, once; return whether all were sent. */
int peercache_tls_pair_send(SSL_CTX *context, int file, const uint8_t *bytes, uint64_t total,
                            uint64_t step)
{
    SSL *ssl = shake_hands(context, 1, file);
    uint64_t sent = 0;
    uint8_t go;

    if (!ssl)
        return 0;
    if (SSL_read(ssl, &go, 1) == 1)
        while (sent < total) {
            uint64_t size = total - sent < step ? total - sent : step;

            if (SSL_write(ssl, bytes + sent, (int)size) != (int)size ||
                BIO_flush(SSL_get_wbio(ssl)) != 1)
                break;
            sent += size;
        }
    ERR_clear_error();
    SSL_free(ssl);
    return sent == total;
}

/* Receive `total` bytes, and return the seconds from the request to the last byte, or -1. */
double peercache_tls_pair_receive(SSL_CTX *context, int file, uint8_t *into, uint64_t total,
                                  uint64_t step)
{
    SSL *ssl = shake_hands(context, 0, file);
    double begun = now_s();
    uint64_t got = 0;

    if (!ssl)
        return -1;
    if (SSL_write(ssl, "g", 1) == 1)
        while (got < total) {
            uint64_t size = total - got < step ? total - got : step;
            int taken = SSL_read(ssl, into + got, (int)size);

            if (taken <= 0)
                break;
            got += (uint64_t)taken;
        }
    begun = now_s() - begun;
    ERR_clear_error();
    SSL_free(ssl);
    return got == total ? begun : -1;
}
