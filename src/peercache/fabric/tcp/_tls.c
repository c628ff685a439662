/* TLS 1.3 with certificates of both sides, for the page server and the receiving loop.
 *
 * Owns    sessions, one connection each, without their sockets. One thread uses a session at a time.
 * Keeps   no byte that was encrypted depends on the caller's memory any more. A send never raises
 *         SIGPIPE. A destination that is not mapped is an error, not a crash. A key encrypts a
 *         limited number of records; OpenSSL does not replace it by itself.
 * Limits  UNSENT_BYTES of ciphertext a session, only while a response is on its way. A peer that
 *         sends more than FRUITLESS_MAX records and messages without data in a row, or more than
 *         CLEAR_BYTES_MAX in clear text, is hung up on.
 *
 * In addition to the cipher itself, TLS costs time for each record of 16 KiB: so several records
 * are encrypted before one send, and one receive returns several. If the kernel encrypts (kTLS), a
 * server passes it the plain bytes.
 */
#define _GNU_SOURCE
#include "_tls.h"

#include <errno.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/ssl.h>
#include <openssl/x509v3.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

#define RECORD_BYTES PEERCACHE_TLS_RECORD_BYTES
/* A record's head, its tag, and room for a protocol message of TLS. */
#define RECORD_EXTRA_BYTES 256
#define UNSENT_BYTES PEERCACHE_TLS_UNSENT_BYTES
/* The most places of which the first and last bytes are probed, with one system call. */
#define PROBED_MAX 512
/* The most records and protocol messages without data that a peer sends in a row, in a handshake and
 * after it. An honest handshake has 13, or 22 with the longest certificates, a second hello and two
 * tickets. 32 key updates count twice each and take 0.3 ms, as long as a step of the page server. */
#define FRUITLESS_MAX 64
/* The most bytes of handshake messages before a peer encrypts: one record. A hello has 300 bytes, or
 * 2 KiB with keys for post-quantum cryptography. Reading it takes time in the square of its size: 1 ms
 * for this much, 20 ms for 56 KiB. */
#define CLEAR_BYTES_MAX 16384u
/* A record's type, version and length. */
#define HEAD_BYTES 5
/* The subject alternative name of every certificate of PeerCache. */
#define SHARED_NAME "peercache"
/* Linux's name of its own TLS. */
#define KERNEL_TLS "tls"

/* Why a handshake failed; tls.py uses the same numbers. */
enum failure {
    NONE = 0,
    LOST = 1,
    NO_CERTIFICATE = 2,
    UNKNOWN_CA = 3,
    EXPIRED = 4,
    NOT_YET_VALID = 5,
    BAD_CERTIFICATE = 6,
    NO_TLS = 7,
    OLD_TLS = 8,
    REFUSED_BY_PEER = 9,
    BROKEN = 10
};

/* A place of a read, as in _receiving.c. */
struct place {
    uint64_t address;
    uint64_t size;
};

struct session {
    struct peercache_tls head;
    SSL *ssl;
    /* wait: flags of each send. error: errno of the last receive. by_kernel: the kernel encrypts.
     * is_read_out: no complete record is left here, so more bytes of the socket are needed.
     * fruitless: records and messages without data since the last data. clear: bytes of handshake
     * messages in clear text. is_flooded: the peer has exceeded the limit of one of them. */
    int file, wait, error, by_kernel, is_read_out, fruitless, is_flooded;
    uint32_t clear;
    enum failure failure;
    /* sealed: records that the current key has encrypted. key_records: how many it may. */
    uint64_t sealed, key_records;
    /* Ciphertext from `begin` to `end` waits for the socket. */
    uint8_t *unsent;
    size_t begin, end;
    /* Pieces smaller than a record are collected here. */
    uint8_t *stage;
};

static BIO_METHOD *method;

static int has_room(const struct session *session)
{
    return UNSENT_BYTES - session->end >= RECORD_BYTES + RECORD_EXTRA_BYTES;
}

