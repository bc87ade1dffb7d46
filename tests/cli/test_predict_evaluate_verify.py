"""What is done with a run afterwards: its predictions, its figures, and whether it is whole."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import timm
import torch
import torch.nn.functional as F
from PIL import Image

from flambeau.data.transforms.crops import eval_image
from flambeau.images.decode import decode
from flambeau.recipes.models.small_convnet import SmallConvNet
from flambeau.recipes.setup.environment import usable_cpus
from flambeau.run.folder.run_folder import RunFolder
from flambeau.run.run import Run
from flambeau.trainer import verify_run
from refused import refused

SETTINGS = "--batch-size 4 --precision fp32 --lr 0.05"
SHORT = f"--duration 4st {SETTINGS}"
LINEAR = """
from torch import nn

def make(num_classes, channels, image_size):
    return nn.Sequential(nn.Flatten(), nn.Linear(channels * image_size**2, num_classes))
"""


@pytest.fixture(autouse=True)
def _in_its_own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "linear.py").write_text(LINEAR, encoding="utf-8")


@pytest.fixture
def run(flambeau: Any, images: Path) -> Path:
    """A finished run of the small network."""
    assert flambeau("train", images, "--out run", SHORT).code == 0
    return Path("run")


@pytest.fixture
def interrupted(
    flambeau: Any, images: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., tuple[str | Path, ...]]:
    """A function that trains until after step 3 and is left without a word; the command that goes on."""

    def train(*flags: str) -> tuple[str | Path, ...]:
        original = Run.step

        def step(self: Run, loss: torch.Tensor) -> None:
            if self.state.step == 3:
                raise KeyboardInterrupt
            original(self, loss)

        command = ("train", images, "--model linear.py:make --checkpoint-every 1st", SHORT, *flags)
        with monkeypatch.context() as patch:
            patch.setattr(Run, "step", step)
            answer = flambeau(*command)
        assert (answer.code, answer.err.splitlines()[-1]) == (130, "flambeau: interrupted")
        return command

    return train


@pytest.fixture
def unfinished(interrupted: Callable[..., tuple[str | Path, ...]]) -> Path:
    """A run with checkpoints of steps 1, 2 and 3."""
    interrupted("--keep 3 --out unfinished")
    return Path("unfinished")


def predicted(flambeau: Any, run: Path, *paths: Path, more: str = "") -> list[dict[str, float]]:
    """Of each image, the probability of every class."""
    answer = flambeau("predict", run, *paths, "--json --top 99", more)
    assert (answer.code, answer.err) == (0, "")
    rows = [json.loads(line) for line in answer.out.splitlines()]
    assert [row["image"] for row in rows] == [str(path) for path in paths]
    return [{entry["class"]: entry["probability"] for entry in row["classes"]} for row in rows]


# ---------------------------------------------------------------- predictions


def test_predictions_are_those_of_the_weights(flambeau: Any, run: Path, images: Path) -> None:
    """Against the file of weights, NumPy and Pillow: nothing of the command is used."""
    paths = sorted((images / "val").rglob("*.png"))
    facts = json.loads((run / "dataset.json").read_text(encoding="utf-8"))
    model = SmallConvNet(1, 2).eval()
    model.load_state_dict(safetensors.torch.load_file(run / "model.safetensors"))
    x = np.stack([np.array(Image.open(path)) for path in paths])[:, None] / 255
    x = (x - facts["mean"][0]) / facts["std"][0]
    with torch.no_grad():
        expected = model(torch.from_numpy(x).float()).softmax(1)
    found = predicted(flambeau, run, *paths)
    assert all(list(row.values()) == sorted(row.values(), reverse=True) for row in found)
    table = torch.tensor([[row["a"], row["b"]] for row in found])
    torch.testing.assert_close(table, expected, rtol=1e-4, atol=2e-5)


def test_photos_are_predicted_by_a_timm_model(flambeau: Any, photos: Path) -> None:
    command = ("train", photos, "--out birds --model test_resnet --image-size 64")
    assert flambeau(*command, SHORT).code == 0
    facts = json.loads(Path("birds/dataset.json").read_text(encoding="utf-8"))
    checkpoint_path = "birds/model.safetensors"
    model = timm.create_model("test_resnet", num_classes=3, checkpoint_path=checkpoint_path).eval()
    paths = sorted(photos.rglob("*.jpg"))[:4]  # a CMYK one, a grey one and a turned one among them
    for path, row in zip(paths, predicted(flambeau, Path("birds"), *paths), strict=True):
        pixels = eval_image(decode(path.read_bytes(), channels=3), 64)
        x = (pixels / 255 - facts["mean"]) / facts["std"]
        with torch.no_grad():
            expected = model(torch.from_numpy(x).float().permute(2, 0, 1)[None]).softmax(1)[0]
        found = torch.tensor([row[name] for name in ("ant", "bee", "cat")])
        torch.testing.assert_close(found, expected, rtol=0, atol=0.02)  # bytes are rounded


def test_more_images_than_a_batch_keep_their_order(flambeau: Any, run: Path, images: Path) -> None:
    paths = sorted((images / "train").rglob("*.png"))
    alone = {path: predicted(flambeau, run, path)[0] for path in paths[:3]}
    many = predicted(flambeau, run, *(paths * 5)[:70])
    for index, path in enumerate((paths * 5)[:70]):
        if path in alone:
            assert many[index] == pytest.approx(alone[path], abs=1e-5)


def test_predictions_for_people(flambeau: Any, run: Path, images: Path) -> None:
    path = images / "val" / "b" / "00.png"
    code, out, _ = flambeau("predict", run, path)
    assert code == 0
    name, _, ranking = out.strip().rpartition(": ")
    assert name == str(path)
    best, second = ranking.split(", ")
    assert {best[0], second[0]} == {"a", "b"}
    assert best.endswith("%")
    assert flambeau("predict", run, path, "--top 1").out.strip().endswith(best)


def test_wrong_images_and_wrong_runs(flambeau: Any, run: Path, images: Path) -> None:
    good = images / "val" / "a" / "00.png"
    Path("noise.png").write_bytes(b"noise")
    Path("cut.png").write_bytes(good.read_bytes()[:60])
    Path("empty.png").touch()
    for path, part in (
        ("gone.png", "gone.png does not exist"),
        ("noise.png", "noise.png: not a JPEG, PNG"),
        ("cut.png", "cut.png: "),
        ("empty.png", "empty.png: the file is empty"),
    ):
        refused(flambeau("predict", run, good, path), part)
    for verb in ("predict {} x.png", "evaluate {} images", "verify {}"):
        refused(flambeau(verb.format("gone")), "gone does not exist")
        if not verb.startswith("verify"):  # which checks images too
            refused(flambeau(verb.format("images")), "images is not a run folder")
            refused(
                flambeau(verb.format("linear.py")), "linear.py is a file: give the folder of a run"
            )
    refused(flambeau("verify linear.py"), "linear.py is no packed file")
    refused(flambeau("predict", run, good, "--top 0"), "--top must be at least 1, got 0")


def test_a_file_in_the_place_of_the_run_folder(flambeau: Any, run: Path, images: Path) -> None:
    shutil.copy(run / "model.safetensors", "alone.safetensors")
    for verb in ("evaluate", "predict"):
        for part in ("model.safetensors", "config.toml"):
            near = f"is a file: give the folder of a run, such as {run.name}, in which it lies"
            refused(flambeau(verb, Path(run.name, part), images), near)
        message = refused(flambeau(verb, "alone.safetensors", images), "is a file: give the folder")
        assert "such as" not in message
        for part in ("checkpoints", "checkpoints/step-00000004"):
            near = f"give the folder of a run, such as {run.name}, in which it lies"
            message = refused(flambeau(verb, Path(run.name, part), images), near)
            assert "choose another" not in message
    for part in ("config.toml", "metrics.jsonl", "result.json", "checkpoints"):
        refused(
            flambeau("verify", Path(run.name, part)), f"Check all of it: flambeau verify {run.name}"
        )
    assert flambeau("verify", run / "model.safetensors").code == 0


@pytest.mark.parametrize("words", ["--out", "--plot"])
def test_a_file_that_exists_is_told_in_the_words_of_the_command(
    words: str, flambeau: Any, run: Path, images: Path
) -> None:
    name = {"--out": "a.csv", "--plot": "a.png"}[words]
    Path(name).write_text("mine")
    message = refused(flambeau("evaluate", run, images, words, name), "or give --force")
    assert "force=" not in message
    refused(flambeau("evaluate", run, images, words, f"none/{name}"), "there is no folder none")
    if words == "--out":
        assert "force=" not in refused(flambeau("predict", run, images, words, name), "--force")
        refused(flambeau("predict", run, images, "--out none/a.csv"), "there is no folder none")
    refused(flambeau("convert", run, "none/a.pth"), "there is no folder none")
    assert not Path("none").exists()


def test_download_without_a_data_set_by_name(flambeau: Any, run: Path, images: Path) -> None:
    for verb in ("evaluate", "predict"):
        part = f"download has no effect with {images}, only with torchvision:NAME or hf:NAME: leave it out"
        refused(flambeau(verb, run, images, "--download"), part)


def test_the_weights_of_a_run_are_checked(flambeau: Any, run: Path, images: Path) -> None:
    weights = run / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:-4])
    refused(flambeau("evaluate", run, images), "model.safetensors cannot be read as safetensors")
    safetensors.torch.save_file({"x": torch.zeros(1)}, weights)
    refused(flambeau("evaluate", run, images), "do not fit the model small_convnet", "is missing")
    weights.unlink()
    refused(flambeau("predict", run, images / "val" / "a" / "00.png"), "model.safetensors")


def test_a_changed_model_file_is_said(flambeau: Any, images: Path) -> None:
    assert flambeau("train", images, "--out run --model linear.py:make", SHORT).code == 0
    path = images / "val" / "a" / "00.png"
    (line,) = flambeau("predict run", path).err.splitlines()
    assert line == f"running {Path('linear.py').resolve()}:make, which run names (your own)"
    Path("linear.py").write_text(LINEAR + "# a remark", encoding="utf-8")
    for command in (("predict run", path), ("evaluate run", images)):
        code, _, err = flambeau(*command)
        assert code == 0
        assert err.endswith("linear.py has changed since the run was started\n")
    other = LINEAR.replace("2, num_classes)", "2, num_classes, bias=False)")
    Path("linear.py").write_text(other, encoding="utf-8")
    refused(flambeau("predict run", path), "do not fit the model")


def test_an_unfinished_run_predicts_with_its_newest_checkpoint(
    flambeau: Any, unfinished: Path, images: Path
) -> None:
    path = images / "val" / "a" / "00.png"
    answer = flambeau("predict", unfinished, path)
    assert answer.code == 0
    assert "the run is not finished: these are the weights of step-00000003" in answer.err
    damaged = unfinished / "checkpoints" / "step-00000003" / "model.safetensors"
    damaged.write_bytes(damaged.read_bytes()[:-1])
    answer = flambeau("predict", unfinished, path)
    assert answer.code == 0
    assert "passed over: " in answer.err
    assert answer.err.splitlines()[-1].endswith("step-00000002")
    shutil.rmtree(unfinished / "checkpoints")
    refused(flambeau("predict", unfinished, path), "no whole checkpoint yet")


# ---------------------------------------------------------------- figures


def without_code(err: str) -> str:
    """Without the lines that name the file of a model."""
    return "".join(line for line in err.splitlines(keepends=True) if line[:8] != "running ")


def evaluated(flambeau: Any, *words: Any) -> dict[str, float]:
    answer = flambeau("evaluate", *words, "--json")
    assert (answer.code, without_code(answer.err)) == (0, "")
    figures: dict[str, float] = json.loads(answer.out)
    return figures


@pytest.mark.parametrize("more", ["", "--ema 0.5"])
def test_figures_on_the_validation_data_are_those_of_the_run(
    more: str, flambeau: Any, images: Path
) -> None:
    assert flambeau("train", images, "--out run --epochs 3", SETTINGS, more).code == 0
    metrics = json.loads(Path("run/result.json").read_text(encoding="utf-8"))["metrics"]
    for data, workers in ((images, "0"), (images / "val", "2")):
        figures = evaluated(flambeau, "run", data, "--workers", workers)
        assert figures["accuracy"] == metrics["val_accuracy"]
        assert figures["loss"] == pytest.approx(metrics["val_loss"], rel=1e-5)
        assert (figures["images"], figures["bad_images"]) == (8, 0)


def test_figures_are_those_of_the_predictions(flambeau: Any, run: Path, images: Path) -> None:
    paths = sorted((images / "train").rglob("*.png"))
    rows = predicted(flambeau, run, *paths)
    right = [
        max(row, key=row.__getitem__) == path.parent.name
        for row, path in zip(rows, paths, strict=True)
    ]
    losses = [-np.log(row[path.parent.name]) for row, path in zip(rows, paths, strict=True)]
    refused(flambeau("evaluate", run, images / "train"), f"trained on all {len(paths)} images of")
    figures = evaluated(flambeau, run, images / "train", "--all")
    assert (figures["trained_on"], figures["counts_trained_on"]) == (len(paths), True)
    assert figures["accuracy"] == pytest.approx(np.mean(right))
    assert figures["loss"] == pytest.approx(np.mean(losses), rel=1e-3)
    assert figures["images"] == len(paths)


def test_some_classes_are_enough_and_others_are_refused(
    flambeau: Any, run: Path, make_images: Callable[..., Path], tmp_path: Path
) -> None:
    only_b = make_images(tmp_path / "some", classes="ab", seed=5)
    shutil.rmtree(only_b / "a")
    whole = evaluated(flambeau, run, make_images(tmp_path / "both", classes="ab", seed=5))
    part = evaluated(flambeau, run, only_b)
    assert (part["images"], whole["images"]) == (8, 16)
    make_images(tmp_path / "other", classes="az")
    refused(flambeau("evaluate run other"), "is of class 'z', which the model lacks")
    refused(flambeau("evaluate run gone"), "gone does not exist")
    refused(
        flambeau("evaluate run run/config.toml"),
        "config.toml is neither a folder nor a file of packed images",
    )


def test_a_record_file_is_evaluated(flambeau: Any) -> None:
    import flambeau.data.sources.open_data as sources

    command = "train --out fm --duration 1st --batch-size 8 --model linear.py:make --precision fp32"
    assert flambeau(command).code == 0
    metrics = json.loads(Path("fm/result.json").read_text(encoding="utf-8"))["metrics"]
    val = sources.EMBEDDED.with_name("fashion_mnist_val.rec")
    figures = evaluated(flambeau, "fm", val)
    assert (figures["accuracy"], figures["images"]) == (metrics["val_accuracy"], 1000)


@pytest.mark.parametrize("workers", [0, 2])
def test_bad_images_in_an_evaluation(workers: int, flambeau: Any, run: Path, images: Path) -> None:
    bad = [images / "val" / "a" / "01.png", images / "val" / "b" / "02.png"]
    for path in bad:
        path.write_bytes(b"noise")
    command = ("evaluate", run, images, f"--workers {workers}")
    refused(flambeau(*command), f"{bad[0]}: not a JPEG", "--skip-bad-images")
    refused(
        flambeau(*command, "--skip-bad-images 1"), str(bad[1]), "--skip-bad-images 1 is used up"
    )
    figures = evaluated(flambeau, *command[1:], "--skip-bad-images 2")
    assert (figures["images"], figures["bad_images"]) == (6, 2)
    assert not list(run.glob("bad_images*"))
    for path in (images / "val").rglob("*.png"):
        path.write_bytes(b"noise")
    refused(flambeau(*command, "--skip-bad-images 99"), "no image")
    for flag in ("--workers -1", "--skip-bad-images -1"):
        refused(flambeau("evaluate", run, images, flag), f"{flag[:-3]} must be at least 0, got -1")


# ---------------------------------------------------------------- verification


def test_a_finished_run_is_whole(flambeau: Any, run: Path, images: Path) -> None:
    code, out, err = flambeau("verify", run)
    assert (code, err) == (0, "")
    step = json.loads((run / "result.json").read_text(encoding="utf-8"))["step"]
    assert out.splitlines() == [
        "step-00000000: whole",
        "step-00000004: whole",
        f"model.safetensors: whole (best weights, step {step})",
        "finished: there is nothing to resume",
    ]
    (run / "model.safetensors").unlink()
    answer = flambeau("verify", run)
    assert answer.code == 1
    assert f"model.safetensors: MISSING (best weights, step {step})" in answer.out.splitlines()
    assert "remove result.json and start the command of the run again" in answer.out
    answer = flambeau("train", images, "--out run", SHORT)
    assert answer.code == 0
    assert "weights: model.safetensors is MISSING, see `verify` below" in answer.out


def test_settings_that_are_no_longer_those_of_a_run_are_noticed(
    flambeau: Any, run: Path, images: Path
) -> None:
    """What `predict` refuses is not called whole."""
    config = run / "config.toml"
    written = config.read_text(encoding="utf-8")
    for content, said in (
        (f"{written}colour = 1\n", "config.toml: unknown key 'colour'"),
        ("", "config.toml says no "),
    ):
        config.write_text(content, encoding="utf-8")
        assert flambeau("predict", run, images).code == 2
        refused(flambeau("verify", run), said)
    config.unlink()
    refused(flambeau("verify", run), "there is no config.toml in it")


def test_weights_whose_result_is_missing_are_not_called_whole(flambeau: Any, run: Path) -> None:
    (run / "result.json").unlink()
    code, out, _ = flambeau("verify", run)
    assert code == 0
    assert "model.safetensors: not verified, as result.json is missing" in out
    assert "a resume would be exact, from step 4" in out


@pytest.mark.parametrize(
    ("name", "at", "said"),
    [
        ("model.safetensors", -5, "model.safetensors: DAMAGED, not what the run has left"),
        ("metrics.jsonl", 3, "DAMAGED: metrics.jsonl is not what it was at the checkpoint"),
        ("metrics.jsonl", -2, "DAMAGED: metrics.jsonl is not what it was at the checkpoint"),
    ],
)
def test_a_changed_byte_of_a_finished_run_is_noticed(
    name: str, at: int, said: str, flambeau: Any, run: Path
) -> None:
    content = bytearray((run / name).read_bytes())
    content[at] ^= 1
    (run / name).write_bytes(content)
    code, out, _ = flambeau("verify", run)
    assert code == 1
    assert any(line.startswith(said) for line in out.splitlines()), out


def test_a_line_after_the_end_of_a_finished_run_is_noticed(flambeau: Any, run: Path) -> None:
    with (run / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"step": 9}\n')
    code, out, _ = flambeau("verify", run)
    assert code == 1
    said = "DAMAGED: metrics.jsonl has 12 bytes that the run has not written, at its end"
    assert said in out.splitlines()


@pytest.mark.parametrize("position", [0, 64])
def test_evaluations_after_a_checkpoint_within_an_epoch_are_no_damage(
    position: int, run: Path
) -> None:
    """A run that was stopped in its last evaluation: the checkpoint stays, the evaluations are made again."""
    size = (run / "metrics.jsonl").stat().st_size
    checkpoint = {"metrics_bytes": size - 30, "position": position}
    found = verify_run._added_metrics(RunFolder(run), checkpoint)
    assert len(found) == (position == 0)


def test_an_unfinished_run_can_go_on(flambeau: Any, unfinished: Path) -> None:
    code, out, _ = flambeau("verify", unfinished)
    assert code == 0
    assert out.splitlines() == [
        "step-00000001: whole",
        "step-00000002: whole",
        "step-00000003: whole",
        "a resume would be exact, from step 3",
    ]


@pytest.mark.parametrize("name", ["model.safetensors", "training_state.pt", "manifest.json"])
def test_every_damage_is_named(name: str, flambeau: Any, unfinished: Path) -> None:
    file = unfinished / "checkpoints" / "step-00000002" / name
    content = bytearray(file.read_bytes())
    content[len(content) // 3] ^= 1
    file.write_bytes(content)
    code, out, _ = flambeau("verify", unfinished)
    assert code == 1
    assert f"step-00000002: DAMAGED: {name} is not what was saved" in out
    assert "a resume would be exact, from step 3" in out
    assert "step-00000001: whole" in out


def test_why_a_resume_would_not_be_exact(
    flambeau: Any, unfinished: Path, images: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reasons() -> list[str]:
        answer = flambeau("verify", unfinished)
        assert answer.code == 1
        assert "would be exact" not in answer.out
        prefix = "a resume would not be exact: "
        lines = answer.out.splitlines()
        return [line.removeprefix(prefix) for line in lines if line.startswith(prefix)]

    threads = torch.get_num_threads()
    with monkeypatch.context() as patch:
        patch.setenv("OMP_NUM_THREADS", str(threads + 1))
        assert reasons() == [f"threads {threads} then, {threads + 1} now"]
    with monkeypatch.context() as patch:
        patch.setattr(torch, "__version__", "9.9.9")
        (reason,) = reasons()
        assert reason.endswith(" then, 9.9.9 now")
    extra = images / "train" / "a" / "extra.png"
    shutil.copy(images / "train" / "a" / "00.png", extra)
    (reason,) = reasons()
    assert "training data have changed" in reason
    extra.unlink()
    images.rename("moved")
    (reason,) = reasons()
    assert "images does not exist" in reason
    Path("moved").rename(images)
    model = Path("linear.py").read_text(encoding="utf-8")
    Path("linear.py").write_text(model + "# more", encoding="utf-8")
    (reason,) = reasons()
    assert "linear.py has changed" in reason
    Path("linear.py").write_text(model, encoding="utf-8")
    assert flambeau("verify", unfinished).code == 0
    shutil.rmtree(unfinished / "checkpoints")
    assert reasons() == ["there is no whole checkpoint"]


def test_lost_figures_are_noticed(
    flambeau: Any, interrupted: Callable[..., tuple[str | Path, ...]]
) -> None:
    command = interrupted("--log-every 1 --out run")
    assert flambeau("verify run").code == 0
    metrics = Path("run/metrics.jsonl")
    whole = metrics.read_bytes()

    def reason() -> str:
        code, out, _ = flambeau("verify run")
        assert code == 1
        return out.splitlines()[-1].removeprefix("a resume would not be exact: metrics.jsonl ")

    metrics.write_bytes(bytes([whole[0] ^ 1]) + whole[1:])
    assert reason() == "is not what it was at the checkpoint"
    metrics.unlink()
    assert reason() == "is missing"
    metrics.mkdir()
    assert reason() == "is no file"
    metrics.rmdir()
    metrics.write_bytes(b"")
    assert reason() == "is shorter than at the checkpoint"
    answer = flambeau(*command)
    assert answer.code == 0
    assert "run/metrics.jsonl is shorter than at the checkpoint: lines are lost" in answer.err


def test_a_resume_takes_no_checkpoint_under_the_name_of_another(
    flambeau: Any, interrupted: Callable[..., tuple[str | Path, ...]]
) -> None:
    command = interrupted("--out run")
    older, newest = sorted(Path("run/checkpoints").glob("step-*"))[-2:]
    shutil.rmtree(newest)
    shutil.copytree(older, newest)
    wrong = f"manifest.json is of step {int(older.name[5:])}: the folder was renamed or copied"
    answer = flambeau("verify run")
    assert (answer.code, f"{newest.name}: DAMAGED: {wrong}" in answer.out) == (1, True)
    answer = flambeau(*command)
    assert answer.code == 0
    assert f"{newest} is damaged: {wrong}; going on from {older.name}" in answer.err


def test_verify_uses_the_threads_that_training_would(flambeau: Any, unfinished: Path) -> None:
    report = json.loads((unfinished / "environment.json").read_text(encoding="utf-8"))
    assert report["exactness"]["threads"] <= usable_cpus()
    torch.set_num_threads(usable_cpus() + 1)
    assert flambeau("verify", unfinished).code == 0


def test_one_checkpoint_can_be_verified(flambeau: Any, run: Path) -> None:
    folder = run / "checkpoints" / "step-00000004"
    code, out, _ = flambeau("verify", folder)
    assert (code, out) == (0, f"{folder}: whole, step 4\n")
    weights = folder / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    code, out, _ = flambeau("verify", folder)
    assert code == 1
    assert "model.safetensors" in out
    assert flambeau("verify", folder, "--deep").code == 2


def test_loss_is_the_mean_over_images(flambeau: Any, run: Path, images: Path) -> None:
    """70 images are two batches of unequal size; each counts the same."""
    facts = json.loads((run / "dataset.json").read_text(encoding="utf-8"))
    for index in range(54):
        shutil.copy(images / "train" / "a" / "00.png", images / "train" / "a" / f"x{index}.png")
    model = SmallConvNet(1, 2).eval()
    model.load_state_dict(safetensors.torch.load_file(run / "model.safetensors"))
    paths = sorted((images / "train").rglob("*.png"))
    assert len(paths) == 70
    x = np.stack([np.array(Image.open(path)) for path in paths])[:, None] / 255
    x = torch.from_numpy((x - facts["mean"][0]) / facts["std"][0]).float()
    targets = torch.tensor([int(path.parent.name == "b") for path in paths])
    with torch.no_grad():
        logits = model(x)
    figures = evaluated(flambeau, run, images / "train", "--all")
    assert figures["accuracy"] == pytest.approx(
        float((logits.argmax(1) == targets).double().mean())
    )
    assert figures["loss"] == pytest.approx(float(F.cross_entropy(logits, targets)), rel=1e-5)
