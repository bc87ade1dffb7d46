/* Levels to floating-point values: by a table for each channel, which holds scaling and normalization. */
#include "jpeg.h"

/* pixels: count * channels levels; table: 256 values for each channel; out: as many values, all of a channel together
 * (planes) or those of a pixel. */
EXPORT void flambeau_floats(const uint8_t *pixels, size_t count, int channels, const float *table, int planes, float *out) {
    for (int c = 0; c < channels; c++) {
        const float *values = table + 256 * c;
        const uint8_t *in = pixels + c;
        float *to = planes ? out + (size_t)c * count : out + c;
        size_t step = planes ? 1 : (size_t)channels;
        for (size_t i = 0; i < count; i++) to[i * step] = values[in[i * (size_t)channels]];
    }
}
