"""What `flambeau doctor`'s watch costs a step of about 250 us: blocks with and without it, in one process.

    python bench/doctor_overhead_blocks.py [--blocks N] [--record]

bench/doctor_overhead.py compares processes, as a user runs them; on a machine that others use, two
processes differ by more than the watch costs. Here every other block of steps, a second or two, is watched:
by the step's hook, the clock around the DataLoader and the looks at the stack, in slices with pauses
between them, as all very short steps are. The ratio of neighboring blocks is taken. The figures are medians
over the pairs, with the middle half of them, of wall time and of the CPU time of the process with all its
threads.
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.optimizer import _global_optimizer_post_hooks
from torch.utils.data import DataLoader, Dataset

from flambeau.tune.watch.loader_clock import watch_loaders
from flambeau.tune.watch.plan import Plan
from flambeau.tune.watch.step_watch import StepWatch
from provenance import commit, cpu_model, record  # beside this script

STEPS, WINDOW_S = 4_000, 2.0  # 1 to 2.5 s in a window of 4, twice as long for steps so short


class Ready(Dataset[tuple[Tensor, Tensor]]):
    """The same batch again and again."""

    x, y = torch.randn(256, 32), torch.randint(10, (256,))

    def __len__(self) -> int:
        return 10_000_000

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x, self.y


class Training:
    """A model, its optimizer, and loaders that were made without and with the clock around them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 10))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)
        self.bare: Iterator[Any] = iter(DataLoader(Ready(), batch_size=None))
        self.clock = watch_loaders({}, folder)
        self.clocked: Iterator[Any] = iter(DataLoader(Ready(), batch_size=None))

    def block(self, *, is_watched: bool) -> tuple[float, float]:
        """Microseconds of a step: of wall time, and of CPU time."""
        if not is_watched:
            return self._timed(self.bare)
        plan = Plan(warmup_steps=100, warmup_s=0, seconds=WINDOW_S)
        watch = StepWatch(self.folder, plan, self.clock, lambda: None)
        watch.install()
        while not (windows := list(self.folder.glob("*.window"))):
            self._step(self.clocked)
        figures = self._timed(self.clocked)
        assert windows[0].exists(), "the window has ended before the block"
        while not (results := list(self.folder.glob("[0-9]*[0-9].json"))):
            self._step(self.clocked)
        results[0].unlink()
        _global_optimizer_post_hooks.clear()
        return figures

    def _timed(self, batches: Iterator[Any]) -> tuple[float, float]:
        began, began_cpu = time.perf_counter(), time.process_time()
        for _ in range(STEPS):
            self._step(batches)
        wall, cpu = time.perf_counter() - began, time.process_time() - began_cpu
        return 1e6 * wall / STEPS, 1e6 * cpu / STEPS

    def _step(self, batches: Iterator[Any]) -> None:
        x, y = next(batches)
        self.optimizer.zero_grad()
        nn.functional.cross_entropy(self.model(x), y).backward()
        self.optimizer.step()


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--blocks", type=int, default=40, help="pairs of blocks")
    parser.add_argument("--record", action="store_true", help="append to bench/results")
    told = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        training = Training(Path(folder))
        for is_watched in (False, True):
            training.block(is_watched=is_watched)
        pairs = []
        for number in range(told.blocks):
            order = [False, True] if number % 2 else [True, False]
            measured = {is_watched: training.block(is_watched=is_watched) for is_watched in order}
            pairs.append((measured[False], measured[True]))
    row: dict[str, Any] = {"pairs": told.blocks, "steps_per_block": STEPS}
    for place, name in enumerate(("wall", "cpu")):
        ratios = [watched[place] / bare[place] for bare, watched in pairs]
        quarters = statistics.quantiles(ratios, n=4)
        row |= {
            f"{name}_us": round(statistics.median(bare[place] for bare, _ in pairs), 1),
            f"{name}_ratio": round(quarters[1], 4),
            f"{name}_ratio_middle_half": [round(quarters[0], 4), round(quarters[2], 4)],
        }
    origin = {"torch": torch.__version__, "cpu": cpu_model(), "commit": commit()}
    record(row | origin, __file__, keep=told.record)


if __name__ == "__main__":
    main()
