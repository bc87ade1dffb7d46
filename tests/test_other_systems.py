"""What of flambeau would work on Windows and macOS, as far as Linux can play them.

Windows: see fixtures/without_unix.py. macOS, and Windows, start processes by spawn. Their disks fold case, as
exFAT does, which has no links either; that test needs root, `apt install exfat-fuse exfatprogs` and FUSE.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

FIXTURES = Path(__file__).parent / "fixtures"
UNIX_ALONE = (
    "flambeau.images.native",  # a library of C that ctypes loads
    "flambeau.parallel.launcher",
    "flambeau.sandbox",
    "flambeau.tune",
)
"""What may need modules that Windows does not have; all else is imported without them."""

_IMPORT_ALL = """
import importlib, json, pkgutil
import flambeau

failed = {}
for module in pkgutil.walk_packages(flambeau.__path__, "flambeau."):
    if not module.name.endswith("__main__"):
        try:
            importlib.import_module(module.name)
        except Exception as error:
            failed[module.name] = f"{type(error).__name__}: {error}"
print(json.dumps(failed))
"""
_COMMANDS = """
import contextlib, io, json, sys
from flambeau.cli.command import main

results = []
for words in json.load(sys.stdin):
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        code = main(words)
    results.append([code, said.getvalue()])
print(json.dumps(results))
"""


_SPAWN = """
import multiprocessing, sys

if __name__ == "__main__":
    multiprocessing.set_start_method("spawn")
    from flambeau.cli.command import main

    sys.exit(main(sys.argv[1:]))
