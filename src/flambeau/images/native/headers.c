/* The markers of a JPEG (ITU-T T.81, annex B). */
#include "jpeg.h"

#include <string.h>

const uint8_t NATURAL_ORDER[64 + 32] = {
    0,  1,  8,  16, 9,  2,  3,  10, 17, 24, 32, 25, 18, 11, 4,  5,  12, 19, 26, 33, 40, 48, 41, 34, 27, 20, 13,
    6,  7,  14, 21, 28, 35, 42, 49, 56, 57, 50, 43, 36, 29, 22, 15, 23, 30, 37, 44, 51, 58, 59, 52, 45, 38, 31,
    39, 46, 53, 60, 61, 54, 47, 55, 62, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63,
    63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63, 63};

int get_u16(const uint8_t *bytes) { return bytes[0] << 8 | bytes[1]; }

static int read_quant(Header *j, const uint8_t *body, int size) {
    if (j->scan_count) j->quant_after_scan = 1;
    while (size > 0) {
        int wide = body[0] >> 4, id = body[0] & 15, need = 1 + 64 * (wide + 1);
        if (wide > 1 || id > 3 || size < need) return BAD_HEADER;
        for (int k = 0; k < 64; k++)
            j->quant[id][NATURAL_ORDER[k]] =
                (uint16_t)(wide ? get_u16(body + 1 + 2 * k) : body[1 + k]);
        j->quant_defined |= 1 << id;
        j->wide_quant |= wide;
        body += need;
        size -= need;
    }
    return OK;
}

static int read_huffman(Header *j, const uint8_t *body, int size) {
    while (size > 0) {
        int ac = body[0] >> 4, id = body[0] & 15, total = 0;
        if (size < 17 || ac > 1 || id > 3) return BAD_HEADER;
        for (int k = 1; k <= 16; k++) total += body[k];
        if (total > 256 || size < 17 + total) return BAD_HEADER;
        HuffmanSpec *spec = &j->huffman[ac][id];
        memcpy(spec->counts + 1, body + 1, 16);
        memcpy(spec->symbols, body + 17, (size_t)total);
        spec->num_symbols = total;
        body += 17 + total;
        size -= 17 + total;
    }
    return OK;
}

static int read_frame(Header *j, int marker, const uint8_t *body, int size) {
    if (j->width || size < 6) return BAD_HEADER;
    if (marker > 0xC2 || body[0] != 8) return UNSUPPORTED;
    j->progressive = marker == 0xC2;
    j->height = get_u16(body + 1);
    j->width = get_u16(body + 3);
    j->num_components = body[5];
    if (!j->height || !j->width || (long long)j->height * j->width > MAX_PIXELS) return UNSUPPORTED;
    if (j->num_components != 1 && j->num_components != 3) return UNSUPPORTED;
    if (size != 6 + 3 * j->num_components) return BAD_HEADER;
    j->h_max = j->v_max = 1;
    for (int k = 0; k < j->num_components; k++) {
        const uint8_t *entry = body + 6 + 3 * k;
        Component *c = &j->components[k];
        c->id = entry[0];
        c->h = entry[1] >> 4;
        c->v = entry[1] & 15;
        c->tq = entry[2];
        if (c->h < 1 || c->h > 4 || c->v < 1 || c->v > 4 || c->tq > 3) return BAD_HEADER;
        if (j->num_components == 1) c->h = c->v = 1;
        if (c->h > j->h_max) j->h_max = c->h;
        if (c->v > j->v_max) j->v_max = c->v;
    }
    int blocks = 0;
    for (int k = 0; k < j->num_components; k++) {
        const Component *c = &j->components[k], *like = &j->components[k ? 1 : 0];
        if (j->h_max % c->h || j->v_max % c->v || c->h != like->h || c->v != like->v) return UNSUPPORTED;
        int ratio = 10 * (j->h_max / c->h) + j->v_max / c->v; /* those that TurboJPEG knows */
        if (k ? ratio != 11 && ratio != 21 && ratio != 12 && ratio != 22 && ratio != 41 && ratio != 14 : ratio != 11)
            return UNSUPPORTED;
        blocks += c->h * c->v;
        for (int i = 0; i < k; i++)
            if (j->components[i].id == c->id) return BAD_HEADER;
    }
    if (blocks > 10) return UNSUPPORTED; /* B.2.3: no interleaved scan may hold more */
    j->mcus_x = (j->width + 8 * j->h_max - 1) / (8 * j->h_max);
    j->mcus_y = (j->height + 8 * j->v_max - 1) / (8 * j->v_max);
    return OK;
}