/* Send what waits; return 0 when nothing is left, or -1 and errno. */
static int flush(struct session *session)
{
    while (session->begin < session->end) {
        ssize_t sent = send(session->file, session->unsent + session->begin,
                            session->end - session->begin, MSG_NOSIGNAL | session->wait);

        if (sent < 0)
            return -1;
        session->begin += (size_t)sent;
    }
    session->begin = session->end = 0;
    return 0;
}

static int write_socket(BIO *bio, const char *bytes, size_t size, size_t *written)
{
    struct session *session = BIO_get_data(bio);

    BIO_clear_retry_flags(bio);
    if (!session->unsent)
        session->unsent = malloc(UNSENT_BYTES);
    if (!session->unsent)
        return 0;
    if (size > UNSENT_BYTES - session->end)
        size = UNSENT_BYTES - session->end;
    if (!size) {
        BIO_set_retry_write(bio);
        return 0;
    }
    memcpy(session->unsent + session->end, bytes, size);
    session->end += size;
    *written = size;
    return 1;
}

static int read_socket(BIO *bio, char *into, size_t size, size_t *got)
{
    struct session *session = BIO_get_data(bio);
    ssize_t taken;

    /* What the peer must answer is sent first; what the socket does not accept, its owner flushes.
     * */
    if (session->begin < session->end)
        flush(session);
    taken = recv(session->file, into, size, 0);
    BIO_clear_retry_flags(bio);
    session->error = taken < 0 ? errno : 0;
    if (taken <= 0) {
        if (taken < 0 && (errno == EAGAIN || errno == EWOULDBLOCK || errno == EINTR))
            BIO_set_retry_read(bio);
        return 0;
    }
    *got = (size_t)taken;
    return 1;
}

static long control(BIO *bio, int command, long number, void *pointer)
{
    (void)bio, (void)number, (void)pointer;
    return command == BIO_CTRL_FLUSH;
}

/* Called by OpenSSL for each record's head and each protocol message. OpenSSL would read on for as
 * long as there are records without data: what looks like the peer's end makes it return. */
static void notice(int is_sent, int version, int kind, const void *bytes, size_t size, SSL *ssl,
                   void *argument)
{
    struct session *session = argument;
    const uint8_t *head = bytes;

    (void)version;
    if (is_sent || (kind != SSL3_RT_HEADER && kind != SSL3_RT_HANDSHAKE))
        return;
    session->fruitless++;
    if (kind == SSL3_RT_HEADER && size >= HEAD_BYTES && head[0] == SSL3_RT_HANDSHAKE)
        session->clear += (uint32_t)head[3] << 8 | head[4];
    if (session->fruitless <= FRUITLESS_MAX && session->clear <= CLEAR_BYTES_MAX)
        return;
    session->is_flooded = 1;
    SSL_set_shutdown(ssl, SSL_get_shutdown(ssl) | SSL_RECEIVED_SHUTDOWN);
}

/* Return a BIO with which OpenSSL may delegate encryption to the kernel, or null if the kernel has
 * no TLS. During the handshake OpenSSL writes to it without MSG_NOSIGNAL: Python ignores SIGPIPE.
 * */
static BIO *kernel_bio(int file)
{
    if (setsockopt(file, IPPROTO_TCP, TCP_ULP, KERNEL_TLS, sizeof(KERNEL_TLS)) < 0)
        return NULL;
    return BIO_new_socket(file, BIO_NOCLOSE);
}

/* Find out, after the handshake, whether the kernel encrypts; if not, this code sends the records.
 * */
static void settle_encryption(struct session *session)
{
    BIO *ours = SSL_get_rbio(session->ssl), *used = SSL_get_wbio(session->ssl);

    if (used == ours)
        return;
    session->by_kernel = BIO_get_ktls_send(used) != 0;
    if (!session->by_kernel && BIO_up_ref(ours))
        SSL_set0_wbio(session->ssl, ours);
}

