/* Masks: the number of a class for each pixel; resized by nearest neighbour, and renumbered. */
#include "jpeg.h"

#include <stdlib.h>
#include <string.h>

#if HAVE_AVX2_TARGET
#include <immintrin.h>
#endif

enum { PIXELS = 8, REACH = 16 }; /* of a step below: so many results, from at most so many bytes one after another */

typedef struct {
    int32_t begin;         /* the first of the bytes; -1: they are further apart, or end beyond the row */
    uint8_t places[REACH]; /* of the results among them */
} Step;

static void plan(const int32_t *columns, size_t steps, size_t row, Step *out) {
    for (size_t k = 0; k < steps; k++, columns += PIXELS, out++) {
        int32_t low = columns[0], high = columns[0];
        for (int i = 1; i < PIXELS; i++) {
            if (columns[i] < low) low = columns[i];
            if (columns[i] > high) high = columns[i];
        }
        out->begin = high - low < REACH && (size_t)low + REACH <= row ? low : -1;
        memset(out->places, 0, sizeof out->places);
        for (int i = 0; out->begin >= 0 && i < PIXELS; i++) out->places[i] = (uint8_t)(columns[i] - low);
    }
}

INLINE void gather(const uint8_t *in, const int32_t *columns, size_t width, uint8_t *out) {
    for (size_t i = 0; i < width; i++) out[i] = in[columns[i]];
}

#if HAVE_AVX2_TARGET
AVX2 static void gather_avx2(const uint8_t *in, const int32_t *columns, size_t width, const Step *steps, uint8_t *out) {
    size_t i = 0;
    for (; i + PIXELS <= width; i += PIXELS, steps++) {
        if (steps->begin < 0) {
            gather(in, columns + i, PIXELS, out + i);
            continue;
        }
        __m128i bytes = _mm_loadu_si128((const __m128i *)(const void *)(in + steps->begin));
        __m128i places = _mm_loadu_si128((const __m128i *)(const void *)steps->places);
        _mm_storel_epi64((__m128i *)(void *)(out + i), _mm_shuffle_epi8(bytes, places));
    }
    gather(in, columns + i, width - i, out + i);
}
#endif

/* out: pixel (i, j) is that of row rows[i] and column columns[j] of `in`, whose rows have `row` pixels and begin every
 * `stride` bytes.  scalar: without AVX2, for tests.  The result is OK or NO_MEMORY. */
EXPORT int flambeau_nearest(const uint8_t *in, size_t row, ptrdiff_t stride, const int32_t *rows, size_t height,
                            const int32_t *columns, size_t width, int scalar, uint8_t *out) {
    size_t num_steps = width / PIXELS;
    Step *steps = NULL;
    int is_wide = HAVE_AVX2_TARGET && !scalar && routines(0) != routines(1) && num_steps;
    if (is_wide) {
        if (!(steps = malloc(num_steps * sizeof *steps))) return NO_MEMORY;
        plan(columns, num_steps, row, steps);
    }
    for (size_t i = 0; i < height; i++, out += width) {
        if (i && rows[i] == rows[i - 1]) {
            memcpy(out, out - width, width);
            continue;
        }
        const uint8_t *from = in + rows[i] * stride;
#if HAVE_AVX2_TARGET
        if (is_wide) {
            gather_avx2(from, columns, width, steps, out);
            continue;
        }
#endif
        gather(from, columns, width, out);
    }
    free(steps);
    return OK;
}

enum { BLOCK = 4096 };

/* Whether table[level] is the level for all of them. */
EXPORT int flambeau_keeps(const uint8_t *levels, size_t count, const uint8_t *table) {
    int same = 0; /* the levels below stay */
    while (same < 256 && table[same] == same) same++;
    if (same == 256) return 1;
    const uint8_t turn = table[255] == 255; /* then it becomes 0 here, which is below, too */
    const uint8_t least = (uint8_t)(same + turn);
    for (size_t at = 0; at < count; at += BLOCK) {
        size_t stop = count - at < BLOCK ? count : at + BLOCK;
        uint8_t beyond = 0, changed = 0;
        for (size_t i = at; i < stop; i++) beyond |= (uint8_t)(levels[i] + turn) >= least;
        for (size_t i = at; beyond && i < stop; i++) changed |= table[levels[i]] != levels[i];
        if (changed) return 0;
    }
    return 1;
}

EXPORT void flambeau_renumber(const uint8_t *levels, size_t count, const uint8_t *table, uint8_t *out) {
    for (size_t i = 0; i < count; i++) out[i] = table[levels[i]];
}
