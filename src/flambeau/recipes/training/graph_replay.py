"""Many small kernels as one CUDA graph, for work that finds its tensors at the same addresses again.

把许多小的 GPU 内核录制成一个 CUDA graph：只要张量的地址与之前相同，就整体重放。

Source: original, with torch.cuda.CUDAGraph; what may be recorded is in torch's note "CUDA semantics", section
on CUDA graphs.

A GPU that waits for the host's launches gains, as in the optimizer step of a small model; one that is busy
gains nothing. Not for work that reads values on the host, draws random numbers, or changes anything but
tensors on the device: a replay repeats kernels, and no Python.
"""

import contextlib
import gc
from collections import deque
from collections.abc import Callable, Hashable, Sequence

import torch
from torch import Tensor

_RECENT = 8  # addresses that come back within so many calls are recorded; chosen


class GraphReplay:
    """Runs a function, and once its tensors were at the same addresses before, as a CUDA graph.

    The bits are the same either way. Graphs are made on a GPU only.

    Args:
        device: where the work is done.
        max_graphs: recorded at most, each for one set of addresses; other work runs as it is. One takes some
            kilobytes, beside what the work allocates.

    Example:
        >>> x = torch.zeros(2)
        >>> replay = GraphReplay(x.device)
        >>> for _ in range(3):
        ...     replay(lambda: x.add_(1), [x])
        >>> x.tolist(), replay.num_replays  # on a GPU the last two are replays
        ([3.0, 3.0], 0)
    """

    def __init__(self, device: torch.device, *, max_graphs: int = 16) -> None:
        self.num_replays = 0
        """Calls that were replays."""
        self._is_on = device.type == "cuda"
        self._device = device
        self._max_graphs = max_graphs
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        self._recent: deque[Hashable] = deque(maxlen=_RECENT)
        if self._is_on:
            self._stream = torch.cuda.Stream(device)
            self._pool = torch.cuda.graph_pool_handle()  # one for all: their results are not kept

    def __call__(
        self, work: Callable[[], object], tensors: Sequence[Tensor], settings: Hashable = ()
    ) -> None:
        """Run the work.

        Args:
            work: must do the same whenever tensors and settings are the same. A tensor that it makes must
                not outlive it.
            tensors: all that it reads and writes, strided.
            settings: numbers that a kernel would have recorded, such as a momentum.
        """
        if not self._is_on:
            work()
            return
        key = (*map(Tensor.data_ptr, tensors), settings)
        graph = self._graphs.get(key)
        if graph is None:
            if key not in self._recent or len(self._graphs) >= self._max_graphs:
                self._recent.append(key)
                work()
                return
            graph = self._record(work)
            if graph is None:
                self._is_on = False
                work()
                return
            self._graphs[key] = graph
        graph.replay()
        self.num_replays += 1

    def _record(self, work: Callable[[], object]) -> torch.cuda.CUDAGraph | None:
        """Record the work, which does not run; None if it cannot be recorded.

        Not by `torch.cuda.graph`, which empties torch's cache of memory: all addresses would change.
        """
        graph = torch.cuda.CUDAGraph()
        computing = torch.cuda.current_stream(self._device)
        # A recording that fails leaves the generator unusable: it gets a copy.
        generator = torch.cuda.default_generators[self._device.index or 0]
        draws = generator.graphsafe_get_state()
        generator.graphsafe_set_state(generator.clone_state())
        self._stream.wait_stream(computing)
        collects = gc.isenabled()
        gc.disable()  # a tensor or event that is collected in between would end the recording
        try:
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
                try:
                    work()
                finally:
                    graph.capture_end()
        except RuntimeError:
            # Where the end of the recording fails, torch's memory stays as during one, and keeps what other
            # streams have used; where it does not, there is nothing to end.
            with contextlib.suppress(RuntimeError):
                torch._C._cuda_endAllocateToPool(self._device.index or 0, self._pool)
            return None
        finally:
            generator.graphsafe_set_state(draws)
            if collects:
                gc.enable()
            computing.wait_stream(self._stream)
        return graph
