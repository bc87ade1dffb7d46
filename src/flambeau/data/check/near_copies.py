"""Images that show the same picture: resized, recompressed, cropped to 90 % of its sides, or mirrored.

Each image, whole, in nine parts, and mirrored, is searched in its k-means cell and the nearest others (an
inverted file: Sivic and Zisserman 2003, "Video Google", section 4); similar candidates are aligned and judged
at a higher resolution. For 1.2 million images the arrays take 4 kB per image at the peak
(bench/check_scale.py). Not for pictures that were rotated, recolored, or cropped further.
"""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flambeau.data.check.image_facts import STEPS
from flambeau.data.check.small_pictures import (
    COARSE,
    NUM_QUERIES,
    PARTS,
    aligned,
    frequencies,
    part_spectra,
    structure,
    unit,
    whole_spectra,
)

# All numbers here were chosen on photographs; bench/near_duplicates.py measures their effect.
_CANDIDATE = 0.75  # cosine of coarse spectra
_SAME = 0.96  # cosine of aligned spectra
_IDENTICAL = 0.995  # the same, enough for a copy even among many images that are nearly alike
_MEAN, _CONTRAST, _CHROMA = 16.0, 0.2, 14.0  # differences; compressing and resizing keep them small
_STRUCTURE = 2.0  # gray levels; a clear sky has less, and resembles every other

# If all images look alike (clothes on black), a copy is still much nearer than the fourth nearest.
_REFERENCE, _NEARER = 3, 0.3
_KEPT = 8  # candidates per image

_CELL_FREQUENCIES = 6
_PER_CELL = 256  # images
_PROBED = 8  # cells in which each part is searched; 4 find 99.8 % of what 8 find
_BLOCK = 8192  # images that are searched at once
_ROWS = 1024  # of a matrix product, which then stays in the cache


class NearPair(NamedTuple):
    """Two images of the same picture.

    Attributes:
        first, second: `second` shows all or a part of `first`.
        cuts: what it does not show at the top, bottom, left and right, in 1/STEPS.
    """

    first: int
    second: int
    is_mirrored: bool
    cuts: tuple[int, int, int, int]
    likeness: float

    @property
    def cut(self) -> float:
        """The share of the first that the second does not show, 0 to 1."""
        top, bottom, left, right = self.cuts
        return 1 - (1 - (top + bottom) / STEPS) * (1 - (left + right) / STEPS)


class _Candidates(NamedTuple):
    query: Tensor
    match: Tensor
    score: Tensor
    part: Tensor  # of NUM_QUERIES


def near_pairs(
    small: NDArray[np.uint8],
    chroma: NDArray[np.float32],
    *,
    advance: Callable[[int], object] = lambda _: None,
) -> list[NearPair]:
    """The pairs of images of one picture, each once.

    `small`: (N, SIDE, SIDE) grey; images that hardly vary are not compared.
    """
    pictures = torch.from_numpy(small)
    blocks = range(0, len(pictures), _BLOCK)
    varies = torch.cat(
        [torch.zeros(0), *(structure(pictures[at : at + _BLOCK].float()) for at in blocks)]
    )
    numbers = (varies >= _STRUCTURE).nonzero()[:, 0]
    advance(len(pictures) - len(numbers))
    if len(numbers) < 2:
        return []
    index = _Index(pictures, numbers)
    colors = torch.from_numpy(chroma)
    reference = torch.full((len(pictures),), 0.5)
    kept: list[tuple[Tensor, ...]] = []
    for queries in numbers.split(_BLOCK):
        candidates = index.search(queries)
        parts = zip(*(column.split(_BLOCK) for column in candidates), strict=True)
        judged = [_judged(pictures, colors, _Candidates(*part)) for part in parts]
        if judged:
            is_same, *columns = (torch.cat(column) for column in zip(*judged, strict=True))
            _note_reference(reference, candidates.query, columns[-1])
            kept.append(tuple(column[is_same] for column in columns))
        advance(len(queries))
    return _each_once(kept, reference)


