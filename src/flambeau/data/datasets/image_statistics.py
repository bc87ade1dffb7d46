"""Mean, standard deviation and sizes of the images of a source, from some of them."""

import contextlib
import dataclasses
import statistics
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from PIL import Image

from flambeau.data.sources.source import Source, image_blocks, pixel_kind
from flambeau.data.sources.store_files import read_alone
from flambeau.data.sources.wide_source import COLORS, of_kind
from flambeau.errors import DecodeError, InputError
from flambeau.images.decode import Picture, Stored, decode
from flambeau.images.stand_ins import why_unreadable
from flambeau.images.thread_pool import DecodePool

_LEAST_STD = 0.0039  # one grey level of 255, for images of a single flat color

# A JPEG may be decoded down to this size for its mean: four times faster for most photos.
_STATISTICS_SIDE = 128

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Probe:
    """From some of a source's images: the (height, width) of all, if one; whether all lack color."""

    median_shorter_side: int
    same_size: tuple[int, int] | None
    grey: bool


def probe(source: Source, *, limit: int = 64) -> Probe:
    """Read the headers of some images, evenly spaced over the source; bad ones are skipped."""
    facts = _sampled(source, limit, _size_and_grey)
    sizes = [size for size, _ in facts]
    return Probe(
        median_shorter_side=round(statistics.median(map(min, sizes))),
        same_size=sizes[0] if len(set(sizes)) == 1 else None,
        grey=all(grey for _, grey in facts),
    )


def _size_and_grey(data: Stored) -> tuple[tuple[int, int], bool]:
    picture = Picture(data)
    return (picture.height, picture.width), picture.grey


def several_pages(*sources: Source, limit: int = 64) -> tuple[int, int]:
    """How many images are TIFF files of several pages, of how many."""
    found: list[bool] = []
    for source in sources:
        with contextlib.suppress(InputError):  # none can be read, which is reported elsewhere
            found += _sampled(
                of_kind(source, "uint8"), limit, lambda data: Picture(data).has_more_pages
            )
    return sum(found), len(found)


def page_remarks(*sources: Source, channels: int | None = None) -> list[str]:
    """A line if images are TIFF files of several pages.

    None if the model's `channels` are no color: pages may be these.
    """
    if channels not in (None, *COLORS):
        return []
    count, looked_at = several_pages(*sources)
    if not count:
        return []
    return [
        f"{count} of {looked_at} images looked at have several pages, as stacks and the channels of an "
        "OME-TIFF; only the first page of each is read"
    ]


def mean_std(
    source: Source, *, channels: int, limit: int = 1000
) -> tuple[list[float], list[float]]:
    """Mean and standard deviation of each channel, over evenly spaced images.

    Images weigh the same, whatever their size; bad ones are skipped. Numbers in [0, 1] with 4 digits, or of
    floating-point pixels in their unit with 6; the deviation is at least 0.0039, or a millionth of the
    largest mean, to divide by it.
    """
    levels = np.arange(256)
    is_float = pixel_kind(source) != "uint8"

    def moments(data: Stored) -> tuple[Any, Any]:
        pixels = decode(data, channels=channels, min_side=_STATISTICS_SIDE)
        if is_float != (pixels.dtype != np.uint8):
            raise DecodeError("pixels of another type than its source has by `pixel_kind`")
        if is_float:
            wide = pixels.astype(np.float64)
            return wide.mean((0, 1)), (wide**2).mean((0, 1))
        if channels not in COLORS:
            wide = pixels.astype(np.float64) / 255
            return wide.mean((0, 1)), (wide**2).mean((0, 1))
        # Twenty times faster than sums over the pixels.
        histogram = Image.fromarray(pixels.squeeze(2) if channels == 1 else pixels).histogram()
        counts = np.reshape(histogram, (channels, 256))
        area = pixels.size // channels
        return counts @ levels / (255 * area), counts @ levels**2 / (255**2 * area)

    mean, square = np.mean(_sampled(source, limit, moments), axis=0)
    if is_float:
        least = max(1e-12, 1e-6 * float(abs(mean).max()))
        std = np.sqrt(np.maximum(square - mean * mean, least**2))
        return [float(f"{n:.6g}") for n in mean], [float(f"{n:.6g}") for n in std]
    std = np.sqrt(np.maximum(square - mean * mean, _LEAST_STD**2))
    return mean.round(4).tolist(), std.round(4).tolist()


def _sampled(source: Source, limit: int, measure: Callable[[Stored], T]) -> list[T]:
    """Measurements of some images, evenly spaced over the source; bad ones are skipped."""
    count = min(len(source), limit)
    indices = [number * len(source) // count for number in range(count)]
    results: dict[int, T] = {}
    problems: dict[int, str] = {}

    blocks = image_blocks(source)
    is_sparse = blocks is not None and len(blocks) >= count

    def work(number: int) -> None:
        try:
            with read_alone() if is_sparse else contextlib.nullcontext():
                data = source.read(indices[number])
            results[number] = measure(data)
        except OSError as error:
            problems[number] = why_unreadable(error)
        except DecodeError as error:
            problems[number] = str(error)

    DecodePool().each(count, work)
    if not results:
        raise InputError(
            f"no image can be read; the first one is {source.describe(indices[0])}: {problems[0]}"
        )
    return [results[number] for number in sorted(results)]
