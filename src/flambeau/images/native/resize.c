/* Bilinear and bicubic resizing with antialiasing: torch's weights and torch's rounding, so torch's pixels; or Pillow's.
 *
 * As `_upsample_bilinear2d_aa` and `_upsample_bicubic2d_aa` compute it on uint8: a triangle as wide as the scale, or a
 * cubic (Keys' with a = -1/2) of twice that reach, weights in double precision,
 * scaled to integers by the largest power of two that lets the largest of them fit into 16 bits; first along the
 * rows, rounded to 8 bits, then along the columns. Pillow's weights always have 22 bits behind the point: the upper
 * ones and the lower ones are multiplied apart.
 */
#include "jpeg.h"

#include <stdlib.h>
#include <string.h>

#if HAVE_AVX2_TARGET
#include <immintrin.h>
#endif

enum { PILLOWS_PRECISION = 22, LOWER_BITS = 11 };
enum { GROUP = 4 }; /* taps come in such groups, and places along a row; the last ones weigh nothing */

typedef struct {
    int length, count, taps, precision;
    int *first;       /* of each place: the first sample that counts */
    int16_t *weights; /* (count, taps) */
    int16_t *upper;   /* as many: what stands above LOWER_BITS; NULL where `weights` are all of it */
} Axis;

struct Resizer {
    Axis x, y;
    int channels, avx2, next; /* next: the row that `push_row` is given */
    size_t row_stride, stride;/* of `row` and `rows` */
    uint8_t *row, *rows;      /* `row`: two of them, with room to be read beyond their ends */
};

static int padded(int count) { return (count + GROUP - 1) / GROUP * GROUP; }

static int most_taps(int length, int count, int cubic) {
    double scale = (double)length / count, support = (scale <= 1 ? 1 : scale) * (cubic ? 2 : 1);
    int whole = (int)support;
    return 2 * (whole + (support > whole)) + 1;
}

static double filter(double x, int cubic) {
    if (x < 0) x = -x;
    if (!cubic) return x < 1 ? 1 - x : 0;
    return x < 1 ? (1.5 * x - 2.5) * x * x + 1 : x < 2 ? (((x - 5) * x + 8) * x - 4) * -0.5 : 0;
}

/* `spare`: most_taps numbers for each of count places. */
static void weigh(Axis *a, int mirror, int cubic, double *spare) {
    double scale = (double)a->length / a->count, wide = scale >= 1 ? scale : 1, inverse = 1 / wide, largest = 0;
    double support = wide * (cubic ? 2 : 1);
    int most = most_taps(a->length, a->count, cubic), used = 0;
    for (int i = 0; i < a->count; i++) {
        double centre = scale * (i + 0.5), total = 0, *w = spare + (size_t)i * (size_t)most;
        int low = (int)(centre - support + 0.5), high = (int)(centre + support + 0.5);
        if (low < 0) low = 0;
        if (high > a->length) high = a->length;
        if (high > low + most) high = low + most; /* rounding */
        if (high - low > used) used = high - low;
        a->first[mirror ? a->count - 1 - i : i] = low;
        for (int k = low; k < high; k++) total += w[k - low] = filter((k - centre + 0.5) * inverse, cubic);
        for (int k = 0; k < most; k++) {
            w[k] = k < high - low ? w[k] / total : 0;
            if (w[k] > largest) largest = w[k];
        }
    }
    a->taps = padded(used);
    for (a->precision = a->upper ? PILLOWS_PRECISION : 0; a->precision < 22; a->precision++)
        if ((int)(0.5 + largest * (2 << a->precision)) >= 1 << 15) break;
    for (int i = 0; i < a->count; i++) {
        size_t at = (size_t)(mirror ? a->count - 1 - i : i) * (size_t)a->taps;
        for (int k = 0; k < a->taps; k++, at++) {
            double w = k < most ? spare[(size_t)i * (size_t)most + (size_t)k] : 0;
            int weight = (int)((w < 0 ? -0.5 : 0.5) + w * (1 << a->precision));
            a->weights[at] = (int16_t)(a->upper ? weight & ((1 << LOWER_BITS) - 1) : weight);
            if (a->upper) a->upper[at] = (int16_t)(weight >> LOWER_BITS);
        }
    }
}

