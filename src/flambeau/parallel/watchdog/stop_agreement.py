"""Where to stop: a request on any rank stops all ranks at the same point; without one, no step waits.

A run can stop at its points (between two steps, for example). All ranks pass the same points in order, so a
count identifies a point. Each rank always reaches its next point without waiting for another rank.
After a request, a thread of each rank publishes the number of that point, and from then on the main thread
waits at each point until all numbers are published. All stop at the highest: no rank has passed it, because
each waits before passing its own number, and each reaches it, because earlier points are passed as usual. The
waiting depends on the threads alone, never on a main thread inside a collective, so nothing can deadlock.
"""

import threading
from collections.abc import Callable
from typing import Final

from torch.distributed.distributed_c10d import Store

_NEVER: Final = 1 << 62
"""The point of a rank that has left: no run gets there, so no running rank stops for it."""


class StopAgreement:
    """One rank's part in the agreement; `stop_signal` names the signal that asked to stop, or None."""

    def __init__(self, *, rank: int, world: int, stop_signal: Callable[[], str | None]) -> None:
        self._rank, self._world, self._stop_signal = rank, world, stop_signal
        self._signal: str | None = None
        self._stop_at: int | None = None
        self._decided = threading.Event()
        self._has_published = False
        self.point = 0

    # Called by the main thread, without a lock: `reach_point` counts before it reads the signal, and
    # `exchange` sets the signal before it reads the count. So either the main thread sees the signal and
    # waits, or the other thread sees the count of the point that is being passed.

    def reach_point(self) -> str | None:
        """The run can stop here: the signal's name if all ranks do, else None."""
        self.point += 1
        if self._world == 1:
            return self._stop_signal()
        if self._signal is None:
            return None
        self._decided.wait()
        assert self._stop_at is not None
        return self._signal if self.point >= self._stop_at else None

    @property
    def stops_next(self) -> bool:
        """Whether all ranks stop at their next point, so that work can be cut short."""
        if self._world == 1:
            return self._stop_signal() is not None
        return self._stop_at is not None and self.point + 1 >= self._stop_at

    # Called by the other thread.

    @property
    def has_new_request(self) -> bool:
        """This process was asked to stop, and the others do not know it yet."""
        return self._signal is None and self._stop_signal() is not None

    def exchange(self, store: Store) -> None:
        """Publish and read stop requests, when `has_new_request` or the counter 'changes' did."""
        if self._signal is None:
            signal = self._stop_signal()
            if signal is not None:
                store.compare_set("stop", "", signal)
            elif not store.check(["stop"]):
                return
            self._signal = store.get("stop").decode()
            self._publish(store, self.point + 1)
        if self._stop_at is None and store.add("published", 0) == self._world:
            points = store.multi_get([f"point/{rank}" for rank in range(self._world)])
            self._decide(max(map(int, points)))

    def leave(self, store: Store) -> None:
        """This rank's run is over: the others must not wait for it."""
        self._publish(store, _NEVER)

    def abandon(self) -> None:
        """There will be no agreement; a main thread that waits for one continues."""
        if self._stop_at is None:
            self._decide(_NEVER)

    def _publish(self, store: Store, point: int) -> None:
        if not self._has_published:
            self._has_published = True
            store.set(f"point/{self._rank}", str(point))
            store.add("published", 1)
            store.add("changes", 1)

    def _decide(self, point: int) -> None:
        self._stop_at = point
        self._decided.set()
