/* Prints checksums of what the kernel makes of JPEGs, for test_aarch64.py, which compares two processors.
 *
 *     kernel_main PATH HEIGHT WIDTH [PATH HEIGHT WIDTH ...]
 */
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

int flambeau_decode_region(const uint8_t *data, size_t size, const int *box, int scale_eighths, int channels,
                           const int *to, int scalar, uint8_t *out);
int flambeau_resize(const uint8_t *pixels, const int *shape, ptrdiff_t stride, const int *to, int scalar, uint8_t *out);
int flambeau_segment(const uint8_t *data, size_t size, int interval_px, uint8_t **out, size_t *out_size);
int flambeau_png_rows(const uint8_t *data, size_t rows, size_t width, int channels, uint8_t *out);
void flambeau_free(uint8_t *bytes);

static uint32_t state = 1;

static int below(int limit) { /* Numerical Recipes' generator */
    state = state * 1664525u + 1013904223u;
    return (int)((state >> 8) % (uint32_t)limit);
}

static void print_sum(const char *what, int code, const uint8_t *bytes, size_t size) { /* FNV-1a */
    uint64_t sum = 14695981039346656037u;
    for (size_t k = 0; !code && k < size; k++) sum = (sum ^ bytes[k]) * 1099511628211u;
    printf("%s %d %zu %016llx\n", what, code, size, (unsigned long long)sum);
}

static void decode_boxes(const uint8_t *data, size_t size, int full_height, int full_width) {
    static const int scales_eighths[4] = {8, 4, 2, 1};
    uint8_t *out = malloc((size_t)(full_height + 64) * (size_t)(full_width + 64) * 3);
    for (int k = 0; k < 64; k++) {
        int eighths = scales_eighths[k % 4], channels = k / 4 % 2 ? 1 : 3;
        int height = (full_height * eighths + 7) / 8, width = (full_width * eighths + 7) / 8;
        int box[4] = {0, 0, height, width}; /* the whole image, the last pixel, and then any */
        if (k >= 8) {
            box[2] = 1 + (k < 16 ? 0 : below(height));
            box[3] = 1 + (k < 16 ? 0 : below(width));
            box[0] = k < 16 ? height - 1 : below(height - box[2] + 1);
            box[1] = k < 16 ? width - 1 : below(width - box[3] + 1);
        }
        size_t count = (size_t)box[2] * (size_t)box[3] * (size_t)channels;
        int code = flambeau_decode_region(data, size, box, eighths, channels, NULL, 0, out);
        print_sum("box", code, out, count);
        if (code) continue; /* a progressive one: nothing was written */
        int to[5] = {1 + below(50), 1 + below(50), k % 2, k / 2 % 2, k / 4 % 2};
        uint8_t small[50 * 50 * 3];
        count = (size_t)to[0] * (size_t)to[1] * (size_t)channels;
        print_sum("crop", flambeau_decode_region(data, size, box, eighths, channels, to, 0, small), small, count);
        int shape[3] = {box[2], box[3], channels};
        print_sum("resize", flambeau_resize(out, shape, (ptrdiff_t)(box[3] * channels), to, 0, small), small, count);
    }
    free(out);
}

static void undo_filters(int channels) {
    static uint8_t rows[40 * (1 + 50 * 3)], pixels[40 * 50 * 3];
    size_t size = 50 * (size_t)channels;
    for (size_t k = 0; k < 40 * (1 + size); k++) rows[k] = (uint8_t)below(k % (1 + size) ? 256 : 5);
    print_sum("png", flambeau_png_rows(rows, 40, 50, channels, pixels), pixels, 40 * size);
}

int main(int argc, char **argv) {
    undo_filters(1);
    undo_filters(3);
    for (int k = 1; k + 2 < argc; k += 3) {
        static uint8_t data[1 << 20];
        FILE *file = fopen(argv[k], "rb");
        if (!file) return 2;
        size_t size = fread(data, 1, sizeof data, file), cut_size = 0;
        fclose(file);
        int height = atoi(argv[k + 1]), width = atoi(argv[k + 2]);
        decode_boxes(data, size, height, width);
        uint8_t *cut = NULL;
        int code = flambeau_segment(data, size, 16 << k % 3, &cut, &cut_size);
        print_sum("segment", code, cut, cut_size);
        if (!code) decode_boxes(cut, cut_size, height, width);
        flambeau_free(cut);
    }
    return 0;
}
