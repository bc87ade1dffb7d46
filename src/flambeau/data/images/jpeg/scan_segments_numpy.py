"""Cut the entropy-coded data of a JPEG into segments without the C kernel, byte for byte as it does.

Source: ITU-T T.81 (JPEG): decoding F.2, encoding F.1.2, the making of Huffman codes K.2 and K.3.
When not to use it: where the kernel is, which also takes progressive files and is some fifty times as fast.
"""

import re
import struct
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from flambeau.data.images.jpeg.headers import (
    INDEX_MARKER,
    INDEX_NAME,
    Jpeg,
    JpegError,
    put_marker,
    read_markers,
)

Ints = NDArray[np.int64]

_ENTRIES_A_PART = 32_000  # 64,000 of the 65,533 bytes that a marker segment can hold
_MAX_PARTS = 64


class _Code(NamedTuple):
    """A Huffman code: number of codes of each length, symbols in their order; code and length by symbol."""

    counts: bytes
    symbols: bytes
    codes: Ints
    lengths: Ints


def transcode(data: bytes, *, interval_px: int) -> bytes:
    """The JPEG with restart markers about `interval_px` apart, and an index of the segments between them.

    Args:
        data: a JPEG as `read_markers` takes it.
        interval_px: pixels, at least 1.

    Raises:
        JpegError: not such a JPEG, or damaged.
    """
    jpeg = read_markers(data)
    blocks = _decode(data, jpeg)
    interval = choose_interval(jpeg, interval_px)
    per_mcu = sum(c.h * c.v for c in jpeg.components)
    segment_of = np.arange(len(blocks)) // (per_mcu * interval)
    of_block = np.repeat(np.arange(len(jpeg.components)), [c.h * c.v for c in jpeg.components])
    component = np.tile(of_block, len(blocks) // per_mcu)
    owner, table, symbols, extra, sizes = _tokens(blocks, component, segment_of)
    codes = [_make_code(np.bincount(symbols[table == k], minlength=256)) for k in range(4)]
    segments = _pack(segment_of[owner], table, symbols, extra, sizes, codes)
    return _assemble(jpeg, segments, interval, codes)


def choose_interval(jpeg: Jpeg, interval_px: int) -> int:
    """MCUs in a segment: a divisor of the row where one is near, so that segments do not wrap."""
    columns, wide = jpeg.mcus[1], jpeg.mcu[1]
    target = max(1, (interval_px + wide // 2) // wide)
    if target >= columns:
        return columns
    near = [d for d in range((target + 1) // 2, min(2 * target, columns) + 1) if not columns % d]
    return min(near, key=lambda d: (max(d, target) / min(d, target), d), default=target)


def _decode(data: bytes, jpeg: Jpeg) -> Ints:
    """(N, 64) coefficients in zigzag order, of the blocks in the order of the scan."""
    rows, columns = jpeg.mcus
    order = [k for k, c in enumerate(jpeg.components) for _ in range(c.h * c.v)]
    per_segment = jpeg.restart_interval or rows * columns
    blocks = np.zeros((rows * columns * len(order), 64), np.int64)
    known = jpeg.huffman()
    tables = [(_lookup(known, (0, c.dc)), _lookup(known, (1, c.ac))) for c in jpeg.components]
    left, at = rows * columns, jpeg.scan
    marker = re.compile(rb"\xff[^\0]", re.DOTALL)
    for number in range(-(-left // per_segment)):
        found = marker.search(data, at)
        if found is None:
            raise JpegError("its data ends too soon")
        last = left <= per_segment
        if found[0][1] != (0xD9 if last else 0xD0 + number % 8):
            raise JpegError("its data is damaged")
        begin = len(blocks) - left * len(order)
        part = blocks[begin : begin + min(left, per_segment) * len(order)]
        _decode_segment(data[at : found.start()].replace(b"\xff\0", b"\xff"), tables, order, part)
        left, at = left - per_segment, found.end()
    return blocks


def _lookup(known: dict[tuple[int, int], tuple[bytes, bytes]], name: tuple[int, int]) -> list[int]:
    """By the next 16 bits: symbol << 8 | length of its code; -1 where no code begins so."""
    if name not in known or not known[name][1]:
        raise JpegError("a Huffman table is missing")
    counts, symbols = known[name]
    lengths = np.repeat(np.arange(1, 17), list(counts))
    widths = 1 << (16 - lengths)
    if widths.sum() > 1 << 16:
        raise JpegError("a Huffman table is damaged")
    table = np.full(1 << 16, -1)
    table[: widths.sum()] = np.repeat(np.array(list(symbols)) * 256 + lengths, widths)
    return table.tolist()


def _decode_segment(
    data: bytes, tables: list[tuple[list[int], list[int]]], order: list[int], out: Ints
) -> None:
    # 40 bits from each byte on: a code of 16, a value of 11, and where in the byte it begins.
    padded = np.frombuffer(data + bytes(300), np.uint8).astype(np.int64)
    count = len(padded) - 4
    parts = [padded[k : count + k] << (8 * (4 - k)) for k in range(5)]
    windows = np.sum(parts, axis=0).tolist()
    predictors = [0] * len(tables)
    at, end = 0, 8 * len(data)
    for first in range(0, len(out), len(order)):
        for k, component in enumerate(order):
            found, at = _decode_block(windows, at, *tables[component])
            if at > end:
                raise JpegError("its data ends too soon")
            predictors[component] = found[0] = found[0] + predictors[component]
            for position, value in found.items():
                out[first + k, position] = value
    if end - at >= 8:
        raise JpegError("its data is damaged")


def _decode_block(
    windows: list[int], at: int, dc: list[int], ac: list[int]
) -> tuple[dict[int, int], int]:
    """Coefficients that are not zero, by zigzag position, the first one a difference; and the next bit."""
    found, k, table, limit = {0: 0}, 0, dc, 11
    while k < 64:
        bits = windows[at >> 3] << (at & 7) & 0xFF_FFFF_FFFF
        entry = table[bits >> 24]
        size = entry >> 8 & 15
        k += entry >> 12
        if entry < 0 or (size and k > 63) or size > limit or (table is dc and entry >> 8 > limit):
            raise JpegError("its data is damaged")
        length = entry & 255
        if size:
            value = bits >> (40 - length - size) & ((1 << size) - 1)
            found[k] = value if value >> (size - 1) else value - (1 << size) + 1
        elif table is ac and entry >> 12 < 15:
            return found, at + length
        at += length + size
        k, table, limit = k + 1, ac, 10
    return found, at


def _tokens(blocks: Ints, component: Ints, segment: Ints) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """What is to be written, in order: block, table (see `_assemble`), symbol, bits behind it, how many."""
    differences = np.empty(len(blocks), np.int64)
    for k in range(int(component.max()) + 1):
        mine = component == k
        dc, where = blocks[mine, 0], segment[mine]
        before = np.concatenate([[0], dc[:-1]])
        before[np.concatenate([[True], where[1:] != where[:-1]])] = 0
        differences[mine] = dc - before
    block, position = np.nonzero(blocks[:, 1:])
    value, position = blocks[block, position + 1], position + 1
    before = np.concatenate([[0], position[:-1]])
    before[np.concatenate([[True], block[1:] != block[:-1]])[: len(block)]] = 0
    run = position - before[: len(block)] - 1
    sizes = np.concatenate([_size(differences), _size(value)])
    if (sizes[: len(blocks)] > 11).any() or (sizes[len(blocks) :] > 10).any():
        raise JpegError("its coefficients are beyond what a baseline JPEG can hold")
    long = np.repeat(np.arange(len(block)), run >> 4)  # a run of 16 zeros is a symbol of its own
    open_end = np.flatnonzero(blocks[:, 63] == 0)
    every = np.arange(len(blocks))
    owner = np.concatenate([every, block, block[long], open_end])
    # Within a block: DC, then each run of 16 zeros before its value, the end of the block last.
    place = np.concatenate(
        [0 * every, 2 * position + 1, 2 * position[long], np.full(len(open_end), 255)]
    )
    symbol = np.concatenate(
        [
            sizes[: len(blocks)],
            (run & 15) << 4 | sizes[len(blocks) :],
            np.full(len(long), 0xF0),
            np.zeros(len(open_end), np.int64),
        ]
    )
    nothing = np.zeros(len(long) + len(open_end), np.int64)
    extra = np.concatenate([differences, value])
    extra = np.where(extra < 0, extra + (1 << sizes) - 1, extra)
    order = np.argsort(256 * owner + place, kind="stable")
    is_ac = np.arange(len(owner)) >= len(blocks)
    table = 2 * (component[owner] > 0) + is_ac
    whole = [np.concatenate([part, nothing]) for part in (extra, sizes)]
    return owner[order], table[order], symbol[order], whole[0][order], whole[1][order]


def _size(values: Ints) -> Ints:
    """Bits of the magnitude; exact: a float has more of them."""
    return np.frexp(np.abs(values).astype(np.float64))[1].astype(np.int64)


def _make_code(frequencies: Ints) -> _Code:
    """The shortest code of at most 16 bits; no code of ones only, which T.81 forbids."""
    weights = [*frequencies.tolist(), 1]
    groups = {k: [k] for k, weight in enumerate(weights) if weight}
    depth = [0] * 257
    while len(groups) > 1:
        a, b = sorted(groups, key=lambda k: (weights[k], -k))[:2]
        for k in groups[a] + groups[b]:
            depth[k] += 1
        weights[a] += weights[b]
        groups[a] += groups.pop(b)
    counts = np.bincount(depth, minlength=258)
    for k in range(257, 16, -1):
        while counts[k]:
            shorter = k - 2
            while not counts[shorter]:
                shorter -= 1
            # In turn, not at once: two of the places may be the same.
            for place, change in ((k, -2), (k - 1, 1), (shorter + 1, 2), (shorter, -1)):
                counts[place] += change
    counts[max(np.flatnonzero(counts[:17]))] -= 1
    symbols = [k for k in sorted(range(256), key=lambda k: depth[k]) if depth[k]]
    codes, lengths, code, at = np.zeros(256, np.int64), np.zeros(256, np.int64), 0, 0
    for length in range(1, 17):
        for symbol in symbols[at : at + counts[length]]:
            codes[symbol], lengths[symbol] = code, length
            code += 1
        at += counts[length]
        code <<= 1
    return _Code(bytes(counts[1:17].tolist()), bytes(symbols), codes, lengths)


def _pack(
    segment: Ints, table: Ints, symbols: Ints, extra: Ints, sizes: Ints, codes: list[_Code]
) -> list[bytes]:
    """The bits of each segment as bytes, filled up with ones, a zero behind each 0xFF."""
    code = np.stack([c.codes for c in codes])[table, symbols] << sizes | extra
    bits = np.stack([c.lengths for c in codes])[table, symbols] + sizes
    per_segment = np.bincount(segment, weights=bits).astype(np.int64)
    sizes_bytes = -(-per_segment // 8)
    begins = np.concatenate([[0], np.cumsum(sizes_bytes)])
    before = np.concatenate([[0], np.cumsum(bits)[:-1]])
    first = np.searchsorted(segment, np.arange(len(per_segment)))
    start = before - before[first][segment] + 8 * begins[segment]
    stream = np.ones(8 * begins[-1], np.uint8)
    for k in range(int(bits.max())):  # the k-th bit from the right of all that are as long
        long = bits > k
        stream[(start + bits - 1 - k)[long]] = code[long] >> k & 1
    packed = np.packbits(stream).tobytes()
    return [
        packed[begin:end].replace(b"\xff", b"\xff\0")
        for begin, end in zip(begins[:-1].tolist(), begins[1:].tolist(), strict=True)
    ]


def _assemble(jpeg: Jpeg, segments: list[bytes], interval: int, codes: list[_Code]) -> bytes:
    parts = -(-len(segments) // _ENTRIES_A_PART)
    if max(map(len, segments)) > 0xFFFF or parts > _MAX_PARTS:
        raise JpegError("its segments would be too large or too many for the index")
    out = [b"\xff\xd8"]
    for marker, body in jpeg.segments[:-1]:
        ours = marker == INDEX_MARKER and body.startswith(INDEX_NAME[:-1])
        # MPF (several images in one file) holds offsets into the rest of the file, which is left out.
        if not (ours or marker in (0xC4, 0xDD) or (marker == 0xE2 and body.startswith(b"MPF\0"))):
            out.append(put_marker(marker, body))
    named = list(zip((0x00, 0x10, 0x01, 0x11), codes, strict=True))
    used = named if len(jpeg.components) > 1 else named[:2]
    out.append(put_marker(0xC4, b"".join(bytes([n]) + c.counts + c.symbols for n, c in used)))
    out.append(put_marker(0xDD, struct.pack(">H", interval)))
    for part in range(parts):
        chosen = segments[part * _ENTRIES_A_PART : (part + 1) * _ENTRIES_A_PART]
        lengths = np.array([len(segment) for segment in chosen], ">u2").tobytes()
        out.append(put_marker(INDEX_MARKER, INDEX_NAME + bytes([part, parts]) + lengths))
    tables = b"".join(bytes([c.id, 0x11 if k else 0]) for k, c in enumerate(jpeg.components))
    out.append(put_marker(0xDA, bytes([len(jpeg.components)]) + tables + b"\0\x3f\0"))
    for number, segment in enumerate(segments):
        out += [segment, bytes([0xFF, 0xD0 + number % 8])]
    out[-1] = b"\xff\xd9"
    return b"".join(out)
