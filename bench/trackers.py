"""Microseconds that a line costs the training thread with trackers, and how long a slow one holds it up.

    python bench/trackers.py [--lines N] [--record]

Each line of eight figures is appended to metrics.jsonl and told to the trackers, 2 ms after the one before,
far more often than in a usual run, so that their threads have much to do. `median_us` and `p99_us` are of
telling alone; `write_us`, a median, is of the file. `slow` is a function that sleeps 50 ms per line.
One JSON line per set of trackers.
"""

import argparse
import statistics
import tempfile
import time
from pathlib import Path

import torch

from flambeau.run.folder.metrics_log import MetricsLog
from flambeau.run.folder.run_folder import RunFolder
from flambeau.run.options.tracker_names import LineFunction
from flambeau.run.trackers import run_trackers
from provenance import commit, cpu_model, record  # beside this script


def slow(step: int, figures: dict[str, float]) -> None:
    time.sleep(0.05)


CONTENDERS: dict[str, tuple[str | LineFunction, ...]] = {
    "function": (lambda step, figures: None,), "csv": ("csv",), "tensorboard": ("tensorboard",),
    "csv,tensorboard": ("csv", "tensorboard"), "slow": (slow,),
}  # fmt: skip


def times(track: tuple[str | LineFunction, ...], lines: int) -> dict[str, float]:
    told, written = [], []
    with tempfile.TemporaryDirectory() as root:
        folder = RunFolder(Path(root))
        folder.config.write_text('name = "bench"\n')
        log = MetricsLog(folder.metrics, keep_bytes=0)
        trackers = run_trackers.RunTrackers(track, folder, size=0, is_sharded=False, say=print)
        for step in range(lines):
            row = {f"figure_{n}": step / (n + 1) for n in range(8)}
            start = time.perf_counter()
            log.write({"step": step, "epoch": 0, **row})
            middle = time.perf_counter()
            trackers.grow(log.size)
            told.append(1e6 * (time.perf_counter() - middle))
            written.append(1e6 * (middle - start))
            time.sleep(0.002)
        run_trackers.END_WAIT_S = 0.1 if slow in track else 60.0
        trackers.close(None)
        log.close()
    return {
        "median_us": round(statistics.median(told), 1),
        "p99_us": round(statistics.quantiles(told, n=100)[-1], 1),
        "write_us": round(statistics.median(written), 1),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--lines", type=int, default=2000)
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    at = commit()
    for name, track in CONTENDERS.items():
        line = {
            "contender": name, **times(track, arguments.lines), "n": arguments.lines,
            "torch": torch.__version__, "device": cpu_model(), "commit": at,
        }  # fmt: skip
        record(line, __file__, keep=arguments.record)


if __name__ == "__main__":
    main()
