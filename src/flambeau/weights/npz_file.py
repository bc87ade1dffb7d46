"""Reads the arrays of an .npz file into memory, and checks their CRC-32.

Source: numpy.lib.format (NEP 1). Python objects in it are pickles, which are never loaded.
"""

import math
import re
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from flambeau.data.sources.arrays.array_roles import role_of
from flambeau.errors import ZIP_ERRORS, InputError
from flambeau.file_signature import STAND_INS, signature
from flambeau.recipes.checkpoints.safe_pickle import Foreign
from flambeau.recipes.data.mapped_arrays import npy_header, npz_members
from flambeau.recipes.setup.environment import usable_memory

_UNNAMED = re.compile(r"arr_\d+")  # names that numpy.savez gives to unnamed arrays


def read_npz(path: Path) -> dict[str, Any]:
    """The arrays by name of a file of numpy.savez; a `Foreign` for each of Python objects or records.

    ValueError: damaged; as InputError if larger than the memory.
    """
    arrays: dict[str, Any] = {}
    members = list(npz_members(path))
    size = sum(info.file_size for info, _, _ in members)
    memory = usable_memory()
    if memory is not None and size > memory:
        raise InputError(f"{path} takes {size} bytes of memory; there are {memory}")
    try:
        with zipfile.ZipFile(path) as archive:
            for info, (descr, _, shape, start), _ in members:
                name = info.filename.removesuffix(".npy")
                if descr[:1] not in "<>|=" or descr[1:2] not in "biufcSU":
                    arrays[name] = Foreign(f"Python objects or records: {descr[:40]}")
                    continue
                try:
                    item_bytes = np.dtype(descr).itemsize
                except (TypeError, ValueError, SyntaxError) as error:
                    what = f"{info.filename} has a type that NumPy lacks: {descr[:40]!r}"
                    raise ValueError(what) from error
                if start + math.prod(shape) * item_bytes != info.file_size:
                    raise ValueError(f"{info.filename} has not the bytes that its header says")
                with archive.open(info) as member:
                    arrays[name] = np.lib.format.read_array(member, allow_pickle=False)
                    member.read()  # to the end, which checks the CRC-32
    except ZIP_ERRORS as error:
        raise ValueError(f"{path}: {error}") from error
    return arrays


def holds_weights(path: Path) -> bool:
    """Whether an .npz or .npy file holds no images, by its names and types; False if damaged.

    A pointer of Git LFS holds none either.
    """
    file_type = signature(path)
    if file_type is not None and file_type.kind in STAND_INS:
        return True
    try:
        if path.suffix == ".npy":
            with path.open("rb") as file:
                descr, _, shape, _ = npy_header(file, f"{path}")
            return (len(shape) < 3 and descr[1:2] not in "SVO") or not shape
        headers = {
            info.filename.removesuffix(".npy"): header for info, header, _ in npz_members(path)
        }
    except ValueError:
        return False
    for name, (descr, _, shape, _) in headers.items():
        role = role_of(name)
        is_pixels = descr[1:] == "u1" and len(shape) > 2
        if is_pixels or (role and role[1] in ("images", "labels")) or _UNNAMED.fullmatch(name):
            return False
    return bool(headers)
