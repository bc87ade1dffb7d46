/* Blends of an image with another: brightness, contrast and saturation, in single float32 operations. */
#include "jpeg.h"

INLINE uint8_t level(float value) { return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value); }

/* The luma of each pixel of three levels, without its fraction: (2989 r + 5870 g + 1140 b) / 10000. */
INLINE void luma_in(const uint8_t *rgb, size_t count, uint8_t *out) {
    for (size_t i = 0; i < count; i++, rgb += 3)
        out[i] = (uint8_t)((float)(2989 * rgb[0] + 5870 * rgb[1] + 1140 * rgb[2]) * 1e-4f);
}

INLINE void blend_in(const uint8_t *levels, size_t count, float share, float constant, uint8_t *out) {
    for (size_t i = 0; i < count; i++) out[i] = level((float)levels[i] * share + constant);
}

INLINE void blend_grey_in(const uint8_t *rgb, const uint8_t *grey, size_t count, float share, float rest, uint8_t *out) {
    for (size_t i = 0; i < count; i++) {
        float other = (float)grey[i] * rest;
        for (int c = 0; c < 3; c++) out[3 * i + c] = level((float)rgb[3 * i + c] * share + other);
    }
}

#if HAVE_AVX2_TARGET
AVX2 static void luma_avx2(const uint8_t *rgb, size_t count, uint8_t *out) { luma_in(rgb, count, out); }

AVX2 static void blend_avx2(const uint8_t *levels, size_t count, float share, float constant, uint8_t *out) {
    blend_in(levels, count, share, constant, out);
}

AVX2 static void blend_grey_avx2(const uint8_t *rgb, const uint8_t *grey, size_t count, float share, float rest,
                                 uint8_t *out) {
    blend_grey_in(rgb, grey, count, share, rest, out);
}

#define WITH_AVX2(function, ...) \
    if (routines(0) != routines(1)) { \
        function(__VA_ARGS__); \
        return; \
    }
#else
#define WITH_AVX2(function, ...)
#endif

EXPORT void flambeau_luma(const uint8_t *rgb, size_t count, uint8_t *out) {
    WITH_AVX2(luma_avx2, rgb, count, out)
    luma_in(rgb, count, out);
}

/* share times each of `count` levels, and a constant. */
EXPORT void flambeau_blend(const uint8_t *levels, size_t count, float share, float constant, uint8_t *out) {
    WITH_AVX2(blend_avx2, levels, count, share, constant, out)
    blend_in(levels, count, share, constant, out);
}

/* share times each level of `count` pixels, and rest times the pixel's grey. */
EXPORT void flambeau_blend_grey(const uint8_t *rgb, const uint8_t *grey, size_t count, float share, float rest,
                                uint8_t *out) {
    WITH_AVX2(blend_grey_avx2, rgb, grey, count, share, rest, out)
    blend_grey_in(rgb, grey, count, share, rest, out);
}
