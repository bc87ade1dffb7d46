"""Images that are wrong by themselves or unlike the rest: unreadable, blank, dark, bright, tiny, odd."""

import os
from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from flambeau.data.check.finding import Finding, of_single_images
from flambeau.data.check.image_facts import BLANK, BRIGHT, DARK, ImageFacts
from flambeau.images.file_formats import ENDINGS

# All chosen: images that should be looked at, not removed unseen.
_TINY_SIDE, _TINY_SHARE = 10, 8  # pixels of the shorter side; or an eighth of the median
_ODD_SHAPE = 3.0  # times as wide or high as the median shape, and three times as long as short
_FEW = 0.05  # grey or color is odd if fewer images have it


def single_image_findings(facts: ImageFacts, names: Sequence[str]) -> list[Finding]:
    return [
        *of_single_images(
            "unreadable",
            "cannot be read",
            "Training stops at the first of them.",
            "Repair or remove them; --skip-bad-images N of train leaves them out.",
            sorted(facts.problems.items()),
        ),
        *of_single_images(
            "blank",
            "of one color, or nearly one, which shows nothing",
            "There is nothing to learn in them but their label.",
            "Look at them; a failed download or export looks like this.",
            _blank(facts),
        ),
        *of_single_images(
            "exposure",
            "almost all black or all white",
            "They may be failed exposures, masks, or images that were scaled wrongly.",
            "Look at them.",
            _dark_or_bright(facts),
        ),
        *of_single_images(
            "tiny",
            "of a tiny size",
            "They are enlarged to the size of training, and are blurred then.",
            "Look at them: thumbnails and icons come with a download.",
            _tiny(facts),
        ),
        *of_single_images(
            "odd",
            "unlike the rest in shape or color",
            "A crop of the usual shape cuts off most of a long one; a few grey images among color ones, or "
            "the reverse, often are of another origin.",
            "Look at them.",
            _odd(facts),
        ),
        *of_single_images(
            "endings",
            "of another format than the ending of the name says",
            "flambeau decodes by content, other programs may not.",
            "Rename them if others read them, too.",
            _endings(facts, names),
        ),
    ]


def is_blank(facts: ImageFacts) -> NDArray[np.bool_]:
    """(N,) bool: one color, or nearly one."""
    blank: NDArray[np.bool_] = facts.is_read & (facts.spread < BLANK)
    return blank


def _blank(facts: ImageFacts) -> Iterator[tuple[int, str]]:
    for number in np.flatnonzero(is_blank(facts)).tolist():
        yield number, f"levels vary by {facts.spread[number]:.1f} of 255"


def _dark_or_bright(facts: ImageFacts) -> Iterator[tuple[int, str]]:
    shows = facts.is_read & ~is_blank(facts)
    for number in np.flatnonzero(shows & (facts.brightest < DARK)).tolist():
        yield number, f"dark: 99 % of the levels are at most {facts.brightest[number]} of 255"
    for number in np.flatnonzero(shows & (facts.darkest > BRIGHT)).tolist():
        yield number, f"bright: 99 % of the levels are at least {facts.darkest[number]} of 255"


def _tiny(facts: ImageFacts) -> Iterator[tuple[int, str]]:
    if not facts.is_read.any():
        return
    shorter = np.minimum(facts.width, facts.height)
    median = float(np.median(shorter[facts.is_read]))
    least = max(min(_TINY_SIDE, median), median / _TINY_SHARE)
    for number in np.flatnonzero(facts.is_read & (shorter < least)).tolist():
        yield number, f"{_size(facts, number)}; half of the images have {median:.0f} or more"


def _odd(facts: ImageFacts) -> Iterator[tuple[int, str]]:
    read = np.flatnonzero(facts.is_read)
    if not len(read):
        return
    shape = np.log(facts.width[read] / facts.height[read])
    far = np.abs(shape - np.median(shape)) > np.log(_ODD_SHAPE)
    is_long = np.abs(shape) > np.log(_ODD_SHAPE)
    for number in read[far & is_long].tolist():
        yield number, f"{_size(facts, number)}, a long strip"
    grey = facts.is_grey[read]
    for is_grey, what in ((True, "grey among color images"), (False, "color among grey images")):
        matches = grey == is_grey
        if 0 < matches.mean() < _FEW:
            for number in read[matches].tolist():
                yield number, what


def _endings(facts: ImageFacts, names: Sequence[str]) -> Iterator[tuple[int, str]]:
    known = {ending: name for name, endings in ENDINGS.items() for ending in endings}
    for number, form in enumerate(facts.formats.tolist()):
        ending = os.path.splitext(names[number])[1].lower()  # noqa: PTH122 - 4 times as fast
        if facts.width[number] and form and known.get(ending, form) != form:
            yield number, f"{form}, by its first bytes"


def _size(facts: ImageFacts, number: int) -> str:
    return f"{facts.width[number]} x {facts.height[number]} pixels"
