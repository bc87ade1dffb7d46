#!/usr/bin/env python
"""Record what a checkout prints and trains, to prove that a change alters nothing.

    git worktree add /tmp/before COMMIT
    python tools/golden_results.py record before.json --tree /tmp/before
    python tools/golden_results.py record after.json
    python tools/golden_results.py compare before.json after.json

Recorded are the `--help` of every command, the public names, what the wheel holds, and 12 short trainings
on the CPU: 1 to 3 processes, fixed parts, FSDP, bf16, EMA, a user's own loop with metrics, and runs that are
interrupted and resumed.
Of a training: the lines of metrics.jsonl without times, a SHA-256 of every tensor of the published weights,
and the settings in config.toml.
The compiled kernel is taken from this checkout where the other one has none.

Results are comparable on one machine with one version of torch only.
`compare` prints each difference and ends with 1 if there is one.
"""

import argparse
import hashlib
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
import zipfile
from pathlib import Path
from typing import Any

from safetensors import safe_open

ROOT = Path(__file__).resolve().parents[1]
TIMES = {"images_per_s", "data_wait", "time_s", "seconds", "time"}
SHORT = ["--duration", "40st", "--log-every", "10", "--checkpoint-every", "20st"]

# A user's own loop; it ends by SIGTERM to itself at the step that the environment names.
SCRIPT = '''
import os, signal, sys
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset
from flambeau import Run


class Pairs:
    """A metric that is no mean."""

    any_order = True

    def __init__(self):
        self.reset()

    def reset(self):
        self.right = self.total = 0

    def update(self, logits, targets):
        self.right += int((logits.argmax(1) == targets).sum())
        self.total += len(targets)

    def compute(self):
        return self.right / max(self.total, 1)


torch.manual_seed(0)
x = torch.randn(331, 12)
y = (x @ torch.randn(12, 5)).argmax(1)
model = nn.Sequential(nn.Linear(12, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 5))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
run = Run(
    "run", model, optimizer, TensorDataset(x, y), duration="4ep", batch_size=24, accumulate=2, clip_norm=1.0,
    ema=0.9, schedule="cosine", warmup="10%", checkpoint_every="5st", log_every=3, bar=False, workers=0,
    metrics={"val_pairs": Pairs()} if os.environ.get("WORLD_SIZE", "1") == "1" else None,
)
stop_at = int(os.environ.get("STOP_AT", "0"))
for epoch in run.epochs():
    for images, targets in run.batches():
        logits = model(images)
        run.step(cross_entropy(logits, targets))
        run.log(train_accuracy=logits.argmax(1) == targets)
        if stop_at and run.state.step == stop_at and not run.state.position % 48:
            os.kill(os.getpid(), signal.SIGTERM)
            stop_at = 0
    for images, targets in run.evaluate(TensorDataset(x[:100], y[:100])):
        logits = model(images)
        run.log(val_accuracy=logits.argmax(1) == targets)
        if os.environ.get("WORLD_SIZE", "1") == "1":
            run.log(val_pairs=(logits, targets))
'''

# name: (arguments of `flambeau`, or a script's processes; interrupted and resumed)
TRAININGS: dict[str, tuple[list[str], bool]] = {
    "plain": (["train", *SHORT], False),
    "levers": (
        ["train", *SHORT, "--model", "small_convnet", "--augment", "trivialaugment", "--mixup", "0.2",
         "--cutmix", "1.0", "--clip-norm", "1", "--accumulate", "2", "--batch-size", "32", "--ema", "0.9",
         "--class-weights", "auto", "--optimizer", "adamw", "--schedule", "multistep", "--workers", "2"],
        False,
    ),
    "bf16": (["train", *SHORT, "--precision", "bf16", "--schedule", "one-cycle"], False),
    "two processes": (["train", *SHORT, "--procs", "2"], False),
    "three processes": (["train", *SHORT, "--procs", "3", "--ema", "0.99", "--balance", "full"], False),
    "parts": (["train", *SHORT, "--parts", "4", "--batch-size", "64"], False),
    "parts on two": (
        ["train", *SHORT, "--parts", "4", "--batch-size", "64", "--procs", "2", "--sync-bn"], False
    ),
    "fsdp": (["train", *SHORT, "--procs", "2", "--shard", "fsdp", "--optimizer", "adamw"], False),
    "resumed": (["train", *SHORT, "--ema", "0.9", "--random-erasing", "0.5", "--schedule", "plateau"], True),
    "own loop": (["SCRIPT"], False),
    "own loop on two": (["launch", "--procs", "2", "SCRIPT"], False),
    "own loop resumed": (["SCRIPT"], True),
}  # fmt: skip


