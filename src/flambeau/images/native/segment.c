/* The lossless transcoder: the same coefficients, in segments that can be found and decoded one by one. */
#include "segment.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    uint8_t *bytes;
    size_t size, capacity;
    uint64_t bits; /* right-aligned */
    int count, failed;
} Output;

typedef struct {
    uint64_t frequency[257]; /* the last one stands for the code of ones only, which must not be used */
    uint16_t code[256];
    uint8_t length[256];
    HuffmanSpec spec;
} Encoder;

typedef struct {
    Coefficients c;
    Output out;
    Encoder encoders[2][2]; /* DC, AC; the first component, the others */
    uint16_t *lengths;
    int interval, num_segments;
} Segmenter;

static void reserve(Output *o, size_t more) {
    if (o->failed || o->capacity - o->size >= more) return;
    size_t capacity = o->capacity + o->capacity / 2 + more + 4096;
    uint8_t *bytes = realloc(o->bytes, capacity);
    if (!bytes) {
        o->failed = 1;
        return;
    }
    o->bytes = bytes;
    o->capacity = capacity;
}

static void append(Output *o, const uint8_t *bytes, size_t count) {
    reserve(o, count);
    if (o->failed) return;
    memcpy(o->bytes + o->size, bytes, count);
    o->size += count;
}

static void append_marker(Output *o, int marker, int body) {
    const uint8_t bytes[4] = {0xFF, (uint8_t)marker, (uint8_t)((body + 2) >> 8), (uint8_t)(body + 2)};
    append(o, bytes, 4);
}

INLINE void put_byte(Output *o, uint8_t byte) { /* room is reserved for each MCU */
    o->bytes[o->size++] = byte;
    if (byte == 0xFF) o->bytes[o->size++] = 0;
}

INLINE void put_bits(Output *o, uint32_t bits, int count) {
    o->bits = o->bits << count | bits;
    o->count += count;
    while (o->count >= 8) put_byte(o, (uint8_t)(o->bits >> (o->count -= 8)));
}

static void flush(Output *o) { /* F.1.2.3: the last byte is filled with ones */
    if (o->count) put_bits(o, (1u << (8 - o->count)) - 1, 8 - o->count);
    o->bits = 0;
}

INLINE int size_of(int value) { return value ? 32 - __builtin_clz((unsigned)(value < 0 ? -value : value)) : 0; }

/* A symbol and the bits of a value behind it; `emit` is a constant where this is inlined. */
INLINE void put(Output *o, Encoder *e, int run, int size, int value, int emit) {
    int symbol = run << 4 | size;
    if (!emit) {
        e->frequency[symbol]++;
        return;
    }
    uint32_t bits = (uint32_t)(value < 0 ? value + (1 << size) - 1 : value);
    put_bits(o, (uint32_t)e->code[symbol] << size | bits, e->length[symbol] + size);
}

INLINE int code_block(Output *o, Encoder *dc, Encoder *ac, const int16_t *block, int *predictor, int emit) {
    int difference = block[0] - *predictor, size = size_of(difference), run = 0;
    if (size > 11) return UNSUPPORTED;
    *predictor = block[0];
    put(o, dc, 0, size, difference, emit);
    for (int k = 1; k < 64; k++) {
        int value = block[NATURAL_ORDER[k]];
        if (!value) {
            run++;
            continue;
        }
        size = size_of(value);
        if (size > 10) return UNSUPPORTED;
        for (; run > 15; run -= 16) put(o, ac, 15, 0, 0, emit);
        put(o, ac, run, size, value, emit);
        run = 0;
    }
    if (run) put(o, ac, 0, 0, 0, emit);
    return OK;
}

INLINE int code_mcu(Segmenter *s, int mcu, int *predictors, int emit) {
    const Header *j = &s->c.header;
    int x = mcu % j->mcus_x, y = mcu / j->mcus_x;
    for (int k = 0; k < j->num_components; k++) {
        const Component *c = &j->components[k];
        Encoder *dc = &s->encoders[0][k > 0], *ac = &s->encoders[1][k > 0];
        for (int v = 0; v < c->v; v++) {
            size_t row = (size_t)(y * c->v + v) * (size_t)(j->mcus_x * c->h);
            const int16_t *block = s->c.blocks[k] + 64 * (row + (size_t)(x * c->h));
            for (int h = 0; h < c->h; h++, block += 64) {
                int error = code_block(&s->out, dc, ac, block, &predictors[k], emit);
                if (error) return error;
            }
        }
    }
    return OK;
}

