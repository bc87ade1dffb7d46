"""What the sandbox of trials costs: a training that reads photographs, with it and without, in turn.

    python bench/sandbox_cost.py --rounds 8 --record

Prints a JSON line: the time of a step in the sandbox in that outside of it, in pairs of runs, and the seconds
from the start of a trial's process to that of the script.
"""

import argparse
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from flambeau.sandbox.sandbox import UNPROTECTED, WAYS, Sandbox
from flambeau.tune.doctor.trial import Script
from flambeau.tune.watch.plan import Plan
from provenance import commit, cpu_model, record  # beside this script

FILES = 3000
SCRIPT = """
import sys, torch
from pathlib import Path
import numpy as np
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset

torch.set_num_threads(1)
class Photos(Dataset):
    files = sorted(Path(sys.argv[1]).rglob("*.jpg"))
    def __len__(self):
        return len(self.files)
    def __getitem__(self, index):
        with Image.open(self.files[index]) as image:
            return torch.from_numpy(np.array(image)).permute(2, 0, 1).float() / 255
model = nn.Sequential(nn.Conv2d(3, 8, 3, 4), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 4))
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
while True:
    for step, x in enumerate(DataLoader(Photos(), batch_size=32, shuffle=True)):
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 50 == 0:
            torch.save(model.state_dict(), "last.pt")
"""


def main() -> None:
    """Run, and print the line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--record", action="store_true", help="append to bench/results")
    told = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        os.chdir(name)
        rng = np.random.default_rng(0)
        for number in range(FILES):
            file = Path(f"photos/{number % 10}/{number}.jpg")
            file.parent.mkdir(parents=True, exist_ok=True)
            small = Image.fromarray(rng.integers(0, 255, (12, 16, 3), np.uint8))
            small.resize((128, 96), Image.Resampling.BICUBIC).save(file, quality=90)
        Path("train.py").write_text(SCRIPT, encoding="utf-8")
        ways = [UNPROTECTED, *WAYS]
        steps: dict[str, list[float]] = {way: [] for way in ways}
        starts: dict[str, list[float]] = {way: [] for way in ways}
        for number in range(told.rounds):
            for way in ways if number % 2 == 0 else reversed(ways):
                steps[way].append(one_step(way))
                starts[way].append(one_start(way))
        for way in WAYS:
            ratios = [one / base for one, base in zip(steps[way], steps[UNPROTECTED], strict=True)]
            low, middle, high = statistics.quantiles(ratios, n=4)
            row = {
                "bench": "sandbox_cost", "way": way, "step_ratio": round(middle, 4),
                "quartiles": [round(low, 4), round(high, 4)], "pairs": len(ratios),
                "step_ms_without": round(1000 * statistics.median(steps[UNPROTECTED]), 2),
                "start_s": round(statistics.median(starts[way]), 3),
                "start_s_without": round(statistics.median(starts[UNPROTECTED]), 3),
                "files": FILES, "torch": torch.__version__, "python": sys.version.split()[0],
                "cpu": cpu_model(), "commit": commit(),
            }  # fmt: skip
            record(row, __file__, keep=told.record)


def one_step(way: str) -> float:
    """Seconds of a step."""
    plan = Plan(watches=False, warmup_steps=100, warmup_s=2.0, steps=100, seconds=5.0)
    with Sandbox(way) as sandbox:
        trial = Script([sys.executable, "train.py", "photos"], sandbox, 120).run(plan)
    assert trial.failure is None, trial.failure
    return trial.step_s


def one_start(way: str) -> float:
    """Seconds that a program takes which does nothing."""
    with Sandbox(way) as sandbox:
        folder = sandbox.new_folder()
        began = time.perf_counter()
        with Path(os.devnull).open("wb") as output:
            process = sandbox.start(["true"], folder, dict(os.environ), output)
            process.wait(60)
        elapsed = time.perf_counter() - began
        sandbox.end(folder)
    return elapsed


if __name__ == "__main__":
    main()
