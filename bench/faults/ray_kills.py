"""Ray Tune's own resume: the search of ray_job.py, killed again and again, beside one that nobody kills."""

import contextlib
import json
import os
import random
import signal
import subprocess
import time
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

_STARTED_S = 120.0  # at most until a search trains its next epoch
_LONGEST_S = 5.0  # from then to its kill


def start(python: Path, folder: Path, more: Mapping[str, str]) -> "subprocess.Popen[bytes]":
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTHON")
    }
    return subprocess.Popen(
        [str(python), str(Path(__file__).with_name("ray_job.py")), str(folder)],
        env={
            **environment,
            **more,
            "HOME": str(folder),
            "OMP_NUM_THREADS": "1",
            "RAY_USAGE_STATS_ENABLED": "0",
        },
        stdout=subprocess.DEVNULL,
        stderr=(folder / "stderr.txt").open("ab"),
        start_new_session=True,
        cwd=folder,
    )


def processes(folder: Path) -> dict[int, str]:
    """The processes that work below a folder, with their commands: the driver, Ray's servers and workers."""
    found = {}
    for place in Path("/proc").glob("[0-9]*"):
        try:
            if (
                (place / "cwd").resolve().is_relative_to(folder)
            ):  # titles of Ray's overwrite environ
                found[int(place.name)] = (place / "cmdline").read_text(errors="replace")
        except OSError:
            continue
    return found


def kill_all(folder: Path) -> None:
    """End what a search has left, until nothing is."""
    while found := processes(folder):
        for pid in found:
            _kill(pid)
        time.sleep(0.1)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


def kill(process: "subprocess.Popen[bytes]", folder: Path, rng: random.Random) -> str:
    """SIGKILL to the command, to the trial that trains, or to all processes of the search."""
    trials = [pid for pid, words in processes(folder).items() if "ImplicitFunc" in words]
    kind = rng.choice(["command", "worker", "all"] if trials else ["command", "all"])
    if kind == "worker":
        _kill(rng.choice(trials))
        return kind
    if kind == "command":
        process.kill()
    else:
        kill_all(folder)
    process.wait()
    time.sleep(1.0)
    kill_all(folder)  # a new start would meet the servers of the dead one
    return kind


def trained(folder: Path) -> list[tuple[float, float, int]]:
    """Of each trained epoch the settings and its number, in order."""
    file = folder / "epochs.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    rows = map(json.loads, lines)
    return [(row["lr"], row["mixup"], row["epoch"]) for row in rows]


def _wait_for_epoch(process: "subprocess.Popen[bytes]", folder: Path, before: int) -> None:
    """Until more than so many epochs are trained, or the search has ended."""
    end = time.monotonic() + _STARTED_S
    while process.poll() is None and len(trained(folder)) <= before:
        assert time.monotonic() < end, (folder / "stderr.txt").read_text()[-3000:]
        time.sleep(0.05)


def storm(
    python: Path, folder: Path, more: Mapping[str, str], *, kills: int, seed: int
) -> Counter[str]:
    """Start and kill until all kills are done, then let it finish; `more`: variables of the environment."""
    rng = random.Random(seed)
    counts: Counter[str] = Counter()
    folder.mkdir(parents=True)
    process = start(python, folder, more)
    try:
        while sum(counts.values()) < kills:
            _wait_for_epoch(process, folder, len(trained(folder)))
            time.sleep(rng.uniform(0.0, _LONGEST_S))
            if process.poll() is not None:
                break
            kind = kill(process, folder, rng)
            counts[kind] += 1
            if kind != "worker":
                process = start(python, folder, more)
        assert process.wait() == 0, (folder / "stderr.txt").read_text()[-3000:]
        time.sleep(1.0)
    finally:
        kill_all(folder)
        process.wait()
    return counts


def ray_alone(python: Path, folder: Path, *, kills: int, seed: int) -> dict[str, Any]:
    """What comes of a search by Ray that is killed so often, beside the same one in peace.

    With Ray's own defaults, by which the state of the search is written about every ten seconds, and with a
    state that is written every second. That state lacks ASHA's (2.60), which then lets other trials go on.
    """
    folder = folder.resolve()
    storm(python, folder / "calm", {}, kills=0, seed=seed)
    found = {}
    for name, more in (("defaults", {}), ("state_each_second", {"TUNE_GLOBAL_CHECKPOINT_S": "1"})):
        killed = folder / name[0]  # short: Ray's sockets are below, and their paths have 107 bytes
        counts = storm(python, killed, more, kills=kills, seed=seed)
        found[name] = {"kills": dict(counts), **_beside(folder / "calm", killed)}
    return found


def _beside(calm: Path, killed: Path) -> dict[str, int]:
    epochs = trained(killed)
    times = Counter(epochs)
    expected, results = ({tuple(row[:2]): row[2:] for row in _results(f)} for f in (calm, killed))
    choices = {(lr, mixup) for lr, mixup, _ in epochs}
    return {
        "trials": len(expected),
        "trials_as_undisturbed": len(expected.keys() & choices),
        "other_trials": len(choices - expected.keys()),
        "same_results": sum(results.get(one) == value for one, value in expected.items()),
        "epochs": len(trained(calm)),
        "epochs_beyond_them": len(set(epochs) - set(trained(calm))),
        "epochs_trained_again": sum(count - 1 for count in times.values()),
        "trials_begun_again": sum(
            count > 1 for (_, _, epoch), count in times.items() if epoch == 1
        ),
    }


def _results(folder: Path) -> list[list[float]]:
    found: list[list[float]] = json.loads((folder / "results.json").read_text())
    return found
