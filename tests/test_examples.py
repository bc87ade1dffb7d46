"""Every script of examples/ runs, is killed in the middle and started again, and ends with the same bits.

The comparison is that of bench/kill_storm.py.
"""

import os
import random
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from scipy.linalg import sqrtm
from sklearn.metrics import r2_score
from torch.nn.functional import avg_pool2d

from flambeau.recipes.checkpoints.atomic_checkpoint import checkpoint_folders
from flambeau.run.loop.nan_guard import NotFinite
from flambeau.run.run import Run
from load_script import load_script

ROOT = Path(__file__).parents[1]
EXAMPLES = ROOT / "examples"
# Flags for few and small steps, the step that SIGKILL follows, and the newest checkpoint then.
TINY = {
    "segmentation": ("--size 16 --samples 60 --duration 3ep", 5, 3),
    "regression": ("--rows 400 --duration 3ep --checkpoint-every 2st", 9, 8),
    "gan": ("--images 1700 --width 4 --duration 20st --checkpoint-every 6st", 15, 12),
    "language_model": ("--chars 4000 --context 16 --duration 2ep --checkpoint-every 4st", 21, 20),
}
StartRanks = Callable[..., Any]


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script(ROOT / "bench" / "kill_storm.py")


def run_script(
    name: str, folder: Path, kill_at: int | None = None, flags: Sequence[str | Path] = ()
) -> None:
    """What `python examples/NAME.py` does in a process of its own, which SIGKILL ends after a step."""
    if os.environ["WORLD_SIZE"] == "1":
        for variable in ("RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
            del os.environ[variable]
    step = Run.step

    def counted(run: Run, loss: torch.Tensor) -> None:
        step(run, loss)
        if run.state.step == kill_at:
            run._recorder.wait_for_all()  # so that the newest checkpoint is known
            os.kill(os.getpid(), signal.SIGKILL)

    Run.step = counted  # type: ignore[method-assign]
    random.seed(0)  # which is saved as well, and is another one in each new process
    sys.argv = [f"{name}.py", *TINY[name][0].split(), "--out", f"{folder}", *map(str, flags)]
    runpy.run_path(f"{EXAMPLES / name}.py", run_name="__main__")


def newest(folder: Path) -> str:
    return checkpoint_folders(folder / "checkpoints")[-1].name


@pytest.mark.parametrize(("name", "world"), [*((name, 1) for name in TINY), ("segmentation", 2)])
def test_it_is_killed_and_ends_with_the_same_bits(
    start_ranks: StartRanks,
    tmp_path: Path,
    bench: ModuleType,
    name: str,
    world: int,
) -> None:
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    _, kill_at, saved = TINY[name]
    unkilled = start_ranks(world, run_script, name, whole)
    codes = start_ranks(world, run_script, name, killed, kill_at).codes()
    assert codes[0] == -signal.SIGKILL
    assert newest(killed) == f"step-{saved:08}"
    start_ranks(world, run_script, name, killed).results()
    unkilled.results()
    for part in ("model.safetensors", "result.json"):
        assert bench.compare(part, *((run / part).read_bytes() for run in (whole, killed))) == []
    assert bench.compare("metrics.jsonl", bench.journal(whole), bench.journal(killed)) == []
    last = (bench.checkpoint(run / "checkpoints" / newest(run)) for run in (whole, killed))
    assert bench.compare("last checkpoint", *last) == []


def test_two_processes_segment_as_one_does(
    start_ranks: StartRanks, tmp_path: Path, bench: ModuleType
) -> None:
    """SyncBatchNorm: with BatchNorm of each process the losses differ by 1 %."""
    runs = tmp_path / "one", tmp_path / "two"
    for world, folder in enumerate(runs, start=1):
        start_ranks(world, run_script, "segmentation", folder).results()
    one, two = (
        [line["train_loss"] for line in bench.journal(folder) if "train_loss" in line]
        for folder in runs
    )
    assert two == pytest.approx(one, rel=1e-3)


def test_files_of_ones_own(start_ranks: StartRanks, tmp_path: Path) -> None:
    """The flags that point a script at other data than its own."""
    rows = (f"{number},{number % 7},{2 * number}\n" for number in range(90))
    (tmp_path / "table.csv").write_text("a,b,target\n" + "".join(rows), encoding="utf-8")
    (tmp_path / "novel.txt").write_text("It was a dark and stormy night. " * 40, encoding="utf-8")
    for folder, mode in (("photos", "RGB"), ("masks", "L"), ("a", "L"), ("b", "L")):
        (tmp_path / "images" / folder).mkdir(parents=True)
        for number in range(10):
            image = Image.new(mode, (30, 20), (number % 4,) * 3 if mode == "RGB" else number % 4)
            image.save(tmp_path / "images" / folder / f"{number}.png")
    flags = {
        "regression": ("--csv", tmp_path / "table.csv"),
        "language_model": ("--text", tmp_path / "novel.txt"),
        "segmentation": (
            "--images",
            tmp_path / "images" / "photos",
            "--masks",
            tmp_path / "images" / "masks",
        ),
        "gan": ("--data", tmp_path / "images"),
    }
    jobs = [start_ranks(1, run_script, name, tmp_path / name, None, flags[name]) for name in TINY]
    for job in jobs:
        job.results()


def test_figures_are_those_of_their_definitions() -> None:
    """R² as scikit-learn has it, the distance with scipy's root of a matrix, exp of the mean loss."""
    found = {name: runpy.run_path(f"{EXAMPLES / name}.py") for name in TINY}
    generator = torch.Generator().manual_seed(0)
    real, fake = torch.randn(2, 300, 1, 28, 28, generator=generator)
    r2, distance, perplexity = (
        found[name][metric]()
        for name, metric in (
            ("regression", "R2"),
            ("gan", "FrechetDistance"),
            ("language_model", "Perplexity"),
        )
    )
    for part in (slice(0, 120), slice(120, 300)):
        r2.update(fake[part, 0, 0, 0], real[part, 0, 0, 0])
        distance.update(real[part], 0.5 * fake[part] + 1)
        perplexity.update(real[part].square())
    expected = r2_score(real[:, 0, 0, 0].numpy(), fake[:, 0, 0, 0].numpy())
    assert float(r2.compute()) == pytest.approx(expected)
    assert float(perplexity.compute()) == pytest.approx(float(real.double().square().mean().exp()))
    a, b = (avg_pool2d(x, 4).flatten(1).double().numpy() for x in (real, 0.5 * fake + 1))
    root = sqrtm(np.cov(a.T) @ np.cov(b.T)).real
    shift = np.square(a.mean(0) - b.mean(0)).sum()
    expected = shift + np.trace(np.cov(a.T) + np.cov(b.T) - 2 * root)
    assert float(distance.compute()) == pytest.approx(expected)


@pytest.mark.parametrize("bad", ["gradient", "loss"])
def test_a_gan_whose_discriminator_goes_bad_stops_with_both_from_before(
    bad: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The discriminator is not stepped either, and the next start has the bits of a run that never saw it."""
    gan = load_script(EXAMPLES / "gan.py")
    make, made = gan.make_discriminator, []

    def goes_bad(width: int) -> torch.nn.Module:
        network = make(width)
        made.append(network)
        calls = iter(range(1000))
        if (
            bad == "gradient"
        ):  # in each step that of the discriminator's loss, and that of the generator's
            network[-1].bias.register_hook(lambda g: g / 0 if next(calls) == 28 else g)
        else:  # the real images, the others, and the others for the generator
            network.register_forward_hook(
                lambda *given: given[2] * torch.nan if next(calls) == 42 else given[2]
            )
        return network

    def start(folder: str) -> bytes:
        flags = [*TINY["gan"][0].split(), "--out", str(tmp_path / folder)]
        monkeypatch.setattr(sys, "argv", ["gan.py", *flags])
        gan.main()
        return (tmp_path / folder / "model.safetensors").read_bytes()

    monkeypatch.setattr(gan, "make_discriminator", goes_bad)
    with pytest.raises(NotFinite, match=r"^step 15 "):
        start("bad")
    assert all(p.isfinite().all() for p in made[0].parameters())
    monkeypatch.setattr(gan, "make_discriminator", make)
    assert start("bad") == start("whole")


def test_a_gan_refuses_a_launcher(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["gan.py"])
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(SystemExit) as ending:
        runpy.run_path(f"{EXAMPLES / 'gan.py'}", run_name="__main__")
    assert ending.value.code == 2
    assert "start it without a launcher" in capsys.readouterr().err