def main() -> int:
    """Record a checkout, or compare two records."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    record = verbs.add_parser("record", help="write what a checkout does")
    record.add_argument("file", type=Path)
    record.add_argument("--tree", type=Path, default=ROOT, help="the checkout (default: this one)")
    record.add_argument("--only", help="one training, by name")
    compare = verbs.add_parser("compare", help="print what differs")
    compare.add_argument("before", type=Path)
    compare.add_argument("after", type=Path)
    arguments = parser.parse_args()
    if arguments.verb == "compare":
        before, after = (json.loads(f.read_text()) for f in (arguments.before, arguments.after))
        found = list(differences(before, after, ""))
        print("\n".join(found) or "no difference")
        return int(bool(found))
    facts = recorded(arguments.tree.resolve(), arguments.only)
    arguments.file.write_text(json.dumps(facts, indent=1, ensure_ascii=False))
    return 0


def recorded(tree: Path, only: str | None) -> dict[str, Any]:
    kernel = ROOT / "src/flambeau/images/native/_kernel.so"
    for native in tree.glob("src/flambeau/**/native/kernel.py"):
        if kernel.is_file() and not (native.parent / "_kernel.so").exists():
            (native.parent / "_kernel.so").write_bytes(kernel.read_bytes())
    env = {
        **os.environ,
        "PYTHONPATH": str(tree / "src"),
        "COLUMNS": "100",
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
    }
    facts: dict[str, Any] = {}
    if only is None:
        facts["help"] = helps(env)
        facts["names"] = names(env)
        facts["wheel"] = wheel(tree)
    for name, (arguments, resumed) in TRAININGS.items():
        if only in (None, name):
            start = time.perf_counter()
            facts[name] = training(arguments, resumed, env)
            print(f"{name}: {time.perf_counter() - start:.0f} s", file=sys.stderr)
    return facts


def helps(env: dict[str, str]) -> dict[str, list[str]]:
    first = run(["--help"], env)
    commands = re.findall(r"^    ([a-z]+)\b", first, re.MULTILINE)
    texts = {"": first, "train --zh": run(["train", "--zh"], env)}
    texts |= {command: run([command, "--help"], env) for command in commands}
    return {command: text.splitlines() for command, text in texts.items()}


def run(arguments: list[str], env: dict[str, str]) -> str:
    command = [sys.executable, "-m", "flambeau", *arguments]
    return subprocess.run(command, env=env, capture_output=True, text=True, check=True).stdout


def names(env: dict[str, str]) -> list[str]:
    code = "import flambeau; print('\\n'.join(sorted(flambeau.__all__)))"
    done = subprocess.run(
        [sys.executable, "-c", code], env=env, capture_output=True, text=True, check=True
    )
    return done.stdout.split()


def wheel(tree: Path) -> list[str]:
    """The files of the wheel."""
    with tempfile.TemporaryDirectory() as folder:
        code = f"from hatchling.build import build_wheel; build_wheel({folder!r})"
        subprocess.run([sys.executable, "-c", code], cwd=tree, check=True, capture_output=True)
        with zipfile.ZipFile(next(Path(folder).glob("*.whl"))) as archive:
            return sorted(archive.namelist())


def training(arguments: list[str], resumed: bool, env: dict[str, str]) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "loop.py").write_text(SCRIPT)
        env = {**env, "XDG_STATE_HOME": str(folder / "state")}
        words = ["loop.py" if word == "SCRIPT" else word for word in arguments]
        command = [sys.executable, *([] if words[0] == "loop.py" else ["-m", "flambeau"]), *words]
        if words[0] == "train":
            command += ["--out", "run"]
        if resumed and words[0] == "train":
            interrupt(command, folder, env)
        elif resumed:
            code = subprocess.run(
                command, cwd=folder, env={**env, "STOP_AT": "11"}, capture_output=True, check=False
            ).returncode
            assert code == 75, f"{words} ended with {code} instead of 75"
        done = subprocess.run(
            command, cwd=folder, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{words} ended with {done.returncode}:\n{done.stderr[-3000:]}"
        lines = [
            json.loads(line) for line in (folder / "run/metrics.jsonl").read_text().splitlines()
        ]
        config = tomllib.loads((folder / "run/config.toml").read_text())
        return {
            "metrics": [{k: v for k, v in line.items() if k not in TIMES} for line in lines],
            "weights": weights(folder / "run/model.safetensors"),
            "config": config,
            "files": sorted(path.name for path in (folder / "run").iterdir()),
        }


def interrupt(command: list[str], folder: Path, env: dict[str, str]) -> None:
    """Start, and stop by SIGTERM as soon as the first line of metrics is there."""
    process = subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    metrics = folder / "run/metrics.jsonl"
    while process.poll() is None and not (metrics.exists() and metrics.stat().st_size):
        time.sleep(0.01)
    process.send_signal(signal.SIGTERM)
    process.wait()


def weights(file: Path) -> dict[str, str]:
    with safe_open(file, framework="numpy") as tensors:
        return {
            name: hashlib.sha256(tensors.get_tensor(name).tobytes()).hexdigest()[:16]
            for name in sorted(tensors.keys())
        }


def differences(before: Any, after: Any, where: str):
    """Sentences, one for each place in which two records differ."""
    if isinstance(before, dict) and isinstance(after, dict):
        for key in dict.fromkeys([*before, *after]):
            yield from differences(before.get(key), after.get(key), f"{where}/{key}")
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, (one, other) in enumerate(zip(before, after, strict=True)):
            yield from differences(one, other, f"{where}[{number}]")
    elif isinstance(before, list) and isinstance(after, list):
        for word, lines in (
            ("gone", [x for x in before if x not in after]),
            ("new", [x for x in after if x not in before]),
        ):
            for line in lines:
                yield f"{where}: {word}: {line}"
    elif before != after:
        yield f"{where}: {before!r} became {after!r}"


if __name__ == "__main__":
    sys.exit(main())