INLINE int code_all(Segmenter *s, int emit) {
    Output *o = &s->out;
    int mcus = s->c.header.mcus_x * s->c.header.mcus_y;
    for (int segment = 0; segment < s->num_segments; segment++) {
        int predictors[MAX_COMPONENTS] = {0};
        size_t begin = o->size;
        for (int k = 0, mcu = segment * s->interval; k < s->interval && mcu < mcus; k++, mcu++) {
            if (emit) reserve(o, 10 * 64 * 8 + 64); /* 10 blocks of 64 coefficients of 26 bits, all stuffed */
            if (o->failed) return NO_MEMORY;
            int error = code_mcu(s, mcu, predictors, emit);
            if (error) return error;
        }
        if (!emit) continue;
        flush(o);
        if (o->size - begin > 0xFFFF) return UNSUPPORTED;
        s->lengths[segment] = (uint16_t)(o->size - begin);
        const uint8_t marker[2] = {0xFF, (uint8_t)(segment + 1 < s->num_segments ? 0xD0 + segment % 8 : 0xD9)};
        append(o, marker, 2);
    }
    return o->failed ? NO_MEMORY : OK;
}

static int count_symbols(Segmenter *s) { return code_all(s, 0); }
static int write_symbols(Segmenter *s) { return code_all(s, 1); }

static int least(const uint64_t *frequency, int except) {
    int found = -1;
    for (int k = 0; k < 257; k++)
        if (frequency[k] && k != except && (found < 0 || frequency[k] <= frequency[found])) found = k;
    return found;
}

/* The shortest code for these frequencies, of at most 16 bits: K.2 and K.3. */
static void make_code(Encoder *e) {
    int length[257] = {0}, next[257], counts[258] = {0};
    memset(next, -1, sizeof next);
    e->frequency[256] = 1;
    for (;;) {
        int a = least(e->frequency, -1), b = least(e->frequency, a);
        if (b < 0) break;
        e->frequency[a] += e->frequency[b];
        e->frequency[b] = 0;
        for (length[a]++; next[a] >= 0; length[a]++) a = next[a];
        next[a] = b;
        for (length[b]++; next[b] >= 0; length[b]++) b = next[b];
    }
    for (int k = 0; k < 257; k++) counts[length[k]]++;
    for (int k = 257; k > 16; k--)
        while (counts[k]) {
            int shorter = k - 2;
            while (!counts[shorter]) shorter--;
            counts[k] -= 2;
            counts[k - 1]++;
            counts[shorter + 1] += 2;
            counts[shorter]--;
        }
    int longest = 16;
    while (!counts[longest]) longest--;
    counts[longest]--; /* the code of ones only */
    e->spec.num_symbols = 0;
    for (int bits = 1; bits < 258; bits++)
        for (int k = 0; k < 256; k++)
            if (length[k] == bits) e->spec.symbols[e->spec.num_symbols++] = (uint8_t)k;
    int code = 0, index = 0;
    for (int bits = 1; bits <= 16; bits++, code <<= 1) {
        e->spec.counts[bits] = (uint8_t)counts[bits];
        for (int k = 0; k < counts[bits]; k++, code++) {
            e->code[e->spec.symbols[index]] = (uint16_t)code;
            e->length[e->spec.symbols[index++]] = (uint8_t)bits;
        }
    }
}

/* About `interval_px` wide; a divisor of the row where one is near, so that segments do not wrap. */
static int choose_interval(const Header *j, int interval_px) {
    int wide = 8 * j->h_max, target = (interval_px + wide / 2) / wide, best = 0;
    if (target < 1) target = 1;
    if (target >= j->mcus_x) return j->mcus_x;
    for (int d = (target + 1) / 2; d <= 2 * target && d <= j->mcus_x; d++) {
        if (j->mcus_x % d) continue;
        if (d <= target) best = d;                                /* nearer than the one before */
        else if (!best || d * best < target * target) return d;   /* nearer as a ratio */
        else break;
    }
    return best ? best : target;
}

/* All segments but those that are written anew, as they are. */
static void copy_headers(Segmenter *s) {
    static const uint8_t soi[2] = {0xFF, 0xD8};
    const Header *j = &s->c.header; /* read_coefficients has come to the end of it: every marker is sound */
    const uint8_t *body;
    size_t pos = 2;
    int size, marker;
    append(&s->out, soi, 2);
    while ((marker = next_marker(j->data, j->size, &pos, &body, &size)) != 0xDA) {
        int dropped = marker == 0xC4 || marker == 0xDD ||
                      (marker == 0xE9 && size >= 9 && !memcmp(body, "FLAMBEAU", 9)) ||
                      (marker == 0xE2 && size >= 4 && !memcmp(body, "MPF", 4));
        if (dropped) continue;
        if (marker == 0xC2) marker = j->wide_quant ? 0xC1 : 0xC0; /* baseline has quantisers of 8 bits */
        append_marker(&s->out, marker, size);
        append(&s->out, body, (size_t)size);
    }
}

