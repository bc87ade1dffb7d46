/* The pixels of a box, from the segments that lie under it. */
#include "jpeg.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    int needed, size;     /* size: samples a block side, 8, 4, 2 or 1 */
    int x_factor, y_factor;
    int fancy_x, fancy_y; /* interpolated, not repeated */
    int width, height;    /* samples of the whole image: libjpeg's downsampled_width */
    int left, top, stride;/* of the plane below, in samples of the whole image */
    uint8_t *samples;
    const HuffmanTable *dc, *ac;
    const uint16_t *quant;
    Idct *idct;
} Plane;

typedef struct {
    Header header;
    const Routines *use;
    HuffmanTable tables[2][4];
    Plane planes[MAX_COMPONENTS];
    int x0, x1, y0, y1; /* MCUs under the box, with what interpolation looks at beside it */
    uint32_t *ends;     /* of the segments, from the start of the scan; without an index there are none */
    int num_segments;
    void *memory;
    uint8_t *buffer;    /* a segment; without an index, all of the scan */
} Region;

static int ceil_div(int a, int b) { return (a + b - 1) / b; }

static void lay_out(Region *r, const int box[4], int scale_eighths, int num_needed) {
    const Header *j = &r->header;
    int top = box[0], left = box[1], height = box[2], width = box[3];
    r->x0 = r->y0 = 1 << 30;
    r->x1 = r->y1 = 0;
    for (int k = 0; k < num_needed; k++) {
        const Component *c = &j->components[k];
        Plane *p = &r->planes[k];
        p->needed = 1;
        p->size = scale_eighths; /* libjpeg decodes chroma at a larger scale where that saves interpolation */
        while (p->size < 8 && j->h_max * scale_eighths % (c->h * p->size * 2) == 0 &&
               j->v_max * scale_eighths % (c->v * p->size * 2) == 0)
            p->size *= 2;
        p->x_factor = j->h_max * scale_eighths / (c->h * p->size);
        p->y_factor = j->v_max * scale_eighths / (c->v * p->size);
        p->width = ceil_div(j->width * c->h * p->size, j->h_max * 8);
        p->height = ceil_div(j->height * c->v * p->size, j->v_max * 8);
        int smooth = scale_eighths > 1;
        p->fancy_x = smooth && p->x_factor == 2 && p->y_factor <= 2 && p->width > 2;
        p->fancy_y = smooth && p->y_factor == 2 && (p->x_factor == 1 || p->fancy_x);
        int first_x = left / p->x_factor - p->fancy_x, last_x = (left + width - 1) / p->x_factor + p->fancy_x;
        int first_y = top / p->y_factor - p->fancy_y, last_y = (top + height - 1) / p->y_factor + p->fancy_y;
        if (first_x < 0) first_x = 0;
        if (first_y < 0) first_y = 0;
        if (last_x > p->width - 1) last_x = p->width - 1;
        if (last_y > p->height - 1) last_y = p->height - 1;
        int mcu_w = c->h * p->size, mcu_h = c->v * p->size;
        if (first_x / mcu_w < r->x0) r->x0 = first_x / mcu_w;
        if (first_y / mcu_h < r->y0) r->y0 = first_y / mcu_h;
        if (last_x / mcu_w >= r->x1) r->x1 = last_x / mcu_w + 1;
        if (last_y / mcu_h >= r->y1) r->y1 = last_y / mcu_h + 1;
    }
}

static int allocate(Region *r, int width) {
    const Header *j = &r->header;
    size_t row = (size_t)width + 64, total = sizeof(uint32_t) * (size_t)r->num_segments + 8 * row;
    size_t buffer = (r->num_segments ? 0xFFFF : j->size - j->pos) + PADDING;
    size_t sizes[MAX_COMPONENTS];
    for (int k = 0; k < j->num_components; k++) {
        Plane *p = &r->planes[k];
        const Component *c = &j->components[k];
        if (!p->needed) continue;
        p->stride = (r->x1 - r->x0) * c->h * p->size;
        p->left = r->x0 * c->h * p->size;
        p->top = r->y0 * c->v * p->size;
        sizes[k] = (size_t)p->stride * (size_t)((r->y1 - r->y0) * c->v * p->size);
        total += sizes[k];
    }
    uint8_t *memory = r->memory = malloc(total + buffer);
    if (!memory) return NO_MEMORY;
    r->ends = (uint32_t *)(void *)memory;
    memory += sizeof(uint32_t) * (size_t)r->num_segments + 8 * row; /* the rows: see write_pixels */
    for (int k = 0; k < j->num_components; k++) {
        if (!r->planes[k].needed) continue;
        r->planes[k].samples = memory;
        memory += sizes[k];
    }
    r->buffer = memory;
    return OK;
}

