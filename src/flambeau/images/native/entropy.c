/* Huffman decoding (ITU-T T.81, annex F.2). */
#include "jpeg.h"

#include <string.h>

/* An entry of `look`, from the low bits on: how many bits to skip; two flags; two steps in zigzag order; how many of the
 * bits belong to the first step; the values after these steps.
 * COMPLETE: the bits hold a whole value, or two; a second step of 0 repeats the first value.  STOP: with COMPLETE, the
 * end of the block is behind it; else the symbol is in the place of the first step, and its value if any is yet to be
 * read, or the code is longer than LOOK_BITS, and no bits are skipped. */
enum { LENGTH = 63, COMPLETE = 64, STOP = 128, FIRST = 8, SECOND = 16, ALONE = 24, VALUE = 32, OTHER_VALUE = 48 };

static uint64_t entry_of(int bits, int symbol, int length, int is_dc) {
    int run = symbol >> 4, size = symbol & 15, spare = LOOK_BITS - length - size, value = 0;
    if (spare < 0 || (is_dc ? run : !size)) return (uint64_t)symbol << FIRST | STOP | (uint64_t)length;
    if (size) {
        value = bits >> spare & ((1 << size) - 1);
        if (value < 1 << (size - 1)) value -= (1 << size) - 1;
    }
    uint64_t sixteen = (uint16_t)value;
    return sixteen << OTHER_VALUE | sixteen << VALUE | (uint64_t)(length + size) << ALONE |
           (uint64_t)(run + 1) << FIRST | COMPLETE | (uint64_t)(length + size);
}

/* What follows a value within the same bits: a second value, or the end of the block. */
static void join_entries(HuffmanTable *t) {
    uint64_t single[1 << LOOK_BITS];
    memcpy(single, t->look, sizeof single);
    for (int bits = 0; bits < 1 << LOOK_BITS; bits++) {
        uint64_t entry = single[bits];
        if (!(entry & COMPLETE)) continue;
        uint64_t next = single[bits << (entry & LENGTH) & ((1 << LOOK_BITS) - 1)];
        if ((entry & LENGTH) + (next & LENGTH) > LOOK_BITS) continue;
        if (next & COMPLETE)
            t->look[bits] = (entry & ~((uint64_t)0xFFFF << OTHER_VALUE)) + (next & LENGTH) +
                            ((next >> FIRST & 255) << SECOND) + (next >> VALUE << OTHER_VALUE);
        else if ((next & LENGTH) && !(next >> FIRST & 255)) t->look[bits] = (entry | STOP) + (next & LENGTH);
    }
}

int build_table(HuffmanTable *t, const HuffmanSpec *spec, int is_dc) {
    memset(t, 0, sizeof *t);
    if (!spec->num_symbols) return BAD_HEADER;
    for (int bits = 0; bits < 1 << LOOK_BITS; bits++) t->look[bits] = STOP;
    memcpy(t->symbols, spec->symbols, sizeof t->symbols);
    t->num_symbols = spec->num_symbols;
    int32_t code = 0;
    int index = 0;
    for (int length = 1; length <= 16; length++, code <<= 1) {
        t->first[length] = index - code;
        for (int k = 0; k < spec->counts[length]; k++, index++, code++) {
            if (is_dc && spec->symbols[index] > 15) return BAD_HEADER; /* unused or not: as libjpeg has it */
            if (code >= (1 << length) - 1) return BAD_HEADER; /* more codes than there can be; ones only is none */
            if (length > LOOK_BITS) continue;
            int first = code << (LOOK_BITS - length), stop = (code + 1) << (LOOK_BITS - length);
            for (int bits = first; bits < stop; bits++)
                t->look[bits] = entry_of(bits, spec->symbols[index], length, is_dc);
        }
        t->max_code[length] = code << (16 - length);
    }
    t->max_code[17] = 0x10000;
    if (!is_dc) join_entries(t);
    return OK;
}

