"""Small grey pictures as vectors by which crops and mirror images can be compared.

A picture is described by its lowest frequencies, those of a cosine transform (DCT-II), each multiplied by
its frequency: in photographs the amplitude falls with the frequency (Field 1987, "Relations between the
statistics of natural images and the response properties of cortical cells"), so all then count alike.
For a part of a picture the matrix product uses other rows, for a mirror image other signs: no picture is
resampled.

Legend: N pictures, S rows and columns, K frequencies per axis, Q queries.
"""

import functools
import math

import torch
from torch import Tensor

from flambeau.data.check.image_facts import SIDE, STEPS

MOST_CUT = 12
"""At each side, in steps: 19 %."""

COARSE, FINE = 8, 12
"""Frequencies per axis, to find candidates and to judge them; see bench/near_duplicates.py."""


@functools.cache
def cut_rows(num_frequencies: int) -> Tensor:
    """(MOST_CUT + 1, MOST_CUT + 1, K, S): by the cuts at both ends of an axis, a matrix to frequencies."""
    steps = torch.arange(MOST_CUT + 1)
    low = steps[:, None, None] / STEPS
    high = 1 - steps[None, :, None] / STEPS
    cells = torch.arange(SIDE) + 0.5
    at = (low + cells / SIDE * (high - low)) * SIDE - 0.5  # position of each cell of the part
    left = at.floor().clamp(0, SIDE - 2)
    share = (at - left).clamp(0, 1)[..., None]
    sampled = torch.nn.functional.one_hot(left.long(), SIDE) * (1 - share)
    sampled = sampled + torch.nn.functional.one_hot(left.long() + 1, SIDE) * share
    waves = torch.cos(math.pi / SIDE * torch.arange(num_frequencies)[:, None] * cells)
    waves *= math.sqrt(2 / SIDE)
    waves[0] /= math.sqrt(2)
    rows: Tensor = waves @ sampled
    return rows


@functools.cache
def frequencies(num_frequencies: int) -> Tensor:
    """(K, K), the length of each wave vector; that of the mean is 0."""
    axis = torch.arange(num_frequencies, dtype=torch.float32)
    lengths: Tensor = torch.hypot(axis[:, None], axis)
    return lengths


def unit(spectra: Tensor) -> Tensor:
    """(..., K, K) of norm 1, flat: (..., K * K)."""
    flat = spectra.flatten(-2)
    scaled: Tensor = flat / flat.norm(dim=-1, keepdim=True).clamp(min=1e-6)
    return scaled


def mirrored(spectra: Tensor) -> Tensor:
    """The spectra of the mirror images: every second frequency along the rows changes its sign."""
    signs = 1 - 2 * (torch.arange(spectra.shape[-1], device=spectra.device) % 2)
    return spectra * signs


# The whole, and nine parts with 94 % of each side: a crop to 90 % of a side or more resembles one of them.
_CUT = 4
_ENDS = ((0, 0), (_CUT, 0), (_CUT // 2, _CUT // 2), (0, _CUT))
PARTS = ((0, 0, 0, 0), *((*rows, *columns) for rows in _ENDS[1:] for columns in _ENDS[1:]))
NUM_QUERIES = 2 * len(PARTS)


def part_spectra(pictures_NSS: Tensor) -> Tensor:
    """(N, NUM_QUERIES, K, K): spectra of each of PARTS and of its mirror image."""
    rows = torch.stack([cut_rows(COARSE)[ends] for ends in _ENDS])  # (4, K, S)
    flat = rows.flatten(0, 1)
    both = (flat @ pictures_NSS @ flat.T).unflatten(1, (4, COARSE)).unflatten(3, (4, COARSE))
    grid = both.permute(0, 1, 3, 2, 4)  # (N, 4, 4, K, K)
    parts = torch.cat([grid[:, :1, 0], grid[:, 1:, 1:].flatten(1, 2)], 1)
    return torch.stack([parts, mirrored(parts)], 2).flatten(1, 2)


def whole_spectra(pictures_NSS: Tensor, num_frequencies: int) -> Tensor:
    """(N, K, K)."""
    rows = cut_rows(num_frequencies)[0, 0]
    spectra: Tensor = rows @ pictures_NSS @ rows.T
    return spectra


def structure(pictures_NSS: Tensor) -> Tensor:
    """(N,) gray levels: root mean square of what varies faster than three half waves per side."""
    spectra = whole_spectra(pictures_NSS, FINE) * (frequencies(FINE) >= 3)
    levels: Tensor = spectra.flatten(1).norm(dim=1) / SIDE
    return levels


def aligned(
    pictures_NSS: Tensor, others_NSS: Tensor, cuts_N4: Tensor, is_mirrored_N: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """How similar a part of each picture and another picture (grey levels, float32) are at best.

    Returns (N,) cosine of the two; (N, 4) the part; and (N, 2) differences of mean gray levels and of log
    contrast.
    """
    table = cut_rows(FINE)
    weights = frequencies(FINE)
    plain = whole_spectra(others_NSS, FINE)
    other = torch.where(is_mirrored_N[:, None, None], mirrored(plain), plain)
    wanted = (other * weights).flatten(1)
    wanted_norm = wanted.norm(dim=1).clamp(min=1e-6)
    cuts = cuts_N4.clone()
    best = torch.full((len(cuts),), -2.0)
    norm = torch.ones(len(cuts))
    mean = torch.zeros(len(cuts))
    for step in (2, 1, 1):
        for axis in (0, 2):
            across = 2 - axis
            fixed = table[cuts[:, across], cuts[:, across + 1]]
            half = pictures_NSS @ fixed.mT if axis == 0 else fixed @ pictures_NSS
            start = cuts[:, axis : axis + 2].clone()
            for first in (0, -step, step):
                for last in (0, -step, step):
                    ends = (start + torch.tensor((first, last))).clamp(0, MOST_CUT)
                    rows = table[ends[:, 0], ends[:, 1]]
                    spectra = rows @ half if axis == 0 else half @ rows.mT
                    flat = (spectra * weights).flatten(1)
                    length = flat.norm(dim=1).clamp(min=1e-6)
                    score = (flat * wanted).sum(1) / (length * wanted_norm)
                    better = score > best
                    best = torch.where(better, score, best)
                    norm = torch.where(better, length, norm)
                    mean = torch.where(better, spectra[:, 0, 0], mean)
                    cuts[:, axis : axis + 2] = torch.where(
                        better[:, None], ends, cuts[:, axis : axis + 2]
                    )
    means = (mean - other[:, 0, 0]).abs() / SIDE
    contrasts = (norm / wanted_norm).log().abs()
    return best, cuts, torch.stack([means, contrasts], 1)
