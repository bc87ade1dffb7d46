/* All quantised coefficients of a JPEG: baseline, extended and progressive Huffman (ITU-T T.81, F.2, G.1, G.2).
 *
 * Strict: whatever a decoder would have to guess at is refused, so that nothing is made worse by rewriting it.
 */
#include "segment.h"

#include <stdlib.h>

typedef struct {
    Coefficients *c;
    ReadBlock *read_block;
    HuffmanTable tables[2][4];
    BitReader reader;
    uint8_t *buffer;      /* the segment that is being read */
    const uint8_t *stop;  /* the marker behind it */
    int predictors[MAX_COMPONENTS];
    int end_of_band_run;
} Scan;

static int read_dc(Scan *s, const Header *j, int k, int16_t *block) {
    if (j->high) { /* G.1.2.1: one more bit */
        if (read_bits(&s->reader, 1)) block[0] |= (int16_t)(1 << j->low);
        return OK;
    }
    int size = read_symbol(&s->reader, &s->tables[0][j->components[k].dc]);
    if (size < 0 || size > 11) return DAMAGED;
    int value = s->predictors[k] + (size ? read_value(&s->reader, size) : 0);
    if (value * (1 << j->low) < -32768 || value * (1 << j->low) > 32767) return DAMAGED;
    s->predictors[k] = value;
    block[0] = (int16_t)(value * (1 << j->low));
    return OK;
}

static int read_ac(Scan *s, const Header *j, int k, int16_t *block) {
    const HuffmanTable *table = &s->tables[1][j->components[k].ac];
    if (s->end_of_band_run) {
        s->end_of_band_run--;
        return OK;
    }
    for (int at = j->spectral_start; at <= j->spectral_end; at++) {
        int symbol = read_symbol(&s->reader, table);
        if (symbol < 0) return DAMAGED;
        int run = symbol >> 4, size = symbol & 15;
        if (!size && run < 15) {
            s->end_of_band_run = (1 << run) - 1 + read_bits(&s->reader, run);
            return OK;
        }
        at += run;
        if (!size) continue;
        if (at > j->spectral_end || size > 10) return DAMAGED;
        int value = read_value(&s->reader, size) * (1 << j->low);
        if (value < -32768 || value > 32767) return DAMAGED;
        block[NATURAL_ORDER[at]] = (int16_t)value;
    }
    return OK;
}

static int refine(Scan *s, int16_t *value, int bit) { /* a coefficient that is not zero: one bit more of it */
    if (read_bits(&s->reader, 1) && !(*value & bit))
        *value = (int16_t)(*value + (*value < 0 ? -bit : bit));
    return 0;
}

static int read_ac_refinement(Scan *s, const Header *j, int k, int16_t *block) { /* G.1.2.3 */
    const HuffmanTable *table = &s->tables[1][j->components[k].ac];
    int bit = 1 << j->low, at = j->spectral_start;
    for (; !s->end_of_band_run && at <= j->spectral_end; at++) {
        int symbol = read_symbol(&s->reader, table);
        if (symbol < 0) return DAMAGED;
        int run = symbol >> 4, size = symbol & 15, value = 0;
        if (size > 1) return DAMAGED;
        if (size) {
            value = read_bits(&s->reader, 1) ? bit : -bit;
        } else if (run < 15) {
            s->end_of_band_run = (1 << run) + read_bits(&s->reader, run);
            break;
        }
        for (; at <= j->spectral_end; at++) {
            int16_t *here = &block[NATURAL_ORDER[at]];
            if (*here) refine(s, here, bit);
            else if (!run--) break;
        }
        if (value) {
            if (at > j->spectral_end) return DAMAGED;
            block[NATURAL_ORDER[at]] = (int16_t)value;
        }
    }
    if (s->end_of_band_run) {
        for (; at <= j->spectral_end; at++)
            if (block[NATURAL_ORDER[at]]) refine(s, &block[NATURAL_ORDER[at]], bit);
        s->end_of_band_run--;
    }
    return OK;
}

static int read_one(Scan *s, const Header *j, int k, int16_t *block) {
    int result;
    if (!j->progressive)
        result = s->read_block(&s->reader, &s->tables[0][j->components[k].dc],
                               &s->tables[1][j->components[k].ac], &s->predictors[k], block);
    else if (!j->spectral_start) result = read_dc(s, j, k, block);
    else if (!j->high) result = read_ac(s, j, k, block);
    else result = read_ac_refinement(s, j, k, block);
    if (result < 0) return result;
    return bits_left(&s->reader) < 0 ? DAMAGED : OK;
}

