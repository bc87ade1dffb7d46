"""Which iterable data sets ask for their worker's share: one that does not gives each sample in every worker.

What torch documents for an IterableDataset is to ask `get_worker_info` while it is iterated.
Without workers it asks all the same, and the answer is None: so what workers would do is known before there
are any.
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

_ASKS = ".asks"
_LOADER = "torch.utils.data.dataloader"  # which asks for itself, too
_PARTS = "torch.utils.data._utils."  # whose collate does, too
_FETCHER = f"{_PARTS}fetch"
_WRAPPER = "torch.utils.data.datapipes.datapipe"  # of what the loader puts around a pipeline
_OF_SHARES = {
    "id",
    "num_workers",
    "dataset",
}  # what is read of the answer; for a seed it says nothing


class WorkerShares:
    """Watches who asks `get_worker_info`, in the trainer and in its workers.

    Args:
        folder: of the trial, in which each class of data sets that has asked is noted.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._seen: set[str] = set()

    def watch(self) -> None:
        """From now on, in whatever module the function has got to."""
        ask = get_worker_info

        @functools.wraps(ask)
        def asked() -> Any:
            self._note(sys._getframe(1), ask())
            return ask()

        for name, module in list(sys.modules.items()):
            is_ours = name.startswith("flambeau.tune.")
            if not is_ours and getattr(module, "__dict__", {}).get(ask.__name__) is ask:
                vars(module)[ask.__name__] = asked

    def are_asked_for(self, loader: DataLoader[Any]) -> bool:
        """Whether workers of this loader read different samples, as far as it has shown."""
        data = loader.dataset
        if not isinstance(data, IterableDataset):
            return True
        if isinstance(data, IterDataPipe) and _has_sharding(data):
            return True
        return (self._folder / _mark(name_of(data))).exists() or _asks(loader.worker_init_fn)

    def _note(self, frame: FrameType, info: Any) -> None:
        names = set(frame.f_code.co_names)
        module = f"{frame.f_globals.get('__name__')}"
        if (
            module == _LOADER
            or module.startswith(_PARTS)
            or ("seed" in names and not names & _OF_SHARES)
        ):
            return
        iterated = _iterated(frame)
        if info is not None and "dataset" in names:  # of a `worker_init_fn`
            iterated = info.dataset
        if iterated is None:  # a script may ask anywhere
            return
        name = name_of(iterated)
        if name not in self._seen:
            self._seen.add(name)
            (self._folder / _mark(name)).touch()


def name_of(data: object) -> str:
    """The class of a data set: what one object of it asks, all do."""
    if isinstance(data, IterDataPipe):
        kinds = {type(part) for part in _parts(data)}
        names = (f"{kind.__module__}.{kind.__qualname__}" for kind in kinds)
        return ">".join(sorted(name for name in names if not name.startswith(_WRAPPER)))
    module = type(data).__module__
    # Spawned workers run the script under another name.
    return f"{'__main__' if module == '__mp_main__' else module}.{type(data).__qualname__}"


def may_change_workers(data: object, change: Mapping[str, Any]) -> bool:
    """Whether a trial may give a data set another number of workers.

    Args:
        data: of a loader that is being made.
        change: of the trial; `shared` has the classes of iterable data sets that ask for their share.
    """
    shared: Collection[str] = change.get("shared", ())
    return not isinstance(data, IterableDataset) or name_of(data) in shared


def _mark(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:16] + _ASKS


def _iterated(frame: FrameType | None) -> Any:
    """The data set that a loader is fetching from; None where none is, as in a `worker_init_fn`."""
    while frame is not None:
        if frame.f_globals.get("__name__") == _FETCHER:
            return getattr(frame.f_locals.get("self"), "dataset", None)
        frame = frame.f_back
    return None


def _has_sharding(pipe: IterDataPipe[Any]) -> bool:
    """A pipeline of torch's own has its shares given by the loader, if a part of it takes them."""
    return any(hasattr(part, "apply_sharding") for part in _parts(pipe))


def _parts(pipe: IterDataPipe[Any]) -> Iterator[object]:
    graphs = [traverse_dps(pipe)]
    while graphs:
        for part, inner in graphs.pop().values():
            yield part
            graphs.append(inner)


def _asks(begin: Callable[..., Any] | None) -> bool:
    """Whether a `worker_init_fn`, which runs in workers alone, gives their data sets shares."""
    while isinstance(begin, functools.partial):
        begin = begin.func
    code = getattr(begin, "__code__", None)
    if (
        begin is None or getattr(begin, "__module__", "") == _LOADER
    ):  # torch's own, of each pipeline
        return False
    return code is not None and {"get_worker_info", "dataset"} <= set(code.co_names)
