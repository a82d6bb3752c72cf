/* Counts quotients of two operations that differ from IEEE's, over all significands of values and factors.

   usage: short_quotients BITS; values have BITS bits behind their first.
   prints: how many of 2^(23 + BITS) pairs differ, and in how many of these one of both has 13 bits or fewer. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static float number(uint32_t bits) { float x; memcpy(&x, &bits, 4); return x; }
static uint32_t bits_of(float x) { uint32_t bits; memcpy(&bits, &x, 4); return bits; }
static int is_short(float x) { return (bits_of(x) & 0x7ff) == 0; }

int main(int count, char **arguments) {
    const int bits = count > 1 ? atoi(arguments[1]) : 7;
    long different = 0, near = 0;
    for (uint32_t m = 0; m < (1u << 23); m++) {
        const float factor = number(0x3f800000u | m), inverse = 1.0f / factor;
        const float rest = fmaf(-factor, inverse, 1.0f) * inverse;
        for (uint32_t k = 0; k < (1u << bits); k++) {
            const float value = number(0x3f800000u | (k << (23 - bits)));
            const float quotient = fmaf(value, inverse, value * rest), exact = value / factor;
            if (quotient != exact) {
                different++;
                near += is_short(quotient) || is_short(exact);
            }
        }
    }
    printf("%ld %ld\n", different, near);
    return 0;
}
