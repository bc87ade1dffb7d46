"""Facts of each image from one pass: size, brightness, hashes, and a small grey picture to compare."""

import hashlib
import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from flambeau.data.sources.source import PixelKind, Source, pixel_kind, stacked_channels
from flambeau.errors import DecodeError, InputError
from flambeau.images.channels import num_shown
from flambeau.images.decode import Picture, Stored
from flambeau.images.file_formats import format_of
from flambeau.images.pixels import Pixels
from flambeau.images.stand_ins import why_unreadable
from flambeau.images.thread_pool import DecodePool

SIDE = 32
"""Pixels of the small grey picture."""

STEPS = 64
"""A part of a picture is given by what is cut off at its top, bottom, left and right, in steps of 1/64 of the
side: half a cell of the small picture."""

# All chosen: images that should be looked at, not removed unseen.
BLANK = 3.0
"""Standard deviation, levels; JPEG noise on one color has less."""
DARK, BRIGHT = 40, 215
"""Levels that 99 % of the pixels do not reach."""

# A JPEG may be decoded down to this: the small picture is a mean over cells of at least 2 x 2 pixels.
_LEAST_SIDE = 2 * SIDE


@dataclass(frozen=True, eq=False)
class ImageFacts:
    """Facts of N images; zeros for those that cannot be read.

    Attributes:
        spread: (N,) float32, the channels' greatest standard deviation of levels 0 .. 255.
        darkest: (N,) uint8: 99 % of each channel's levels are at least this.
        brightest: (N,) uint8: 99 % are at most this.
        file_hash: (N,) uint64 of the bytes; 0 for data that are stored as pixels.
        pixel_hash: (N,) uint64 of size and decoded pixels.
        small: (N, SIDE, SIDE) uint8, the image in grey, stretched to a square.
        chroma: (N, 2) float32, mean Cb and Cr.
    """

    width: NDArray[np.int32]
    height: NDArray[np.int32]
    is_grey: NDArray[np.bool_]
    spread: NDArray[np.float32]
    darkest: NDArray[np.uint8]
    brightest: NDArray[np.uint8]
    file_hash: NDArray[np.uint64]
    pixel_hash: NDArray[np.uint64]
    small: NDArray[np.uint8]
    chroma: NDArray[np.float32]
    formats: NDArray[np.str_]
    problems: dict[int, str] = field(default_factory=dict)

    @property
    def is_read(self) -> NDArray[np.bool_]:
        return self.width > 0


def measure_images(
    source: Source, *, threads: int | None = None, advance: Callable[[], object] = lambda: None
) -> ImageFacts:
    """Read each image once, JPEGs at a small scale, and again in full what then looks like a copy."""
    kind = pixel_kind(source)
    stacked = stacked_channels(source)
    facts = empty_facts(len(source))

    def note(number: int, stored: Stored) -> None:
        record_facts(facts, number, stored, kind, stacked=stacked)

    everything = range(len(source))
    read_each(source, everything, note, facts.problems, threads=threads, advance=advance)
    _compare_in_full(source, facts, kind, threads)
    return facts


def _compare_in_full(
    source: Source, facts: ImageFacts, kind: PixelKind, threads: int | None
) -> None:
    """Hash all pixels of different files that agree at a small scale."""
    files: dict[int, set[int]] = defaultdict(set)
    seen = np.flatnonzero(facts.is_read).tolist()
    for number in seen:
        files[int(facts.pixel_hash[number])].add(int(facts.file_hash[number]))

    stacked = stacked_channels(source)

    def note(number: int, stored: Stored) -> None:
        if stacked is not None:  # hashed in full at once
            return
        pixels = np.ascontiguousarray(Picture(stored).pixels(channels=3))
        width = int(facts.width[number])
        facts.pixel_hash[number] = _pixel_hash(facts, number, width, pixels)

    alike = [number for number in seen if len(files[int(facts.pixel_hash[number])]) > 1]
    read_each(source, alike, note, facts.problems, threads=threads)


def empty_facts(count: int) -> ImageFacts:
    return ImageFacts(
        width=np.zeros(count, np.int32),
        height=np.zeros(count, np.int32),
        is_grey=np.zeros(count, np.bool_),
        spread=np.zeros(count, np.float32),
        darkest=np.zeros(count, np.uint8),
        brightest=np.zeros(count, np.uint8),
        file_hash=np.zeros(count, np.uint64),
        pixel_hash=np.zeros(count, np.uint64),
        small=np.zeros((count, SIDE, SIDE), np.uint8),
        chroma=np.zeros((count, 2), np.float32),
        formats=np.zeros(count, "U4"),
    )


