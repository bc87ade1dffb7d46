"""Training scripts run unchanged but for the line with `fast`, and reach the same accuracy.

Those of PyTorch's examples, torchvision and timm are run where their paths are given:

    FLAMBEAU_PEER_IMAGENET=examples/imagenet/main.py
    FLAMBEAU_PEER_TORCHVISION=vision/references/classification/train.py
    FLAMBEAU_PEER_TIMM=pytorch-image-models/train.py
"""

import ast
import os
import statistics
import tarfile
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
from PIL import Image

from flambeau.data.drop_in.fast_loader import FastLoader
from load_script import load_script

PHOTOS = Path(__file__).resolve().parents[4] / "shared" / "datasets" / "imagenette-mini.tar"
BENCH = Path(__file__).resolve().parents[3] / "bench"
STAND_IN = Path(__file__).parent / "training_script.py"
LOADERS = "train_loader", "val_loader"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(BENCH)  # it imports its neighbor
    return load_script(BENCH / "peer_scripts.py")


@pytest.fixture(scope="module")
def spots(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Four classes of spots in noise, by their color: 30 images of each to train on, 25 others."""
    colors = {
        "red": (150, 90, 90),
        "green": (90, 150, 90),
        "blue": (90, 90, 150),
        "grey": (110,) * 3,
    }
    root, draws = tmp_path_factory.mktemp("spots"), np.random.default_rng(0)
    for part, count in (("train", 30), ("val", 25)):
        for name, color in colors.items():
            (root / part / name).mkdir(parents=True)
            for number in range(count):
                pixels = draws.normal(110, 60, (12, 14, 3))
                top, left = draws.integers(0, 6, 2)
                pixels[top : top + 6, left : left + 6] += np.subtract(color, 110)
                levels = pixels.clip(0, 255).astype(np.uint8)
                large = Image.fromarray(levels).resize((56, 48), Image.Resampling.BICUBIC)
                large.save(root / part / name / f"{number:02}.jpg", quality=90)
    return root


def stand_in(tmp_path: Path, bench: ModuleType) -> tuple[ModuleType, ModuleType]:
    """The script as it is, and with the line."""
    changed = tmp_path / "training_script.py"
    source = STAND_IN.read_text(encoding="utf-8")
    changed.write_text(bench.with_the_line(source, LOADERS), encoding="utf-8")
    assert len(changed.read_text(encoding="utf-8").splitlines()) == len(source.splitlines()) + 1
    return load_script(STAND_IN), load_script(changed)


def test_same_accuracy_and_order(spots: Path, tmp_path: Path, bench: ModuleType) -> None:
    before, after = (
        [script.main(spots, seed=seed, epochs=4) for seed in range(3)]
        for script in stand_in(tmp_path, bench)
    )
    for one, other in zip(before, after, strict=True):
        assert [isinstance(loader, FastLoader) for loader in (*one.loaders, *other.loaders)] == [
            False, False, True, True,
        ]  # fmt: skip
        assert one.labels == other.labels, "the same samples in the same order, in each epoch"
        assert one.labels[0] != one.labels[1]
    means = [statistics.mean(run.accuracy for run in runs) for runs in (before, after)]
    assert min(means) > 60, "chance is 25 %"
    # Four standard errors of the difference of two means of 3 runs on 100 images, at 80 %: 3.3 %.
    assert abs(means[1] - means[0]) < 13


def test_share_of_a_process_and_what_is_dropped(
    spots: Path, tmp_path: Path, bench: ModuleType
) -> None:
    before, after = (
        script.main(spots, seed=0, epochs=2, is_distributed=True)
        for script in stand_in(tmp_path, bench)
    )
    assert before.labels == after.labels
    assert before.labels[0] != before.labels[1], "set_epoch has reached the sampler"
    assert [len(labels) for labels in after.labels] == [54, 54], "60 of 120, in batches of 9"
    for one, other in zip(before.loaders, after.loaders, strict=True):
        for name in (
            "batch_size",
            "drop_last",
            "num_workers",
            "dataset",
            "sampler",
            "batch_sampler",
        ):
            assert type(getattr(one, name)) is type(getattr(other, name))
        assert len(one) == len(other)
    assert after.loaders[0].drop_last and not after.loaders[1].drop_last


def test_where_the_line_goes(bench: ModuleType) -> None:
    source = "def main(on):\n    a = make()\n    if on:\n        b = other()\n    else:\n        b = make()\n"
    lines = bench.with_the_line(f"{source}    b.run()\n", ("a", "b")).splitlines()
    assert lines[6].startswith("    from flambeau.data.fast import fast; a, b = fast(a), fast(b);")
    assert lines[7] == "    b.run()"
    assert isinstance(ast.parse("\n".join(lines)), ast.Module)
    with pytest.raises(SystemExit, match="c is made in 0 places"):
        bench.with_the_line(source, ("a", "c"))


EXPECTED = {
    "imagenet": "RandomResizedCrop, RandomHorizontalFlip, ToTensor, Normalize",
    "torchvision": "RandomResizedCrop, RandomHorizontalFlip, PILToTensor, ConvertImageDtype, Normalize",
    "timm": "RandomResizedCropAndInterpolation, RandomHorizontalFlip, ColorJitter, MaybePILToTensor",
}


@pytest.mark.slow
@pytest.mark.parametrize("name", EXPECTED)
def test_script_of_another_project(name: str, tmp_path: Path, bench: ModuleType) -> None:
    variable = f"FLAMBEAU_PEER_{name.upper()}"
    if variable not in os.environ:
        pytest.skip(f"needs the path of the script in {variable}")
    if not PHOTOS.exists():
        pytest.skip(f"needs ../shared/datasets/{PHOTOS.name}")
    with tarfile.open(PHOTOS) as archive:
        archive.extractall(tmp_path, filter="data")
    script = Path(os.environ[variable])
    run = bench.train(name, script, tmp_path, seed=0, epochs=4, is_fast=True)
    assert (
        f"to be taken over: reading, {EXPECTED[name]}; read by threads" in run.output.splitlines()
    )
    assert run.output.count("; read by threads\n") == 2, "also the loader of evaluations"
    # 400 images, 10 classes: by chance 10 %, with a standard deviation of 1.5 %.
    assert 16 < run.accuracy < 80