static enum failure why_unverified(long result)
{
    switch (result) {
    case X509_V_OK:
        return BROKEN;
    case X509_V_ERR_CERT_HAS_EXPIRED:
        return EXPIRED;
    case X509_V_ERR_CERT_NOT_YET_VALID:
        return NOT_YET_VALID;
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT:
    case X509_V_ERR_UNABLE_TO_GET_ISSUER_CERT_LOCALLY:
    case X509_V_ERR_UNABLE_TO_VERIFY_LEAF_SIGNATURE:
    case X509_V_ERR_DEPTH_ZERO_SELF_SIGNED_CERT:
    case X509_V_ERR_SELF_SIGNED_CERT_IN_CHAIN:
    case X509_V_ERR_CERT_SIGNATURE_FAILURE:
        return UNKNOWN_CA;
    default:
        return BAD_CERTIFICATE;
    }
}

/* Return why the last call failed, according to OpenSSL's error queue. */
static enum failure why_failed(const struct session *session)
{
    unsigned long error = ERR_peek_error();

    if (!error)
        return LOST;
    if (ERR_GET_LIB(error) != ERR_LIB_SSL)
        return BROKEN;
    switch (ERR_GET_REASON(error)) {
    case SSL_R_PEER_DID_NOT_RETURN_A_CERTIFICATE:
        return NO_CERTIFICATE;
    case SSL_R_CERTIFICATE_VERIFY_FAILED:
        return why_unverified(SSL_get_verify_result(session->ssl));
    case SSL_R_WRONG_VERSION_NUMBER:
    case SSL_R_HTTP_REQUEST:
    case SSL_R_HTTPS_PROXY_REQUEST:
    case SSL_R_PACKET_LENGTH_TOO_LONG:
    case SSL_R_ENCRYPTED_LENGTH_TOO_LONG:
    case SSL_R_BAD_RECORD_TYPE:
        return NO_TLS;
    case SSL_R_UNSUPPORTED_PROTOCOL:
    case SSL_R_NO_SHARED_CIPHER:
    case SSL_R_TLSV1_ALERT_PROTOCOL_VERSION:
        return OLD_TLS;
    case SSL_R_UNEXPECTED_EOF_WHILE_READING:
        return LOST;
    default:
        /* Reasons from here on are alerts: errors that the peer reports about us. */
        return ERR_GET_REASON(error) >= SSL_AD_REASON_OFFSET ? REFUSED_BY_PEER : BROKEN;
    }
}

/* Return the bytes that SSL_read or SSL_write moved, 0 at the end, or -1 and errno. */
static int64_t outcome(struct session *session, int result, size_t moved)
{
    if (result > 0)
        return (int64_t)moved;
    if (session->is_flooded) {
        session->failure = BROKEN;
        errno = EPROTO;
        return -1;
    }
    switch (SSL_get_error(session->ssl, result)) {
    case SSL_ERROR_ZERO_RETURN:
        return 0;
    case SSL_ERROR_WANT_READ:
        errno = session->error ? session->error : EAGAIN;
        return -1;
    case SSL_ERROR_WANT_WRITE:
        errno = EAGAIN;
        return -1;
    default:
        /* The connection ended without a TLS message, or with an alert. */
        session->failure = why_failed(session);
        errno = session->error ? session->error : ECONNRESET;
        return -1;
    }
}

static int64_t encrypt(struct session *session, const void *bytes, size_t size)
{
    size_t written = 0;
    int result;

    ERR_clear_error();
    session->error = 0;
    if (session->sealed >= session->key_records) {
        /* The next write sends it before the bytes. The peer answers for its own keys. */
        if (!SSL_key_update(session->ssl, SSL_KEY_UPDATE_NOT_REQUESTED))
            return outcome(session, 0, 0);
        session->sealed = 0;
    }
    session->sealed++;
    result = SSL_write_ex(session->ssl, bytes, size, &written);
    return outcome(session, result, written);
}

/* Encrypt the bytes on the stage; there is room for the result. */
static int send_stage(struct session *session, size_t *staged)
{
    if (*staged && encrypt(session, session->stage, *staged) != (int64_t)*staged)
        return -1;
    *staged = 0;
    return 0;
}