/* Without the zero that follows each 0xFF; out: room for end - begin + PADDING bytes; returns the marker that
 * stopped it, or end. */
const uint8_t *start_reading(BitReader *r, const uint8_t *begin, const uint8_t *end, uint8_t *out) {
    r->next = out;
    r->bits = 0;
    r->count = 0;
    for (;;) {
        const uint8_t *found = begin < end ? memchr(begin, 0xFF, (size_t)(end - begin)) : NULL;
        size_t count = (size_t)((found ? found : end) - begin);
        memcpy(out, begin, count);
        out += count;
        begin += count;
        if (!found || end - begin < 2 || begin[1]) break;
        *out++ = 0xFF;
        begin += 2;
    }
    memset(out, 0, PADDING);
    r->end = out;
    return begin;
}

/* At least 56 bits.  No check: a block reads at most 64 * 27 bits, and PADDING holds more than those. */
INLINE void refill(BitReader *r) {
    uint64_t word;
    memcpy(&word, r->next, 8);
#if __BYTE_ORDER__ == __ORDER_LITTLE_ENDIAN__
    word = __builtin_bswap64(word);
#endif
    r->bits |= word >> r->count; /* bits below `count` are those that follow: oring them again changes nothing */
    r->next += (63 - r->count) >> 3;
    r->count |= 56;
}

INLINE void skip(BitReader *r, uint64_t count) {
    r->bits <<= count;
    r->count -= (int)count;
}

INLINE int long_symbol(BitReader *r, const HuffmanTable *t) { /* a code beyond `look`; needs 16 bits */
    int32_t peek = (int32_t)(r->bits >> 48);
    int length = LOOK_BITS + 1;
    while (peek >= t->max_code[length]) length++;
    if (length > 16) return -1;
    int index = (peek >> (16 - length)) + t->first[length];
    skip(r, (uint64_t)length);
    return index >= 0 && index < t->num_symbols ? t->symbols[index] : -1;
}

INLINE int value_now(BitReader *r, int size) { /* needs 15 bits; size 1 to 15 */
    int64_t positive = (int64_t)r->bits >> 63; /* -1 or 0: a branch on it would be guessed wrongly every other time */
    int64_t value = (int64_t)(r->bits >> (64 - size));
    skip(r, (uint64_t)size);
    return (int)(value + (~positive & (1 - ((int64_t)1 << size))));
}

int read_symbol(BitReader *r, const HuffmanTable *t) {
    refill(r);
    uint64_t entry = t->look[r->bits >> (64 - LOOK_BITS)];
    if (!(entry & LENGTH)) return long_symbol(r, t);
    if (!(entry & COMPLETE)) {
        skip(r, entry & LENGTH);
        return entry >> FIRST & 255;
    }
    int value = (int16_t)(entry >> VALUE), size = 0;
    for (value = value < 0 ? -value : value; value; value >>= 1) size++;
    skip(r, (entry >> ALONE & LENGTH) - (uint64_t)size); /* without the values that the entry holds as well */
    return (int)((entry >> FIRST & 31) - 1) << 4 | size;
}

int read_bits(BitReader *r, int count) {
    if (!count) return 0;
    refill(r);
    int value = (int)(r->bits >> (64 - count));
    skip(r, (uint64_t)count);
    return value;
}

int read_value(BitReader *r, int size) {
    refill(r);
    return value_now(r, size);
}

INLINE int left_now(const BitReader *r) { return (int)(8 * (r->end - r->next)) + r->count; }

int bits_left(const BitReader *r) { return left_now(r); }

/* The first value of an entry was the last one of the block: what else the entry holds is the next block's. */
INLINE void give_back(BitReader *r, uint64_t before, uint64_t entry, int16_t *out, int keep) {
    r->bits = before << (entry >> ALONE & LENGTH);
    r->count += (int)(entry & LENGTH) - (int)(entry >> ALONE & LENGTH);
    if (keep) out[63] = (int16_t)(entry >> VALUE);
}

