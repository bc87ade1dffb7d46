/* Coefficients to samples to RGB, with libjpeg's arithmetic.
 *
 * The inverse DCT is the algorithm of C. Loeffler, A. Ligtenberg and G. Moschytz, 'Practical Fast 1-D DCT
 * Algorithms with 11 Multiplications', ICASSP 1989, in the fixed-point form of libjpeg's `islow`: constants of
 * 13 bits, 2 more bits kept between the passes.  It is linear, so each output's sum of products is written
 * out; the rounded results are the same where no intermediate value of libjpeg-turbo leaves its 16 bits, which
 * `fits` makes sure of: beyond them its SIMD wraps or saturates, in other ways on other CPUs.
 */
#include "jpeg.h"

#include <string.h>

#if HAVE_AVX2_TARGET
#include <immintrin.h>
#endif

enum { CONST_BITS = 13, PASS1_BITS = 2 };

/* The first pass gives at most 4 * 11363 / 8192 times the absolute sum of a column, and the second adds two of those
 * in 16 bits: columns 0 and 4, 1 and 5, 3 and 7.  With 5900 for each half of the columns that is below 32767.
 * Samples of 8 bits never need more: the sum of the squares of 64 coefficients is at most 64 * 128^2, so the absolute
 * sum of 32 of them at most 5793.  MAX_DC: libjpeg's transform to 1 x 1 takes the result modulo 1024. */
enum { MAX_SUM = 5900, MAX_DC = 4088 };

/* Rows: output parts; columns: inputs 0, 4, 2, 6 of the even, 1, 3, 5, 7 of the odd half; times 2^13.
 * Made of the published constants, e.g. 10703 = 4433 + 6270. */
static const int16_t EVEN[4][4] = {
    {8192, 8192, 10703, 4433}, {8192, -8192, 4433, -10704}, {8192, -8192, -4433, 10704}, {8192, 8192, -10703, -4433}};
static const int16_t ODD[4][4] = {
    {11363, 9633, 6437, 2260}, {9633, -2259, -11362, -6436}, {6437, -11362, 2261, 9633}, {2260, -6436, 9633, -11363}};

/* The 4-point and 2-point transforms of libjpeg's reduced sizes: odd inputs 1, 3, 5, 7. */
static const int32_t ODD4[2][4] = {{20995, 7373, -4926, -4176}, {8697, -17799, 11893, -1730}};
static const int32_t ODD2[4] = {29692, -10426, 6967, -5906};
static const int32_t EVEN4[2] = {15137, -6270}; /* inputs 2, 6 */

INLINE int clamp16(int x) { return x < -32768 ? -32768 : x > 32767 ? 32767 : x; }

INLINE uint8_t sample_of(int x) { return (uint8_t)(x < -128 ? 0 : x > 127 ? 255 : x + 128); }

INLINE int rounded(int32_t x, int shift) { return (int32_t)((uint32_t)x + (1u << (shift - 1))) >> shift; }

INLINE int dequantised(const int16_t *c, const uint16_t *q, int k) {
    return (int16_t)(uint16_t)((uint32_t)(uint16_t)c[k] * q[k]);
}

INLINE int magnitude(int x) { return x < 0 ? -x : x; }

INLINE int dc_fits(const int16_t *c, const uint16_t *q) { return magnitude(c[0]) * q[0] <= MAX_DC; }

/* Coefficients within +-32767, of which only the first may be beyond +-1023; quantisers up to 32767. */
INLINE int fits_scalar(const int16_t *c, const uint16_t *q, int last) {
    int32_t sums[2] = {0};
    if (!last) return dc_fits(c, q);
    for (int k = 0; k < 64; k++) sums[k >> 1 & 1] += magnitude(c[k]) * q[k];
    return sums[0] <= MAX_SUM && sums[1] <= MAX_SUM;
}

INLINE int32_t dot4(const int16_t *w, int a, int b, int c, int d) { /* wraps, as SIMD adds do */
    return (int32_t)((uint32_t)(w[0] * a) + (uint32_t)(w[1] * b) + (uint32_t)(w[2] * c) + (uint32_t)(w[3] * d));
}

