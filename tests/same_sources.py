"""Sources of the same samples: what a training sees of shards in a store, and of the files on the disk."""

import io

import numpy as np
import torch
from PIL import Image

from flambeau.data.sources.open_store import SHARDS_INDEX
from flambeau.data.sources.source import Source, left_out_lines, mask_of, mask_problem, mask_values
from flambeau.data.sources.targets import groups_of, separator_of, task_of
from flambeau.errors import DecodeError
from object_server import Fault, Request


def png(seed: int) -> bytes:
    pixels = np.random.default_rng(seed).integers(0, 256, (20, 24, 3), np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return file.getvalue()


def mask_png(seed: int, values: tuple[int, ...] = (0, 1, 7), *, width: int = 24) -> bytes:
    chosen = np.random.default_rng(seed).choice(np.array(values, np.uint8), (20, width))
    file = io.BytesIO()
    Image.fromarray(chosen).save(file, "png")
    return file.getvalue()


def same(far: Source, near: Source) -> None:
    """Everything that a training sees is equal."""
    assert len(far) == len(near)
    assert far.fingerprint == near.fingerprint
    assert far.classes == near.classes
    assert list(far.names) == list(near.names)
    assert torch.equal(far.labels, near.labels)
    assert far.labels.dtype == near.labels.dtype
    assert (task_of(far), separator_of(far)) == (task_of(near), separator_of(near))
    assert mask_values(far) == mask_values(near)
    groups = groups_of(far), groups_of(near)
    assert [one and list(one) for one in groups] == [groups[1] and list(groups[1])] * 2
    for index in range(len(near)):
        one, other = far.read(index), near.read(index)
        assert type(one) is type(other)
        assert np.array_equal(one, other) if isinstance(one, np.ndarray) else one == other
        assert (mask_problem(far, index) is None) == (mask_problem(near, index) is None)
        assert mask_or_none(far, index) == mask_or_none(near, index)
    assert list(map(_what, left_out_lines(far))) == list(map(_what, left_out_lines(near)))


def _what(line: str) -> str:
    """A line on what is left out without the name of the file, which has colons."""
    return line[line.rindex("columns") if ": columns" in line else line.rindex(": ") :]


def mask_or_none(source: Source, index: int) -> object:
    try:
        mask = mask_of(source, index)
    except DecodeError:
        return "damaged"
    return None if mask is None else mask.tolist()


def without_index(request: Request) -> Fault | None:
    return Fault(status=404) if request.name.endswith(SHARDS_INDEX) else None
