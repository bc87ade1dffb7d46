"""Ray Tune's own resume, beside a sweep: twelve trials that are killed in the middle and restored.

    python bench/faults/ray_resume.py --python RAY_PYTHON [--record]

RAY_PYTHON is of an environment with `ray[tune]` and `optuna`. Its trials are of three epochs of a formula,
one trial at a time, with a checkpoint after each epoch; random search and Optuna's TPE, each with a seed. The
driver and all its processes are killed by SIGKILL when the fifth trial has begun, and `Tuner.restore`
continues. Two undisturbed searches show whether the seed alone decides the trials.
"""

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from provenance import commit, cpu_model, record

TRIALS = 12
EPOCHS = 3
WORK = """
import json, os, sys, tempfile, time
from pathlib import Path
os.environ["RAY_AIR_NEW_OUTPUT"] = "0"
import ray
from ray import tune
from ray.tune.search.basic_variant import BasicVariantGenerator
from ray.tune.search.optuna import OptunaSearch

folder, searcher = Path(sys.argv[1]), sys.argv[2]

def objective(config):
    begun = 0
    checkpoint = tune.get_checkpoint()
    if checkpoint:
        with checkpoint.as_directory() as place:
            begun = int(Path(place, "epoch").read_text()) + 1
    for epoch in range(begun, 3):
        with open(folder / "epochs.jsonl", "a") as file:
            file.write(json.dumps([config["lr"], config["mixup"], epoch]) + "\\n")
        time.sleep(0.5)
        with tempfile.TemporaryDirectory() as place:
            Path(place, "epoch").write_text(str(epoch))
            loss = (config["lr"] - 0.1) ** 2 + config["mixup"] / (epoch + 1)
            tune.report({"loss": loss}, checkpoint=tune.Checkpoint.from_directory(place))

ray.init(num_cpus=1, include_dashboard=False, logging_level="error", log_to_driver=False)
path = folder / "results" / "search"
if path.is_dir():
    tuner = tune.Tuner.restore(str(path), trainable=objective, resume_unfinished=True)
else:
    algorithm = (
        BasicVariantGenerator(random_state=0, max_concurrent=1)
        if searcher == "random"
        else tune.search.ConcurrencyLimiter(OptunaSearch(seed=0), max_concurrent=1)
    )
    tuner = tune.Tuner(
        objective,
        param_space={"lr": tune.loguniform(1e-3, 1.0), "mixup": tune.uniform(0.0, 0.4)},
        tune_config=tune.TuneConfig(
            num_samples=12, search_alg=algorithm, metric="loss", mode="min"
        ),
        run_config=tune.RunConfig(
            name="search", storage_path=str(folder / "results"), verbose=0
        ),
    )
tuner.fit()
"""


def start(python: str, folder: Path, searcher: str) -> "subprocess.Popen[bytes]":
    folder.mkdir(parents=True, exist_ok=True)
    log = (folder / "log").open("ab")
    return subprocess.Popen(
        [python, "-c", WORK, str(folder), searcher],
        stdout=log, stderr=log, start_new_session=True,
    )  # fmt: skip


def epochs_of(folder: Path) -> list[list[float]]:
    """Rate, mixup and number of each epoch that was trained, in their order."""
    file = folder / "epochs.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def trials_of(folder: Path) -> list[tuple[float, ...]]:
    """The settings of each trial, in the order in which they began."""
    return list(dict.fromkeys((rate, mixup) for rate, mixup, _ in epochs_of(folder)))


def kill_all(driver: "subprocess.Popen[bytes]") -> None:
    """The driver and what it has started: Ray's own processes are in other groups."""
    for place in Path("/proc").glob("[0-9]*"):
        try:
            words = (place / "cmdline").read_bytes()
        except OSError:
            continue
        if (
            b"ray" in words
            and int(place.name) not in (os.getpid(), driver.pid)
            and b"/ray/" in words
        ):
            os.kill(int(place.name), signal.SIGKILL)
    os.killpg(driver.pid, signal.SIGKILL)
    driver.wait()


def compared(python: str, folder: Path, searcher: str) -> dict[str, Any]:
    calm = [folder / f"{searcher} calm {number}" for number in range(2)]
    for one in calm:
        if start(python, one, searcher).wait():
            raise SystemExit((one / "log").read_text()[-2000:])
    stormy = folder / f"{searcher} killed"
    driver = start(python, stormy, searcher)
    while len(trials_of(stormy)) < 5 and driver.poll() is None:
        time.sleep(0.05)
    kill_all(driver)
    time.sleep(2)
    code = start(python, stormy, searcher).wait()
    expected = trials_of(calm[0])
    found = trials_of(stormy)
    done = [tuple(one) for one in epochs_of(stormy)]
    return {
        "restore_ended_with": code,
        "seed_decides": expected == trials_of(calm[1]),
        "trials": len(found),
        "as_if_not_killed": sum(one in expected for one in found),
        "epochs_trained_again": len(done) - len(set(done)),
        "epochs_missing": TRIALS * EPOCHS - len(set(done)),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--python", required=True, help="of an environment with ray[tune] and optuna"
    )
    parser.add_argument("--record", action="store_true")
    arguments = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="ray-resume-"))
    versions = subprocess.run(
        [arguments.python, "-c", "import ray, optuna; print(ray.__version__, optuna.__version__)"],
        capture_output=True, text=True, check=True,
    ).stdout.split()  # fmt: skip
    line = {
        "bench": "ray_resume",
        **{name: compared(arguments.python, folder, name) for name in ("random", "optuna")},
        "ray": versions[0],
        "optuna": versions[1],
        "processor": cpu_model(),
        "commit": commit(),
    }
    record(line, __file__, keep=arguments.record)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main()