INLINE int32_t wide4(const int32_t *w, int a, int b, int c, int d) {
    return (int32_t)((uint32_t)w[0] * (uint32_t)a + (uint32_t)w[1] * (uint32_t)b +
                     (uint32_t)w[2] * (uint32_t)c + (uint32_t)w[3] * (uint32_t)d);
}

/* One pass over eight columns at once, in loops that compilers turn into SIMD of any kind. */
INLINE void pass_scalar(int16_t x[8][8], int shift) {
    int16_t y[8][8];
    for (int i = 0; i < 4; i++)
        for (int k = 0; k < 8; k++) {
            uint32_t even = (uint32_t)dot4(EVEN[i], x[0][k], x[4][k], x[2][k], x[6][k]);
            uint32_t odd = (uint32_t)dot4(ODD[i], x[1][k], x[3][k], x[5][k], x[7][k]);
            y[i][k] = (int16_t)clamp16(rounded((int32_t)(even + odd), shift));
            y[7 - i][k] = (int16_t)clamp16(rounded((int32_t)(even - odd), shift));
        }
    for (int i = 0; i < 8; i++)
        for (int k = 0; k < 8; k++) x[k][i] = y[i][k];
}

static int idct8_scalar(const int16_t *c, const uint16_t *q, int last, uint8_t *out, ptrdiff_t stride) {
    int16_t x[8][8];
    if (!fits_scalar(c, q, last)) return DAMAGED;
    if (!last) { /* a block of one color: both passes only shift */
        int value = dequantised(c, q, 0) * (1 << PASS1_BITS);
        for (int k = 0; k < 8; k++) memset(out + k * stride, sample_of(rounded(value, PASS1_BITS + 3)), 8);
        return OK;
    }
    for (int k = 0; k < 64; k++) x[k / 8][k % 8] = (int16_t)dequantised(c, q, k);
    pass_scalar(x, CONST_BITS - PASS1_BITS);
    pass_scalar(x, CONST_BITS + PASS1_BITS + 3);
    for (int i = 0; i < 8; i++)
        for (int k = 0; k < 8; k++) out[i * stride + k] = sample_of(x[i][k]);
    return OK;
}

INLINE void idct4_body(const int16_t *c, const uint16_t *q, uint8_t *out, ptrdiff_t stride) {
    int work[4][8];
    for (int pass = 0; pass < 2; pass++) {
        int shift = pass ? CONST_BITS + PASS1_BITS + 4 : CONST_BITS - PASS1_BITS + 1;
        for (int k = 0; k < (pass ? 4 : 8); k++) {
            int x[8];
            if (!pass && k == 4) continue; /* no output depends on column 4 */
            for (int i = 0; i < 8; i++)
                x[i] = i == 4 ? 0 : pass ? work[k][i] : dequantised(c, q, 8 * i + k);
            int32_t dc = (int32_t)((uint32_t)x[0] << (CONST_BITS + 1));
            int32_t even = (int32_t)((uint32_t)EVEN4[0] * (uint32_t)x[2] + (uint32_t)EVEN4[1] * (uint32_t)x[6]);
            for (int i = 0; i < 2; i++) {
                uint32_t base = i ? (uint32_t)dc - (uint32_t)even : (uint32_t)dc + (uint32_t)even;
                uint32_t odd = (uint32_t)wide4(ODD4[i], x[1], x[3], x[5], x[7]);
                int near = rounded((int32_t)(base + odd), shift), far = rounded((int32_t)(base - odd), shift);
                if (pass) {
                    out[k * stride + i] = sample_of(near);
                    out[k * stride + 3 - i] = sample_of(far);
                } else {
                    work[i][k] = near;
                    work[3 - i][k] = far;
                }
            }
        }
    }
}

