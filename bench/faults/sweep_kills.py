"""Sweeps that are killed again and again, beside the same sweep that nobody kills.

    python bench/faults/sweep_kills.py [--kills N] [--procs N] [--seed S] [--folds N] [--seeds N]
                                      [--folder DIR] [--ray PYTHON] [--record]

The command `flambeau sweep` over small images, with halving and, where asked for, folds and seeds, is
started, and after a random time it is killed by SIGKILL: the command alone, a worker alone, or all processes
at once; until it has got its kills, and then to its end. Equal must be: the steps, their settings and
figures, the weights of every run, and the tables over the runs of a trial. The line also says how many epochs
were trained more than once. Beside it stand Optuna's own resume and, with a Python that has `ray[tune]`, Ray
Tune's.
"""

import argparse
import hashlib
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

sys.path.insert(0, str(Path(__file__).parents[1]))

from provenance import commit, cpu_model, record
from ray_kills import ray_alone

CLASSES = 4
IMAGES = 40  # per class
FLAGS = [
    "--set", "lr=1e-3..1:log", "--set", "mixup=0,0.2", "--set", "batch_size=16,32",
    "--model", "tiny_convnet", "--epochs", "4", "--halving", "2", "--seed", "3",
]  # fmt: skip
TRAININGS = 24  # trials, times the runs of each
_EARLY = 0.2  # of the kills: at any moment after a start, such as before a run is begun
_EARLY_S = 5.0
_STARTED_S = 120.0  # at most until a start trains
_TRAINING_S = 1.5  # of training until the other kills


def make_images(folder: Path) -> None:
    """Noise around a color per class: what is learned soon, and not at once."""
    pixels = np.random.default_rng(0)
    for number in range(CLASSES):
        place = folder / f"class{number}"
        place.mkdir(parents=True)
        for index in range(IMAGES):
            shape = pixels.integers(0, 160, (24, 24, 3)) + 24 * number
            Image.fromarray(shape.clip(0, 255).astype(np.uint8)).save(place / f"{index}.png")


