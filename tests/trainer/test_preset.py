"""--preset: the settings of a file of the package, and what it is not for."""

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flambeau.cli.command import main
from flambeau.run.options.toml_file import load_toml
from flambeau.trainer import api
from flambeau.trainer.settings.settings import PRESETS, Settings
from flambeau.trainer.settings.stored_settings import PRESET_FOLDER, with_preset

SHORT = "--preset speedrun --device cpu --batch-size 8 --precision fp32"


def write_images(folder: Path, sizes: tuple[int, ...]) -> None:
    draw = np.random.default_rng(0)
    for name in ("dark", "light"):
        (folder / name).mkdir(parents=True)
        for index in range(8):
            side = sizes[index % len(sizes)]
            pixels = draw.integers(0, 256, (side, side, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{index}.png")


@pytest.fixture
def images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    write_images(tmp_path / "images", (16,))
    return "images"


def refused(capsys: pytest.CaptureFixture[str], words: str) -> str:
    capsys.readouterr()
    assert main(["train", *words.split()]) == 2
    (line,) = (line for line in capsys.readouterr().err.splitlines() if line.startswith("flambeau"))
    return line


def test_every_preset_is_a_file_of_settings_with_its_measurement_in_its_head() -> None:
    files = sorted(PRESET_FOLDER.glob("*.toml"))
    assert [file.stem for file in files] == sorted(PRESETS)
    for file in files:
        values = load_toml(file)
        settings = Settings(**with_preset({"preset": file.stem}))
        assert {name: getattr(settings, name) for name in values} == values
        head = file.read_text(encoding="utf-8").partition("\n\n")[0]
        assert "easured" in head.partition("device =")[0]


def test_a_run_has_the_settings_of_the_file_but_for_its_flags_and_goes_on_without_the_name(
    images: str,
) -> None:
    assert main(["train", images, *SHORT.split(), "--epochs", "1", "--out", "run"]) == 0
    stored = load_toml(Path("run/config.toml"))
    expected = load_toml(PRESET_FOLDER / "speedrun.toml")
    expected |= {"device": "cpu", "batch_size": 8, "precision": "fp32", "duration": "1ep"}
    assert stored["preset"] == "speedrun"
    assert {name: stored[name] for name in expected} == expected
    assert main(["train", images, "--out", "run", "--extend", "1ep"]) == 0
    assert load_toml(Path("run/config.toml"))["preset"] == "speedrun"


def test_python_and_a_file_name_it_too(images: str) -> None:
    short = {"device": "cpu", "batch_size": 8, "precision": "fp32", "duration": "1st"}
    api.train(images, out="one", bar=False, preset="speedrun", **short)  # type: ignore[arg-type]
    lines = [f"{name} = {value!r}" for name, value in {"preset": "speedrun", **short}.items()]
    Path("mine.toml").write_text("\n".join(lines), encoding="utf-8")
    assert main(["train", images, "--config", "mine.toml", "--out", "two"]) == 0
    assert load_toml(Path("one/config.toml")) == load_toml(Path("two/config.toml"))
    assert load_toml(Path("one/config.toml"))["optimizer"] == "muon"


def test_what_does_not_fit_is_refused_in_a_line(
    images: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert "did you mean 'speedrun'?" in refused(capsys, f"{images} --preset spedrun")
    write_images(tmp_path / "uneven", (16, 20))
    line = refused(capsys, f"uneven {SHORT}")
    assert "preset = 'speedrun' is for images that are all squares of one size" in line
    line = refused(capsys, f"{images} {SHORT} --model small_convnet")
    assert "speedrun_convnet: leave --model or the preset out" in line
    assert not list(tmp_path.glob("runs/*"))


@pytest.mark.skipif(torch.cuda.is_available(), reason="of a machine without a GPU")
def test_without_a_gpu_it_says_how_to_do_without(
    images: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = refused(capsys, f"{images} --preset speedrun")
    assert "is for a GPU" in line and "--device cpu" in line