INLINE void idct2_body(const int16_t *c, const uint16_t *q, uint8_t *out, ptrdiff_t stride) {
    int work[2][8];
    for (int pass = 0; pass < 2; pass++) {
        int shift = pass ? CONST_BITS + PASS1_BITS + 5 : CONST_BITS - PASS1_BITS + 2;
        for (int k = 0; k < (pass ? 2 : 8); k++) {
            int x[8];
            if (!pass && k && k % 2 == 0) continue; /* of the even columns only 0 counts */
            for (int i = 0; i < 8; i++)
                x[i] = i && i % 2 == 0 ? 0 : pass ? work[k][i] : dequantised(c, q, 8 * i + k);
            uint32_t dc = (uint32_t)x[0] << (CONST_BITS + 2);
            uint32_t odd = (uint32_t)wide4(ODD2, x[1], x[3], x[5], x[7]);
            int near = rounded((int32_t)(dc + odd), shift), far = rounded((int32_t)(dc - odd), shift);
            if (pass) {
                out[k * stride] = sample_of(near);
                out[k * stride + 1] = sample_of(far);
            } else {
                work[0][k] = near;
                work[1][k] = far;
            }
        }
    }
}

static int idct1(const int16_t *c, const uint16_t *q, int last, uint8_t *out, ptrdiff_t stride) {
    (void)last;
    (void)stride;
    if (!dc_fits(c, q)) return DAMAGED;
    out[0] = sample_of(rounded(dequantised(c, q, 0), 3));
    return OK;
}

static int idct4_scalar(const int16_t *c, const uint16_t *q, int last, uint8_t *out, ptrdiff_t stride) {
    if (!fits_scalar(c, q, last)) return DAMAGED;
    idct4_body(c, q, out, stride);
    return OK;
}

static int idct2_scalar(const int16_t *c, const uint16_t *q, int last, uint8_t *out, ptrdiff_t stride) {
    if (!fits_scalar(c, q, last)) return DAMAGED;
    idct2_body(c, q, out, stride);
    return OK;
}

/* The bodies below are plain loops: compiled twice, the compiler turns them into AVX2 by itself. */

INLINE void widen_body(const uint16_t *restrict s, int count, int shift, uint8_t *restrict out) {
    unsigned even = shift == 2 ? 1 : 8, odd = shift == 2 ? 2 : 7; /* libjpeg rounds up and down in turn */
    for (int i = 0; i < count; i++) {
        unsigned here = 3u * s[i + 1];
        out[2 * i] = (uint8_t)((here + s[i] + even) >> shift);
        out[2 * i + 1] = (uint8_t)((here + s[i + 2] + odd) >> shift);
    }
}

INLINE void blend_body(const uint8_t *restrict near, const uint8_t *restrict far, int count, int bias,
                       uint8_t *restrict out) {
    for (int i = 0; i < count; i++) out[i] = (uint8_t)((3 * near[i] + far[i] + bias) >> 2);
}

INLINE void sum_body(const uint8_t *restrict near, const uint8_t *restrict far, int count,
                     uint16_t *restrict out) {
    for (int i = 0; i < count; i++) out[i] = (uint16_t)(3 * near[i] + far[i]);
}

INLINE uint8_t clamp8(int x) { return (uint8_t)(x < 0 ? 0 : x > 255 ? 255 : x); }

INLINE void rgb_of(int y, int cb, int cr, uint8_t *out) { /* JFIF's equations times 2^16 */
    out[0] = clamp8(y + ((91881 * cr + 32768) >> 16));
    out[1] = clamp8(y + ((-22554 * cb - 46802 * cr + 32768) >> 16));
    out[2] = clamp8(y + ((116130 * cb + 32768) >> 16));
}

static void widen_scalar(const uint16_t *s, int count, int shift, uint8_t *out) {
    widen_body(s, count, shift, out);
}
static void blend_scalar(const uint8_t *near, const uint8_t *far, int count, int bias, uint8_t *out) {
    blend_body(near, far, count, bias, out);
}
static void sum_scalar(const uint8_t *near, const uint8_t *far, int count, uint16_t *out) {
    sum_body(near, far, count, out);
}
static void ycc_to_rgb_scalar(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, int count, uint8_t *out) {
    for (int i = 0; i < count; i++) rgb_of(y[i], cb[i] - 128, cr[i] - 128, out + 3 * i);
}

#if HAVE_AVX2_TARGET
/* Two rows as pairs (a0 b0 a1 b1 ...), so that one multiply-add gives eight sums of two products. */
AVX2 INLINE __m256i pairs(__m128i a, __m128i b) {
    return _mm256_inserti128_si256(_mm256_castsi128_si256(_mm_unpacklo_epi16(a, b)), _mm_unpackhi_epi16(a, b), 1);
}