INLINE uint8_t clip(int32_t sum, int precision) {
    int value = sum >> precision;
    return (uint8_t)(value < 0 ? 0 : value > 255 ? 255 : value);
}

INLINE int32_t weight(const Axis *a, int at) {
    return a->upper ? a->upper[at] * (1 << LOWER_BITS) + a->weights[at] : a->weights[at];
}

static void along_row(const Resizer *r, uint8_t *out) {
    const Axis *a = &r->x;
    for (int i = 0; i < a->count; i++)
        for (int c = 0; c < r->channels; c++) {
            const uint8_t *in = r->row + a->first[i] * r->channels + c;
            int32_t sum = 1 << (a->precision - 1);
            for (int k = 0; k < a->taps; k++) sum += weight(a, i * a->taps + k) * in[k * r->channels];
            *out++ = clip(sum, a->precision);
        }
}

static void along_column(const uint8_t *const *rows, const Axis *a, int place, int begin, int end, uint8_t *out) {
    for (int i = begin; i < end; i++) {
        int32_t sum = 1 << (a->precision - 1);
        for (int k = 0; k < a->taps; k++) sum += weight(a, place * a->taps + k) * rows[k][i];
        out[i] = clip(sum, a->precision);
    }
}

#if HAVE_AVX2_TARGET
/* A result of three channels in two rows, the first one below: r, g, b and 0 of four bytes each, not shifted yet;
 * added to `sums`. */
AVX2 INLINE __m256i sums_of(const uint8_t *in, size_t next, const int16_t *weights, int groups, __m256i sums) {
    const __m256i spread = _mm256_setr_epi8(0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1,
                                            0, -1, 3, -1, 1, -1, 4, -1, 2, -1, 5, -1, -1, -1, -1, -1);
    const __m256i farther = _mm256_setr_epi8(6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1,
                                             6, -1, 9, -1, 7, -1, 10, -1, 8, -1, 11, -1, -1, -1, -1, -1);
    for (int g = 0; g < groups; g++, in += 3 * GROUP, weights += GROUP) {
        __m256i four = _mm256_castsi128_si256(_mm_loadu_si128((const __m128i *)in));
        four = _mm256_inserti128_si256(four, _mm_loadu_si128((const __m128i *)(in + next)), 1);
        int32_t near, far;
        memcpy(&near, weights, sizeof near);
        memcpy(&far, weights + 2, sizeof far);
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_shuffle_epi8(four, spread), _mm256_set1_epi32(near)));
        sums = _mm256_add_epi32(sums, _mm256_madd_epi16(_mm256_shuffle_epi8(four, farther), _mm256_set1_epi32(far)));
    }
    return sums;
}

/* Three channels: four results of two rows at once. */
AVX2 INLINE void along_rows_in(const Resizer *r, int groups, uint8_t *out) {
    const __m256i close = _mm256_setr_epi8(0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1,
                                           0, 1, 2, 4, 5, 6, 8, 9, 10, 12, 13, 14, -1, -1, -1, -1);
    const __m256i half = _mm256_set1_epi32(1 << (r->x.precision - 1));
    const __m128i shift = _mm_cvtsi32_si128(r->x.precision);
    for (int i = 0; i < r->x.count; i += GROUP, out += 3 * GROUP) {
        __m256i sums[GROUP];
#pragma GCC unroll 4
        for (int k = 0; k < GROUP; k++) {
            const uint8_t *in = r->row + 3 * r->x.first[i + k];
            int at = GROUP * groups * (i + k);
            sums[k] = half;
            if (r->x.upper) {
                sums[k] = sums_of(in, r->row_stride, r->x.upper + at, groups, _mm256_setzero_si256());
                sums[k] = _mm256_add_epi32(_mm256_slli_epi32(sums[k], LOWER_BITS), half);
            }
            sums[k] = _mm256_sra_epi32(sums_of(in, r->row_stride, r->x.weights + at, groups, sums[k]), shift);
        }
        __m256i all = _mm256_packus_epi16(_mm256_packs_epi32(sums[0], sums[1]), _mm256_packs_epi32(sums[2], sums[3]));
        all = _mm256_shuffle_epi8(all, close);
        _mm_storeu_si128((__m128i *)out, _mm256_castsi256_si128(all));
        _mm_storeu_si128((__m128i *)(out + r->stride), _mm256_extracti128_si256(all, 1));
    }
}