static int read_ends(Region *r) {
    const Header *j = &r->header;
    uint64_t end = 0;
    int segment = 0;
    for (int part = 0; part < j->num_parts; part++)
        for (int k = 0; k < j->part_entries[part] && segment < r->num_segments; k++, segment++) {
            end += (uint64_t)get_u16(j->part[part] + 2 * k) + (segment ? 2 : 0);
            if (end > j->size - j->pos || end > UINT32_MAX) return DAMAGED;
            r->ends[segment] = (uint32_t)end;
        }
    const uint8_t *eoi = j->data + j->pos + end;
    return j->size - j->pos < end + 2 || eoi[0] != 0xFF || eoi[1] != 0xD9 ? DAMAGED : OK;
}

static int open_region(Region *r, const uint8_t *data, size_t size) {
    Header *j = &r->header;
    int error = open_header(j, data, size);
    if (error) return error;
    int found = next_scan(j);
    if (found < 0) return found;
    if (!found) return BAD_HEADER;
    if (j->progressive || j->num_scan != j->num_components) return UNSUPPORTED;
    if (j->spectral_start || j->spectral_end != 63 || j->high || j->low) return BAD_HEADER;
    /* At most 2^26 MCUs: the multiplications here and in lay_out cannot overflow. */
    if (j->num_parts) {
        long long mcus = (long long)j->mcus_x * j->mcus_y, entries = 0;
        if (j->restart_interval < 1 || j->num_parts != j->declared_parts) return DAMAGED;
        r->num_segments = (int)((mcus + j->restart_interval - 1) / j->restart_interval);
        for (int part = 0; part < j->num_parts; part++) entries += j->part_entries[part];
        if (entries != r->num_segments) return DAMAGED;
    }
    for (int k = 0; k < j->num_components; k++) {
        const Component *c = &j->components[k];
        for (int ac = 0; ac < 2; ac++) {
            int id = ac ? c->ac : c->dc;
            HuffmanTable *table = &r->tables[ac][id];
            if (!table->num_symbols && (error = build_table(table, &j->huffman[ac][id], !ac))) return error;
        }
        r->planes[k].dc = &r->tables[0][c->dc];
        r->planes[k].ac = &r->tables[1][c->ac];
        r->planes[k].quant = j->quant[c->tq];
        for (int i = 0; j->wide_quant && i < 64; i++)
            if (j->quant[c->tq][i] > INT16_MAX) return UNSUPPORTED; /* `fits` takes them as signed */
    }
    return OK;
}

/* Sixteen bytes a step: of memset GCC makes `rep stos`, which is slow to begin. */
INLINE void clear(int16_t *coefficients) {
    typedef int16_t Eight __attribute__((vector_size(16), aligned(2), may_alias));
    for (int k = 0; k < 64; k += 8) *(Eight *)(coefficients + k) = (Eight){0};
}

/* Blocks of one MCU that is under the box, x and y counted from r->x0 and r->y0. */
static int decode_mcu(Region *r, BitReader *reader, int *predictors, int x, int y) {
    int16_t coefficients[64];
    for (int k = 0; k < r->header.num_components; k++) {
        const Component *c = &r->header.components[k];
        Plane *p = &r->planes[k];
        for (int v = 0; v < c->v; v++)
            for (int h = 0; h < c->h; h++) {
                ReadBlock *read = p->needed ? r->use->read_block : r->use->skip_block;
                if (p->needed) clear(coefficients);
                int last = read(reader, p->dc, p->ac, &predictors[k], coefficients);
                if (last < 0) return last;
                if (!p->needed) continue;
                size_t row = (size_t)(y * c->v + v) * (size_t)p->size;
                size_t column = (size_t)(x * c->h + h) * (size_t)p->size;
                int error = p->idct(coefficients, p->quant, last, p->samples + row * (size_t)p->stride + column, p->stride);
                if (error) return error;
            }
    }
    return OK;
}

/* Blocks of one MCU beside or above the box: the next one cannot be found without them. */
static int skip_mcu(Region *r, BitReader *reader, int *predictors) {
    for (int k = 0; k < r->header.num_components; k++)
        for (int block = r->header.components[k].h * r->header.components[k].v; block > 0; block--) {
            int last = r->use->skip_block(reader, r->planes[k].dc, r->planes[k].ac, &predictors[k], NULL);
            if (last < 0) return last;
        }
    return OK;
}

/* That the first segments end at a marker, each at its own, and hold none: one beside the box would tell libjpeg that
 * other segments come next. */