AVX2 INLINE __m256i weights(const int16_t *w) {
    return _mm256_set1_epi32((int)((uint32_t)(uint16_t)w[0] | (uint32_t)(uint16_t)w[1] << 16));
}

AVX2 INLINE __m128i narrow(__m256i x) { /* eight int32 to int16, saturated */
    return _mm_packs_epi32(_mm256_castsi256_si128(x), _mm256_extracti128_si256(x, 1));
}

AVX2 INLINE void pass_avx2(__m128i *x, int shift) {
    __m256i even04 = pairs(x[0], x[4]), even26 = pairs(x[2], x[6]);
    __m256i odd13 = pairs(x[1], x[3]), odd57 = pairs(x[5], x[7]);
    __m256i half = _mm256_set1_epi32(1 << (shift - 1));
    for (int i = 0; i < 4; i++) {
        __m256i even = _mm256_add_epi32(_mm256_madd_epi16(even04, weights(EVEN[i])),
                                        _mm256_madd_epi16(even26, weights(EVEN[i] + 2)));
        __m256i odd = _mm256_add_epi32(_mm256_madd_epi16(odd13, weights(ODD[i])),
                                       _mm256_madd_epi16(odd57, weights(ODD[i] + 2)));
        even = _mm256_add_epi32(even, half);
        x[i] = narrow(_mm256_srai_epi32(_mm256_add_epi32(even, odd), shift));
        x[7 - i] = narrow(_mm256_srai_epi32(_mm256_sub_epi32(even, odd), shift));
    }
}

AVX2 INLINE void transpose(__m128i *x) {
    __m128i a[8], b[8];
    for (int i = 0; i < 4; i++) {
        a[2 * i] = _mm_unpacklo_epi16(x[2 * i], x[2 * i + 1]);
        a[2 * i + 1] = _mm_unpackhi_epi16(x[2 * i], x[2 * i + 1]);
    }
    for (int i = 0; i < 2; i++) {
        b[4 * i] = _mm_unpacklo_epi32(a[4 * i], a[4 * i + 2]);
        b[4 * i + 1] = _mm_unpackhi_epi32(a[4 * i], a[4 * i + 2]);
        b[4 * i + 2] = _mm_unpacklo_epi32(a[4 * i + 1], a[4 * i + 3]);
        b[4 * i + 3] = _mm_unpackhi_epi32(a[4 * i + 1], a[4 * i + 3]);
    }
    for (int i = 0; i < 4; i++) {
        x[2 * i] = _mm_unpacklo_epi64(b[i], b[4 + i]);
        x[2 * i + 1] = _mm_unpackhi_epi64(b[i], b[4 + i]);
    }
}

AVX2 INLINE int fits_avx2(const int16_t *c, const uint16_t *q, int last) {
    if (!last) return dc_fits(c, q);
    __m256i sums = _mm256_setzero_si256(); /* of columns 0 and 1, 2 and 3, ...; even rows and odd ones */
    for (int k = 0; k < 64; k += 16)
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_abs_epi16(_mm256_loadu_si256((const __m256i *)(c + k))),
                                                        _mm256_loadu_si256((const __m256i *)(q + k))));
    __m128i half = _mm_add_epi32(_mm256_castsi256_si128(sums), _mm256_extracti128_si256(sums, 1));
    half = _mm_add_epi32(half, _mm_unpackhi_epi64(half, half));
    return !(_mm_movemask_epi8(_mm_cmpgt_epi32(half, _mm_set1_epi32(MAX_SUM))) & 0xFF);
}

