"""What a loop logs as `predictions` is in evaluation.json and in the report of its run."""

import base64
import errno
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader, Dataset, Subset
from torchvision import transforms
from torchvision.datasets import ImageFolder

from flambeau import fast
from flambeau.errors import InputError
from flambeau.report.evaluated import evaluated
from flambeau.run.loop import logged_predictions
from flambeau.run.loop.logged_predictions import EvaluationFile
from flambeau.run.run import Run

CLASSES = ["day", "dusk", "night"]
TRANSFORM = transforms.Compose(
    [
        transforms.Resize((8, 8)),
        transforms.ToTensor(),
        transforms.Normalize([0.4, 0.5, 0.6], [0.2, 0.25, 0.3]),
    ]
)


@pytest.fixture(autouse=True)
def _photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    draw = np.random.default_rng(1)
    for label, name in enumerate(CLASSES):
        Path("photos", name).mkdir(parents=True)
        for number in range(9):
            pixels = draw.integers(9 * label, 9 * label + 230, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(f"photos/{name}/{number}.png")


def images() -> ImageFolder:
    return ImageFolder("photos", TRANSFORM)


def train(
    folder: str = "run",
    *,
    data: Any = None,
    log: Callable[[Tensor, Tensor, Tensor], dict[str, Any]] = lambda logits, y, x: {
        "predictions": (logits, y, x)
    },
    stop_at: int | None = None,
    **options: Any,
) -> tuple[Run, nn.Module]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    options = {"duration": "2ep", "batch_size": 6, "bar": False, **options}
    run = Run(folder, model, optimizer, images(), **options)
    for _ in run.epochs():
        for x, y in run.batches():
            run.step(cross_entropy(model(x), y))
            if run.state.step == stop_at:
                raise KeyError("stopped")
        for x, y in run.evaluate(images() if data is None else data):
            logits = model(x)
            run.log(val_accuracy=logits.argmax(1) == y, **log(logits, y, x))
    return run, model


def stored(folder: str = "run") -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(Path(folder, "evaluation.json").read_text())
    assert evaluated(facts) is not None  # as a report reads it
    return facts


def check(facts: dict[str, Any], model: nn.Module) -> None:
    """Compare with what the model says now, counted here."""
    with torch.no_grad():
        rows = [(x, y, model.eval()(x[None])[0].softmax(0)) for x, y in images()]
    table = np.zeros((3, 3), int)
    for _, y, shares in rows:
        table[y, int(shares.argmax())] += 1
    assert facts["images"] == 27
    assert facts["labels"] == table.sum(1).tolist()
    assert facts["predicted"] == table.sum(0).tolist()
    assert facts["right"] == table.diagonal().tolist()
    wrong = {(a, b, int(table[a, b])) for a in range(3) for b in range(3) if a != b and table[a, b]}
    assert {tuple(one) for one in facts["confused"]} == wrong
    assert wrong  # else nothing is shown
    worst = max(
        (k for k, (_, y, shares) in enumerate(rows) if int(shares.argmax()) != y),
        key=lambda k: float(rows[k][2].max()),
    )
    assert facts["mistakes"][0]["index"] == worst
    assert facts["mistakes"][0]["probability"] == pytest.approx(
        float(rows[worst][2].max()), abs=1e-5
    )


def picture(sample: dict[str, Any]) -> np.ndarray[Any, Any]:
    head, _, text = sample["picture"].partition(",")
    assert head == "data:image/jpeg;base64"
    image = Image.open(io.BytesIO(base64.b64decode(text)))
    assert image.size == (112, 112)  # enlarged 14 times
    return np.asarray(image.resize((8, 8), Image.Resampling.BOX)).astype(int)


def test_confusions_names_and_pictures() -> None:
    preprocess = {"image_size": 8, "mean": [0.4, 0.5, 0.6], "std": [0.2, 0.25, 0.3]}
    Path("net.py").write_text(
        "from torch import nn\ndef build():\n    return nn.Sequential(nn.Flatten(), nn.Linear(192, 3))\n"
    )
    run, model = train(builder="net.py:build", preprocess=preprocess, classes=CLASSES)
    assert run.result is not None
    facts = stored()
    assert facts["step"] == run.result.step
    assert facts["classes"] == CLASSES
    if run.result.step == run.state.step:
        check(facts, model)
    for sample in (*facts["mistakes"], *facts["unsure"]):
        assert sample["image"] == images().samples[sample["index"]][0]
        assert sample["label"] == images().targets[sample["index"]]
        there = np.asarray(Image.open(sample["image"])).astype(int)
        assert np.abs(picture(sample) - there).mean() < 25  # as a JPEG with a quarter of the color
        others = [
            np.abs(picture(sample) - np.asarray(Image.open(p))).mean() for p, _ in images().samples
        ]
        assert int(np.argmin(others)) == sample["index"]
    page = Path("run/report.html").read_text()
    assert facts["mistakes"][0]["picture"] in page


def test_figures_are_those_of_the_published_weights() -> None:
    """The last ones here, as nothing chooses the best."""
    _, model = train(best="val_nothing", best_mode="max", classes=CLASSES)
    check(stored(), model)


def test_without_names_and_pictures() -> None:
    _, model = train(
        log=lambda logits, y, x: {"predictions": (logits, y)}, best="no", best_mode="max"
    )
    facts = stored()
    check(facts, model)
    assert facts["classes"] == ["0", "1", "2"]
    assert "picture" not in facts["mistakes"][0]


def test_without_predictions_there_is_no_file() -> None:
    train(log=lambda logits, y, x: {})
    assert not Path("run/evaluation.json").exists()


def test_a_resume_and_parts_of_a_batch_give_the_same() -> None:
    train("whole", classes=CLASSES)
    with pytest.raises(KeyError):
        train("stopped", stop_at=7, checkpoint_every="2st", classes=CLASSES)
    assert Path("stopped/evaluation.json").exists()  # of the first epoch
    train("stopped", checkpoint_every="2st", classes=CLASSES)
    assert stored("stopped") == stored("whole")


@pytest.mark.parametrize("procs", [2, 3])
def test_several_ranks_give_the_file_of_one(start_ranks: Callable[..., Any], procs: int) -> None:
    train("one", classes=CLASSES)

    def work() -> None:
        train("several", classes=CLASSES)

    start_ranks(procs, work, group=True).results()
    one, several = stored("one"), stored("several")
    for facts in (one, several):  # rounded differently: gradients are added in another order
        for sample in (*facts["mistakes"], *facts["unsure"]):
            assert "picture" in sample
            for name in ("probability", "of_label", "picture"):
                del sample[name]
        del facts["calibration"], facts["calibration_error"]
    assert several == one


def test_images_of_loaders_are_named_where_their_order_is_known() -> None:
    paths = [path for path, _ in images().samples]
    train("loader", data=DataLoader(images(), batch_size=5))
    train("fast", data=fast(DataLoader(images(), batch_size=5)))
    train("part", data=Subset(images(), range(26, 3, -1)))
    for folder in ("loader", "fast"):
        for sample in stored(folder)["mistakes"]:
            assert sample["image"] == paths[sample["index"]]
    for sample in stored("part")["mistakes"]:
        assert sample["image"] == paths[26 - sample["index"]]
    train("shuffled", data=DataLoader(images(), batch_size=5, shuffle=True))
    assert stored("shuffled")["mistakes"][0]["image"].startswith("image ")


class Pairs(Dataset[tuple[Tensor, Tensor]]):
    """No files."""

    def __len__(self) -> int:
        return 27

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        x, y = images()[index]
        return x, torch.tensor(y)


def test_images_of_other_data_sets_have_numbers() -> None:
    train(data=Pairs())
    for sample in stored()["mistakes"]:
        assert sample["image"] == f"image {sample['index']}"


def test_out_of_memory_counts_nothing_twice() -> None:
    train("whole", classes=CLASSES)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.02)
    options: dict[str, Any] = {"duration": "2ep", "batch_size": 6, "classes": CLASSES}
    run = Run("cut", model, optimizer, images(), bar=False, **options)
    for _ in run.epochs():
        for x, y in run.batches():
            run.step(cross_entropy(model(x), y))
        for x, y in run.evaluate(images()):
            with run.halving():
                logits = model(x)
                run.log(val_accuracy=logits.argmax(1) == y, predictions=(logits, y, x))
                if len(x) > 4:
                    raise torch.OutOfMemoryError("CUDA out of memory")
    assert stored("cut") == stored("whole")


