"""The images of a folder out of a packed copy of them, by the paths that a data set opens."""

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

_MOST_BYTES = 1 << 26  # of a .pack.json, which has a line for each file of shards


class PackedCopy:
    """What `flambeau pack FOLDER FILE` has made, to be asked for by the paths of its images.

    Args:
        path: of the packed file.
        folder: that it was packed from.

    Raises:
        InputError: no such file, or not packed from this folder as it is now.
    """

    def __init__(self, path: Path, folder: Path) -> None:
        images = FolderSource(folder)
        made = _made(path)
        if images.fingerprint not in [fingerprint for _, fingerprint in made["config"]["data"]]:
            raise InputError(
                f"{path} was not packed from {folder} as it is now: names or sizes of its files differ\n"
                f"Pack it again: flambeau pack {folder} {path}"
            )
        self._source: Source = open_parts(path)[0]
        root = os.path.abspath(images.folder)  # noqa: PTH100  as `find` has it: without links followed
        self._places = {
            f"{root}/{name}": place
            for name, place in zip(images.names, _places(made, self._source, images), strict=True)
            if place is not None
        }
        if not self._places:
            raise InputError(
                f"{path} does not say which image is which: pack it as .rec, .tar or .lmdb, or in order"
            )

    def find(self, file: Any) -> Stored | None:
        """The image of a path, or of an open file that has one; None where it is no image of the folder."""
        name = file if isinstance(file, str | os.PathLike) else getattr(file, "name", None)
        if not isinstance(name, str | os.PathLike):
            return None
        place = self._places.get(os.path.abspath(os.fspath(name)))  # noqa: PTH100  a Path would be slow
        return None if place is None else self._source.read(place)


def copy_for(path: str | os.PathLike[str], dataset: Any) -> PackedCopy:
    """The packed copy of the folder that a data set reads.

    Raises:
        InputError: as PackedCopy; a data set without an attribute `root`, or of several folders.
    """
    own = (getattr(part, "root", None) for part in parts_of(dataset))
    roots = {str(root) for root in own if isinstance(root, str | os.PathLike)}
    if len(roots) != 1:
        found = ", ".join(sorted(roots)) or "none"
        raise InputError(
            f"packed needs a data set of one folder, its attribute root; found: {found}"
        )
    return PackedCopy(Path(path), Path(roots.pop()))


def _places(made: dict[str, Any], packed: Source, images: FolderSource) -> list[int | None]:
    """Where each image is in the packed file: by its key, or as so many in the same order."""
    config = made["config"]
    places = {name: place for place, name in enumerate(packed.names)}
    found = [places.get(key) for key in keys_for(config["format"], images)]
    in_order = not config.get("shuffle") and not made.get("bad_images")
    if not any(place is not None for place in found) and in_order and len(packed) == len(images):
        return list(range(len(images)))
    return found


def _made(path: Path) -> dict[str, Any]:
    """How a packed file was made, from the file beside it that says so."""
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
