"""The runs below an address, as folders that hold what `flambeau runs` reads of them, and no weights."""

import contextlib
import dataclasses
import os
import re
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from flambeau.data.stores.address import address_of
from flambeau.data.stores.store import Listed, Missing, Store, store
from flambeau.errors import InputError
from flambeau.run.folder.lock import is_locked
from flambeau.run.folder.mirror import leads_elsewhere
from flambeau.run.folder.store_run import working_folder
from flambeau.run.folder.summary import MAX_DEPTH, TAIL_BYTES, RunSummary

_READ = re.compile(
    r"config\.toml|dataset\.json|result\.json|metrics\.jsonl|sweep\.toml|not-finite-step-\d+\.json"
)
_MOST_BYTES = 2**22  # of a file that is read whole; readers refuse a larger one
_MOST_NAMES = 200_000
_AT_ONCE = 16  # requests; most of their time is spent on waiting


@contextlib.contextmanager
def runs_below(address: str) -> Iterator[Path]:
    """A temporary folder with those of the runs; InputError: the store cannot list, or holds too much."""
    root = address_of(address).rstrip("/")
    with (
        tempfile.TemporaryDirectory(prefix="flambeau-runs-") as folder,
        ThreadPoolExecutor(_AT_ONCE) as pool,
    ):
        _Search(store(), root, Path(folder), pool).fill()
        yield Path(folder)


def as_in_store(summary: RunSummary, address: str) -> RunSummary:
    """A summary as of the run at an address: whether it runs is known if it is trained on this machine."""
    is_running = summary.state == "stopped" and is_locked(working_folder(address))
    return dataclasses.replace(
        summary,
        state="running" if is_running else summary.state,
        changed=summary.changed or None,
    )


class _Search:
    def __init__(self, source: Store, root: str, folder: Path, pool: ThreadPoolExecutor) -> None:
        self._store, self._root, self._folder, self._pool = source, root, folder, pool
        self._num_names = 0

    def fill(self) -> None:
        waiting = [self._root]
        for _ in range(MAX_DEPTH + 1):
            below: list[str] = []
            runs: list[tuple[str, list[Listed]]] = []
            for address, found in zip(waiting, self._pool.map(self._list, waiting), strict=True):
                if any(one.address == f"{address}/config.toml" for one in found):
                    runs.append((address, found))
                else:
                    below += [one.address.rstrip("/") for one in found if one.is_folder]
                    self._fetch([one for one in found if one.address.endswith("/sweep.toml")])
            for _, found in runs:
                self._fetch([one for one in found if _READ.fullmatch(_name(one))])
            list(self._pool.map(self._outline, runs))
            waiting = [one for one in below if _name_of(one)[0] != "."]
            for address in waiting:  # also of those that are too deep, so that the search says so
                self._here(address).mkdir(parents=True, exist_ok=True)

    def _list(self, address: str) -> list[Listed]:
        found = self._store.listed_facts(address)
        self._num_names += len(found)
        if self._num_names > _MOST_NAMES:
            raise InputError(
                f"{self._root} holds more than {_MOST_NAMES:,} names\nName a folder in it, that of your runs"
            )
        return found

    def _outline(self, run: tuple[str, list[Listed]]) -> None:
        """Show by an empty file that weights are there, and by empty folders which checkpoints are."""
        address, found = run
        names = {_name(one): one for one in found}
        if "model.safetensors" in names:
            (self._here(address) / "model.safetensors").touch()
        if "checkpoints" not in names:
            return
        self._here(f"{address}/checkpoints").mkdir(parents=True, exist_ok=True)
        steps = [one for one in self._list(f"{address}/checkpoints") if one.is_folder]
        # By rising step, as long as they have as many digits.
        steps.sort(key=lambda one: (len(one.address), one.address))
        changed = 0.0
        for one in steps:
            self._here(one.address.rstrip("/")).mkdir(parents=True, exist_ok=True)
        for one in self._list(steps[-1].address.rstrip("/")) if steps else ():
            if _name(one) == "manifest.json":
                self._fetch_one(one)
                changed = one.changed or 0
        os.utime(self._here(f"{address}/checkpoints"), (changed, changed))

    def _fetch(self, files: Sequence[Listed]) -> None:
        list(self._pool.map(self._fetch_one, files))

    def _fetch_one(self, one: Listed) -> None:
        path = self._here(one.address)
        path.parent.mkdir(parents=True, exist_ok=True)
        is_log = _name(one) == "metrics.jsonl"
        try:
            size = one.size or self._store.facts(one.address).size  # not all lists have sizes
            start = max(0, size - TAIL_BYTES) if is_log else 0
            stop = size if is_log else min(size, _MOST_BYTES + 1)
            data = self._store.read(one.address, start, stop)
        except Missing:  # removed since it was listed
            return
        with path.open("wb") as file:
            file.seek(start)  # what lies before takes no room
            file.write(data)
        os.utime(path, (one.changed or 0, one.changed or 0))

    def _here(self, address: str) -> Path:
        name = address.removeprefix(self._root).lstrip("/")
        if name and leads_elsewhere(name):
            raise InputError(f"{self._root} holds a file with a name that leads elsewhere")
        return self._folder / name


def _name(one: Listed) -> str:
    return _name_of(one.address.rstrip("/"))


def _name_of(address: str) -> str:
    return address.rpartition("/")[2]
