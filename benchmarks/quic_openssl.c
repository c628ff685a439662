// Pages over the QUIC of OpenSSL 3.5, with mutual TLS: a program of `benchmarks.quic`.
//   quic_openssl server|client ADDRESS PORT CA CERT KEY CONGESTION [PAGES FLIGHT LIMIT]
// One connection, and a stream for each page. CONGESTION is ignored: it has NewReno only.
#include <arpa/inet.h>
#include <openssl/err.h>
#include <openssl/quic.h>
#include <openssl/ssl.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <time.h>

enum { STREAMS = 64, PAGE_BYTES = 1 << 20, PAGES_MAX = 65536, BUFFER_BYTES = 4 << 20 };
static const unsigned char PROTOCOL[] = {4, 'p', 'a', 'g', 'e'};
static unsigned char page[PAGE_BYTES];
static SSL *stream[STREAMS];
static size_t moved[STREAMS];

static double now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static double cpu_s(void)
{
    struct rusage used;
    getrusage(RUSAGE_SELF, &used);
    return (double)(used.ru_utime.tv_sec + used.ru_stime.tv_sec) +
           (double)(used.ru_utime.tv_usec + used.ru_stime.tv_usec) / 1e6;
}

static void need(int is_fine, const char *what)
{
    if (is_fine)
        return;
    fprintf(stderr, "%s\n", what);
    ERR_print_errors_fp(stderr);
    exit(1);
}

static int choose(SSL *ssl, const unsigned char **out, unsigned char *size, const unsigned char *in,
                  unsigned length, void *more)
{
    (void)ssl, (void)more;
    int found = SSL_select_next_proto((unsigned char **)out, size, PROTOCOL, sizeof PROTOCOL, in,
                                      length);
    return found == OPENSSL_NPN_NEGOTIATED ? SSL_TLSEXT_ERR_OK : SSL_TLSEXT_ERR_ALERT_FATAL;
}

static void rest(int fd, SSL *ssl)
{
    struct timeval left;
    int is_infinite, wait_ms = 50;
    if (SSL_get_event_timeout(ssl, &left, &is_infinite) && !is_infinite && left.tv_sec == 0 &&
        left.tv_usec < wait_ms * 1000)
        wait_ms = (int)(left.tv_usec + 999) / 1000;
    struct pollfd polled = {fd, (short)(SSL_net_write_desired(ssl) ? POLLIN | POLLOUT : POLLIN), 0};
    poll(&polled, 1, wait_ms);
}

static void serve(SSL_CTX *context, int fd)
{
    SSL_CTX_set_alpn_select_cb(context, choose, NULL);
    SSL *listener = SSL_new_listener(context, 0), *peer = NULL;
    need(listener && SSL_set_fd(listener, fd) && SSL_listen(listener), "listen");
    puts("ready");
    fflush(stdout);
    for (int is_busy = 0;; is_busy = 0) {
        size_t count;
        SSL_handle_events(listener);
        SSL *next = SSL_accept_connection(listener, SSL_ACCEPT_CONNECTION_NO_BLOCK);
        if (next) { // One client at a time.
            for (int i = 0; i < STREAMS; SSL_free(stream[i]), stream[i++] = NULL) {
            }
            SSL_free(peer);
            peer = next;
            SSL_set_blocking_mode(peer, 0);
            SSL_set_default_stream_mode(peer, SSL_DEFAULT_STREAM_MODE_NONE);
            SSL_set_incoming_stream_policy(peer, SSL_INCOMING_STREAM_POLICY_ACCEPT, 0);
        }
        for (int i = 0; peer && i < STREAMS; i++) {
            char request[4];
            if (!stream[i] && (stream[i] = SSL_accept_stream(peer, SSL_ACCEPT_STREAM_NO_BLOCK)))
                moved[i] = PAGE_BYTES;
            if (!stream[i])
                continue;
            if (moved[i] == PAGE_BYTES && SSL_read_ex(stream[i], request, sizeof request, &count))
                moved[i] = 0;
            if (moved[i] < PAGE_BYTES &&
                SSL_write_ex2(stream[i], page + moved[i], PAGE_BYTES - moved[i],
                              SSL_WRITE_FLAG_CONCLUDE, &count)) {
                is_busy = 1;
                moved[i] += count;
                if (moved[i] == PAGE_BYTES) {
                    SSL_free(stream[i]);
                    stream[i] = NULL;
                }
            }
        }
        if (!is_busy && !next)
            rest(fd, listener);
    }
}