AVX2 static int idct8_avx2(const int16_t *c, const uint16_t *q, int last, uint8_t *out, ptrdiff_t stride) {
    if (!fits_avx2(c, q, last)) return DAMAGED;
    if (!last) { /* a block of one color: both passes only shift */
        int value = dequantised(c, q, 0) * (1 << PASS1_BITS);
        __m128i all = _mm_set1_epi8((char)sample_of(rounded(value, PASS1_BITS + 3)));
        for (int k = 0; k < 8; k++) _mm_storel_epi64((__m128i *)(out + k * stride), all);
        return OK;
    }
    __m128i x[8];
    for (int k = 0; k < 8; k++)
        x[k] = _mm_mullo_epi16(_mm_loadu_si128((const __m128i *)(c + 8 * k)),
                               _mm_loadu_si128((const __m128i *)(q + 8 * k)));
    pass_avx2(x, CONST_BITS - PASS1_BITS);
    transpose(x);
    pass_avx2(x, CONST_BITS + PASS1_BITS + 3);
    transpose(x);
    __m128i centre = _mm_set1_epi8((char)128);
    for (int k = 0; k < 8; k += 2) {
        __m128i rows = _mm_add_epi8(_mm_packs_epi16(x[k], x[k + 1]), centre);
        _mm_storel_epi64((__m128i *)(out + k * stride), rows);
        _mm_storel_epi64((__m128i *)(out + (k + 1) * stride), _mm_srli_si128(rows, 8));
    }
    return OK;
}

AVX2 static int idct4_avx2(const int16_t *c, const uint16_t *q, int last, uint8_t *out, ptrdiff_t stride) {
    if (!fits_avx2(c, q, last)) return DAMAGED;
    idct4_body(c, q, out, stride);
    return OK;
}

AVX2 static int idct2_avx2(const int16_t *c, const uint16_t *q, int last, uint8_t *out, ptrdiff_t stride) {
    if (!fits_avx2(c, q, last)) return DAMAGED;
    idct2_body(c, q, out, stride);
    return OK;
}

AVX2 static void widen_avx2(const uint16_t *s, int count, int shift, uint8_t *out) {
    __m256i even = _mm256_set1_epi16((short)(shift == 2 ? 1 : 8)), odd = _mm256_set1_epi16((short)(shift == 2 ? 2 : 7));
    int i = 0;
    for (; i + 16 <= count; i += 16) {
        __m256i here = _mm256_loadu_si256((const __m256i *)(s + i + 1));
        here = _mm256_add_epi16(here, _mm256_slli_epi16(here, 1));
        __m256i left = _mm256_add_epi16(_mm256_loadu_si256((const __m256i *)(s + i)), even);
        __m256i right = _mm256_add_epi16(_mm256_loadu_si256((const __m256i *)(s + i + 2)), odd);
        __m256i first = _mm256_srli_epi16(_mm256_add_epi16(here, left), shift);
        __m256i second = _mm256_srli_epi16(_mm256_add_epi16(here, right), shift);
        _mm256_storeu_si256((__m256i *)(out + 2 * i), _mm256_or_si256(first, _mm256_slli_epi16(second, 8)));
    }
    widen_body(s + i, count - i, shift, out + 2 * i);
}

AVX2 static void blend_avx2(const uint8_t *near, const uint8_t *far, int count, int bias, uint8_t *out) {
    blend_body(near, far, count, bias, out);
}

AVX2 static void sum_avx2(const uint8_t *near, const uint8_t *far, int count, uint16_t *out) {
    sum_body(near, far, count, out);
}

/* (2 * color * weight / 2^16 + 1) / 2, both rounded down: color * weight / 2^16 to the nearest, ties up. */
AVX2 INLINE __m256i scaled(__m256i color, int weight) {
    __m256i twice = _mm256_mulhi_epi16(_mm256_slli_epi16(color, 1), _mm256_set1_epi16((short)weight));
    return _mm256_srai_epi16(_mm256_add_epi16(twice, _mm256_set1_epi16(1)), 1);
}

/* The same of two sums of products: colors as pairs (blue0 red0 blue1 red1 ...). */
AVX2 INLINE __m256i scaled_pairs(__m256i colors, const int16_t *w) {
    __m256i sums = _mm256_add_epi32(_mm256_madd_epi16(colors, weights(w)), _mm256_set1_epi32(32768));
    return _mm256_srai_epi32(sums, 16);
}

AVX2 INLINE __m256i sixteen_words(const uint8_t *bytes) {
    return _mm256_cvtepu8_epi16(_mm_loadu_si128((const __m128i *)bytes));
}