static int read_scan(Header *j, const uint8_t *body, int size) {
    if (!j->width || size < 1) return BAD_HEADER;
    j->num_scan = body[0];
    if (j->num_scan < 1 || j->num_scan > j->num_components || size != 4 + 2 * j->num_scan)
        return BAD_HEADER;
    for (int k = 0, from = 0; k < j->num_scan; k++) { /* in the order of the frame: B.2.3 */
        while (from < j->num_components && j->components[from].id != body[1 + 2 * k]) from++;
        if (from == j->num_components) return BAD_HEADER;
        Component *c = &j->components[from];
        c->dc = body[2 + 2 * k] >> 4;
        c->ac = body[2 + 2 * k] & 15;
        if (c->dc > 3 || c->ac > 3) return BAD_HEADER;
        if (!(j->quant_defined >> c->tq & 1)) return BAD_HEADER;
        j->scan_components[k] = from++;
    }
    const uint8_t *rest = body + 1 + 2 * j->num_scan;
    j->spectral_start = rest[0];
    j->spectral_end = rest[1];
    j->high = rest[2] >> 4;
    j->low = rest[2] & 15;
    j->scan_count++;
    return OK;
}

static int read_index(Header *j, const uint8_t *body, int size) {
    static const char name[9] = "FLAMBEAU";
    if (size < 12 || memcmp(body, name, 9) || body[9] != 1) return OK; /* another APP9, or a later version */
    if (body[10] != j->num_parts || j->num_parts == MAX_PARTS || size % 2) return BAD_HEADER;
    if (j->num_parts && body[11] != j->declared_parts) return BAD_HEADER;
    j->declared_parts = body[11];
    j->part[j->num_parts] = body + 12;
    j->part_entries[j->num_parts++] = (size - 12) / 2;
    return OK;
}

static int read_segment(Header *j, int marker, const uint8_t *body, int size) {
    if (marker == 0xDB) return read_quant(j, body, size);
    if (marker == 0xC4) return read_huffman(j, body, size);
    if (marker == 0xDD) {
        if (size != 2) return BAD_HEADER;
        j->restart_interval = get_u16(body);
        return OK;
    }
    if (marker < 0xD0) /* 0xC8: extensions, 0xCC: arithmetic coding */
        return marker == 0xC8 || marker == 0xCC ? UNSUPPORTED : read_frame(j, marker, body, size);
    if (marker < 0xE0 || (marker > 0xEF && marker != 0xFE)) return BAD_HEADER; /* nor does libjpeg take it */
    if (marker == 0xE0 && size >= 5 && !memcmp(body, "JFIF", 5)) j->has_jfif = 1;
    if (marker == 0xE9) return read_index(j, body, size);
    if (marker == 0xEE && size >= 12 && !memcmp(body, "Adobe", 5)) j->adobe_transform = body[11];
    return OK;
}

int open_header(Header *j, const uint8_t *data, size_t size) {
    memset(j, 0, sizeof *j);
    j->adobe_transform = -1;
    j->data = data;
    j->size = size;
    j->pos = 2;
    return size >= 4 && data[0] == 0xFF && data[1] == 0xD8 ? OK : BAD_HEADER;
}

int next_marker(const uint8_t *data, size_t size, size_t *pos, const uint8_t **body, int *body_size) {
    while (*pos + 2 <= size && data[*pos] == 0xFF && data[*pos + 1] == 0xFF) ++*pos; /* fill bytes */
    if (*pos + 2 > size || data[*pos] != 0xFF) return BAD_HEADER;
    int marker = data[*pos + 1];
    *pos += 2;
    if (marker == 0xD9) return marker;
    if (marker < 0xC0 || (marker >= 0xD0 && marker <= 0xD8) || *pos + 2 > size) return BAD_HEADER;
    int length = get_u16(data + *pos);
    if (length < 2 || size - *pos < (size_t)length) return BAD_HEADER;
    *body = data + *pos + 2;
    *body_size = length - 2;
    *pos += (size_t)length;
    return marker;
}

int next_scan(Header *j) {
    for (;;) {
        const uint8_t *body;
        int size, marker = next_marker(j->data, j->size, &j->pos, &body, &size);
        if (marker < 0) return marker;
        if (marker == 0xD9) return 0;
        int error = marker == 0xDA ? read_scan(j, body, size) : read_segment(j, marker, body, size);
        if (error) return error;
        if (marker == 0xDA) return 1;
    }
}

Colors stored_colors(const Header *j) { /* as libjpeg guesses it */
    const Component *c = j->components;
    if (j->num_components == 1) return GREY;
    if (j->has_jfif) return YCC;
    if (j->adobe_transform >= 0) return j->adobe_transform ? YCC : RGB;
    return c[0].id == 'R' && c[1].id == 'G' && c[2].id == 'B' ? RGB : YCC;
}

/* Where the next marker begins, from `at` on, that is neither a fill byte nor a restart; `size` if there is none. */
EXPORT size_t flambeau_next_marker(const uint8_t *data, size_t size, size_t at) {
    while (at + 1 < size) {
        const uint8_t *found = memchr(data + at, 0xFF, size - 1 - at);
        if (!found) return size;
        at = (size_t)(found - data);
        if (found[1] && found[1] != 0xFF && (found[1] & 0xF8) != 0xD0) return at;
        at += found[1] == 0xFF ? 1 : 2; /* fill bytes may be many; a zero or a restart is none */
    }
    return size;
}
