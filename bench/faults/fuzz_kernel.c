/* The C kernel fed with hostile bytes: libFuzzer's entry; with -DREAD_FILES a program that reads the files named.
 *
 * Eight bytes say what is asked for, the others are the file: a part of a JPEG at a scale, resized or not, with and
 * without AVX2; the JPEG cut into segments, and read again; and the same bytes as rows of a PNG. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

int flambeau_decode_region(const uint8_t *data, size_t size, const int *box, int scale_eighths, int channels,
                           const int *to, int scalar, uint8_t *out);
int flambeau_segment(const uint8_t *data, size_t size, int interval_px, uint8_t **out, size_t *out_size);
int flambeau_png_rows(const uint8_t *data, size_t rows, size_t width, int channels, uint8_t *out);
void flambeau_free(uint8_t *bytes);

enum { SETTINGS = 8, MOST = 1 << 20 };

static void decode(const uint8_t *file, size_t size, const uint8_t *s) {
    const int scales[] = {8, 4, 2, 1};
    int box[4] = {s[0], s[1], 1 + s[2], 1 + s[3]}, to[4] = {1 + s[4], 1 + s[5], s[6] & 1, s[6] >> 1 & 1};
    int channels = s[7] & 1 ? 3 : 1, resize = s[7] >> 1 & 1;
    size_t bytes = (size_t)channels * (size_t)(resize ? to[0] * to[1] : box[2] * box[3]);
    uint8_t *out = malloc(bytes), *scalar = malloc(bytes);
    int code = flambeau_decode_region(file, size, box, scales[s[7] >> 2 & 3], channels, resize ? to : NULL, 0, out);
    int other = flambeau_decode_region(file, size, box, scales[s[7] >> 2 & 3], channels, resize ? to : NULL, 1, scalar);
    if (code != other || (!code && memcmp(out, scalar, bytes))) abort(); /* every pixel written, and the same */
    free(out);
    free(scalar);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    if (size < SETTINGS) return 0;
    size_t length = size - SETTINGS;
    uint8_t *file = malloc(length ? length : 1); /* of its own, so that each byte too many is seen */
    memcpy(file, data + SETTINGS, length);
    decode(file, length, data);
    uint8_t *cut;
    size_t cut_size;
    /* A small file may claim a large picture, whose coefficients are as large: that is slow, and no fault. */
    if (!flambeau_segment(file, length, 1 + data[4], &cut, &cut_size)) {
        uint8_t *copy = malloc(cut_size);
        memcpy(copy, cut, cut_size);
        flambeau_free(cut);
        decode(copy, cut_size, data);
        free(copy);
    }
    int channels = data[7] & 1 ? 3 : 1;
    size_t width = 1 + data[3], rows = length / (1 + width * (size_t)channels);
    uint8_t *pixels = malloc(rows * width * (size_t)channels + 1);
    if (rows) flambeau_png_rows(file, rows, width, channels, pixels);
    free(pixels);
    free(file);
    return 0;
}

#ifdef READ_FILES
int main(int count, char **names) {
    static uint8_t data[MOST];
    for (int i = 1; i < count; i++) {
        FILE *file = fopen(names[i], "rb");
        if (!file) return 1;
        size_t size = fread(data, 1, MOST, file);
        fclose(file);
        LLVMFuzzerTestOneInput(data, size);
    }
    return 0;
}
#endif