def read_each(
    source: Source,
    numbers: Sequence[int],
    note: Callable[[int, Stored], object],
    problems: dict[int, str],
    *,
    threads: int | None = None,
    advance: Callable[[], object] = lambda: None,
    until: float = math.inf,
) -> None:
    """Read images on several threads, and record why one of them cannot be read.

    `note` gets an image's number and stored form, and may raise what is wrong with it.
    """

    def work(position: int) -> None:
        if time.monotonic() > until:
            return
        number = numbers[position]
        try:
            note(number, source.read(number))
        except OSError as error:
            problems[number] = why_unreadable(error)
        except DecodeError as error:
            problems[number] = str(error)
        except MemoryError:
            problems[number] = "the memory is too small for it"
        except InputError as error:
            problems[number] = "; ".join(str(error).splitlines())
        advance()

    DecodePool(threads).each(len(numbers), work)


def record_facts(
    facts: ImageFacts, number: int, stored: Stored, kind: PixelKind, *, stacked: int | None = None
) -> None:
    """Decode an image, a JPEG at a small scale, and fill in its facts.

    Args:
        stacked: its channels, if these are no color: those shown are its picture, all count for its hash.
    """
    if stacked is not None:
        record_facts(facts, number, shown_pixels(stored, stacked), kind)
        whole = np.ascontiguousarray(stored)
        facts.pixel_hash[number] = _pixel_hash(facts, number, int(facts.width[number]), whole)
        return
    if isinstance(stored, bytes):
        facts.file_hash[number] = content_hash(stored)
        facts.formats[number] = format_of(stored)
    picture = Picture(stored)
    is_grey = picture.grey  # before the pixels, whose decoding closes the image
    scale = picture.scale_eighths_for(picture.height, picture.width, least=_LEAST_SIDE)
    pixels = np.ascontiguousarray(picture.pixels(channels=3, scale_eighths=scale))
    facts.is_grey[number] = is_grey
    facts.height[number] = picture.height
    image = Image.fromarray(_of_8_bits(pixels, kind))
    _note_levels(facts, number, image)
    if scale < 8 and (
        facts.spread[number] < BLANK
        or facts.brightest[number] < DARK
        or facts.darkest[number] > BRIGHT
    ):
        _note_levels(facts, number, Image.fromarray(full_levels(stored, kind)))
    small = image.resize((SIDE, SIDE), Image.Resampling.BILINEAR).convert("YCbCr")
    parts = np.asarray(small)
    facts.small[number] = parts[:, :, 0]
    facts.chroma[number] = parts[:, :, 1:].mean((0, 1))
    facts.pixel_hash[number] = _pixel_hash(facts, number, picture.width, pixels)
    facts.width[number] = picture.width  # last: an image with a width counts as read


def shown_pixels(stored: Stored, stacked: int | None) -> Stored:
    """The shown channels of an image that is no color; any other as it is."""
    if stacked is None or isinstance(stored, bytes):
        return stored
    return np.ascontiguousarray(stored[:, :, : num_shown(stacked)])


def full_levels(stored: Stored, kind: PixelKind) -> NDArray[np.uint8]:
    """(H, W, 3) uint8, contiguous: all pixels of an image, upright."""
    pixels = np.ascontiguousarray(Picture(stored).pixels(channels=3))
    levels: NDArray[np.uint8] = _of_8_bits(pixels, kind)
    return levels


def _pixel_hash(facts: ImageFacts, number: int, width: int, pixels: Pixels) -> int:
    shape = f"{width} {facts.height[number]} {facts.is_grey[number]} "
    return content_hash(shape.encode(), pixels.data)


def _note_levels(facts: ImageFacts, number: int, image: Image.Image) -> None:
    """Fill in what the histogram of an RGB image says."""
    counts = np.reshape(image.histogram(), (3, 256))
    area = image.width * image.height
    levels = np.arange(256)
    mean = counts @ levels / area
    variance = counts @ levels**2 / area - mean**2
    facts.spread[number] = np.sqrt(max(variance.max(), 0))
    shares = counts.cumsum(1) / area
    facts.darkest[number] = (shares <= 0.01).sum(1).min()
    facts.brightest[number] = (shares < 0.99).sum(1).max()


def _of_8_bits(pixels: Pixels, kind: PixelKind) -> Pixels:
    """Levels 0 .. 255; floats beyond 0 .. 1 are scaled from their minimum to their maximum."""
    if pixels.dtype == np.uint8:
        return pixels
    low, high = (0.0, 1.0) if kind == "unit" else (float(pixels.min()), float(pixels.max()))
    if not np.isfinite(pixels).all():
        raise DecodeError("pixels that are NaN or infinite")
    scaled = (pixels - low) * (255 / max(high - low, 1e-30))
    levels: Pixels = scaled.clip(0, 255).round().astype(np.uint8)
    return levels


def content_hash(*parts: bytes | memoryview) -> int:
    """64 bits: two of 1.2 million different images collide with a probability of 4e-8."""
    digest = hashlib.blake2b(digest_size=8)
    for part in parts:
        digest.update(part)
    return int.from_bytes(digest.digest(), "little")
