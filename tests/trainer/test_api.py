"""`flambeau.load` and `flambeau.evaluate`: trained models in a program or a notebook."""

import contextlib
import json
import os
import random
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

import flambeau
from flambeau.cli.command import main
from flambeau.errors import InputError
from flambeau.trainer import start as start_module
from flambeau.trainer.api import evaluate, load, train
from flambeau.trainer.evaluation.answers import Ranking
from flambeau.trainer.fit import Training, fit
from flambeau.trainer.prediction.classify_files import predict
from flambeau.trainer.prediction.predictor import Predictor
from flambeau.trainer.prediction.trained_model import load_trained


def picture(label: int, seed: int = 0, size: tuple[int, int] = (20, 24)) -> Image.Image:
    generator = np.random.default_rng([label, seed])
    pixels = generator.integers(80 * label, 80 * label + 90, (*size, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


@pytest.fixture(scope="module")
def root(
    tmp_path_factory: pytest.TempPathFactory,
    kept_process: Callable[[], contextlib.AbstractContextManager[None]],
) -> Path:
    """The runs `color` and `grey`, and their images."""
    root = tmp_path_factory.mktemp("api")
    for name, mode in (("color", "RGB"), ("grey", "L")):
        for label, kind in enumerate(("ant", "bee", "cat")):
            (root / f"{name}_images" / kind).mkdir(parents=True)
            for seed in range(8):
                image = picture(label, seed).convert(mode)
                image.save(root / f"{name}_images" / kind / f"{seed}.png")
        command = f"train {root}/{name}_images --out {root}/{name} --duration 4st --batch-size 8"
        with kept_process():
            assert main([*command.split(), "--precision", "fp32", "--image-size", "16"]) == 0
    return root


@pytest.fixture
def color(root: Path) -> Predictor:
    return load(root / "color")


def test_images_of_all_kinds_give_the_same(color: Predictor, root: Path, tmp_path: Path) -> None:
    image = picture(1, 5)
    path = tmp_path / "x.png"
    image.save(path)
    x_HWC = np.asarray(image)
    x_CHW = torch.from_numpy(x_HWC.copy()).permute(2, 0, 1)
    expected = color(path)
    assert (len(expected), expected.probabilities.shape) == (1, (1, 3))
    torch.testing.assert_close(expected.probabilities.sum(), torch.tensor(1.0))
    kinds: list[Any] = [str(path), image, x_HWC, x_CHW, x_HWC[None], x_CHW[None], [image], (path,)]
    for images in kinds:
        assert torch.equal(color(images).logits, expected.logits)
    many = color([path, image, x_HWC, [x_CHW, np.stack([x_HWC, x_HWC])]])
    assert len(many) == 6
    torch.testing.assert_close(many.logits, expected.logits.expand(6, -1))
    [(_, answer)] = predict(load_trained(root / "color", say=print), [path])
    assert isinstance(answer, Ranking)
    ranking = answer.classes
    assert dict(expected.top()[0]) == pytest.approx(dict(ranking))
    assert expected.classes == (ranking[0][0],)
    assert next(iter(expected)) == (ranking[0][0], pytest.approx(ranking[0][1]))


@pytest.mark.parametrize("run", ["color", "grey"])
@pytest.mark.parametrize("mode", ["1", "L", "LA", "P", "RGB", "RGBA", "I;16", "I", "CMYK"])
def test_pil_images_are_as_their_files(mode: str, run: str, root: Path, tmp_path: Path) -> None:
    image = picture(2)
    if mode in ("I;16", "I"):
        image = Image.fromarray(np.asarray(image.convert("L")).astype(np.uint16) * 257)
        image = image if mode == "I;16" else image.convert("I")
    else:
        if mode in ("RGBA", "LA"):
            image.putalpha(Image.linear_gradient("L").resize(image.size))
        image = image.convert(mode)
    path = tmp_path / ("x.tif" if mode in ("CMYK", "I") else "x.png")
    image.save(path)
    predictor = load(root / run)
    assert torch.equal(predictor(image).logits, predictor(path).logits)


def test_a_photo_is_turned_upright(color: Predictor, tmp_path: Path) -> None:
    image, exif = picture(0, size=(30, 20)), Image.Exif()
    exif[0x0112] = 6
    image.save(tmp_path / "x.png", exif=exif)
    with Image.open(tmp_path / "x.png") as opened:
        found = color(opened)
    assert torch.equal(found.logits, color(tmp_path / "x.png").logits)
    assert torch.equal(found.logits, color(image.transpose(Image.Transpose.ROTATE_270)).logits)


def test_many_images_keep_their_order(color: Predictor) -> None:
    images = [picture(k % 3, k) for k in range(70)]
    found = color(images)
    alone = torch.cat([color(image).logits for image in images])
    torch.testing.assert_close(found.logits, alone, rtol=1e-4, atol=1e-5)
    assert len(color([])) == 0
    assert color([]).classes == ()


def test_the_model_and_its_preprocessing(color: Predictor, root: Path) -> None:
    image = picture(1)
    x = color.preprocess([image, image])
    assert (x.shape, x.dtype) == ((2, 3, 16, 16), torch.float32)
    with torch.no_grad():
        torch.testing.assert_close(color.model(x)[:1], color(image).logits)
    assert not color.model.training
    assert (color.classes, color.image_size) == (("ant", "bee", "cat"), 16)
    assert repr(color) == "Predictor(small_convnet, 3 classes, 16 x 16, on cpu)"
    assert repr(color([image] * 12)).count("%") == 10
    larger = load(root / "color", image_size=24)
    assert larger.preprocess(image).shape == (1, 3, 24, 24)
    assert color.preprocess(image).shape == (1, 3, 16, 16)


def test_flips(color: Predictor) -> None:
    x = np.asarray(picture(2, size=(16, 16)))
    expected = (color(x).probabilities + color(x[:, ::-1]).probabilities) / 2
    torch.testing.assert_close(color(x, flip_tta=True).probabilities, expected)


@pytest.mark.parametrize(
    ("image", "part"),
    [
        (torch.zeros(3, 8, 8), r"image 1: a tensor of torch.float32: values are uint8"),
        (np.zeros((8, 8, 3)), r"image 1: an array of float64: values are uint8"),
        (
            torch.zeros(8, 8, 3, dtype=torch.uint8),
            r"a tensor of shape \(8, 8, 3\): an image is \(C",
        ),
        (
            np.zeros((3, 8, 8), np.uint8),
            r"an array of shape \(3, 8, 8\): grey or color is \(H, W\)",
        ),
        (np.zeros(8, np.uint8), r"an array of shape \(8,\)"),
        (Image.new("F", (8, 8)), "floating-point pixels have no defined brightness"),
        ("gone.png", "gone.png does not exist"),
        (".", r"\. is a folder: give the paths of its images"),
        ("noise.png", r"noise.png: not a JPEG, PNG"),
    ],
)
def test_what_is_no_image_is_refused(
    image: Any, part: str, color: Predictor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("noise.png").write_bytes(b"noise")
    with pytest.raises(InputError, match=part):
        color([picture(0), image])
    with pytest.raises(TypeError, match=r"images are paths, PIL images.*got int"):
        color([3])  # type: ignore[list-item]
    with pytest.raises(TypeError, match="got bytes"):
        color(b"x")  # type: ignore[arg-type]


def test_an_evaluation_is_that_of_the_command(root: Path, capsys: Any) -> None:
    run, data = root / "color", root / "color_images"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        evaluation = evaluate(str(run), str(data), all_images=True)
        again = evaluate(load(run), data, workers=2, all_images=True)
        held_out = evaluate(run, data)
    assert capsys.readouterr() == ("", "")
    assert (held_out.num_images, held_out.num_trained_on, held_out.counts_trained_on) == (3, 21, 0)
    assert {image for image, *_ in held_out.predictions} < {
        image for image, *_ in evaluation.predictions
    }
    assert main(["evaluate", str(run), str(data), "--json", "--all"]) == 0
    assert json.loads(capsys.readouterr().out) == evaluation.as_dict() == again.as_dict()
    assert (evaluation.num_images, evaluation.num_bad, evaluation.image_size) == (24, 0, 16)
    assert main(["evaluate", str(run), str(data), "--all"]) == 0
    assert capsys.readouterr().out == f"{evaluation}\n"
    assert repr(evaluation.predictions) == "<predictions of 24 images>"
    path, label, ranking = next(iter(evaluation.predictions))
    assert (Path(path).parent.name, label) == ("ant", "ant")
    assert len(ranking) == 3
    found = load(run)([path for path, *_ in evaluation.predictions])
    assert found.classes == tuple(ranking[0][0] for *_, ranking in evaluation.predictions)


def test_files_of_an_evaluation(root: Path, tmp_path: Path) -> None:
    evaluation = evaluate(root / "grey", root / "grey_images")
    evaluation.save_predictions(tmp_path / "p.csv")
    evaluation.plot_confusion(str(tmp_path / "c.png"))
    for write in (evaluation.save_predictions, evaluation.plot_confusion):
        name = "p.csv" if write == evaluation.save_predictions else "c.png"
        with pytest.raises(InputError, match=f"{name} exists"):
            write(tmp_path / name)
        write(tmp_path / name, force=True)
    assert len((tmp_path / "p.csv").read_text(encoding="utf-8").splitlines()) == 1 + 3  # held out


def test_wrong_runs_and_settings(root: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="gone does not exist"):
        load(tmp_path / "gone")
    with pytest.raises(InputError, match=r"image_size must be from 8 to 16384, got 3"):
        load(root / "color", image_size=3)
    with pytest.raises(InputError, match="workers must be at least 0, got -1"):
        evaluate(root / "color", root / "color_images", workers=-1)
    with pytest.raises(InputError, match="skip_bad_images must be at least 0, got -2"):
        evaluate(root / "color", root / "color_images", skip_bad_images=-2)


def test_an_unfinished_run_warns_where_it_is_asked(root: Path) -> None:
    weights = (root / "grey" / "result.json").rename(root / "grey" / "result.away")
    try:
        with pytest.warns(UserWarning, match="the run is not finished") as caught:
            load(root / "grey")
            evaluate(root / "grey", root / "grey_images")
        assert [Path(one.filename).name for one in caught] == ["test_api.py"] * 2
        said: list[str] = []
        load(root / "grey", say=said.append)
        assert len(said) == 1
    finally:
        weights.rename(root / "grey" / "result.json")


def test_the_doors() -> None:
    assert flambeau.load is load
    assert flambeau.evaluate is evaluate


TINY: dict[str, Any] = {"batch_size": 8, "precision": "fp32", "image_size": 16, "bar": False}


def test_train_does_what_the_command_does(root: Path, tmp_path: Path) -> None:
    result = train(root / "color_images", out=tmp_path / "run", duration="4st", **TINY)
    assert result.folder == tmp_path / "run"
    assert (result.step, set(result.metrics)) == (4, {"val_loss", "val_accuracy"})
    theirs, ours = (root / "color" / "model.safetensors"), (result.folder / "model.safetensors")
    assert ours.read_bytes() == theirs.read_bytes()
    assert train(root / "color_images", out=tmp_path / "run", **TINY) == result
    assert load(result.folder).classes == ("ant", "bee", "cat")


def test_train_leaves_the_process_as_it_was(root: Path, tmp_path: Path) -> None:
    def state() -> tuple[Any, ...]:
        return (
            torch.are_deterministic_algorithms_enabled(), torch.get_num_threads(),
            torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark,
            torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
            torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate(),
            signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT),
        )  # fmt: skip

    before = state()
    for seed in (1, 2):  # twice in one process
        folder = tmp_path / str(seed)
        train(root / "grey_images", out=folder, epochs=1, seed=seed, **TINY)
        assert state() == before
    assert (tmp_path / "1/model.safetensors").read_bytes() != (
        tmp_path / "2/model.safetensors"
    ).read_bytes()


def test_errors_of_train_are_in_words_of_python(root: Path, tmp_path: Path) -> None:
    images = root / "color_images"
    with pytest.raises(TypeError, match="train has no setting 'epoch'; did you mean 'epochs'"):
        train(images, epoch=1)  # type: ignore[call-arg]
    with pytest.raises(InputError, match=r"^epochs must be at least 1, got 0"):
        train(images, epochs=0)
    train(images, out=tmp_path / "run", epochs=1, **TINY)
    with pytest.raises(InputError) as caught:
        train(images, out=tmp_path / "run", epochs=2, **TINY)
    assert "another configuration" in str(caught.value)
    assert "fresh= sets it aside" in str(caught.value)
    assert "--" not in str(caught.value)
    train(images, out=tmp_path / "run", epochs=2, fresh=True, **TINY)
    assert (tmp_path / "run.old-1").is_dir()
    with pytest.raises(InputError, match="name another one with out="):
        train(images, out=images / "run")


def test_a_stop_asked_for_ends_train_with_a_checkpoint(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped_fit(training: Training) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        fit(training)

    images = root / "color_images"
    with monkeypatch.context() as patch:
        patch.setattr(start_module, "fit", stopped_fit)
        with pytest.raises(SystemExit) as stopped:
            train(images, out=tmp_path / "run", duration="4st", **TINY)
    assert stopped.value.code == 75
    result = train(images, out=tmp_path / "run", **TINY)
    ours = (result.folder / "model.safetensors").read_bytes()
    assert ours == (root / "color" / "model.safetensors").read_bytes()


def test_another_default_dtype_changes_nothing(root: Path, tmp_path: Path) -> None:
    """Images and models of `flambeau train` are float32."""
    images = root / "color_images"

    def everything(folder: Path) -> tuple[Any, ...]:
        train(images, out=folder, duration="2st", batch_size=8, image_size=16, bar=False)
        predictor = load(folder)
        found = evaluate(predictor, images)
        pixels = predictor.preprocess(picture(1))
        return predictor.model.state_dict(), found.loss, pixels, predictor(picture(1)).probabilities

    usual = everything(tmp_path / "usual")
    torch.set_default_dtype(torch.float64)
    try:
        other = everything(tmp_path / "other")
        assert torch.get_default_dtype() is torch.float64
    finally:
        torch.set_default_dtype(torch.float32)
    torch.testing.assert_close(other, usual, rtol=0, atol=0)
