"""The command and the script of the README on several processes, as a user starts them."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

README = Path(__file__).parents[2] / "README.md"


def test_the_script_of_the_readme_runs_unchanged(
    start_ranks: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", README.read_text(), re.S)

    def work(folder: Path) -> str:
        folder.mkdir(exist_ok=True)
        os.chdir(folder)
        exec(compile(script, "script", "exec"), {"__name__": "__main__"})
        result = json.loads((folder / "runs" / "mine" / "result.json").read_text())
        del result["sha256"]  # of weights that are equal but for their last digits
        return json.dumps(result)

    monkeypatch.chdir(tmp_path)
    alone = work(tmp_path / "alone")
    results = start_ranks(3, work, tmp_path / "ranks").results()
    assert results == [alone] * 3
    weights = [
        load_file(tmp_path / name / "runs/mine/model.safetensors") for name in ("alone", "ranks")
    ]
    torch.testing.assert_close(*weights, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
def test_torchrun_starts_again_what_was_killed(
    tmp_path: Path, make_images: Callable[..., Path]
) -> None:
    make_images(tmp_path / "data", per_class=24)
    out = tmp_path / "out"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--max-restarts", "1",
        "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", "-m", "flambeau", "train",
        str(tmp_path / "data"), "--out", str(out), "--duration", "40ep", "--batch-size", "8",
        "--checkpoint-every", "2ep", "--log-every", "1", "--device", "cpu", "--precision", "fp32",
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as job:
        try:
            metrics, deadline = out / "metrics.jsonl", time.monotonic() + 60
            while not (metrics.exists() and '"step": 40,' in metrics.read_text()):
                assert job.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            os.kill(int((out / ".lock").read_text()), signal.SIGKILL)
            _, said = job.communicate(timeout=300)
        finally:
            job.terminate()
    assert job.returncode == 0, said
    assert len(re.findall(r"^going on from step \d+ of 240$", said, re.M)) == 1, said
    assert (out / "model.safetensors").exists()


@pytest.mark.slow
def test_the_report_names_a_process_that_was_killed_and_the_run_is_extended(
    tmp_path: Path, make_images: Callable[..., Path]
) -> None:
    """And what all processes say of an extension is said once; each start of two takes 8 s of a core."""
    make_images(tmp_path / "data", per_class=24)
    out = tmp_path / "out"
    command = [
        sys.executable, "-m", "flambeau", "launch", "--procs", "2", "--max-restarts", "1", "--", "train",
        str(tmp_path / "data"), "--out", str(out), "--duration", "40ep", "--batch-size", "8",
        "--checkpoint-every", "2ep", "--log-every", "1", "--device", "cpu", "--precision", "fp32",
    ]  # fmt: skip
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as job:
        try:
            metrics, deadline = out / "metrics.jsonl", time.monotonic() + 60
            while not (metrics.exists() and '"step": 40,' in metrics.read_text()):
                assert job.poll() is None
                assert time.monotonic() < deadline
                time.sleep(0.05)
            os.kill(int((out / ".lock").read_text()), signal.SIGKILL)
            _, said = job.communicate(timeout=300)
        finally:
            job.terminate()
    assert job.returncode == 0, said
    events = [json.loads(line) for line in (out / "events.jsonl").read_text().splitlines()]
    (lost,) = [event for event in events if event["text"].startswith("lost: ")]
    assert re.fullmatch(
        r"lost: rank 0 of 2 \(host .*, process \d+\) was killed by SIGKILL", lost["text"]
    )
    assert 40 <= lost["step"] < 240
    after = events[events.index(lost) + 1]
    assert after["text"].startswith("going on from step ")
    assert "was killed by SIGKILL" in (out / "report.html").read_text()

    def extended(by: str) -> tuple[int, str]:
        words = [*command[: command.index("launch")], "train", "--procs", "2"]
        words += [*command[command.index("train") + 1 :], "--extend", by]
        done = subprocess.run(words, capture_output=True, text=True, timeout=300, check=False)
        return done.returncode, done.stderr

    code, said = extended("1ep")
    assert (code, said.count("is extended by 1ep: from step")) == (0, 1), said
    code, said = extended("0ep")
    assert (code, said.count("the run has been extended by 1ep: give extend = '1ep'")) == (2, 1), (
        said
    )


@pytest.mark.slow
def test_a_run_in_parts_goes_on_with_the_same_bits_on_another_number_of_processes(
    tmp_path: Path, make_images: Callable[..., Path], run_python: Any
) -> None:
    make_images(tmp_path / "data", per_class=24)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}

    def train(out: Path, procs: int, stop_at: str | None = None) -> str:
        launch = ["launch", "--procs", str(procs), "--"] if procs > 1 else []
        command = [
            sys.executable, "-m", "flambeau", *launch, "train", str(tmp_path / "data"), "--out", str(out),
            "--parts", "4", "--batch-size", "16", "--ema", "0.9", "--clip-norm", "1", "--mixup", "0.2",
            "--duration", "40ep", "--log-every", "1", "--device", "cpu", "--precision", "fp32",
        ]  # fmt: skip
        with subprocess.Popen(command, stderr=subprocess.PIPE, text=True, env=environment) as job:
            try:
                metrics, deadline = out / "metrics.jsonl", time.monotonic() + 60
                while stop_at and not (metrics.exists() and stop_at in metrics.read_text()):
                    assert job.poll() is None
                    assert time.monotonic() < deadline
                    time.sleep(0.05)
                if stop_at:
                    job.send_signal(signal.SIGTERM)
                _, said = job.communicate(timeout=300)
            finally:
                job.terminate()
        assert job.returncode == (75 if stop_at else 0), said
        return said

    alone, moved = tmp_path / "alone", tmp_path / "moved"
    train(alone, 1)
    train(moved, 1, stop_at='"step": 20,')
    verdict = run_python("-m", "flambeau", "verify", str(moved)).stdout.splitlines()[-1]
    anywhere = "on any number of processes with OMP_NUM_THREADS=1"
    assert re.fullmatch(rf"a resume would be exact, from step \d+, {anywhere}", verdict)
    said = train(moved, 3)
    assert len(re.findall(r"^going on from step \d+ of \d+$", said, re.M)) == 1, said
    assert "not to the same bits" not in said
    expected, found = (load_file(folder / "model.safetensors") for folder in (alone, moved))
    assert expected.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in expected.items())
    lines = [
        re.sub(r'"(images_per_s|data_wait)": [^,}]*', "", (folder / "metrics.jsonl").read_text())
        for folder in (alone, moved)
    ]
    assert lines[0] == lines[1]
