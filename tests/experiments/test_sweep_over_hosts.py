"""One sweep on two hosts that share its folder: host names and processes of their own, by `unshare`."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

HOST = ["unshare", "--uts", "--pid", "--fork", "--kill-child", "--mount-proc"]
FLAGS = (
    "--set lr=1e-3..1:log --trials 4 --halving 2 --at-once 2 "
    "--model tiny_convnet --epochs 8 --batch-size 8"
)
LOST_S = 90.0  # until a host that says nothing is lost; see claim.py


def host(name: str, command: list[str]) -> "subprocess.Popen[bytes]":
    """A command on a host of its own, whose processes all end with the first."""
    inside = 'hostname "$0"; exec "$@"'
    return subprocess.Popen(
        [*HOST, "sh", "-c", inside, name, *command],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )


@pytest.fixture
def sweep(tmp_path: Path) -> Iterator[Callable[[str, str], "subprocess.Popen[bytes]"]]:
    """Starts the sweep on a host, in a folder."""
    asked = [*HOST, "hostname", "a"]
    is_there = shutil.which("unshare") is not None
    if not is_there or subprocess.run(asked, capture_output=True, check=False).returncode:
        pytest.skip("unshare is missing or refused here")
    pixels = np.random.default_rng(0)
    for number in range(2):
        place = tmp_path / "images" / f"class{number}"
        place.mkdir(parents=True)
        for index in range(200):
            levels = pixels.integers(0, 160, (24, 24, 3), dtype=np.uint8) + 60 * number
            Image.fromarray(levels.astype(np.uint8)).save(place / f"{index}.png")
    started = []

    def start(name: str, out: str) -> "subprocess.Popen[bytes]":
        words = ["sweep", str(tmp_path / "images"), *FLAGS.split(), "--out", str(tmp_path / out)]
        process = host(name, [sys.executable, "-m", "flambeau", *words])
        started.append(process)
        return process

    yield start
    for process in started:
        if process.poll() is None:
            process.kill()
        process.communicate()


def rows(folder: Path) -> list[dict[str, Any]]:
    file = folder / "sweep.jsonl"
    lines = file.read_bytes().split(b"\n")[:-1] if file.exists() else []
    return [json.loads(line) for line in lines]


def outcome(folder: Path) -> list[Any]:
    """Steps, figures and weights."""
    found = rows(folder)
    weights = {
        run.name: (max((run / "checkpoints").iterdir()) / "model.safetensors").read_bytes()
        for run in sorted((folder / "trials").iterdir())
    }
    steps = [row for row in found if "trial" in row]
    results = sorted(
        (row["step"], row["value"], row["is_whole"]) for row in found if "member" in row
    )
    return [steps, results, weights]


def owners(folder: Path) -> dict[str, str]:
    """The hosts that train now, by run of a step."""
    claims = folder / "claims"
    found = {one.name: one.read_text().strip() for one in claims.glob("*")}
    return {name: owner for name, owner in found.items() if owner}


def wait_for(condition: Callable[[], bool], *, seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
def test_another_host_takes_over_what_a_lost_one_has_left(
    sweep: Callable[[str, str], "subprocess.Popen[bytes]"], tmp_path: Path
) -> None:
    alone = sweep("alone", "calm")
    assert alone.wait() == 0, alone.communicate()[1].decode()
    shared = tmp_path / "shared"
    first, second = (sweep(name, "shared") for name in ("first", "second"))
    wait_for(lambda: {"first", "second"} <= {*owners(shared).values()}, seconds=300)
    lost = [name for name, owner in owners(shared).items() if owner == "first"]
    first.send_signal(signal.SIGKILL)  # with it go all processes of its host
    first.wait()
    began = time.monotonic()
    assert second.wait(timeout=LOST_S + 120) == 0, second.communicate()[1].decode()
    assert lost
    step = int(lost[0].partition("-")[0])
    assert any(row["step"] == step for row in rows(shared) if "member" in row)
    assert time.monotonic() - began > LOST_S - 20  # until then the host might have lived
    assert outcome(shared) == outcome(tmp_path / "calm")
