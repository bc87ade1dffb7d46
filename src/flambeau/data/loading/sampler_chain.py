"""The samplers inside a loader: whether they give each rank a share, and what they keep between epochs."""

import copy
import random
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch.utils.data import BatchSampler, DataLoader, Dataset, IterableDataset, Sampler

from flambeau.errors import InputError
from flambeau.recipes.setup.seeding import cpu_generators_restored, seed_cpu

# As DistributedSampler and Accelerate name the number of processes, and this process among them.
_NUM_RANKS = ("num_replicas", "num_processes")
_RANK = ("rank", "process_index")
_GENERATORS = (torch.Generator, random.Random, np.random.Generator, np.random.RandomState)


def owners_of(loader: Any) -> list[Any]:
    """The loader and all that decides its order: samplers and loaders in it, an IterableDataset."""
    found = [loader]
    for owner in found:  # grows
        values = [getattr(owner, name, None) for name in ("batch_sampler", "sampler", "dataset")]
        for value in (*values, *_inner(owner)):
            if _decides_order(value) and not any(value is one for one in found):
                found.append(value)
    return found


def _inner(owner: Any) -> Iterator[Any]:
    for value in getattr(owner, "__dict__", {}).values():
        if isinstance(value, (list, tuple)) and len(value) <= 64:  # samplers, not samples
            yield from value
        else:
            yield value


def _decides_order(value: Any) -> bool:
    if isinstance(value, (Sampler, BatchSampler, DataLoader, IterableDataset)):
        return True
    if isinstance(value, (type, Dataset)) or callable(getattr(value, "__getitem__", None)):
        return False  # map-style data, whatever methods it has
    return any(hasattr(value, name) for name in ("set_epoch", *_NUM_RANKS))


def are_shares(loader: Any, *, rank: int, world: int) -> bool:
    """Whether a sampler, or an IterableDataset, gives each rank batches of its own.

    InputError: it does for other processes, or another rank.
    """
    shared = False
    for owner in owners_of(loader):
        name = type(owner).__name__
        num_ranks = _first_int(owner, _NUM_RANKS)
        if num_ranks in (None, 1):
            continue
        if num_ranks != world:
            raise InputError(
                f"the loader's {name} shares the data among {num_ranks} processes, and this job has {world}: "
                "some samples would not be trained on, or twice\n"
                f"Start {num_ranks} processes, make the {name} for {world}, or give the Dataset"
            )
        if _first_int(owner, _RANK) not in (None, rank):
            raise InputError(
                f"the loader's {name} gives this process, rank {rank}, the share of rank "
                f"{_first_int(owner, _RANK)}: make it with rank={rank}"
            )
        shared = True
    return shared


def _first_int(owner: Any, names: tuple[str, ...]) -> int | None:
    values = [getattr(owner, name, None) for name in names]
    return next((value for value in values if isinstance(value, int)), None)


def unsaved_generator(loader: Any) -> str | None:
    """What has a generator of its own, in no checkpoint; None if nothing."""
    for owner in owners_of(loader):
        names = ["generator"]
        # With a set_epoch it is taken to seed its generator there.
        draws = isinstance(owner, Sampler | IterableDataset)
        if draws and not hasattr(owner, "set_epoch"):
            names += vars(owner)
        for name in names:
            if isinstance(getattr(owner, name, None), _GENERATORS):
                return f"{type(owner).__name__} has a {name}="
    return None


def set_epoch(loader: Any, epoch: int) -> None:
    """Tell all that take it the number of the epoch."""
    for owner in owners_of(loader):
        if (setter := getattr(owner, "set_epoch", None)) is not None:
            setter(epoch)


def first_indices(loader: Any, *, seed: int) -> str | None:
    """The first batch's samples as text, by copies of the samplers; None if only reading shows them."""
    loader = getattr(loader, "loader", loader)  # inside one of `fast`, or timm's PrefetchLoader
    is_plain = getattr(type(loader), "__iter__", None) is DataLoader.__iter__
    if not is_plain or isinstance(loader.dataset, IterableDataset):
        return None
    sampler = _copied(loader.sampler if loader.batch_sampler is None else loader.batch_sampler)
    with cpu_generators_restored():
        set_epoch(sampler, 0)
        seed_cpu(seed)
        return repr(next(iter(sampler), None))


def _copied(sampler: Any) -> Any:
    """A copy of a sampler and of those inside it, but not of the data that it holds."""
    twin = copy.copy(sampler)
    for name, value in getattr(twin, "__dict__", {}).items():
        if _decides_order(value):
            setattr(twin, name, _copied(value))
    return twin