/* As `send_pieces`, if the kernel encrypts: it has read all accepted bytes when this returns. */
static int64_t send_by_kernel(struct session *session, const struct iovec *pieces, size_t count)
{
    struct msghdr message = {.msg_iov = (struct iovec *)(uintptr_t)pieces, .msg_iovlen = count};
    int64_t sent;

    /* Zero bytes would become an empty record. */
    if (!count || (count == 1 && !pieces->iov_len)) {
        if (session->sealed < session->key_records)
            return 0;
        /* Kernels before 6.14 cannot replace a key. The connection ends after a response, and the
         * client opens another one. */
        errno = EKEYEXPIRED;
        return -1;
    }
    sent = sendmsg(session->file, &message, MSG_NOSIGNAL | session->wait);
    if (sent > 0)
        session->sealed += ((uint64_t)sent + RECORD_BYTES - 1) / RECORD_BYTES;
    return sent;
}

static int64_t send_pieces(struct peercache_tls *tls, const struct iovec *pieces, size_t count)
{
    struct session *session = (struct session *)tls;
    uint64_t taken = 0;
    size_t staged = 0, done = 0;

    if (session->by_kernel)
        return send_by_kernel(session, pieces, count);
    if (!session->stage && !(session->stage = malloc(RECORD_BYTES)))
        return -1;
    if (flush(session) < 0)
        return -1;
    while (count) {
        const uint8_t *bytes = (const uint8_t *)pieces->iov_base + done;
        size_t left = pieces->iov_len - done, size = RECORD_BYTES - staged;

        if (!left) {
            pieces++, count--, done = 0;
            continue;
        }
        if (!has_room(session) && flush(session) < 0)
            break;
        if (size > left)
            size = left;
        if (size == RECORD_BYTES) {
            if (encrypt(session, bytes, size) != (int64_t)size)
                return -1;
        } else {
            memcpy(session->stage + staged, bytes, size);
            staged += size;
            if (staged == RECORD_BYTES && send_stage(session, &staged) < 0)
                return -1;
        }
        done += size;
        taken += size;
    }
    /* All accepted bytes are encrypted when this returns: there is room for the last record. */
    if (send_stage(session, &staged) < 0)
        return -1;
    if (flush(session) < 0 && errno != EAGAIN && errno != EWOULDBLOCK && errno != EINTR)
        return -1;
    if (session->begin == session->end) {
        free(session->unsent);
        free(session->stage);
        session->unsent = session->stage = NULL;
    }
    return (int64_t)taken;
}

static int64_t receive(struct peercache_tls *tls, void *into, size_t size)
{
    struct session *session = (struct session *)tls;
    size_t got = 0;
    int result;

    ERR_clear_error();
    session->error = 0;
    result = SSL_read_ex(session->ssl, into, size, &got);
    if (result > 0)
        session->fruitless = 0;
    /* OpenSSL reads from the socket only for the rest of an incomplete record. */
    session->is_read_out = result <= 0 && (session->error == EAGAIN || session->error == EWOULDBLOCK);
    return outcome(session, result, got);
}

static int has_unsent(const struct peercache_tls *tls)
{
    const struct session *session = (const struct session *)tls;

    return session->begin < session->end;
}

static int has_pending(const struct peercache_tls *tls)
{
    const struct session *session = (const struct session *)tls;

    /* OpenSSL also counts the bytes of an incomplete record, which cannot be used yet. */
    return !session->is_read_out && SSL_has_pending(session->ssl);
}

static void free_session(struct peercache_tls *tls)
{
    struct session *session = (struct session *)tls;

    SSL_free(session->ssl);
    free(session->unsent);
    free(session->stage);
    free(session);
}

static const struct peercache_tls_operations operations = {
    .send = send_pieces,
    .receive = receive,
    .has_unsent = has_unsent,
    .has_pending = has_pending,
    .free = free_session,
};

/* --- functions for tls.py --------------------------------------------------------------------- */