static int check_scan(const Header *j, Coefficients *c) {
    int start = j->spectral_start, end = j->spectral_end;
    if (j->quant_after_scan) return UNSUPPORTED;
    if (!j->progressive && (start || end != 63 || j->high || j->low)) return BAD_HEADER;
    if (j->progressive && (start > end || end > 63 || j->high > 13 || j->low > 13)) return BAD_HEADER;
    if (j->progressive && (start ? j->num_scan != 1 : end != 0)) return BAD_HEADER;
    for (int k = 0; k < j->num_scan; k++) {
        int8_t *bits = c->bits_left[j->scan_components[k]];
        if (start && bits[0] < 0) return DAMAGED;
        for (int at = start; at <= end; at++) { /* G.1.1.1: each bit once, in order; DC first */
            if (bits[at] < 0 ? j->high != 0 : j->high != bits[at] || j->low != j->high - 1) return DAMAGED;
            bits[at] = (int8_t)j->low;
        }
    }
    return OK;
}

static void open_segment(Scan *s, const uint8_t *begin) {
    const Header *j = &s->c->header;
    s->stop = start_reading(&s->reader, begin, j->data + j->size, s->buffer);
    for (int k = 0; k < MAX_COMPONENTS; k++) s->predictors[k] = 0;
}

static int is_finished(const Scan *s) { /* but for the bits that fill up the last byte */
    return !s->end_of_band_run && bits_left(&s->reader) < 8;
}

static int restart(Scan *s, int count) {
    const Header *j = &s->c->header;
    if (!is_finished(s) || j->data + j->size - s->stop < 2 || s->stop[1] != 0xD0 + count % 8) return DAMAGED;
    open_segment(s, s->stop + 2);
    return OK;
}

static int read_mcu(Scan *s, const Header *j, int x, int y) {
    for (int i = 0; i < j->num_scan; i++) {
        int k = j->scan_components[i];
        const Component *c = &j->components[k];
        int wide = j->num_scan > 1 ? c->h : 1, tall = j->num_scan > 1 ? c->v : 1;
        for (int v = 0; v < tall; v++)
            for (int h = 0; h < wide; h++) {
                size_t row = (size_t)(y * tall + v), column = (size_t)(x * wide + h);
                size_t block = row * (size_t)(j->mcus_x * c->h) + column;
                int error = read_one(s, j, k, s->c->blocks[k] + 64 * block);
                if (error) return error;
            }
    }
    return OK;
}

static int read_scan_data(Coefficients *c) {
    Header *j = &c->header;
    Scan *s = calloc(1, sizeof *s);
    if (!s) return NO_MEMORY;
    s->c = c;
    s->buffer = c->buffer;
    s->read_block = routines(0)->read_block;
    int error = check_scan(j, c), across = j->mcus_x, down = j->mcus_y;
    for (int k = 0; !error && k < j->num_scan; k++)
        for (int ac = 0; !error && ac < 2; ac++) {
            if (j->progressive && (ac ? !j->spectral_start : j->spectral_start || j->high)) continue;
            const Component *component = &j->components[j->scan_components[k]];
            int id = ac ? component->ac : component->dc;
            error = build_table(&s->tables[ac][id], &j->huffman[ac][id], !ac);
        }
    if (j->num_scan == 1) { /* without the blocks that only fill up an MCU: A.2.2 */
        const Component *component = &j->components[j->scan_components[0]];
        across = (j->width * component->h + 8 * j->h_max - 1) / (8 * j->h_max);
        down = (j->height * component->v + 8 * j->v_max - 1) / (8 * j->v_max);
    }
    open_segment(s, j->data + j->pos);
    for (int y = 0, done = 0; !error && y < down; y++)
        for (int x = 0; !error && x < across; x++, done++) {
            if (j->restart_interval && done && done % j->restart_interval == 0)
                error = restart(s, done / j->restart_interval - 1);
            if (!error) error = read_mcu(s, j, x, y);
        }
    if (!error && !is_finished(s)) error = DAMAGED;
    j->pos = (size_t)(s->stop - j->data);
    free(s);
    return error;
}

int read_coefficients(Coefficients *c, const uint8_t *data, size_t size) {
    Header *j = &c->header;
    int found = open_header(j, data, size);
    if (found) return found;
    for (int k = 0; k < MAX_COMPONENTS; k++)
        for (int at = 0; at < 64; at++) c->bits_left[k][at] = -1;
    while ((found = next_scan(j)) == 1) {
        size_t total = 0;
        for (int k = 0; !c->memory && k < j->num_components; k++) {
            c->num_blocks[k] = (size_t)(j->mcus_x * j->components[k].h) * (size_t)(j->mcus_y * j->components[k].v);
            total += c->num_blocks[k];
        }
        if (!c->memory) {
            c->memory = calloc(total, 64 * sizeof(int16_t));
            c->buffer = malloc(size + PADDING);
            if (!c->memory || !c->buffer) return NO_MEMORY;
            for (int k = 0; k < j->num_components; k++)
                c->blocks[k] = k ? c->blocks[k - 1] + 64 * c->num_blocks[k - 1] : c->memory;
        }
        int error = read_scan_data(c);
        if (error) return error;
    }
    if (found < 0) return found;
    for (int k = 0; k < j->num_components; k++)
        for (int at = 0; at < 64; at++) /* libjpeg would smooth what an unfinished progressive image lacks */
            if (c->bits_left[k][at] != 0) return DAMAGED;
    return j->scan_count ? OK : DAMAGED;
}
