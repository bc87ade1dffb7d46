"""A client of the job's store whose calls return in bounded time, even if the store hangs."""

import threading
from collections.abc import Callable
from queue import Empty, SimpleQueue
from typing import Any, TypeVar

from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, not in __all__
from torch.distributed.distributed_c10d import PrefixStore, Store

T = TypeVar("T")


class StoreLost(Exception):
    """The store is gone or does not answer."""


class StoreClient:
    """Has a connection and a thread of its own, because a call to an unreachable store blocks forever."""

    def __init__(self, connect: Callable[[], Store], *, prefix: str, wait_s: float) -> None:
        self._connect, self._prefix, self._wait_s = connect, prefix, wait_s
        self._requests: SimpleQueue[Callable[[Store], Any] | None] = SimpleQueue()
        self._answers: SimpleQueue[tuple[Any, BaseException | None]] = SimpleQueue()
        self.address = "an unknown address"
        self._thread = threading.Thread(target=self._serve, name="flambeau store", daemon=True)
        self._thread.start()

    def call(self, request: Callable[[Store], T]) -> T:
        """What `request` returns for the store; StoreLost: no answer; the client is then unusable."""
        self._requests.put(request)
        # In slices: if the whole job was suspended for an hour, only one slice has expired.
        for _ in range(20):
            try:
                answer, error = self._answers.get(timeout=self._wait_s / 20)
                break
            except Empty:
                continue
        else:
            raise StoreLost(f"no answer for {self._wait_s:.0f} s")
        if isinstance(error, RuntimeError):  # as torch raises for a store
            raise StoreLost(str(error).partition("\n")[0]) from error
        if error is not None:
            raise error
        result: T = answer
        return result

    def close(self) -> None:
        """Close the connection; a thread that is stuck in a call is abandoned."""
        self._requests.put(None)
        self._thread.join(1.0)

    def _serve(self) -> None:
        store: Store | None = None
        while (request := self._requests.get()) is not None:
            try:
                if store is None:
                    store = self._open()
                answer: tuple[Any, BaseException | None] = (request(store), None)
            except BaseException as error:
                answer = (None, error)  # `call` raises it
            self._answers.put(answer)

    def _open(self) -> Store:
        store = self._connect()
        if isinstance(store, TCPStore):
            self.address = f"{store.host}:{store.port}"
        return PrefixStore(self._prefix, store)
