"""What being watched costs a training of very short steps: flambeau doctor beside TraceML.

    python bench/doctor_overhead.py [--rounds N] [--record]

The step is that of a small MLP of 256 samples on one thread, about 250 us, in a plain loop that times blocks
of 10000 steps itself, 2.5 seconds: of so short steps a fifth is watched, half a second at a time. Each round
runs the same loop bare, under `flambeau doctor`'s watch, and by `traceml run` with `trace_step` around each
step, in turn; the figures of a run are the medians of its blocks, of wall time and of CPU time of the process
that trains with all its threads, which other programs disturb less. One JSON line per contender: the medians
over the rounds of its ratios to the bare run of the same round. Without TraceML (traceml-ai) there is none of
it; `load` is how many programs wanted a CPU before.
"""

import argparse
import importlib.metadata
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import torch

from flambeau.sandbox.sandbox import Sandbox
from flambeau.tune.doctor.trial import Script
from flambeau.tune.watch.plan import Plan
from provenance import commit, cpu_model, record  # beside this script

WARM_UP_S, SECONDS = 3.0, 18.0
SCRIPT = """
import contextlib, json, os, statistics, sys, time
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset

out = os.path.join(os.environ.get("FLAMBEAU_TRIAL", ""), sys.argv[1])  # a trial keeps nothing else
is_traced, warm_up_s, seconds = sys.argv[2] == "traceml", *map(float, sys.argv[3:5])
torch.set_num_threads(1)

class Ready(Dataset):
    x, y = torch.randn(256, 32), torch.randint(10, (256,))
    def __len__(self):
        return 10_000_000
    def __getitem__(self, index):
        return self.x, self.y

model = nn.Sequential(nn.Linear(32, 128), nn.ReLU(), nn.Linear(128, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
around = contextlib.nullcontext
if is_traced:
    import traceml_ai as traceml
    traceml.init(mode="auto")
    around = lambda: traceml.trace_step(model)
blocks, cpu_blocks, began = [], [], time.perf_counter()
start, cpu_start = began, time.process_time()
for number, (x, y) in enumerate(DataLoader(Ready(), batch_size=None), start=1):
    with around():
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    if number % 10_000 == 0:
        now, cpu_now = time.perf_counter(), time.process_time()
        if now - began > warm_up_s:
            blocks.append((now - start) / 10_000)
            cpu_blocks.append((cpu_now - cpu_start) / 10_000)
        start, cpu_start = now, cpu_now
        if now - began > warm_up_s + seconds:
            break
with open(out, "w") as file:
    found = {"median_us": statistics.median(blocks), "cpu_us": statistics.median(cpu_blocks)}
    json.dump({name: 1e6 * seconds for name, seconds in found.items()}, file)
time.sleep(2)
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--record", action="store_true")
    told = parser.parse_args()
    found: dict[str, list[dict[str, float]]] = {"bare": [], "doctor": []}
    versions = {"torch": torch.__version__}
    if importlib.util.find_spec("traceml_ai"):
        found["traceml"] = []
        versions["traceml"] = importlib.metadata.version("traceml-ai")
    load = round(os.getloadavg()[0], 2)
    with tempfile.TemporaryDirectory() as place:
        script = Path(place) / "train.py"
        script.write_text(SCRIPT, encoding="utf-8")
        for number in range(told.rounds):
            names = list(found)
            for name in names[number % len(names) :] + names[: number % len(names)]:
                found[name].append(one_run(name, script))
                print(name, found[name][-1], file=sys.stderr, flush=True)
    for name, runs in found.items():
        row: dict[str, object] = {"contender": name, "rounds": told.rounds}
        for figure in ("median_us", "cpu_us"):
            ratios = [
                run[figure] / bare[figure] for run, bare in zip(runs, found["bare"], strict=True)
            ]
            row |= {
                figure: round(statistics.median(run[figure] for run in runs), 2),
                f"{figure}_to_bare": round(statistics.median(ratios), 4),
                f"{figure}_ratios": [round(ratio, 4) for ratio in ratios],
            }
        row |= {**versions, "cpu": cpu_model(), "load": load, "commit": commit()}
        record(row, __file__, keep=told.record)


def one_run(name: str, script: Path) -> dict[str, float]:
    """The script once, for a contender; what it has measured of itself."""
    out = script.with_name("measured.json")
    out.unlink(missing_ok=True)
    words = [str(script), out.name, name, f"{WARM_UP_S}", f"{SECONDS}"]
    if name == "doctor":
        # Its window opens before the script's own and closes after it.
        plan = Plan(warmup_s=WARM_UP_S - 1, seconds=SECONDS + 60)
        with Sandbox() as sandbox:
            Script([sys.executable, *words], sandbox, WARM_UP_S + SECONDS + 60).run(
                plan, before_removal=lambda folder: shutil.copy(folder / out.name, out)
            )
    else:
        command = [sys.executable, *words]
        if name == "traceml":
            traceml = Path(sys.executable).with_name("traceml")
            command = [str(traceml), "run", words[0], "--mode", "summary", "--args", *words[1:]]
        log = script.with_name(f"{name}.log")
        with log.open("w", encoding="utf-8") as output:
            subprocess.run(
                command, stdout=output, stderr=subprocess.STDOUT, check=False, cwd=script.parent,
                env={**os.environ, "TRACEML_DASHBOARD_AUTO_OPEN": "0"}, timeout=180,
            )  # fmt: skip
        if not out.exists():
            sys.exit(f"{name} has measured nothing:\n{log.read_text(encoding='utf-8')[-2000:]}")
    time.sleep(0.5)
    figures: dict[str, float] = json.loads(out.read_text(encoding="utf-8"))
    return figures


if __name__ == "__main__":
    main()
