"""The images of a folder, read from a packed copy by the paths that a data set opens."""

import json
import os
from pathlib import Path
from typing import Any

from flambeau.data.drop_in.known_datasets import parts_of
from flambeau.data.pack.writers import keys_for
from flambeau.data.sources.folder import FolderSource
from flambeau.data.sources.open_data import open_parts
from flambeau.data.sources.source import Source
from flambeau.errors import InputError
from flambeau.images.decode import Stored

_MOST_BYTES = 1 << 26  # of a .pack.json, which has a line for each file of a sharded data set


class PackedCopy:
    """What `flambeau pack FOLDER FILE` wrote, read by the paths of its images."""

    def __init__(self, path: Path, folder: Path) -> None:
        images = FolderSource(folder)
        made = _made(path)
        if images.fingerprint not in [fingerprint for _, fingerprint in made["config"]["data"]]:
            raise InputError(
                f"{path} was not packed from {folder} as it is now: names or sizes of its files differ\n"
                f"Pack it again: flambeau pack {folder} {path}"
            )
        self._source: Source = open_parts(path)[0]
        root = os.path.abspath(images.folder)  # noqa: PTH100  as in `find`: links are not resolved
        self._indices = {
            f"{root}/{name}": index
            for name, index in zip(images.names, _indices(made, self._source, images), strict=True)
            if index is not None
        }
        if not self._indices:
            raise InputError(
                f"{path} does not say which image is which: pack it as .rec, .tar or .lmdb, or in order"
            )

    def find(self, file: Any) -> Stored | None:
        """The image of a path, or of an open file with a name, if the folder has it."""
        name = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
        if not isinstance(name, str | os.PathLike):
            return None
        index = self._indices.get(os.path.abspath(os.fspath(name)))  # noqa: PTH100  Path is slow
        return None if index is None else self._source.read(index)


def copy_for(path: str | os.PathLike[str], dataset: Any) -> PackedCopy:
    """The packed copy of the folder that a data set reads."""
    roots = {
        str(part.root)
        for part in parts_of(dataset)
        if isinstance(getattr(part, "root", None), str | os.PathLike)
    }
    if len(roots) != 1:
        listed = ", ".join(sorted(roots)) or "none"
        raise InputError(
            f"packed needs a data set of one folder, its attribute root; found: {listed}"
        )
    return PackedCopy(Path(path), Path(roots.pop()))


def _indices(made: dict[str, Any], packed: Source, images: FolderSource) -> list[int | None]:
    """The index of each image in the packed file: by its key, or the same if the order was kept."""
    config = made["config"]
    by_key = {name: index for index, name in enumerate(packed.names)}
    indices = [by_key.get(key) for key in keys_for(config["format"], images)]
    in_order = not config.get("shuffle") and not made.get("bad_images")
    if not any(index is not None for index in indices) and in_order and len(packed) == len(images):
        return list(range(len(images)))
    return indices


def _made(path: Path) -> dict[str, Any]:
    """The .pack.json beside a packed file."""
    if not path.exists():
        raise InputError(f"{path} does not exist; make it: flambeau pack FOLDER {path}")
    for beside in sorted(path.absolute().parent.glob("*.pack.json")):
        try:
            if beside.stat().st_size <= _MOST_BYTES:
                made: dict[str, Any] = json.loads(beside.read_bytes())
                config = made["config"]
                if path.name in made["files"] and config["format"]:
                    _ = [fingerprint for _, fingerprint in config["data"]]
                    return made
        except (OSError, ValueError, TypeError, KeyError):
            continue  # of another file, or damaged
    raise InputError(f"no .pack.json beside {path} says what it was packed from: pack it again")
