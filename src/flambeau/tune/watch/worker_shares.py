"""Which iterable data sets split their samples among workers; others give each sample in every worker.

Torch documents that an IterableDataset calls `get_worker_info` while it is iterated. Without workers it
calls it too and gets None: so one knows what workers would do before there are any.
"""

import functools
import hashlib
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

from torch.utils.data import DataLoader, IterableDataset, IterDataPipe, get_worker_info
from torch.utils.data.graph import traverse_dps

_SUFFIX = ".asks"
_LOADER = "torch.utils.data.dataloader"  # calls get_worker_info for itself
_PARTS = "torch.utils.data._utils."  # its collate does, too
_FETCHER = f"{_PARTS}fetch"
_WRAPPER = "torch.utils.data.datapipes.datapipe"  # the loader puts these around a pipeline
# Code that reads one of these fields splits samples; code that reads only the seed does not.
_SHARE_NAMES = {"id", "num_workers", "dataset"}


class WorkerShares:
    """Notes which data sets call `get_worker_info`, with a file per class in the trial's folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: set[str] = set()

    def watch(self) -> None:
        """Replace the function in every module that has imported it."""
        original = get_worker_info

        @functools.wraps(original)
        def noting() -> Any:
            self._note(sys._getframe(1), original())
            return original()

        for name, module in list(sys.modules.items()):
            is_ours = name.startswith("flambeau.tune.")
            if not is_ours and getattr(module, "__dict__", {}).get(original.__name__) is original:
                vars(module)[original.__name__] = noting

    def is_split(self, loader: DataLoader[Any]) -> bool:
        """Whether the workers of this loader read different samples, as far as is known."""
        data = loader.dataset
        if not isinstance(data, IterableDataset):
            return True
        # The loader splits a pipeline of torch if one of its parts supports it.
        if isinstance(data, IterDataPipe) and any(
            hasattr(part, "apply_sharding") for part in _parts(data)
        ):
            return True
        return (self._folder / _mark(name_of(data))).exists() or _splits(loader.worker_init_fn)

    def _note(self, frame: FrameType, info: Any) -> None:
        names = set(frame.f_code.co_names)
        module = f"{frame.f_globals.get('__name__')}"
        if (
            module == _LOADER
            or module.startswith(_PARTS)
            or ("seed" in names and not names & _SHARE_NAMES)
        ):
            return
        iterated = _iterated(frame)
        if info is not None and "dataset" in names:  # of a `worker_init_fn`
            iterated = info.dataset
        if iterated is None:  # a script may call it anywhere
            return
        name = name_of(iterated)
        if name not in self._seen:
            self._seen.add(name)
            (self._folder / _mark(name)).touch()


def name_of(data: object) -> str:
    """The class of a data set: all its objects behave alike."""
    if isinstance(data, IterDataPipe):
        kinds = {type(part) for part in _parts(data)}
        names = (f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
        return ">".join(sorted(name for name in names if not name.startswith(_WRAPPER)))
    module = type(data).__module__
    # Spawned workers run the script under another name.
    return f"{'__main__' if module == '__mp_main__' else module}.{type(data).__qualname__}"


def may_change_workers(data: object, change: Mapping[str, Any]) -> bool:
    """Whether a trial may change a data set's number of workers; `shared` lists those that split samples."""
    shared: Collection[str] = change.get("shared", ())
    return not isinstance(data, IterableDataset) or name_of(data) in shared


def _mark(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16] + _SUFFIX


def _iterated(frame: FrameType | None) -> Any:
    """The data set that a loader is fetching from; None if none is, as in a `worker_init_fn`."""
    while frame is not None:
        if frame.f_globals.get("__name__") == _FETCHER:
            return getattr(frame.f_locals.get("self"), "dataset", None)
        frame = frame.f_back
    return None


def _parts(pipe: IterDataPipe[Any]) -> Iterator[object]:
    graphs = [traverse_dps(pipe)]
    while graphs:
        for part, inner in graphs.pop().values():
            yield part
            graphs.append(inner)


def _splits(init_fn: Callable[..., Any] | None) -> bool:
    """Whether a `worker_init_fn` splits the samples of its data set."""
    while isinstance(init_fn, functools.partial):
        init_fn = init_fn.func
    code = getattr(init_fn, "__code__", None)
    if code is None or getattr(init_fn, "__module__", "") == _LOADER:  # torch's, for pipelines
        return False
    return {"get_worker_info", "dataset"} <= set(code.co_names)
