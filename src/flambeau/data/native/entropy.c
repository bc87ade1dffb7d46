/* Huffman decoding (ITU-T T.81, annex F.2). */
#include "jpeg.h"

#include <string.h>

/* An entry of `look`: the bits to skip; 64 where they hold the whole value, which then is in the upper half, and
 * run + 1 (the steps in zigzag order) in the second byte; else the symbol is there. */
enum { LENGTH = 63, COMPLETE = 64, SYMBOL_SHIFT = 8, VALUE_SHIFT = 16 };

static int32_t entry_of(int bits, int symbol, int length, int is_dc) {
    int run = symbol >> 4, size = symbol & 15, spare = LOOK_BITS - length - size, value = 0;
    if (spare < 0 || (is_dc ? run : !size)) return symbol << SYMBOL_SHIFT | length;
    if (size) {
        value = bits >> spare & ((1 << size) - 1);
        if (value < 1 << (size - 1)) value -= (1 << size) - 1;
    }
    return value * (1 << VALUE_SHIFT) + ((run + 1) << SYMBOL_SHIFT | COMPLETE | (length + size));
}

int build_table(HuffmanTable *t, const HuffmanSpec *spec, int is_dc) {
    memset(t, 0, sizeof *t);
    if (!spec->num_symbols) return BAD_HEADER;
    memcpy(t->symbols, spec->symbols, sizeof t->symbols);
    t->num_symbols = spec->num_symbols;
    int32_t code = 0;
    int index = 0;
    for (int length = 1; length <= 16; length++, code <<= 1) {
        t->first[length] = index - code;
        for (int k = 0; k < spec->counts[length]; k++, index++, code++) {
            if (code >= 1 << length) return BAD_HEADER; /* more codes than there can be */
            if (length > LOOK_BITS) continue;
            int first = code << (LOOK_BITS - length), stop = (code + 1) << (LOOK_BITS - length);
            for (int bits = first; bits < stop; bits++)
                t->look[bits] = entry_of(bits, spec->symbols[index], length, is_dc);
        }
        t->max_code[length] = code << (16 - length);
    }
    t->max_code[17] = 0x10000;
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

INLINE void skip(BitReader *r, int count) {
    r->bits <<= count;
    r->count -= count;
}

INLINE int long_symbol(BitReader *r, const HuffmanTable *t) { /* a code beyond `look`; needs 16 bits */
    int32_t peek = (int32_t)(r->bits >> 48);
    int length = LOOK_BITS + 1;
    while (peek >= t->max_code[length]) length++;
    if (length > 16) return -1;
    int index = (peek >> (16 - length)) + t->first[length];
    skip(r, length);
    return index >= 0 && index < t->num_symbols ? t->symbols[index] : -1;
}

INLINE int value_now(BitReader *r, int size) { /* needs 15 bits; size 1 to 15 */
    int value = (int)(r->bits >> (64 - size));
    skip(r, size);
    return value < 1 << (size - 1) ? value - (1 << size) + 1 : value;
}

int read_symbol(BitReader *r, const HuffmanTable *t) {
    refill(r);
    uint64_t bits = r->bits >> (64 - LOOK_BITS);
    int32_t entry = t->look[bits];
    if (!entry) return long_symbol(r, t);
    if (!(entry & COMPLETE)) {
        skip(r, entry & LENGTH);
        return entry >> SYMBOL_SHIFT & 255;
    }
    int value = entry >> VALUE_SHIFT, size = 0; /* without the value that the entry holds as well */
    for (value = value < 0 ? -value : value; value; value >>= 1) size++;
    skip(r, (entry & LENGTH) - size);
    return ((entry >> SYMBOL_SHIFT & 31) - 1) << 4 | size;
}

int read_bits(BitReader *r, int count) {
    if (!count) return 0;
    refill(r);
    int value = (int)(r->bits >> (64 - count));
    skip(r, count);
    return value;
}

int read_value(BitReader *r, int size) {
    refill(r);
    return value_now(r, size);
}

INLINE int left_now(const BitReader *r) { return (int)(8 * (r->end - r->next)) + r->count; }

int bits_left(const BitReader *r) { return left_now(r); }

/* The AC coefficients; returns the last position, beyond 63 or negative if damaged. */
INLINE int read_ac_now(BitReader *r, const HuffmanTable *ac, int16_t *out) {
    int k = 0, last = 0;
    while (k < 63) {
        int32_t entry = 0;
        refill(r); /* for three symbols: two of LOOK_BITS at most, and one of 16 + 10 */
#pragma GCC unroll 3
        for (int step = 0; step < 3; step++) {
            entry = ac->look[r->bits >> (64 - LOOK_BITS)];
            skip(r, entry & LENGTH);
            if (!(entry & COMPLETE)) break;
            k += entry >> SYMBOL_SHIFT & 31;
            out[NATURAL_ORDER[k]] = (int16_t)(entry >> VALUE_SHIFT);
            last = k;
            if (k >= 63) break;
        }
        if (entry & COMPLETE) continue;
        int symbol = entry ? entry >> SYMBOL_SHIFT : long_symbol(r, ac), size = symbol & 15;
        if (symbol < 0) return DAMAGED;
        k += symbol >> 4;
        if (!size) {
            if (symbol != 0xF0) break; /* end of block */
            k++;
            continue;
        }
        if (++k > 63 || size > 10) return DAMAGED;
        out[NATURAL_ORDER[k]] = (int16_t)value_now(r, size);
        last = k;
    }
    return last;
}

INLINE int read_block_now(BitReader *reader, const HuffmanTable *dc, const HuffmanTable *ac, int *predictor,
                          int16_t *out) {
    BitReader r = *reader; /* in registers */
    refill(&r);
    int32_t entry = dc->look[r.bits >> (64 - LOOK_BITS)];
    int value = entry >> VALUE_SHIFT;
    skip(&r, entry & LENGTH);
    if (!(entry & COMPLETE)) {
        int size = entry ? entry >> SYMBOL_SHIFT : long_symbol(&r, dc);
        if (size < 0 || size > 11) return DAMAGED; /* F.1.2.1: 8-bit images need no more */
        value = size ? value_now(&r, size) : 0;
    }
    value += *predictor;
    if (value < -32768 || value > 32767) return DAMAGED;
    *predictor = value;
    out[0] = (int16_t)value;
    int last = read_ac_now(&r, ac, out);
    *reader = r;
    return last > 63 || left_now(reader) < 0 ? DAMAGED : last;
}

int read_block(BitReader *reader, const HuffmanTable *dc, const HuffmanTable *ac, int *predictor, int16_t *out) {
    return read_block_now(reader, dc, ac, predictor, out);
}

/* With the shifts of BMI2, which every CPU with AVX2 has. */
AVX2 int read_block_avx2(BitReader *reader, const HuffmanTable *dc, const HuffmanTable *ac, int *predictor,
                         int16_t *out) {
    return read_block_now(reader, dc, ac, predictor, out);
}