static int check_markers(const Region *r, int segments) {
    const uint8_t *scan = r->header.data + r->header.pos, *at = scan;
    for (int segment = 0; segment < segments; segment++) {
        const uint8_t *end = scan + r->ends[segment], *found;
        for (; at < end && (found = memchr(at, 0xFF, (size_t)(end - at))); at = found + 2)
            if (found[1]) return DAMAGED; /* also where `end` is: at a marker */
        if (end[0] != 0xFF || end[1] != (segment + 1 < r->num_segments ? 0xD0 + segment % 8 : 0xD9)) return DAMAGED;
        at = end + 2;
    }
    return OK;
}

/* MCUs x0 to x1 of one row. */
static int decode_row(Region *r, int y) {
    const Header *j = &r->header;
    int interval = j->restart_interval, wanted = y * j->mcus_x + r->x0, stop = y * j->mcus_x + r->x1;
    for (int segment = wanted / interval; segment < r->num_segments && (long long)segment * interval < stop; segment++) {
        size_t begin = segment ? (size_t)r->ends[segment - 1] + 2 : 0;
        const uint8_t *scan = j->data + j->pos;
        BitReader reader;
        int predictors[MAX_COMPONENTS] = {0};
        start_reading(&reader, scan + begin, scan + r->ends[segment], r->buffer);
        for (int mcu = segment * interval; mcu < stop && mcu - segment * interval < interval; mcu++) {
            int error = mcu < wanted ? skip_mcu(r, &reader, predictors)
                                     : decode_mcu(r, &reader, predictors, mcu - wanted, y - r->y0);
            if (error) return error;
        }
    }
    return OK;
}

/* Without an index: from the first MCU to the last one under the box. */
static int decode_scan(Region *r) {
    const Header *j = &r->header;
    const uint8_t *end = j->data + j->size, *marker = NULL;
    BitReader reader;
    int predictors[MAX_COMPONENTS] = {0}, interval = j->restart_interval, mcu = 0;
    for (int y = 0; y < r->y1; y++)
        for (int x = 0; x < j->mcus_x; x++, mcu++) {
            if (!mcu || (interval && mcu % interval == 0)) {
                if (mcu && (end - marker < 2 || marker[1] != 0xD0 + (mcu / interval - 1) % 8)) return DAMAGED;
                marker = start_reading(&reader, mcu ? marker + 2 : j->data + j->pos, end, r->buffer);
                memset(predictors, 0, sizeof predictors);
            }
            int error = x < r->x0 || x >= r->x1 || y < r->y0 ? skip_mcu(r, &reader, predictors)
                                                             : decode_mcu(r, &reader, predictors, x - r->x0, y - r->y0);
            if (error) return error;
        }
    /* What a decoder makes of other markers here is for libjpeg to say. */
    if (end - marker < 2) return DAMAGED;
    return marker[1] == 0xD9 || (interval && marker[1] >= 0xD0 && marker[1] <= 0xD7) ? OK : DAMAGED;
}

static int decode(Region *r) {
    if (!r->num_segments) return decode_scan(r);
    int error = read_ends(r);
    long long last = (long long)(r->y1 - 1) * r->header.mcus_x + r->x1 - 1;
    if (!error) error = check_markers(r, (int)(last / r->header.restart_interval) + 1);
    for (int y = r->y0; !error && y < r->y1; y++) error = decode_row(r, y);
    return error;
}

static const uint8_t *row_of(const Plane *p, int y) { /* the last row stands for those below it */
    if (y < 0) y = 0;
    if (y > p->height - 1) y = p->height - 1;
    return p->samples + (size_t)(y - p->top) * (size_t)p->stride;
}

/* One row of a component at full resolution; `spare` holds two rows of 16-bit numbers. */
static const uint8_t *upsample(const Region *r, const Plane *p, int y, int left, int width, uint8_t *out,
                               uint16_t *spare) {
    const uint8_t *near = row_of(p, y / p->y_factor);
    if (p->x_factor == 1 && p->y_factor == 1) return near + (left - p->left);
    const uint8_t *far = p->fancy_y ? row_of(p, y / 2 + (y % 2 ? 1 : -1)) : near;
    int first = left / p->x_factor, count = (left + width - 1) / p->x_factor - first + 1;
    if (p->x_factor == 1) {
        near += first - p->left;
        if (!p->fancy_y) return near;
        r->use->blend(near, far + (first - p->left), count, y % 2 ? 2 : 1, out);
        return out;
    }
    if (!p->fancy_x) {
        for (int i = 0; i < width; i++) out[i] = near[(left + i) / p->x_factor - p->left];
        return out;
    }
    int begin = first ? first - 1 : 0, end = first + count < p->width ? first + count + 1 : p->width;
    uint16_t *padded = spare + (begin - first + 1);
    if (p->fancy_y)
        r->use->sum(near + (begin - p->left), far + (begin - p->left), end - begin, padded);
    else
        for (int i = 0; i < end - begin; i++) padded[i] = near[begin - p->left + i];
    if (!first) spare[0] = spare[1];
    if (first + count == p->width) spare[count + 1] = spare[count];
    r->use->widen(spare, count, p->fancy_y ? 4 : 2, out);
    return out + left % 2;
}

