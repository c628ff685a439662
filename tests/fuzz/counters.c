/* Linked into the C parts for `make fuzz`: counts what gcc's -fsanitize-coverage=trace-pc reports, in
 * the form that libFuzzer reads. Two places may share a counter. */
#include <stdint.h>

#define COUNTERS 32749
#define HERE __attribute__((visibility("hidden")))

static uint8_t counters[COUNTERS];
/* An address and flags for each counter. */
static uintptr_t places[COUNTERS][2];

void __sanitizer_cov_8bit_counters_init(uint8_t *begin, uint8_t *end);
void __sanitizer_cov_pcs_init(const uintptr_t *begin, const uintptr_t *end);

HERE void __sanitizer_cov_trace_pc(void)
{
    uintptr_t place = (uintptr_t)__builtin_return_address(0);

    places[place % COUNTERS][0] = place;
    counters[place % COUNTERS]++;
}

/* libFuzzer has no use for these, which clang does not report. */
HERE void __sanitizer_cov_trace_cmpf(float one, float other)
{
    (void)one, (void)other;
}

HERE void __sanitizer_cov_trace_cmpd(double one, double other)
{
    (void)one, (void)other;
}

__attribute__((constructor)) static void begin(void)
{
    __sanitizer_cov_8bit_counters_init(counters, counters + COUNTERS);
    __sanitizer_cov_pcs_init(places[0], places[COUNTERS]);
}