class Count:
    """A metric of the user's by that name."""

    def __init__(self) -> None:
        self.total = 0

    def update(self, logits: Tensor, targets: Tensor) -> None:
        self.total += len(logits)

    def compute(self) -> int:
        return self.total

    def reset(self) -> None:
        self.total = 0


def test_what_was_logged_by_that_name_before_is_as_it_was() -> None:
    run, _ = train("mean", log=lambda logits, y, x: {"predictions": logits.argmax(1)})
    assert run.result is not None
    assert 0 <= run.result.metrics["predictions"] <= 2
    assert not Path("mean/evaluation.json").exists()
    run, _ = train(
        "metric",
        log=lambda logits, y, x: {"predictions": (logits, y)},
        metrics={"predictions": Count()},
    )
    assert run.result is not None
    assert run.result.metrics["predictions"] == 27
    assert not Path("metric/evaluation.json").exists()


@pytest.mark.parametrize(
    ("log", "why"),
    [
        (lambda logits, y, x: (y, logits), r"must be logits \(N, K\) and targets \(N,\)"),
        (lambda logits, y, x: (logits, y[:2]), r"must be logits \(N, K\) and targets \(N,\)"),
        (lambda logits, y, x: (logits, y.float()), "of whole numbers"),
        (
            lambda logits, y, x: (logits[:, :2], y.clamp(max=1)),
            "2 logits per image, and classes has 3",
        ),
        (lambda logits, y, x: (logits, y, x[:1]), r"images must be \(6, C, H, W\)"),
        (lambda logits, y, x: (logits, y, x[0]), r"images must be \(6, C, H, W\)"),
    ],
)
def test_other_shapes_are_told(log: Callable[..., Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        train(log=lambda *args: {"predictions": log(*args)}, classes=CLASSES)


def test_of_training_batches_they_are_refused() -> None:
    model = nn.Sequential(nn.Flatten(), nn.Linear(192, 3))
    run = Run("run", model, torch.optim.SGD(model.parameters()), images(), duration="1ep")
    with pytest.raises(RuntimeError, match=r"counts in `for \.\.\. in run\.evaluate"):
        for _ in run.epochs():
            for x, y in run.batches():
                run.log(predictions=(model(x), y))
                run.step(cross_entropy(model(x), y))


def facts_of(step: int) -> dict[str, Any]:
    nothing: dict[str, Any] = {"labels": [0], "predicted": [0], "right": [0], "confused": []}
    more = {"calibration": [], "calibration_error": 0.0, "mistakes": [], "unsure": []}
    return {"step": step, "images": 0, "classes": ["a"], **nothing, **more}


def test_the_file_is_of_the_weights_that_are_published(tmp_path: Path) -> None:
    path = tmp_path / "evaluation.json"
    said: list[str] = []
    file = EvaluationFile(path)
    file.note(facts_of(1), published=1, say=said.append)
    for step in range(2, 30):  # none better
        file.note(facts_of(step), published=1, say=said.append)
    assert json.loads(path.read_text())["step"] == 1
    file.note(facts_of(30), published=30, say=said.append)
    assert json.loads(path.read_text())["step"] == 30
    file.note(facts_of(31), published=1, say=said.append)  # after a rollback
    assert json.loads(path.read_text())["step"] == 1
    other = EvaluationFile(path)  # after a resume
    other.write(1, say=said.append)
    assert path.exists()
    other.write(5, say=said.append)  # of weights that are no longer published
    assert not path.exists()
    assert said == []


def test_a_full_disk_does_not_end_the_run(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def full(path: Path, data: bytes) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(logged_predictions, "write_file", full)
    run, _ = train()
    assert run.result is not None
    told = capsys.readouterr().err
    assert "evaluation.json could not be written" in told
    assert "No space left on device" in told


@pytest.mark.parametrize("content", ["{}", "mine", '{"step": 3, "accuracy": 0.5}'])
def test_a_file_of_the_users_own_is_left_alone(
    content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyError):
        train(stop_at=2, log=lambda logits, y, x: {})
    Path("run/evaluation.json").write_text(content)
    train()
    assert Path("run/evaluation.json").read_text() == content
    assert capsys.readouterr().err.count("is not of this run, and is left as it is") == 1
    train(log=lambda logits, y, x: {})
    assert Path("run/evaluation.json").read_text() == content


def test_classes_alone_are_for_the_report_and_the_rest_belongs_together() -> None:
    with pytest.raises(InputError, match="give builder, too"):
        train(classes=CLASSES, preprocess=TRANSFORM)
    train(classes=CLASSES)
    assert "builder" not in Path("run/config.toml").read_text()
