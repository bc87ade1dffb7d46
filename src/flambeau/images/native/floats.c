/* Levels to floating-point values: by a table for each channel, which holds scaling and normalization. */
#include "jpeg.h"

#if HAVE_AVX2_TARGET
#include <immintrin.h>

/* To memory past the caches. out: at a multiple of 32 bytes. The result is how many values were written. */
AVX2 static size_t stream_plane(const uint8_t *in, size_t count, size_t step, const float *values, float *out) {
    size_t i = 0;
    for (; i + 8 <= count; i += 8, in += 8 * step) {
        __m256 v = _mm256_setr_ps(values[in[0]], values[in[step]], values[in[2 * step]], values[in[3 * step]],
                                  values[in[4 * step]], values[in[5 * step]], values[in[6 * step]], values[in[7 * step]]);
        _mm256_stream_ps(out + i, v);
    }
    return i;
}
#endif

/* pixels: count * channels levels; table: 256 values for each channel; out: as many values, all of a channel together
 * (planes) or those of a pixel. stream: nobody reads them while they could still be in a cache. */
EXPORT void flambeau_floats(const uint8_t *pixels, size_t count, int channels, const float *table, int planes, int stream,
                            float *out) {
    for (int c = 0; c < channels; c++) {
        const float *values = table + 256 * c;
        const uint8_t *in = pixels + c;
        float *to = planes ? out + (size_t)c * count : out + c;
        size_t step = planes ? 1 : (size_t)channels, i = 0;
#if HAVE_AVX2_TARGET
        if (stream && planes && (uintptr_t)to % 32 == 0 && routines(0) != routines(1))
            i = stream_plane(in, count, (size_t)channels, values, to);
#endif
        for (; i < count; i++) to[i * step] = values[in[i * (size_t)channels]];
    }
#if HAVE_AVX2_TARGET
    if (stream) _mm_sfence();
#endif
}