def _judged(pictures: Tensor, colors: Tensor, pairs: _Candidates) -> tuple[Tensor, ...]:
    """Whether each pair shows the same picture, and the columns of NearPair."""
    is_mirrored = pairs.part % 2 == 1
    score, cuts, differences = aligned(
        pictures[pairs.query].float(),
        pictures[pairs.match].float(),
        torch.tensor(PARTS)[pairs.part // 2],
        is_mirrored,
    )
    hue = (colors[pairs.query] - colors[pairs.match]).abs().amax(1)
    is_same = (score >= _SAME) & (differences[:, 0] <= _MEAN)
    is_same &= (differences[:, 1] <= _CONTRAST) & (hue <= _CHROMA)
    return is_same, pairs.query, pairs.match, is_mirrored, cuts, score


def _note_reference(reference: Tensor, query: Tensor, score: Tensor) -> None:
    """Store the score of each image's fourth nearest; images with fewer candidates keep the default."""
    by_score = score.argsort(descending=True)
    order = by_score[query[by_score].argsort(stable=True)]
    sorted_query = query[order]
    first = torch.searchsorted(sorted_query, sorted_query)
    is_fourth = torch.arange(len(order)) - first == _REFERENCE
    reference[sorted_query[is_fourth]] = score[order][is_fourth]


def _each_once(kept: list[tuple[Tensor, ...]], reference: Tensor) -> list[NearPair]:
    best: dict[tuple[int, int], NearPair] = {}
    for query, match, is_mirrored, cuts, score in kept:
        distance = 1 - torch.maximum(reference[query], reference[match])
        stands_out = ((1 - score) <= _NEARER * distance) | (score >= _IDENTICAL)
        columns = (query, match, is_mirrored, cuts, score.clamp(max=1))
        for row in zip(*(column[stands_out].tolist() for column in columns), strict=True):
            first, second, mirrored, parts, likeness = row
            pair = NearPair(first, second, mirrored, tuple(parts), likeness)
            key = (min(pair[:2]), max(pair[:2]))
            if key not in best or pair.likeness > best[key].likeness:
                best[key] = pair
    return [best[key] for key in sorted(best)]


class _Index:
    """Coarse spectra of pictures (N, SIDE, SIDE) uint8 that can be matched, by k-means cells."""

    def __init__(self, pictures: Tensor, numbers: Tensor) -> None:
        self._pictures = pictures
        parts = [whole_spectra(pictures[part].float(), COARSE) for part in numbers.split(_BLOCK)]
        self._spectra = torch.cat([unit(part * frequencies(COARSE)) for part in parts])
        keys = torch.cat([self._keys(part) for part in parts])
        self._centers = _cell_centers(keys, max(1, len(numbers) // _PER_CELL))
        cells = torch.cat([(part @ self._centers.T).argmax(1) for part in keys.split(_BLOCK)])
        order = cells.argsort(stable=True)
        self._numbers, self._spectra = numbers[order], self._spectra[order]
        self._ends = torch.bincount(cells, minlength=len(self._centers)).cumsum(0).tolist()

    @staticmethod
    def _keys(spectra: Tensor) -> Tensor:
        """The vectors that are clustered: fewer frequencies, the low ones with more weight."""
        low = spectra[..., :_CELL_FREQUENCIES, :_CELL_FREQUENCIES]
        return unit(low * frequencies(_CELL_FREQUENCIES).sqrt())

    def search(self, queries: Tensor) -> _Candidates:
        """The _KEPT most similar other images of each query."""
        spectra = part_spectra(self._pictures[queries].float()).flatten(0, 1)
        vectors = unit(spectra * frequencies(COARSE))
        probed = min(_PROBED, len(self._centers))
        cells = (self._keys(spectra) @ self._centers.T).topk(probed, sorted=False).indices
        order = cells.flatten().argsort(stable=True)
        rows = order // probed
        ends = torch.bincount(cells.flatten(), minlength=len(self._centers)).cumsum(0).tolist()
        hits = []
        for cell, end in enumerate(self._ends):
            start, begin = (self._ends[cell - 1], ends[cell - 1]) if cell else (0, 0)
            searching = rows[begin : ends[cell]]
            for some in searching.split(_ROWS):
                scores = vectors[some] @ self._spectra[start:end].T
                is_near = scores.amax(1) > _CANDIDATE  # few are; topk takes several times as long
                top = scores[is_near].topk(min(_KEPT + 1, end - start), sorted=False)
                row, column = (top.values > _CANDIDATE).nonzero(as_tuple=True)
                members = start + top.indices[row, column]
                hits.append((some[is_near][row], members, top.values[row, column]))
        row, member, score = (torch.cat(column) for column in zip(*hits, strict=True))
        query = queries[row // NUM_QUERIES]
        match = self._numbers[member]
        others = query != match
        columns = (query, match, score, row % NUM_QUERIES)
        return _best_of_each(_Candidates(*(column[others] for column in columns)))


def _best_of_each(pairs: _Candidates) -> _Candidates:
    """Each pair once, with its highest score, and _KEPT pairs per query."""
    by_score = pairs.score.argsort(descending=True, stable=True)
    pairs = _Candidates(*(column[by_score] for column in pairs))
    key = pairs.query * (int(pairs.match.max()) + 1 if len(pairs.match) else 1) + pairs.match
    order = key.argsort(stable=True)
    is_first = torch.ones(len(order), dtype=torch.bool)
    is_first[1:] = key[order][1:] != key[order][:-1]
    chosen = order[is_first].sort().values  # by score again
    pairs = _Candidates(*(column[chosen] for column in pairs))
    order = pairs.query.argsort(stable=True)
    query = pairs.query[order]
    rank = torch.arange(len(order)) - torch.searchsorted(query, query)
    return _Candidates(*(column[order[rank < _KEPT]] for column in pairs))


def _cell_centers(keys: Tensor, count: int) -> Tensor:
    """Centers of spherical k-means on a fixed random sample."""
    draw = torch.Generator().manual_seed(0)
    sample = keys[torch.randperm(len(keys), generator=draw)[: 64 * count]]
    centers = sample[:count].clone()
    for _ in range(8):
        sums = torch.zeros_like(centers)
        for part in sample.split(_BLOCK):
            sums.index_add_(0, (part @ centers.T).argmax(1), part)
        is_used = sums.norm(dim=1, keepdim=True) > 1e-6
        unit_sums = sums / sums.norm(dim=1, keepdim=True).clamp(min=1e-6)
        centers = torch.where(is_used, unit_sums, centers)
    return centers
