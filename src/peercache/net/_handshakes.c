/* Counts why TLS handshakes of the control plane failed, from what nng logs about them: nng reports
 * the reason nowhere else.
 *
 * Takes   nng, on its own threads and under its locks: so no Python runs here, and nothing waits.
 * Keeps   no text: it may hold what a peer has sent.
 */
#include <stdint.h>
#include <string.h>

/* The reasons; net/handshakes.py uses the same numbers. */
enum reason { OTHER, NO_CERTIFICATE, BAD_CERTIFICATE, NO_TLS, OLD_TLS, REFUSED_BY_PEER, REASONS };

static uint64_t failed[REASONS];

/* Texts of Mbed TLS. */
static const struct {
    const char *text;
    enum reason reason;
} known[] = {
    {"No client certification received", NO_CERTIFICATE},
    {"Certificate verification failed", BAD_CERTIFICATE},
    {"An invalid SSL record was received", NO_TLS},
    {"not within min/max boundaries", OLD_TLS},
    /* An alert that the peer sent too early, or under another key than the current one. */
    {"Verification of the message MAC failed", REFUSED_BY_PEER},
    {"A fatal alert message was received", REFUSED_BY_PEER},
};

/* Other log texts of nng about a handshake that has failed already. */
#define AGAIN "An unexpected message was received"

/* An `nng_logger`: level, facility, the event's name and the text. */
void peercache_handshakes_log(int level, int facility, const char *event, const char *text)
{
    enum reason reason = OTHER;

    (void)level, (void)facility;
    if (!event || !text || strcmp(event, "NNG-TLS-HANDSHAKE") != 0 || strstr(text, AGAIN))
        return;
    for (size_t index = 0; index < sizeof(known) / sizeof(known[0]); index++)
        if (strstr(text, known[index].text))
            reason = known[index].reason;
    __atomic_fetch_add(&failed[reason], 1, __ATOMIC_RELAXED);
}

/* Return how many handshakes have failed for a reason. */
uint64_t peercache_handshakes_failed(uint32_t reason)
{
    return reason < REASONS ? __atomic_load_n(&failed[reason], __ATOMIC_RELAXED) : 0;
}