AVX2 INLINE void sixteen_pixels(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, uint8_t *out) {
    const __m256i centre = _mm256_set1_epi16(128);
    /* r0 g0 r1 g1 ... and b0 . b1 . ... to r0 g0 b0 r1 g1 b1 ... */
    const __m256i rg = _mm256_broadcastsi128_si256(_mm_setr_epi8(0, 1, -1, 2, 3, -1, 4, 5, -1, 6, 7, -1, -1, -1, -1, -1));
    const __m256i b = _mm256_broadcastsi128_si256(_mm_setr_epi8(-1, -1, 0, -1, -1, 1, -1, -1, 2, -1, -1, 3, -1, -1, -1, -1));
    const int16_t for_green[2] = {-22554, 18734};
    __m256i luma = sixteen_words(y);
    __m256i blue = _mm256_sub_epi16(sixteen_words(cb), centre), red = _mm256_sub_epi16(sixteen_words(cr), centre);
    /* Weights beyond 16 bits: 91881 = 65536 + 26345, -46802 = 18734 - 65536, 116130 = 2 * 65536 - 14942. */
    __m256i r = _mm256_add_epi16(_mm256_add_epi16(luma, red), scaled(red, 26345));
    __m256i g = _mm256_packs_epi32(scaled_pairs(_mm256_unpacklo_epi16(blue, red), for_green),
                                   scaled_pairs(_mm256_unpackhi_epi16(blue, red), for_green));
    g = _mm256_add_epi16(_mm256_sub_epi16(luma, red), g);
    __m256i u = _mm256_add_epi16(_mm256_add_epi16(luma, _mm256_slli_epi16(blue, 1)), scaled(blue, -14942));
    __m256i packed = _mm256_packus_epi16(r, g); /* r0 .. r7 g0 .. g7, r8 .. */
    packed = _mm256_unpacklo_epi8(packed, _mm256_srli_si256(packed, 8));
    u = _mm256_packus_epi16(u, u);
    __m256i low = _mm256_or_si256(_mm256_shuffle_epi8(packed, rg), _mm256_shuffle_epi8(u, b));
    __m256i high = _mm256_or_si256(_mm256_shuffle_epi8(_mm256_srli_si256(packed, 8), rg),
                                   _mm256_shuffle_epi8(_mm256_srli_si256(u, 4), b));
    _mm_storeu_si128((__m128i *)out, _mm256_castsi256_si128(low));
    _mm_storeu_si128((__m128i *)(out + 12), _mm256_castsi256_si128(high));
    _mm_storeu_si128((__m128i *)(out + 24), _mm256_extracti128_si256(low, 1));
    __m128i end = _mm256_extracti128_si256(high, 1);
    int32_t four = _mm_extract_epi32(end, 2);
    _mm_storel_epi64((__m128i *)(out + 36), end);
    memcpy(out + 44, &four, sizeof four);
}

AVX2 static void ycc_to_rgb_avx2(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, int count, uint8_t *out) {
    int i = 0;
    for (; i + 16 <= count; i += 16) sixteen_pixels(y + i, cb + i, cr + i, out + 3 * i);
    if (i == count) return;
    if (i) { /* some of them for the second time */
        i = count - 16;
        sixteen_pixels(y + i, cb + i, cr + i, out + 3 * i);
    } else {
        ycc_to_rgb_scalar(y, cb, cr, count, out);
    }
}

static const Routines AVX2_ROUTINES = {read_block_avx2, skip_block_avx2, idct8_avx2, idct4_avx2, idct2_avx2, idct1,
                                       widen_avx2, blend_avx2, sum_avx2, ycc_to_rgb_avx2};
#endif

static const Routines SCALAR_ROUTINES = {read_block, skip_block, idct8_scalar, idct4_scalar, idct2_scalar, idct1,
                                         widen_scalar, blend_scalar, sum_scalar, ycc_to_rgb_scalar};

const Routines *routines(int scalar) {
#if HAVE_AVX2_TARGET
    if (!scalar && __builtin_cpu_supports("avx2") && __builtin_cpu_supports("bmi2")) return &AVX2_ROUTINES;
#endif
    (void)scalar;
    return &SCALAR_ROUTINES;
}
