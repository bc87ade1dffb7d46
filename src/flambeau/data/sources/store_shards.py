"""Labelled images in a shard that lies in a store; see `open_store`, which finds and opens shards."""

import functools
from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from flambeau.data.sources.left_out import LeftOut
from flambeau.data.sources.masks.masked_source import MaskedSource, Masks
from flambeau.data.sources.sample_blocks import group_blocks
from flambeau.data.sources.shard_index import MaskPart, ShardPart
from flambeau.data.sources.store_files import StoreFiles
from flambeau.data.sources.target_names import TaskName
from flambeau.data.sources.targets import TargetChoice
from flambeau.data.stores.address import beside
from flambeau.data.stores.block_cache import CacheOptions
from flambeau.images.decode import Stored


class StoreShard:
    """The samples of a shard in a store: those of the file on a local disk, to the fingerprint.

    Args:
        index_of: what the index came from, for messages.

    Attributes:
        image_sizes, image_blocks: see `image_blocks`.
        groups, parts: what a table says of each image; None if it does not.
    """

    def __init__(
        self, address: str, part: ShardPart, cache: CacheOptions, *, index_of: str | None = None
    ) -> None:
        self._address, self._part, self._cache = address, part, cache
        self._index_of = index_of
        self.task: TaskName = part.task
        self.separator = part.separator
        self.classes = part.classes
        self.labels: Tensor = part.labels
        self.fingerprint = part.fingerprint
        self.left_out = (LeftOut(address, Counter(part.left_out), columns=part.columns),)
        self.groups: Sequence[str] | None = part.groups
        self.parts: Sequence[str] | None = part.parts
        sizes = part.images.sizes
        has_bad = bool(len(part) and sizes.min() < 0)
        self.image_sizes = np.maximum(sizes, 0) if has_bad else sizes
        if part.rows is not None:
            self.image_blocks = group_blocks(self.image_sizes, part.rows.lengths)

    @functools.cached_property
    def files(self) -> StoreFiles:
        """Images, and any masks; made when one is read, for there may be many shards."""
        part = self._part
        places = [part.images]
        identity = part.fingerprint
        if part.masks is not None:
            places.append(part.masks.places)
            identity += part.masks.fingerprint
        return StoreFiles(
            self._address,
            places,
            self._cache,
            identity=identity,
            rows=part.rows,
            index_of=self._index_of,
        )

    @property
    def names(self) -> Sequence[str]:
        return self._part.names

    def __len__(self) -> int:
        return len(self._part)

    def describe(self, index: int) -> str:
        return self.files.describe(index, 0)

    def read(self, index: int) -> Stored:
        data = self.files.read(index)
        shape = None if self._part.shapes is None else self._part.shapes[index]
        if shape is None or not shape.any():
            return data
        return np.frombuffer(data, np.uint8).reshape(shape)

    def fetch_ahead(self, indices: NDArray[Any]) -> bool:
        """Begin to fetch these samples' blocks, in order; False if enough are under way."""
        return self.files.fetch_ahead(indices)


def masked_shard(
    address: str, images: StoreShard, masks: MaskPart, choice: TargetChoice
) -> MaskedSource:
    """A shard's images with masks, as `masked_tar` and `masked_table` open a file's."""
    named = masks.named
    if named is not None:
        named = named._replace(whose=beside(address, named.whose))
    described = Masks(
        read=functools.partial(images.files.read, column=1),
        describe=functools.partial(images.files.describe, column=1),
        fingerprint=masks.fingerprint,
        named=named,
        known=(masks.counts, masks.problems_at(address)),
    )
    return MaskedSource(images, described, choice)