static void write_row(const Region *r, const uint8_t *const rows[3], int width, int channels, uint8_t *out) {
    Colors stored = stored_colors(&r->header);
    if (channels == 1 && stored != RGB) {
        memcpy(out, rows[0], (size_t)width);
    } else if (channels == 1) { /* ITU-R 601 luma, as libjpeg rounds it */
        for (int i = 0; i < width; i++)
            out[i] = (uint8_t)((19595 * rows[0][i] + 38470 * rows[1][i] + 7471 * rows[2][i] + 32768) >> 16);
    } else if (stored == YCC) {
        r->use->ycc_to_rgb(rows[0], rows[1], rows[2], width, out);
    } else {
        for (int i = 0; i < width; i++)
            for (int k = 0; k < 3; k++) out[3 * i + k] = rows[stored == RGB ? k : 0][i];
    }
}

/* To `out`, or row by row to the resizer. */
static void write_pixels(const Region *r, const int box[4], int channels, Resizer *resizer, uint8_t *out) {
    size_t row = (size_t)box[3] + 64; /* 3 rows of bytes, 2 of 16-bit numbers */
    uint8_t *memory = (uint8_t *)r->memory + sizeof(uint32_t) * (size_t)r->num_segments;
    uint16_t *spare = (uint16_t *)(void *)memory;
    for (int y = 0; y < box[2]; y++) {
        const uint8_t *rows[3] = {0};
        for (int k = 0; k < r->header.num_components; k++)
            if (r->planes[k].needed)
                rows[k] = upsample(r, &r->planes[k], box[0] + y, box[1], box[3], memory + (4 + (size_t)k) * row, spare);
        write_row(r, rows, box[3], channels,
                  resizer ? next_row(resizer) : out + (size_t)y * (size_t)box[3] * (size_t)channels);
        if (resizer) push_row(resizer);
    }
}

static int check_box(const Header *j, const int box[4], int scale_eighths) {
    if (scale_eighths != 8 && scale_eighths != 4 && scale_eighths != 2 && scale_eighths != 1) return BAD_BOX;
    int full_height = ceil_div(j->height * scale_eighths, 8), full_width = ceil_div(j->width * scale_eighths, 8);
    int tiny = scale_eighths < 8 && j->height < 8 && j->width < 8; /* as without the kernel: nobody needs it */
    return tiny || box[0] < 0 || box[1] < 0 || box[2] < 1 || box[3] < 1 || box[2] > full_height ||
                   box[3] > full_width || box[0] > full_height - box[2] || box[1] > full_width - box[3]
               ? BAD_BOX
               : OK;
}

/* box: top, left, height, width at this scale; scale_eighths: 8 for the full size, 4, 2 or 1; to: height, width and
 * whether to mirror, whether by cubics, or NULL for the size of the box; out: height * width * channels bytes.
 * scalar: without AVX2, for tests. */
EXPORT int flambeau_decode_region(const uint8_t *data, size_t size, const int *box, int scale_eighths, int channels,
                                  const int *to, int scalar, uint8_t *out) {
    Region *r = calloc(1, sizeof *r);
    Resizer *resizer = NULL;
    if (!r) return NO_MEMORY;
    r->use = routines(scalar);
    int error = open_region(r, data, size);
    const Header *j = &r->header;
    if (!error) error = check_box(j, box, scale_eighths);
    if (!error && to && (to[0] < 1 || to[1] < 1 || to[0] > MAX_SIDE || to[1] > MAX_SIDE)) error = BAD_BOX;
    if (!error) {
        lay_out(r, box, scale_eighths, channels == 1 && stored_colors(j) != RGB ? 1 : j->num_components);
        for (int k = 0; k < j->num_components; k++) {
            int s = r->planes[k].size;
            r->planes[k].idct = s == 8 ? r->use->idct8 : s == 4 ? r->use->idct4 : s == 2 ? r->use->idct2 : r->use->idct1;
        }
        error = allocate(r, box[3]);
    }
    if (!error) error = decode(r);
    if (!error && to) {
        resizer = new_resizer(&(ResizeTo){to[0], to[1], to[2], to[3], 0}, box[2], box[3], channels, scalar);
        if (!resizer) error = NO_MEMORY;
    }
    if (!error) write_pixels(r, box, channels, resizer, out);
    if (!error && resizer) error = write_resized(resizer, out);
    free(resizer);
    free(r->memory);
    free(r);
    return error;
}

EXPORT int flambeau_interface(void) { return 7; } /* as in kernel.py */

EXPORT int flambeau_uses_avx2(void) { return routines(0) != routines(1); }
