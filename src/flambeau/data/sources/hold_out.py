"""The train/validation split of data that have none, by hashes of the images' names."""

import hashlib

import torch

from flambeau.data.sources.source import Source, SubsetSource
from flambeau.errors import InputError


def hold_out(source: Source, *, share: float, seed: int) -> tuple[Source, Source]:
    """Split a source into two, class by class, by the hashes of its images' names.

    Of a class of n images round(n * share) are held out, at least one; a single image is kept.
    The smallest hashes of a class are held out, and a hash depends on the seed and the image's name alone:
    adding or removing an image moves at most one other image of its class to the other part.

    Args:
        share: of each class, above 0 and below 1.

    Returns:
        The kept and the held-out images, each in the order of the source.
    """
    if not 0 < share < 1:
        raise ValueError(f"the share to hold out must be above 0 and below 1, got {share}")
    hashes = [
        hashlib.sha256(f"{seed}\n{name}".encode(errors="surrogateescape")).digest()
        for name in source.names
    ]
    members: dict[int, list[int]] = {}
    for index, label in enumerate(source.labels.tolist()):
        members.setdefault(label, []).append(index)
    held = torch.zeros(len(source), dtype=torch.bool)
    for of_class in members.values():
        if len(of_class) > 1:
            count = min(max(1, round(len(of_class) * share)), len(of_class) - 1)
            held[sorted(of_class, key=hashes.__getitem__)[:count]] = True
    if not held.any():
        raise InputError(
            f"no class has two images, so none can be held out to validate on (the first image is "
            f"{source.describe(0)})\nAdd images, or give a folder with train/ and val/"
        )
    return SubsetSource(source, (~held).nonzero()[:, 0]), SubsetSource(source, held.nonzero()[:, 0])
