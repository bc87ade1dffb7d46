/* PNG's filters undone: each row is stored as differences to its neighbours. Source: W3C PNG, third edition, section 9. */
#include <stdlib.h>
#include <string.h>

#include "jpeg.h"

enum { NONE, SUB, UP, AVERAGE, PAETH };

/* The one of left, above and above left that is nearest to left + above - above left. */
INLINE int paeth(int left, int above, int corner) {
    int to_left = abs(above - corner), to_above = abs(left - corner), to_corner = abs(left + above - 2 * corner);
    int nearest = to_above < to_left ? above : left, least = to_above < to_left ? to_above : to_left;
    return to_corner < least ? corner : nearest;
}

/* Eight bytes from `at` on. */
INLINE uint64_t eight(const uint8_t *at) {
    uint64_t word;
    memcpy(&word, at, 8);
    return word;
}

INLINE uint64_t repeated(uint8_t byte) { return byte * UINT64_C(0x0101010101010101); }

INLINE uint8_t *store(uint8_t *at, uint64_t word) {
    memcpy(at, &word, 8);
    return at + 8;
}

/* As `undo` with SUB or PAETH, of pixels of one byte: eight of them at once where they are those to the left or those
 * above, as in most of a mask. */
INLINE void undo_flat(int filter, const uint8_t *in, const uint8_t *above, size_t size, uint8_t *out) {
    uint8_t left = 0, corner = 0, *const end = out + size;
    while (out < end) {
        if (end - out >= 8 && !eight(in)) { /* no difference to what is expected */
            uint64_t word = repeated(left);
            int is_flat = filter == SUB;
            if (filter == PAETH && left == corner) { /* then the nearest is the one above, here and in the next */
                word = eight(above);
                is_flat = 1;
            } else if (filter == PAETH) { /* with the same above as in the corner it is the left one */
                is_flat = eight(above) == repeated(corner);
            }
            if (is_flat) {
                out = store(out, word);
                in += 8;
                above += 8;
                left = out[-1];
                corner = above[-1];
                continue;
            }
        }
        size_t count = end - out < 8 ? (size_t)(end - out) : 8;
        for (size_t i = 0; i < count; i++) {
            left = (uint8_t)(in[i] + (filter == SUB ? left : paeth(left, above[i], corner)));
            corner = above[i];
            out[i] = left;
        }
        in += count;
        above += count;
        out += count;
    }
}

/* One row of `size` bytes of pixels of `step` bytes; above is the row before. */
INLINE int undo(int filter, const uint8_t *in, const uint8_t *above, size_t size, size_t step, uint8_t *out) {
    uint8_t left[3] = {0}, corner[3] = {0};
    switch (filter) {
    case NONE: memcpy(out, in, size); return OK;
    case UP:
        for (size_t i = 0; i < size; i++) out[i] = (uint8_t)(in[i] + above[i]);
        return OK;
    case SUB:
        if (step == 1) {
            undo_flat(SUB, in, above, size, out);
            return OK;
        }
        for (size_t i = 0; i < size; i += step)
            for (size_t c = 0; c < step; c++) out[i + c] = left[c] = (uint8_t)(in[i + c] + left[c]);
        return OK;
    case AVERAGE:
        for (size_t i = 0; i < size; i += step)
            for (size_t c = 0; c < step; c++) out[i + c] = left[c] = (uint8_t)(in[i + c] + (left[c] + above[i + c]) / 2);
        return OK;
    case PAETH:
        if (step == 1) {
            undo_flat(PAETH, in, above, size, out);
            return OK;
        }
        for (size_t i = 0; i < size; i += step)
            for (size_t c = 0; c < step; c++) {
                out[i + c] = left[c] = (uint8_t)(in[i + c] + paeth(left[c], above[i + c], corner[c]));
                corner[c] = above[i + c];
            }
        return OK;
    default: return DAMAGED;
    }
}

/* data: for each row its filter and `width` pixels of 1 or 3 channels; out: the pixels. The result is OK, DAMAGED or NO_MEMORY. */
EXPORT int flambeau_png_rows(const uint8_t *data, size_t rows, size_t width, int channels, uint8_t *out) {
    size_t size = width * (size_t)channels;
    uint8_t *nothing = calloc(size, 1); /* above the first row */
    if (nothing == NULL) return NO_MEMORY;
    const uint8_t *above = nothing;
    int code = OK;
    for (size_t row = 0; row < rows && !code; row++, data += size + 1, out += size) {
        code = channels == 3 ? undo(data[0], data + 1, above, size, 3, out) : undo(data[0], data + 1, above, size, 1, out);
        above = out;
    }
    free(nothing);
    return code;
}
