"""The index that `flambeau pack --shards` writes beside its shards, with which they are read from a store.

Without it a reader of a store must read every shard once, before it knows what is in them.
"""

import contextlib
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from flambeau.data.sources.index_cache import INDEX_SUFFIX
from flambeau.data.sources.open_store import KINDS, SHARDS_INDEX
from flambeau.data.sources.path_format import kind_of_name, open_shard, whole_name
from flambeau.data.sources.shard_index import index_shard, write_index
from flambeau.errors import InputError
from flambeau.recipes.checkpoints.atomic_checkpoint import write_file


def shard_index_files(shards: Sequence[Path]) -> dict[Path, list[Path]]:
    """The indexes of packed files, each with its shards; none for other files."""
    found: dict[Path, list[Path]] = {}
    for shard in shards:
        whole = whole_name(shard)
        if whole != shard and kind_of_name(shard.name) in KINDS:
            found.setdefault(whole.with_name(whole.name + SHARDS_INDEX), []).append(shard)
    return found


def write_shard_indexes(shards: Sequence[Path]) -> None:
    """Write the indexes of packed files that are not there yet.

    Shards that cannot be trained on, such as those with boxes as labels, get none.
    """
    for path, of_set in shard_index_files(shards).items():
        hidden = path.with_name(f".{path.name}.tmp")
        shutil.rmtree(hidden, ignore_errors=True)  # of a process that was killed
        if path.exists():
            continue
        hidden.mkdir()
        try:
            content = _content(of_set, hidden)
            if content is not None:
                write_file(hidden / path.name, content)
                (hidden / path.name).replace(path)
        finally:
            shutil.rmtree(hidden, ignore_errors=True)


def _content(shards: Sequence[Path], copies: Path) -> bytes | None:
    """The index of some shards; None if they cannot be trained on."""
    indexes = []
    with contextlib.suppress(InputError):
        for shard in shards:
            with _no_index_beside(shard):
                opened = open_shard(shard, copies=copies)
                indexes.append(index_shard(shard, opened, where=str(shard)))
        return write_index(indexes)
    return None


@contextlib.contextmanager
def _no_index_beside(shard: Path) -> Iterator[None]:
    """Remove what opening a file leaves beside it, which would have to be uploaded, too."""
    # Of the images, and of their masks.
    names = (shard.name + INDEX_SUFFIX, f"{shard.name}.masks{INDEX_SUFFIX}")
    new = [path for path in map(shard.with_name, names) if not path.exists()]
    try:
        yield
    finally:
        for path in new:
            path.unlink(missing_ok=True)
