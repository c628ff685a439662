/* TLS contexts: one certificate, its key, and the CAs that must have issued peers' certificates.
 *
 * Keeps   TLS 1.2 is refused. A peer without a certificate of a CA here, or with one that is expired
 *         or not yet valid, is refused. No session is resumed: each connection shows a certificate.
 * Limits  READ_AHEAD_BYTES of input a client's session. CERTIFICATES_BYTES_MAX of a peer's chain.
 */
#include <openssl/bio.h>
#include <openssl/err.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>

#define READ_AHEAD_BYTES (256u << 10)
/* The longest chain: the certificate, its CA, and the CA of that CA. */
#define CHAIN_MAX 4
/* The longest honest chain has 22 KiB: a certificate with the longest name of an identity 17 KiB, and
 * each of its authorities with a key of 4096 bits 1 to 2 KiB. A stranger may show any certificates,
 * and the shortest have 300 bytes. OpenSSL 3.0 needs 0.1 ms to read each: 10 ms for this many. */
#define CERTIFICATES_BYTES_MAX (32l << 10)
#define SUITES "TLS_AES_128_GCM_SHA256:TLS_CHACHA20_POLY1305_SHA256:TLS_AES_256_GCM_SHA384"

static int add_authorities(SSL_CTX *context, const char *pem)
{
    BIO *source = BIO_new_mem_buf(pem, -1);
    X509_STORE *store = SSL_CTX_get_cert_store(context);
    X509 *found;
    int count = 0;

    while (source && (found = PEM_read_bio_X509(source, NULL, NULL, NULL))) {
        count += X509_STORE_add_cert(store, found);
        X509_free(found);
    }
    BIO_free(source);
    ERR_clear_error(); /* OpenSSL reports the end of the text as an error. */
    return count > 0;
}

static int use_certificate(SSL_CTX *context, const char *pem)
{
    BIO *source = BIO_new_mem_buf(pem, -1);
    X509 *own = source ? PEM_read_bio_X509(source, NULL, NULL, NULL) : NULL;
    X509 *more;
    int is_used = own && SSL_CTX_use_certificate(context, own) == 1;

    X509_free(own);
    while (is_used && (more = PEM_read_bio_X509(source, NULL, NULL, NULL)))
        if (!SSL_CTX_add_extra_chain_cert(context, more)) {
            X509_free(more);
            is_used = 0;
        }
    BIO_free(source);
    ERR_clear_error();
    return is_used;
}

static int use_key(SSL_CTX *context, const char *pem)
{
    BIO *source = BIO_new_mem_buf(pem, -1);
    EVP_PKEY *key = source ? PEM_read_bio_PrivateKey(source, NULL, NULL, "") : NULL;
    int is_used = key && SSL_CTX_use_PrivateKey(context, key) == 1;

    EVP_PKEY_free(key);
    BIO_free(source);
    return is_used && SSL_CTX_check_private_key(context) == 1;
}

/* Return a context of one certificate and the CAs of peers' certificates, or null and in `what` the
 * part that OpenSSL rejects. */
SSL_CTX *peercache_tls_context(int is_server, const char *authorities, const char *certificate,
                               const char *key, const char **what)
{
    SSL_CTX *context = SSL_CTX_new(is_server ? TLS_server_method() : TLS_client_method());

    *what = "the library";
    if (!context)
        return NULL;
    if (SSL_CTX_set_min_proto_version(context, TLS1_3_VERSION) == 1 &&
        SSL_CTX_set_ciphersuites(context, SUITES) == 1) {
        /* Tickets would let a peer reconnect after its certificate was revoked. */
        SSL_CTX_set_num_tickets(context, 0);
        SSL_CTX_set_session_cache_mode(context, SSL_SESS_CACHE_OFF);
        SSL_CTX_set_options(context, SSL_OP_NO_RENEGOTIATION | SSL_OP_CIPHER_SERVER_PREFERENCE);
        SSL_CTX_set_mode(context, SSL_MODE_ACCEPT_MOVING_WRITE_BUFFER);
        /* A record without data gives others their turn. */
        SSL_CTX_clear_mode(context, SSL_MODE_AUTO_RETRY);
        SSL_CTX_set_verify(context, SSL_VERIFY_PEER | SSL_VERIFY_FAIL_IF_NO_PEER_CERT, NULL);
        SSL_CTX_set_verify_depth(context, CHAIN_MAX);
        SSL_CTX_set_max_cert_list(context, CERTIFICATES_BYTES_MAX);
        SSL_CTX_set_read_ahead(context, 1);
        if (is_server)
            /* Thousands of idle connections must not keep a buffer. */
            SSL_CTX_set_mode(context, SSL_MODE_RELEASE_BUFFERS);
        else
            SSL_CTX_set_default_read_buffer_len(context, READ_AHEAD_BYTES);
        *what = "tls_ca";
        if (add_authorities(context, authorities)) {
            *what = "tls_cert";
            if (use_certificate(context, certificate)) {
                *what = "tls_key";
                if (use_key(context, key))
                    return context;
            }
        }
    }
    ERR_clear_error();
    SSL_CTX_free(context);
    return NULL;
}

void peercache_tls_context_free(SSL_CTX *context)
{
    SSL_CTX_free(context);
}
