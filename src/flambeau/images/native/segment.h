/* Coefficients of a whole image, on their way from one JPEG to another. */
#ifndef FLAMBEAU_SEGMENT_H
#define FLAMBEAU_SEGMENT_H

#include "jpeg.h"

typedef struct {
    Header header;
    int16_t *memory, *blocks[MAX_COMPONENTS]; /* (rows, columns, 64), natural order, whole MCUs */
    size_t num_blocks[MAX_COMPONENTS];
    uint8_t *buffer;      /* for a segment of the data */
    int8_t bits_left[MAX_COMPONENTS][64]; /* progressive: lowest bit read so far; -1: none */
} Coefficients;

int read_coefficients(Coefficients *coefficients, const uint8_t *data, size_t size);

#endif