static void make_method(void)
{
    method = BIO_meth_new(BIO_get_new_index() | BIO_TYPE_SOURCE_SINK, "peercache");
    if (!method || !BIO_meth_set_write_ex(method, write_socket) ||
        !BIO_meth_set_read_ex(method, read_socket) || !BIO_meth_set_ctrl(method, control)) {
        BIO_meth_free(method);
        method = NULL;
    }
}

/* Return a session over a connected socket, or null. wait: flags of each send. key_records: how many
 * records one key encrypts. */
struct session *peercache_tls_open(SSL_CTX *context, int is_server, int file, int wait,
                                   uint64_t key_records)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    struct session *session = calloc(1, sizeof(*session));
    BIO *bio = NULL, *kernels;

    pthread_once(&once, make_method);
    if (session && method && (session->ssl = SSL_new(context)) && (bio = BIO_new(method))) {
        session->head.operations = &operations;
        session->file = file;
        session->wait = wait;
        session->key_records = key_records;
        BIO_set_data(bio, session);
        BIO_set_init(bio, 1);
        kernels = is_server ? kernel_bio(file) : NULL;
        SSL_set_bio(session->ssl, bio, kernels ? kernels : bio);
        SSL_set_msg_callback(session->ssl, notice);
        SSL_set_msg_callback_arg(session->ssl, session);
        if (kernels)
            SSL_set_options(session->ssl, SSL_OP_ENABLE_KTLS);
        if (is_server)
            SSL_set_accept_state(session->ssl);
        else
            SSL_set_connect_state(session->ssl);
        if (SSL_set1_host(session->ssl, SHARED_NAME) == 1)
            return session;
    }
    if (session)
        free_session(&session->head);
    return NULL;
}

void peercache_tls_free(struct session *session)
{
    free_session(&session->head);
}

/* Continue the handshake. Return 0 when it is done, 1 when it waits for the peer's bytes, 2 when
 * the socket accepts no more, and a negative `enum failure` if it failed. */
int peercache_tls_handshake(struct session *session)
{
    int result, error;

    if (flush(session) < 0)
        return errno == EAGAIN || errno == EINTR ? 2 : -LOST;
    ERR_clear_error();
    session->error = 0;
    result = SSL_do_handshake(session->ssl);
    error = SSL_get_error(session->ssl, result);
    if (session->is_flooded)
        session->failure = BROKEN;
    else if (result != 1 && error != SSL_ERROR_WANT_READ && error != SSL_ERROR_WANT_WRITE)
        session->failure = why_failed(session);
    /* An alert is sent, too. */
    if (flush(session) < 0 && errno != EAGAIN && errno != EINTR && !session->failure)
        session->failure = LOST;
    if (session->failure)
        return -(int)session->failure;
    if (session->begin < session->end)
        return 2;
    if (result == 1)
        settle_encryption(session);
    return result == 1 ? 0 : error == SSL_ERROR_WANT_READ ? 1 : 2;
}

/* Write the peer's certificate, one line each: its serial number in hexadecimal, its expiry in
 * seconds since 1970, and each of its URIs. Return the number of bytes, or -1 if they are not text
 * or do not fit. */
int64_t peercache_tls_peer(const struct session *session, char *into, uint64_t size)
{
    X509 *certificate = SSL_get1_peer_certificate(session->ssl);
    BIGNUM *number = certificate ? ASN1_INTEGER_to_BN(X509_get0_serialNumber(certificate), NULL) : NULL;
    char *serial = number ? BN_bn2hex(number) : NULL;
    GENERAL_NAMES *names =
        certificate ? X509_get_ext_d2i(certificate, NID_subject_alt_name, NULL, NULL) : NULL;
    struct tm until = {0};
    int is_known = serial && ASN1_TIME_to_tm(X509_get0_notAfter(certificate), &until);
    int64_t used =
        is_known ? snprintf(into, size, "%s\n%lld\n", serial, (long long)timegm(&until)) : -1;

    for (int index = 0; used >= 0 && index < sk_GENERAL_NAME_num(names); index++) {
        const GENERAL_NAME *name = sk_GENERAL_NAME_value(names, index);
        const ASN1_IA5STRING *text = name->d.uniformResourceIdentifier;
        uint64_t length;

        if (name->type != GEN_URI)
            continue;
        length = (uint64_t)ASN1_STRING_length(text);
        if ((uint64_t)used + length + 1 > size ||
            memchr(ASN1_STRING_get0_data(text), '\n', length)) {
            used = -1;
            break;
        }
        memcpy(into + used, ASN1_STRING_get0_data(text), length);
        used += (int64_t)length;
        into[used++] = '\n';
    }
    GENERAL_NAMES_free(names);
    OPENSSL_free(serial);
    BN_free(number);
    X509_free(certificate);
    return used;
}