def members(folds: int, seeds: int) -> list[str]:
    """The flags of so many runs per trial, and of fewer trials for it."""
    flags = ["--trials", str(TRAININGS // (max(folds, 1) * seeds))]
    return [
        *flags,
        *(["--folds", str(folds)] if folds else []),
        *(["--seeds", str(seeds)] if seeds > 1 else []),
    ]


def start(data: Path, out: Path, flags: list[str], procs: int) -> "subprocess.Popen[bytes]":
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    words = [str(data), *FLAGS, *flags, "--out", str(out), "--procs", str(procs)]
    return subprocess.Popen(
        [sys.executable, "-m", "flambeau", "sweep", *words],
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        start_new_session=True,
    )


def children(pid: int) -> list[int]:
    """The processes below one, as Linux lists them."""
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        try:
            found += [int(word) for word in task.read_text().split()]
        except OSError:
            continue
    return [*found, *(below for child in found for below in children(child))]


def kill(process: "subprocess.Popen[bytes]", rng: random.Random) -> str:
    below = children(process.pid)
    kind = rng.choice(["command", "worker", "all"] if below else ["command"])
    victims = {
        "command": [process.pid],
        "worker": [rng.choice(below)] if below else [],
        "all": [process.pid, *below],
    }[kind]
    for pid in victims:
        try:
            os.kill(pid, signal.SIGKILL)
        except ProcessLookupError:
            continue
    return kind


def _wait_for_a_moment(process: "subprocess.Popen[bytes]", out: Path, rng: random.Random) -> None:
    """Until a random moment, mostly while runs train: a start takes long on a busy machine."""
    if rng.random() < _EARLY:
        time.sleep(rng.uniform(0.0, _EARLY_S))
        return
    end = time.monotonic() + _STARTED_S
    before = _printed_bytes(out)
    while process.poll() is None and _printed_bytes(out) <= before:
        assert time.monotonic() < end, "no run has begun"
        time.sleep(0.02)
    time.sleep(rng.uniform(0.0, _TRAINING_S))


def _printed_bytes(out: Path) -> int:
    """Of all runs."""
    return sum(log.stat().st_size for log in out.glob("logs/*"))


def storm(
    data: Path, out: Path, flags: list[str], *, kills: int, procs: int, seed: int
) -> Counter[str]:
    """Start and kill until all kills are done, then let it finish."""
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    process = start(data, out, flags, procs)
    while sum(counts.values()) < kills:
        _wait_for_a_moment(process, out, rng)
        if process.poll() is not None:
            if process.returncode == 0:
                break  # over before its kills
            assert process.returncode == -signal.SIGKILL, process.communicate()[1].decode()
            process = start(data, out, flags, procs)
            continue
        kind = kill(process, rng)
        counts[kind] += 1
        if kind != "worker":
            process.wait()
            process = start(data, out, flags, procs)
    while process.wait() != 0:
        process = start(data, out, flags, procs)
    return counts


def outcome(out: Path) -> dict[str, object]:
    """What must be equal: steps and figures, and the weights of each run."""
    rows = [json.loads(line) for line in (out / "sweep.jsonl").read_text().splitlines()]
    steps = [row for row in rows if "trial" in row]
    results = sorted(
        (row["step"], row["member"], row.get("value")) for row in rows if "member" in row
    )
    weights = {}
    for run in sorted((out / "trials").iterdir()):
        newest = max((run / "checkpoints").iterdir())
        files = [newest / "model.safetensors", run / "model.safetensors"]
        weights[run.name] = [
            hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.exists()
        ]
    tables = {
        file.name: hashlib.sha256(file.read_bytes()).hexdigest()
        for name in ("figures.json", "out_of_fold-*.csv")
        for file in sorted(out.glob(name))
    }
    return {"steps": steps, "results": results, "weights": weights, "tables": tables}


def repeated_epochs(out: Path) -> int:
    """How many epochs were trained more than once, by the lines of the logs."""
    times: Counter[tuple[str, str]] = Counter()
    for log in (out / "logs").iterdir():
        lines = log.read_text(errors="replace").splitlines()
        times.update(
            (log.name, found[0]) for line in lines if (found := re.match(r"epoch \d+", line))
        )
    return sum(count - 1 for count in times.values())


def optuna_alone(seed: int) -> dict[str, int]:
    """Optuna's own resume: a study of 15 trials that a new process continues with the same seed.

    How many of the 15 trials after it propose what an earlier one has, and how many are those of a study that
    nobody stopped.
    """
    import optuna

    optuna.logging.set_verbosity(optuna.logging.ERROR)

    def objective(trial: Any) -> float:
        rate = trial.suggest_float("lr", 1e-3, 1.0, log=True)
        return (rate - 0.1) ** 2 + trial.suggest_float("mixup", 0.0, 0.4)

    def study(storage: Any, trials: int) -> list[dict[str, float]]:
        sampler = optuna.samplers.RandomSampler(seed=seed)
        made = optuna.create_study(
            storage=storage, sampler=sampler, study_name="a", load_if_exists=True
        )
        made.optimize(objective, n_trials=trials)
        return [trial.params for trial in made.trials]

    calm = study(None, 30)
    with tempfile.TemporaryDirectory() as folder:
        file = optuna.storages.journal.JournalFileBackend(f"{folder}/journal.log")
        study(optuna.storages.JournalStorage(file), 15)
        stopped = study(optuna.storages.JournalStorage(file), 15)
    later = range(15, 30)
    return {
        "repeated": sum(stopped[number] in stopped[:number] for number in later),
        "as_if_not_stopped": sum(stopped[number] == calm[number] for number in later),
    }


def _of_ray(arguments: argparse.Namespace, folder: Path) -> dict[str, object]:
    if arguments.ray is None:
        return {}
    found = ray_alone(arguments.ray, folder / "ray", kills=arguments.kills, seed=arguments.seed)
    asked = [str(arguments.ray), "-c", "import ray; print(ray.__version__)"]
    answer = subprocess.run(asked, check=True, capture_output=True, text=True).stdout
    return {"ray_alone": found, "ray": answer.strip()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=30)
    parser.add_argument("--procs", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--folds", type=int, default=0)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--folder", type=Path, help="keep everything here")
    parser.add_argument("--ray", type=Path, metavar="PYTHON", help="try Ray Tune with this Python")
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    folder = arguments.folder or Path(tempfile.mkdtemp(prefix="sweep-kills-"))
    data = folder / "data"
    make_images(data)
    flags = members(arguments.folds, arguments.seeds)
    calm = start(data, folder / "calm", flags, 1)
    assert calm.wait() == 0, calm.communicate()[1].decode()
    counts = storm(
        data,
        folder / "storm",
        flags,
        kills=arguments.kills,
        procs=arguments.procs,
        seed=arguments.seed,
    )
    expected, found = outcome(folder / "calm"), outcome(folder / "storm")
    line = {
        "bench": "sweep_kills",
        "kills": dict(counts),
        "procs": arguments.procs,
        "folds": arguments.folds,
        "seeds": arguments.seeds,
        "seed": arguments.seed,
        "steps": len(expected["steps"]),  # type: ignore[arg-type]
        "equal": {name: expected[name] == found[name] for name in expected},
        "epochs_trained_again": repeated_epochs(folder / "storm"),
        "optuna_alone_of_15": optuna_alone(arguments.seed),
        **_of_ray(arguments, folder),
        "torch": version("torch"),
        "optuna": version("optuna"),
        "processor": cpu_model(),
        "commit": commit(),
    }
    record(line, __file__, keep=arguments.record)
    if arguments.folder is None:
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
