/* Blends of an image with another (brightness, contrast, saturation), and hue: in single float32 operations, those of
 * color.py. */
#include "jpeg.h"

enum { BLOCK = 64 };

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

/* Up to BLOCK pixels. Hue is a part of the circle: red at 0, green at 1/3, blue at 2/3. */
INLINE void turn_block(const uint8_t *rgb, int count, const float *turns, uint8_t *out) {
    const float even = 12582912.0f; /* 1.5 * 2**23: adding it rounds to a whole number, half to even */
    float r[BLOCK] = {0}, g[BLOCK] = {0}, b[BLOCK] = {0}, top[BLOCK], chroma[BLOCK], angle[BLOCK], value[BLOCK];
    for (int i = 0; i < count; i++) r[i] = rgb[3 * i], g[i] = rgb[3 * i + 1], b[i] = rgb[3 * i + 2];
    for (int i = 0; i < BLOCK; i++) {
        float high = r[i] > g[i] ? r[i] : g[i], low = r[i] < g[i] ? r[i] : g[i];
        top[i] = b[i] > high ? b[i] : high;
        chroma[i] = top[i] - (b[i] < low ? b[i] : low);
        float scale = (1.0f / 6) / (chroma[i] > 1 ? chroma[i] : 1);
        float at_red = (g[i] - b[i]) * scale, at_green = (b[i] - r[i]) * scale + 1.0f / 3;
        float at_blue = (r[i] - g[i]) * scale + 2.0f / 3;
        angle[i] = top[i] == r[i] ? at_red : top[i] == g[i] ? at_green : at_blue;
    }
    for (int c = 0; c < 3; c++) {
        for (int i = 0; i < BLOCK; i++) {
            float away = angle[i] + turns[c];
            away -= (away + even) - even;
            float below = (away < 0 ? -away : away) * 6.0f - 1.0f;
            below = below < 0 ? 0 : below > 1 ? 1 : below;
            value[i] = (top[i] - chroma[i] * below) * (float)(255.999 / 255);
        }
        for (int i = 0; i < count; i++) out[3 * i + c] = (uint8_t)value[i];
    }
}

/* turns: how far each channel then is from its place. */
INLINE void turn_hue_in(const uint8_t *rgb, size_t count, const float *turns, uint8_t *out) {
    for (size_t i = 0; i < count; i += BLOCK)
        turn_block(rgb + 3 * i, (int)(count - i < BLOCK ? count - i : BLOCK), turns, out + 3 * i);
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

AVX2 static void turn_hue_avx2(const uint8_t *rgb, size_t count, const float *turns, uint8_t *out) {
    turn_hue_in(rgb, count, turns, out);
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

EXPORT void flambeau_turn_hue(const uint8_t *rgb, size_t count, const float *turns, uint8_t *out) {
    WITH_AVX2(turn_hue_avx2, rgb, count, turns, out)
    turn_hue_in(rgb, count, turns, out);
}
