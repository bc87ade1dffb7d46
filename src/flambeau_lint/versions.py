"""Versions of the libraries: which one a file is read for."""

import re
from collections.abc import Mapping
from importlib import metadata

NEWEST: Mapping[str, str] = {
    "torch": "2.15",
    "torchvision": "0.29",
    "timm": "1.0",
    "lightning": "2.6",
    "apex": "0.2",
    "tensorflow": "2.21",
    "mxnet": "1.9",
    "numpy": "2.4",
    "torchaudio": "2.9",
    "torchtext": "0.18",
}
"""The newest version of each library that the rules know."""

# The first torch 1.x and the torchvision of the same day; later pairs go up one by one.
_FIRST_PAIR = {"torch": (1, 7), "torchvision": (0, 8)}


def parts_of(version: str) -> tuple[int, ...]:
    """'2.15.0+cu132' as (2, 15, 0); a version that is no number is empty."""
    numbers = re.match(r"\d+(\.\d+)*", version)
    return tuple(int(part) for part in numbers[0].split(".")) if numbers else ()


def is_before(version: str, other: str) -> bool:
    """Whether one version is older; 2.6 and 2.6.0 are the same."""
    left, right = parts_of(version), parts_of(other)
    length = max(len(left), len(right))
    return left + (0,) * (length - len(left)) < right + (0,) * (length - len(right))


def installed_versions() -> dict[str, str]:
    """Of each library, what is installed here, else the newest that the rules know; nothing is imported."""
    found = dict(NEWEST)
    for name in NEWEST:
        for distribution in (name, "pytorch-lightning" if name == "lightning" else name):
            try:
                found[name] = metadata.version(distribution)
                break
            except metadata.PackageNotFoundError:
                continue
    return found


def versions_for(target: str) -> dict[str, str]:
    """The libraries that belong to a version of torch."""
    found = dict(NEWEST, torch=target)
    for name in ("torchvision", "torchtext"):
        found[name] = _zero_version_of(target, NEWEST[name])
    if is_before(target, NEWEST["torchaudio"]):
        found["torchaudio"] = _torchaudio_of(target)
    return found


def _zero_version_of(torch: str, newest: str) -> str:
    """torchvision and torchtext 0.8 came with torch 1.7, both 0.15 with torch 2.0."""
    major, minor = (*parts_of(torch), 0, 0)[:2]
    if major == 1:
        paired = minor - _FIRST_PAIR["torch"][1] + _FIRST_PAIR["torchvision"][1]
        return f"0.{max(paired, 1)}"
    return f"0.{min(15 + minor, parts_of(newest)[1])}"


def _torchaudio_of(torch: str) -> str:
    """torchaudio 0.7 came with torch 1.7; since 2.0 both have the same number."""
    major, minor = (*parts_of(torch), 0, 0)[:2]
    return torch if major > 1 else f"0.{minor}"