/* Encrypt bytes, and send what the socket accepts at once; return whether all were accepted. */
int peercache_tls_send(struct session *session, const void *bytes, uint64_t size)
{
    struct iovec piece = {.iov_base = (void *)(uintptr_t)bytes, .iov_len = size};
    int64_t taken = send_pieces(&session->head, &piece, 1);

    if (taken >= 0 && taken < (int64_t)size)
        errno = EAGAIN;
    return taken == (int64_t)size ? 0 : -1;
}

/* Send what waits, within the socket's timeout; return 0 when nothing is left. */
int peercache_tls_flush(struct session *session)
{
    int wait = session->wait, result;

    session->wait = 0;
    result = flush(session);
    session->wait = wait;
    return result;
}

/* Receive once, at most `size` bytes; return 0 when the peer has closed, or -1 and errno. */
int64_t peercache_tls_receive_once(struct session *session, void *into, uint64_t size)
{
    return receive(&session->head, into, size);
}

/* Return whether the places are mapped: checks their first and last bytes, and only some places if
 * there are more than PROBED_MAX. If a sandbox forbids the call, all pass. See memory/_scatter.c.
 * */
static int are_there(const struct place *places, uint64_t count, uint64_t skip)
{
    struct iovec probed[2 * PROBED_MAX], scratch;
    char bytes[2 * PROBED_MAX] = {0};
    uint64_t stride = count / PROBED_MAX + 1, used = 0;
    ssize_t moved;

    for (uint64_t at = 0; at < count; at += stride) {
        uint64_t first = at ? 0 : skip;

        if (places[at].size <= first)
            continue;
        probed[used].iov_base = (void *)(uintptr_t)(places[at].address + first);
        probed[used++].iov_len = 1;
        probed[used].iov_base = (void *)(uintptr_t)(places[at].address + places[at].size - 1);
        probed[used++].iov_len = 1;
    }
    scratch.iov_base = bytes;
    scratch.iov_len = used;
    moved = process_vm_readv(getpid(), probed, used, &scratch, 1, 0);
    return moved < 0 ? errno != EFAULT : (uint64_t)moved == used;
}

static int64_t now_ns(void)
{
    struct timespec now;

    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

/* As peercache_receive, for a session; returns after left_ns. Only this ends a receive in time from
 * a peer that sends small records: the kernel still delivers what it has when the socket is shut
 * down. */
int64_t peercache_tls_receive(struct session *session, const struct place *places, uint64_t count,
                              uint64_t skip, int64_t left_ns)
{
    int64_t total = 0, until = now_ns() + left_ns;

    if (!are_there(places, count, skip)) {
        errno = EFAULT;
        return -1;
    }
    for (uint64_t at = 0; at < count; at++, skip = 0) {
        uint64_t size = places[at].size;

        while (skip < size) {
            int64_t taken = receive(&session->head,
                                    (void *)(uintptr_t)(places[at].address + skip), size - skip);

            if (taken > 0) {
                skip += (uint64_t)taken;
                total += taken;
            } else if (taken == 0 || session->error || errno != EAGAIN) {
                return total ? total : taken;
            } /* Otherwise it was a record without data. */
            if (now_ns() >= until) {
                errno = EAGAIN;
                return total ? total : -1;
            }
        }
    }
    return total;
}

/* Return why the session failed, an `enum failure`. */
int peercache_tls_failure(const struct session *session)
{
    return (int)session->failure;
}
