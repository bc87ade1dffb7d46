/* Random access inside a baseline JPEG: what the files of this kernel share.
 *
 * The input is hostile until proven otherwise: every read is bounded by the end of the data, every write by
 * sizes derived from checked header fields.  See docs/en/packed_jpeg.md for the format of the index.
 */
#ifndef FLAMBEAU_JPEG_H
#define FLAMBEAU_JPEG_H

#include <stddef.h>
#include <stdint.h>

#if (defined(__x86_64__) || defined(__i386__)) && (defined(__GNUC__) || defined(__clang__))
#define HAVE_AVX2_TARGET 1
#define AVX2 __attribute__((target("avx2,bmi,bmi2")))
#else
#define HAVE_AVX2_TARGET 0
#define AVX2
#endif

#define EXPORT __attribute__((visibility("default"))) /* all else is hidden: calls need no table */
#define INLINE static inline __attribute__((always_inline))

enum { /* The same numbers as in kernel.py. */
    OK = 0,
    BAD_HEADER = -1,
    UNSUPPORTED = -2,
    DAMAGED = -3,
    BAD_BOX = -4,
    NO_MEMORY = -5
};

enum { MAX_COMPONENTS = 3, MAX_PARTS = 64, LOOK_BITS = 10 };
enum { MAX_PIXELS = 178956970, MAX_SIDE = 65535 }; /* as in decode.py; of a JPEG */

typedef struct {
    uint8_t id, h, v, tq; /* h, v: sampling factors, 1 to 4 */
    uint8_t dc, ac;       /* Huffman tables of the current scan */
} Component;

typedef struct {
    uint8_t counts[17]; /* [1..16]: codes of each length */
    uint8_t symbols[256];
    int num_symbols;    /* 0: not defined */
} HuffmanSpec;

typedef struct {
    const uint8_t *data;
    size_t size, pos; /* pos: the next marker to read */
    int width, height, num_components, progressive;
    int h_max, v_max, mcus_x, mcus_y; /* a single component counts as 1 x 1, whatever it declares */
    Component components[MAX_COMPONENTS];
    uint16_t quant[4][64]; /* natural order */
    int quant_defined, quant_after_scan, wide_quant;
    HuffmanSpec huffman[2][4]; /* [0]: DC, [1]: AC */
    int restart_interval;
    int has_jfif, adobe_transform; /* -1: no Adobe marker */
    /* The scan that pos now stands behind. */
    int scan_count, num_scan, scan_components[MAX_COMPONENTS];
    int spectral_start, spectral_end, high, low;
    /* The index: parts of big-endian 16-bit lengths. */
    int num_parts, declared_parts;
    const uint8_t *part[MAX_PARTS];
    int part_entries[MAX_PARTS];
} Header;

typedef enum { GREY, YCC, RGB } Colors;

/* headers.c */
int open_header(Header *header, const uint8_t *data, size_t size);
/* The marker at *pos, which then stands behind its body; the end of the image (0xD9) has none. */
int next_marker(const uint8_t *data, size_t size, size_t *pos, const uint8_t **body, int *body_size);
int next_scan(Header *header); /* 1: at a scan, 0: at the end of the image, else an error */
Colors stored_colors(const Header *header);
int get_u16(const uint8_t *bytes);
/* By zigzag position; with room for two runs that leave the block, which is noticed after the store. */
extern const uint8_t NATURAL_ORDER[64 + 32];

/* entropy.c */
typedef struct {
    uint64_t look[1 << LOOK_BITS]; /* by the next bits; see entropy.c */
    int32_t max_code[18];         /* of each length: the largest code + 1, left-aligned in 16 bits */
    int32_t first[17];            /* of each length: index of its first symbol minus its first code */
    uint8_t symbols[256];
    int num_symbols;
} HuffmanTable;

enum { PADDING = 256 }; /* zeros behind the data: a block takes at most 64 * 27 bits, and 8 bytes are read at once */

typedef struct {
    const uint8_t *next, *end;
    uint64_t bits; /* left-aligned */
    int count;     /* of them, at least */
} BitReader;

int build_table(HuffmanTable *table, const HuffmanSpec *spec, int is_dc);
const uint8_t *start_reading(BitReader *reader, const uint8_t *begin, const uint8_t *end, uint8_t *buffer);
int read_symbol(BitReader *reader, const HuffmanTable *table); /* -1: no such code */
int read_bits(BitReader *reader, int count);
int read_value(BitReader *reader, int size); /* a signed magnitude */
int bits_left(const BitReader *reader);      /* negative: more were read than there are; check after each block */
/* Adds to zeroed coefficients; returns the last position in zigzag order, or one behind it, or an error. */
typedef int ReadBlock(BitReader *reader, const HuffmanTable *dc, const HuffmanTable *ac, int *predictor,
                      int16_t *coefficients);
ReadBlock read_block, read_block_avx2;
ReadBlock skip_block, skip_block_avx2; /* the same without the coefficients */

/* pixels.c */
/* DAMAGED where libjpeg's numbers would overflow. */
typedef int Idct(const int16_t *coefficients, const uint16_t *quant, int last, uint8_t *out, ptrdiff_t stride);
typedef struct {
    ReadBlock *read_block, *skip_block;
    Idct *idct8, *idct4, *idct2, *idct1;
    /* Twice as wide: 3/4 nearest + 1/4 next; `padded` has one more at each end; the sums carry `shift` bits. */
    void (*widen)(const uint16_t *padded, int count, int shift, uint8_t *out);
    void (*blend)(const uint8_t *near, const uint8_t *far, int count, int bias, uint8_t *out);
    void (*sum)(const uint8_t *near, const uint8_t *far, int count, uint16_t *out);
    void (*ycc_to_rgb)(const uint8_t *y, const uint8_t *cb, const uint8_t *cr, int count, uint8_t *out);
} Routines;
const Routines *routines(int scalar);

/* resize.c: rows come in from the top, and when all are there the result goes out. */
typedef struct {
    int height, width, mirror, cubic, pillows; /* cubic: a reach of two pixels, else one; pillows: Pillow's rounding */
} ResizeTo;
typedef struct Resizer Resizer;
Resizer *new_resizer(const ResizeTo *to, int height, int width, int channels, int scalar); /* give back with free() */
uint8_t *next_row(Resizer *resizer); /* where to write it */
void push_row(Resizer *resizer);
int write_resized(const Resizer *resizer, uint8_t *out);

#endif