/* The AC coefficients; returns the last position or one behind it; beyond 63 or negative if damaged. */
INLINE int read_ac_now(BitReader *r, const HuffmanTable *ac, int16_t *out, int keep) {
    int k = 0;
    while (k < 63) {
        uint64_t entry = 0, before = 0;
        refill(r); /* for four lookups: three of LOOK_BITS at most, and one of 16 + 10 */
#pragma GCC unroll 4
        for (int step = 0; step < 4; step++) {
            before = r->bits;
            entry = ac->look[before >> (64 - LOOK_BITS)];
            skip(r, entry & LENGTH);
            if (entry & STOP) break;
            k += (int)(entry >> FIRST & 255);
            if (keep) out[NATURAL_ORDER[k]] = (int16_t)(entry >> VALUE);
            k += (int)(entry >> SECOND & 255);
            if (keep) out[NATURAL_ORDER[k]] = (int16_t)(entry >> OTHER_VALUE);
            if (k >= 63) break;
        }
        if (!(entry & STOP)) {
            if (k - (int)(entry >> SECOND & 255) != 63) continue;
            give_back(r, before, entry, out, keep);
            return 63;
        }
        if (entry & COMPLETE) { /* and the end of the block */
            k += (int)(entry >> FIRST & 255);
            if (keep) out[NATURAL_ORDER[k]] = (int16_t)(entry >> VALUE);
            if (k == 63) give_back(r, before, entry, out, keep);
            return k;
        }
        int symbol = entry & LENGTH ? (int)(entry >> FIRST & 255) : long_symbol(r, ac), size = symbol & 15;
        if (symbol < 0) return DAMAGED;
        if (!size && symbol != 0xF0) return k; /* end of block */
        k += (symbol >> 4) + 1;
        if (!size) continue;
        if (k > 63 || size > 10) return DAMAGED;
        int value = value_now(r, size);
        if (keep) out[NATURAL_ORDER[k]] = (int16_t)value;
    }
    return k;
}

INLINE int read_block_now(BitReader *reader, const HuffmanTable *dc, const HuffmanTable *ac, int *predictor,
                          int16_t *out, int keep) {
    BitReader r = *reader; /* in registers */
    refill(&r);
    uint64_t entry = dc->look[r.bits >> (64 - LOOK_BITS)];
    int value = (int16_t)(entry >> VALUE);
    skip(&r, entry & LENGTH);
    if (!(entry & COMPLETE)) {
        int size = entry & LENGTH ? (int)(entry >> FIRST & 255) : long_symbol(&r, dc);
        if (size < 0 || size > 11) return DAMAGED; /* F.1.2.1: 8-bit images need no more */
        value = size ? value_now(&r, size) : 0;
    }
    value += *predictor;
    if (value < -INT16_MAX || value > INT16_MAX) return DAMAGED; /* so that there is an absolute value */
    *predictor = value;
    if (keep) out[0] = (int16_t)value;
    int last = read_ac_now(&r, ac, out, keep);
    *reader = r;
    return last > 63 || left_now(reader) < 0 ? DAMAGED : last;
}

int read_block(BitReader *reader, const HuffmanTable *dc, const HuffmanTable *ac, int *predictor, int16_t *out) {
    return read_block_now(reader, dc, ac, predictor, out, 1);
}

int skip_block(BitReader *reader, const HuffmanTable *dc, const HuffmanTable *ac, int *predictor, int16_t *out) {
    return read_block_now(reader, dc, ac, predictor, out, 0);
}

/* With the shifts of BMI2, which every CPU with AVX2 has. */
AVX2 int read_block_avx2(BitReader *reader, const HuffmanTable *dc, const HuffmanTable *ac, int *predictor,
                         int16_t *out) {
    return read_block_now(reader, dc, ac, predictor, out, 1);
}

AVX2 int skip_block_avx2(BitReader *reader, const HuffmanTable *dc, const HuffmanTable *ac, int *predictor,
                         int16_t *out) {
    return read_block_now(reader, dc, ac, predictor, out, 0);
}