static void write_tables(Segmenter *s) {
    int groups = s->c.header.num_components > 1 ? 2 : 1, size = 0;
    for (int k = 0; k < 2 * groups; k++) size += 17 + s->encoders[k & 1][k >> 1].spec.num_symbols;
    append_marker(&s->out, 0xC4, size);
    for (int k = 0; k < 2 * groups; k++) {
        const HuffmanSpec *spec = &s->encoders[k & 1][k >> 1].spec;
        const uint8_t name = (uint8_t)((k & 1) << 4 | k >> 1);
        append(&s->out, &name, 1);
        append(&s->out, spec->counts + 1, 16);
        append(&s->out, spec->symbols, (size_t)spec->num_symbols);
    }
}

enum { ENTRIES_A_PART = 32000 }; /* 64,000 of the 65,533 bytes that a marker segment can hold */

/* DRI, and room for the index. */
static size_t write_index(Segmenter *s) {
    Output *o = &s->out;
    const uint8_t interval[2] = {(uint8_t)(s->interval >> 8), (uint8_t)s->interval};
    append_marker(o, 0xDD, 2);
    append(o, interval, 2);
    size_t at = o->size;
    int parts = (s->num_segments + ENTRIES_A_PART - 1) / ENTRIES_A_PART;
    for (int part = 0; part < parts; part++) {
        int first = part * ENTRIES_A_PART, stop = first + ENTRIES_A_PART;
        if (stop > s->num_segments) stop = s->num_segments;
        const uint8_t head[12] = {'F', 'L', 'A', 'M', 'B', 'E', 'A', 'U', 0, 1, (uint8_t)part, (uint8_t)parts};
        append_marker(o, 0xE9, 12 + 2 * (stop - first));
        append(o, head, 12);
        for (int k = first; k < stop; k++) {
            const uint8_t entry[2] = {(uint8_t)(s->lengths[k] >> 8), (uint8_t)s->lengths[k]};
            append(o, entry, 2);
        }
    }
    return at;
}

static void write_scan_header(Segmenter *s) {
    const Header *j = &s->c.header;
    uint8_t body[10], *at = body;
    *at++ = (uint8_t)j->num_components;
    for (int k = 0; k < j->num_components; k++) {
        *at++ = j->components[k].id;
        *at++ = k ? 0x11 : 0;
    }
    *at++ = 0;
    *at++ = 63;
    *at++ = 0;
    append_marker(&s->out, 0xDA, (int)(at - body));
    append(&s->out, body, (size_t)(at - body));
}

static int rewrite(Segmenter *s, const uint8_t *data, size_t size, int interval_px) {
    int error = read_coefficients(&s->c, data, size);
    if (error) return error;
    const Header *j = &s->c.header;
    s->interval = choose_interval(j, interval_px);
    s->num_segments = (j->mcus_x * j->mcus_y + s->interval - 1) / s->interval;
    if (s->num_segments > MAX_PARTS * ENTRIES_A_PART) return UNSUPPORTED;
    s->lengths = calloc((size_t)s->num_segments, sizeof *s->lengths);
    if (!s->lengths) return NO_MEMORY;
    if ((error = count_symbols(s))) return error;
    for (int k = 0; k < 4; k++) make_code(&s->encoders[k & 1][k >> 1]);
    copy_headers(s);
    write_tables(s);
    size_t index = write_index(s);
    write_scan_header(s);
    if (s->out.failed) return NO_MEMORY;
    if ((error = write_symbols(s))) return error;
    size_t end = s->out.size; /* the lengths are known now: write the index once more, over the first one */
    s->out.size = index - 6;
    write_index(s);
    s->out.size = end;
    return OK;
}

/* *out: a new JPEG of *out_size bytes, to be given back to flambeau_free. */
EXPORT int flambeau_segment(const uint8_t *data, size_t size, int interval_px, uint8_t **out, size_t *out_size) {
    Segmenter *s = calloc(1, sizeof *s);
    *out = NULL;
    if (!s) return NO_MEMORY;
    int error = rewrite(s, data, size, interval_px);
    if (error) {
        free(s->out.bytes);
    } else {
        *out = s->out.bytes;
        *out_size = s->out.size;
    }
    free(s->c.memory);
    free(s->c.buffer);
    free(s->lengths);
    free(s);
    return error;
}

EXPORT void flambeau_free(uint8_t *bytes) { free(bytes); }