AVX2 static void along_rows_avx2(const Resizer *r, uint8_t *out) {
    int groups = r->x.taps / GROUP;
    if (groups == 1) along_rows_in(r, 1, out); /* down to 2/3 of the width */
    else if (groups == 2) along_rows_in(r, 2, out);
    else along_rows_in(r, groups, out);
}

/* Of sixteen samples of each row, the first ones below: added to `low` and `high`. */
AVX2 INLINE void add_rows(const uint8_t *const *rows, int i, const int16_t *weights, int taps, __m256i *low,
                          __m256i *high) {
    for (int k = 0; k < taps; k += 2) {
        __m128i a = _mm_loadu_si128((const __m128i *)(rows[k] + i));
        __m128i b = _mm_loadu_si128((const __m128i *)(rows[k + 1] + i));
        int32_t pair;
        memcpy(&pair, weights + k, sizeof pair);
        __m256i w = _mm256_set1_epi32(pair);
        *low = _mm256_add_epi32(*low, _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm_unpacklo_epi8(a, b)), w));
        *high = _mm256_add_epi32(*high, _mm256_madd_epi16(_mm256_cvtepu8_epi16(_mm_unpackhi_epi8(a, b)), w));
    }
}

AVX2 INLINE void along_column_in(const uint8_t *const *rows, const Axis *a, int place, int taps, int size, uint8_t *out) {
    const __m256i half = _mm256_set1_epi32(1 << (a->precision - 1));
    const __m128i shift = _mm_cvtsi32_si128(a->precision);
    int i = 0;
    for (; i + 16 <= size; i += 16) {
        __m256i low = half, high = half;
        if (a->upper) {
            low = high = _mm256_setzero_si256();
            add_rows(rows, i, a->upper + place * taps, taps, &low, &high);
            low = _mm256_add_epi32(_mm256_slli_epi32(low, LOWER_BITS), half);
            high = _mm256_add_epi32(_mm256_slli_epi32(high, LOWER_BITS), half);
        }
        add_rows(rows, i, a->weights + place * taps, taps, &low, &high);
        __m256i all = _mm256_packs_epi32(_mm256_sra_epi32(low, shift), _mm256_sra_epi32(high, shift));
        all = _mm256_permute4x64_epi64(all, 0xD8);
        _mm_storeu_si128((__m128i *)(out + i),
                         _mm_packus_epi16(_mm256_castsi256_si128(all), _mm256_extracti128_si256(all, 1)));
    }
    along_column(rows, a, place, i, size, out);
}

AVX2 static void along_column_avx2(const uint8_t *const *rows, const Axis *a, int place, int size, uint8_t *out) {
    if (a->taps == GROUP) along_column_in(rows, a, place, GROUP, size, out);
    else along_column_in(rows, a, place, a->taps, size, out);
}
#endif