"""


def played(script: str, folder: Path, *, words: str = "") -> str:
    """What a script prints in a process of its own without what Windows lacks."""
    command = [sys.executable, "-W", "ignore", "-c", "import without_unix\n" + script]
    done = subprocess.run(
        command,
        input=words,
        capture_output=True,
        text=True,
        cwd=folder,
        env={"PYTHONPATH": str(FIXTURES), "HOME": str(folder), "OMP_NUM_THREADS": "1"},
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_only_trials_of_scripts_and_launched_processes_need_modules_of_unix(tmp_path: Path) -> None:
    failed = json.loads(played(_IMPORT_ALL, tmp_path))
    others = {name: why for name, why in failed.items() if not name.startswith(UNIX_ALONE)}
    assert others == {}
    assert "fcntl" in failed["flambeau.sandbox.sandbox"]  # so modules of Unix were really missing


@pytest.mark.slow
def test_a_model_is_trained_continued_and_used_without_unix(tmp_path: Path) -> None:
    draw = np.random.default_rng(0)
    for number, name in enumerate(("dark", "light")):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for image in range(4):
            pixels = draw.integers(100 * number, 100 * number + 100, (28, 28), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{image}.png")
    commands = [
        ["train", "--out", "run", "--epochs", "1", "--subset", "0.02", "--workers", "0"],
        ["train", "--out", "run", "--extend", "1ep"],
        ["verify", "run"],
        ["report", "run"],
        ["runs", "."],
        ["certify", "run"],
        ["predict", "run", "photos/dark/0.png"],
        ["pack", "photos", "photos.rec"],
        ["check", "photos"],
        ["env"],
        ["train", "--dry-run", "--out", "dry", "--subset", "0.02"],
    ]
    results = json.loads(played(_COMMANDS, tmp_path, words=json.dumps(commands)))
    said = dict(zip(map(" ".join, commands), results, strict=True))
    assert {words: code for words, (code, _) in said.items() if code} == {}, said
    assert "epoch 2/2" in said["train --out run --extend 1ep"][1]
    assert (tmp_path / "run" / "report.html").is_file()
    dry = said["train --dry-run --out dry --subset 0.02"][1]
    assert "disk at most" in dry
    assert "memory at most" not in dry  # it is not known there


@pytest.mark.slow
def test_commands_that_need_unix_say_so(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text("print('runs')\n", encoding="utf-8")
    commands = [
        ["doctor", "--", "python", "script.py"],
        ["tune"],
        ["launch", "--procs", "2", "script.py"],
        ["train", "--procs", "2", "--out", "run", "--epochs", "1"],
        ["sweep", "--out", "sweep", "--set", "lr=0.1,0.2", "--epochs", "1"],
    ]
    results = json.loads(played(_COMMANDS, tmp_path, words=json.dumps(commands)))
    for words, (code, said) in zip(commands, results, strict=True):
        assert code == 2, words
        what, instead = said.splitlines()[-2:]
        assert what.endswith("which Windows does not have")
        assert instead.startswith("Run it in the Windows Subsystem for Linux: flambeau ")
        assert "runs" not in said.split()


@pytest.mark.slow
def test_workers_that_are_spawned_bring_the_same_batches(tmp_path: Path) -> None:
    (tmp_path / "spawn.py").write_text(_SPAWN, encoding="utf-8")
    draw = np.random.default_rng(0)
    for name in ("dark", "light"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for number in range(20):
            pixels = draw.integers(0, 256, (40, 40, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{number}.jpg")
    weights = []
    for workers in ("0", "2"):
        command = [
            sys.executable,
            "spawn.py",
            "train",
            "photos",
            "--epochs",
            "2",
            "--image-size",
            "32",
        ]
        command += ["--batch-size", "8", "--out", f"run{workers}", "--workers", workers]
        done = subprocess.run(
            command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 0, done.stderr[-3000:]
        weights.append(load_file(tmp_path / f"run{workers}" / "model.safetensors"))
    alone, spawned = weights
    assert all(torch.equal(tensor, spawned[name]) for name, tensor in alone.items())


@pytest.fixture
def exfat(tmp_path: Path) -> Iterator[Path]:
    """An empty disk of exFAT."""
    needed = ("mkfs.exfat", "mount.exfat-fuse", "losetup", "umount")
    if any(shutil.which(name) is None for name in needed) or os.geteuid() != 0:
        pytest.skip("needs root, exfat-fuse and exfatprogs")
    image, place = tmp_path / "disk.img", tmp_path / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(2**28)
    subprocess.run(["mkfs.exfat", image], check=True, capture_output=True)
    loop = ["losetup", "--find", "--show", image]
    made = subprocess.run(loop, capture_output=True, text=True, check=False)
    if made.returncode:
        pytest.skip(f"no loop device: {made.stderr.strip()}")
    device = made.stdout.strip()
    try:
        mount = ["mount.exfat-fuse", device, place]
        if subprocess.run(mount, capture_output=True, check=False).returncode:
            pytest.skip("no FUSE here")
        try:
            yield place
        finally:
            subprocess.run(["umount", "--lazy", place], check=True)
    finally:
        subprocess.run(["losetup", "-d", device], check=True)


@pytest.mark.slow
def test_a_disk_that_folds_case_and_has_no_links(
    exfat: Path, tmp_path: Path, flambeau: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    draw = np.random.default_rng(0)
    for name in ("Cat", "cat", "dog"):
        (tmp_path / "photos" / name).mkdir(parents=True)
        for file in ("A", "a", "b"):
            pixels = draw.integers(0, 256, (32, 32, 3), np.uint8)
            Image.fromarray(pixels).save(tmp_path / "photos" / name / f"{file}.png")
    with pytest.raises(FileExistsError):  # so the disk does fold case
        (exfat / "x").mkdir()
        (exfat / "X").mkdir()
    monkeypatch.chdir(exfat)
    small = "--image-size 32 --batch-size 4 --workers 0 --epochs 2"
    for name in ("photos.rec", "photos.tar", "photos.parquet", "folder"):
        assert flambeau("pack", tmp_path / "photos", name).code == 0
        checked = flambeau("verify", name)
        assert checked.code == 0
        assert "9 images, all whole" in checked.out
    elsewhere = shutil.copytree("folder", tmp_path / "folder")
    for data, run in (("folder", "run"), (elsewhere, tmp_path / "run")):
        assert flambeau("train", data, small, "--out", run).code == 0
    here, there = (load_file(place / "run" / "model.safetensors") for place in (exfat, tmp_path))
    assert all(torch.equal(tensor, there[name]) for name, tensor in here.items())
    assert "this run is finished" in flambeau("train folder", small, "--out RUN").out
    assert flambeau("verify run").code == 0
    assert flambeau("export run --out shipped --data folder").code == 0
    assert not [path for path in Path().iterdir() if path.name.startswith(".")]