static void read_pages(SSL *ssl, int fd, int pages, int flight, double limit_s)
{
    static double since[STREAMS], took[PAGES_MAX];
    int begun = 0, done = 0;
    double began = now_s();
    for (int result; (result = SSL_connect(ssl)) != 1; rest(fd, ssl))
        need(SSL_get_error(ssl, result) == SSL_ERROR_WANT_READ, "connect");
    double shaken = now_s(), busy = cpu_s();
    while (done < begun || (begun < pages && now_s() < shaken + limit_s)) {
        int is_busy = 0;
        SSL_handle_events(ssl);
        for (int i = 0; i < flight; i++) {
            size_t count;
            if (!stream[i] && begun < pages && now_s() < shaken + limit_s &&
                (stream[i] = SSL_new_stream(ssl, SSL_STREAM_FLAG_NO_BLOCK))) {
                need(SSL_write_ex2(stream[i], "page", 4, SSL_WRITE_FLAG_CONCLUDE, &count), "ask");
                begun++, moved[i] = 0, since[i] = now_s();
            }
            if (!stream[i] || !SSL_read_ex(stream[i], page, PAGE_BYTES - moved[i], &count))
                continue;
            is_busy = 1;
            moved[i] += count;
            if (moved[i] == PAGE_BYTES) {
                took[done++] = now_s() - since[i];
                SSL_free(stream[i]);
                stream[i] = NULL;
            }
        }
        if (!is_busy)
            rest(fd, ssl);
    }
    printf("{\"handshake_s\": %f, \"seconds\": %f, \"cpu_s\": %f, \"took\": [", shaken - began,
           now_s() - shaken, cpu_s() - busy);
    for (int i = 0; i < done; i++)
        printf("%s%f", i ? ", " : "", took[i]);
    puts("]}");
    SSL_shutdown_ex(ssl, SSL_SHUTDOWN_FLAG_RAPID, NULL, 0);
}

int main(int count, char **given)
{
    need(count == 8 || count == 11, "server|client ADDRESS PORT CA CERT KEY CONGESTION [...]");
    int is_server = !strcmp(given[1], "server"), size = BUFFER_BYTES;
    SSL_CTX *context = SSL_CTX_new(is_server ? OSSL_QUIC_server_method() : OSSL_QUIC_client_method());
    need(context && SSL_CTX_load_verify_locations(context, given[4], NULL) &&
             SSL_CTX_use_certificate_chain_file(context, given[5]) > 0 &&
             SSL_CTX_use_PrivateKey_file(context, given[6], SSL_FILETYPE_PEM) > 0 &&
             SSL_CTX_set_ciphersuites(context, "TLS_AES_128_GCM_SHA256"),
         "context");
    SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, NULL);
    SSL_CTX_set_mode(context, SSL_MODE_ENABLE_PARTIAL_WRITE);
    struct sockaddr_in at = {.sin_family = AF_INET, .sin_port = htons((uint16_t)atoi(given[3]))};
    inet_pton(AF_INET, given[2], &at.sin_addr);
    int fd = socket(AF_INET, SOCK_DGRAM | SOCK_NONBLOCK, 0);
    setsockopt(fd, SOL_SOCKET, SO_RCVBUF, &size, sizeof size);
    setsockopt(fd, SOL_SOCKET, SO_SNDBUF, &size, sizeof size);
    if (is_server) {
        need(!bind(fd, (struct sockaddr *)&at, sizeof at), "bind");
        serve(context, fd);
    }
    SSL *ssl = SSL_new(context);
    BIO_ADDR *peer = BIO_ADDR_new();
    BIO_ADDR_rawmake(peer, AF_INET, &at.sin_addr, sizeof at.sin_addr, at.sin_port);
    need(!connect(fd, (struct sockaddr *)&at, sizeof at) && SSL_set_fd(ssl, fd) &&
             SSL_set_blocking_mode(ssl, 0) && SSL_set1_initial_peer_addr(ssl, peer) &&
             !SSL_set_alpn_protos(ssl, PROTOCOL, sizeof PROTOCOL),
         "client");
    SSL_set_default_stream_mode(ssl, SSL_DEFAULT_STREAM_MODE_NONE);
    read_pages(ssl, fd, atoi(given[8]), atoi(given[9]), atof(given[10]));
    return 0;
}