Resizer *new_resizer(const ResizeTo *to, int height, int width, int channels, int scalar) {
    Resizer r = {.x = {.length = width, .count = to->width},
                 .y = {.length = height, .count = to->height},
                 .channels = channels, .avx2 = channels == 3 && routines(scalar) != routines(1)};
    int taps = padded(most_taps(width, to->width, to->cubic));
    size_t places = (size_t)padded(to->width), x_weights = places * (size_t)taps;
    size_t y_weights = (size_t)to->height * (size_t)padded(most_taps(height, to->height, to->cubic));
    size_t spares = x_weights > y_weights ? x_weights : y_weights;
    size_t weights = (to->pillows ? 2 : 1) * (x_weights + y_weights);
    r.stride = places * (size_t)channels + 16;
    r.row_stride = (size_t)(width + taps) * (size_t)channels + 16;
    uint8_t *memory = malloc(sizeof r + sizeof(double) * spares + sizeof(int) * (places + (size_t)to->height) +
                             sizeof(int16_t) * weights + 2 * r.row_stride +
                             r.stride * (size_t)(height + 1));
    if (!memory) return NULL;
    double *spare = (double *)(void *)(memory + sizeof r);
    r.x.first = (int *)(void *)(spare + spares);
    r.y.first = r.x.first + places;
    r.x.weights = (int16_t *)(void *)(r.y.first + to->height);
    r.y.weights = r.x.weights + x_weights;
    if (to->pillows) {
        r.x.upper = r.y.weights + y_weights;
        r.y.upper = r.x.upper + x_weights;
    }
    r.row = (uint8_t *)(r.x.weights + weights);
    r.rows = r.row + 2 * r.row_stride;
    memset(r.x.first, 0, sizeof(int) * places);
    memset(r.x.weights, 0, sizeof(int16_t) * weights);
    memset(r.row, 0, 2 * r.row_stride);
    weigh(&r.x, to->mirror, to->cubic, spare);
    weigh(&r.y, 0, to->cubic, spare);
    memcpy(memory, &r, sizeof r);
    return (Resizer *)(void *)memory;
}

uint8_t *next_row(Resizer *r) { return r->row + (r->avx2 && r->next % 2 ? r->row_stride : 0); }

void push_row(Resizer *r) {
    uint8_t *out = r->rows + r->stride * (size_t)r->next++;
#if HAVE_AVX2_TARGET
    if (r->avx2) { /* two at a time; the last one may be alone */
        if (r->next % 2 == 0) along_rows_avx2(r, out - r->stride);
        else if (r->next == r->y.length) along_rows_avx2(r, out);
        return;
    }
#endif
    along_row(r, out);
}

int write_resized(const Resizer *r, uint8_t *out) {
    const Axis *a = &r->y;
    int size = r->x.count * r->channels;
    const uint8_t **rows = malloc(sizeof *rows * (size_t)a->taps);
    if (!rows) return NO_MEMORY;
    for (int i = 0; i < a->count; i++, out += size) {
        for (int k = 0; k < a->taps; k++) {
            int row = a->first[i] + k;
            rows[k] = r->rows + r->stride * (size_t)(row < a->length ? row : a->length - 1);
        }
#if HAVE_AVX2_TARGET
        if (r->avx2) {
            along_column_avx2(rows, a, i, size, out);
            continue;
        }
#endif
        along_column(rows, a, i, 0, size, out);
    }
    free(rows);
    return OK;
}

/* to: height, width, whether to mirror, whether by cubics, whether to round as Pillow does. */
EXPORT int flambeau_resize(const uint8_t *pixels, const int *shape, ptrdiff_t stride, const int *to, int scalar,
                           uint8_t *out) {
    const ResizeTo wanted = {to[0], to[1], to[2], to[3], to[4]};
    if (shape[0] < 1 || shape[1] < 1 || wanted.height < 1 || wanted.width < 1 || shape[0] > MAX_SIDE ||
        shape[1] > MAX_SIDE || wanted.height > MAX_SIDE || wanted.width > MAX_SIDE)
        return BAD_BOX;
    Resizer *r = new_resizer(&wanted, shape[0], shape[1], shape[2], scalar);
    if (!r) return NO_MEMORY;
    for (int y = 0; y < shape[0]; y++) {
        memcpy(next_row(r), pixels + y * stride, (size_t)shape[1] * (size_t)shape[2]);
        push_row(r);
    }
    int error = write_resized(r, out);
    free(r);
    return error;
}
