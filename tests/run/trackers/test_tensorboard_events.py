"""Event files, read back by TensorBoard's own reader."""

import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flambeau import Run
from flambeau.recipes.data.sample_order import sample_order
from flambeau.recipes.setup.seeding import seed_everything
from flambeau.run.trackers.tensorboard_events import TensorboardEvents, tag
from flambeau.run.trackers.tracker import TrackedRun

reader = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
hparams = pytest.importorskip("tensorboard.plugins.hparams.plugin_data_pb2")

Points = list[tuple[int, dict[str, float]]]


def events(folder: Path) -> Any:
    return reader.EventAccumulator(
        str(folder / "tensorboard"), size_guidance={"scalars": 0, "histograms": 0}
    ).Reload()


def curves(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """All scalars but those of time and of the result."""
    found = events(folder)
    return {
        name: [(point.step, point.value) for point in found.Scalars(name)]
        for name in found.Tags()["scalars"]
        if name not in ("images_per_s", "data_wait") and not name.startswith("result/")
    }


def expected(lines: Points) -> dict[str, list[tuple[int, float]]]:
    found: dict[str, list[tuple[int, float]]] = {}
    for step, figures in lines:
        for name, value in figures.items():
            if name != "epoch":  # events hold float32
                rounded = float(torch.tensor(value, dtype=torch.float32))
                found.setdefault(tag(name), []).append((step, rounded))
    return found


def test_scalars_text_and_hyperparameters(
    tmp_path: Path, train: Callable[..., Any], points: Callable[[Path], Points]
) -> None:
    run = train(tmp_path / "run", "tensorboard", config={"lr": 0.1, "data": {"name": "noise"}})
    assert curves(tmp_path / "run") == expected(points(tmp_path / "run"))
    found = events(tmp_path / "run")
    assert {"loss/train", "loss/val", "accuracy/val", "learning_rates/1", "images_per_s"} <= {
        *found.Tags()["scalars"]
    }
    (text,) = found.Tensors("config/text_summary")
    assert b'duration = "4ep"' in text.tensor_proto.string_val[0]
    (result,) = found.Scalars("result/val_accuracy")
    assert (result.step, result.value) == (
        run.result.step,
        pytest.approx(run.result.metrics["val_accuracy"]),
    )
    content = found.summary_metadata["_hparams_/session_start_info"].plugin_data.content
    told = hparams.HParamsPluginData.FromString(content).session_start_info.hparams
    assert told["config.lr"].number_value == 0.1
    assert told["config.data.name"].string_value == "noise"


@pytest.mark.parametrize("flush_s", [0.0, 60.0])
def test_after_a_kill_and_a_resume_each_step_is_there_once(
    flush_s: float,
    tmp_path: Path,
    train: Callable[..., Any],
    killed: Callable[..., None],
    points: Callable[[Path], Points],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TensorboardEvents, "flush_s", flush_s)
    train(tmp_path / "whole", "tensorboard")

    def has_begun(number: int) -> Callable[[], bool]:
        return lambda: len([*(tmp_path / "run").glob("tensorboard/*")]) >= number

    killed(tmp_path / "run", "tensorboard", kill_at=6, until=has_begun(1))
    killed(tmp_path / "run", "tensorboard", kill_at=11, until=has_begun(2))
    train(tmp_path / "run", "tensorboard")
    assert curves(tmp_path / "run") == curves(tmp_path / "whole")
    assert curves(tmp_path / "run") == expected(points(tmp_path / "whole"))
    assert len(events(tmp_path / "run").Tensors("config/text_summary")) == 1


def test_a_resume_may_begin_with_it(
    tmp_path: Path,
    train: Callable[..., Any],
    killed: Callable[..., None],
    points: Callable[[Path], Points],
) -> None:
    killed(tmp_path / "run", None, kill_at=6)
    train(tmp_path / "run", "tensorboard")
    assert curves(tmp_path / "run") == expected(points(tmp_path / "run"))


def test_a_rollback_takes_points_back(
    tmp_path: Path,
    train: Callable[..., Any],
    points: Callable[[Path], Points],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TensorboardEvents, "flush_s", 0.0)
    train(tmp_path / "run", "tensorboard", bad_at=7, on_nan="rollback")
    assert curves(tmp_path / "run") == expected(points(tmp_path / "run"))


def test_images_are_those_of_the_first_batch(tmp_path: Path, train: Callable[..., Any]) -> None:
    run = train(tmp_path / "run", "tensorboard")
    (kept,) = events(tmp_path / "run").Images("first_batch")
    picture = Image.open(io.BytesIO(kept.encoded_image_string)).convert("L")
    assert (kept.step, picture.size) == (0, (8 * 4, 2 * 4))  # side by side, in two rows
    generator = torch.Generator().manual_seed(0)
    images = torch.rand(64, 1, 4, 4, generator=generator)
    order = sample_order(64, seed=0, epoch=0)[:16]
    expected = images[order, 0].reshape(2, 8, 4, 4).transpose(1, 2).reshape(8, 32)
    found = torch.from_numpy(np.array(picture)) / 255
    torch.testing.assert_close(found, expected, atol=1 / 255, rtol=0)
    train(tmp_path / "run", "tensorboard", extend="1ep")
    assert len(events(tmp_path / "run").Images("first_batch")) == 1 and run.result is not None


@pytest.mark.parametrize(
    ("x_NCHW", "expected"),
    [
        (torch.tensor([0, 51, 255], dtype=torch.uint8), [0, 51, 255]),
        (torch.tensor([0.0, 0.2, 0.5]), [0, 51, 127]),
        (torch.tensor([-1.0, 0.0, 3.0]), [0, 63, 255]),
        (torch.tensor([2.0, 2.0, 2.0], dtype=torch.bfloat16), [0, 0, 0]),
    ],
)
def test_floats_beyond_0_to_1_are_stretched(
    x_NCHW: torch.Tensor, expected: list[int], tmp_path: Path
) -> None:
    (tmp_path / "metrics.jsonl").touch()
    tracker = TensorboardEvents(TrackedRun(tmp_path, {}, tmp_path / "metrics.jsonl", 0, print))
    assert tracker.start() == (0, 0)
    tracker.images(x_NCHW.reshape(1, 1, 1, 3))
    tracker.end(None)
    (kept,) = events(tmp_path).Images("first_batch")
    picture = Image.open(io.BytesIO(kept.encoded_image_string)).convert("L")
    assert np.array(picture).tolist() == [expected]


def test_histograms_are_those_of_a_run_that_was_not_killed(
    tmp_path: Path,
    train: Callable[..., Any],
    killed: Callable[..., None],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(TensorboardEvents, "flush_s", 0.0)
    train(tmp_path / "whole", "tensorboard:histograms", bad_at=15, on_nan="rollback")

    def is_told() -> bool:
        record = tmp_path / "run" / "trackers" / "tensorboard.json"
        return record.exists() and json.loads(record.read_text())["step"] >= 9

    track = "tensorboard:histograms"
    killed(tmp_path / "run", track, kill_at=10, until=is_told, on_nan="rollback")
    train(tmp_path / "run", track, bad_at=15, on_nan="rollback")
    whole, resumed = (
        events(tmp_path / name).Histograms("weights/1.weight") for name in ("whole", "run")
    )
    assert [one.step for one in resumed] == [one.step for one in whole] == [4, 8, 12, 16]
    values = [[one.histogram_value.sum_squares for one in kept] for kept in (whole, resumed)]
    assert values[0] == values[1]


def test_histograms_of_each_evaluation_are_those_of_the_weights(
    tmp_path: Path, train: Callable[..., Any]
) -> None:
    run = train(tmp_path / "run", "tensorboard:histograms")
    found = events(tmp_path / "run")
    assert found.Tags()["histograms"] == ["weights/1.weight", "weights/1.bias"]
    kept = found.Histograms("weights/1.weight")
    assert [one.step for one in kept] == [4, 8, 12, 16]
    weights = run.model[1].weight.detach().double()
    last = kept[-1].histogram_value
    assert (last.num, last.min) == (48, float(weights.min()))
    assert last.sum_squares == pytest.approx(float((weights**2).sum()))


class Draws(torch.nn.Sequential):
    """Draws and changes a buffer in each forward pass, in evaluation too."""

    def __init__(self) -> None:
        super().__init__(
            torch.nn.Conv2d(1, 4, 3), torch.nn.BatchNorm2d(4, momentum=None), torch.nn.Flatten(),
            torch.nn.Linear(16, 3),
        )  # fmt: skip
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.passes += 1
        np.random.rand()
        noisy: torch.Tensor = super().forward(x + 0.1 * torch.rand_like(x))
        return noisy


def with_graph(folder: Path, track: str | None, model: torch.nn.Module, **options: Any) -> Any:
    """Weights and generators after three steps, and what was said."""
    said = list[str]()
    data = torch.utils.data.TensorDataset(torch.rand(12, 1, 4, 4), torch.arange(12) % 3)
    seed_everything(5)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    run = Run(
        folder,
        model,
        optimizer,
        data,
        duration="3st",
        batch_size=4,
        bar=False,
        track=track,
        **options,
    )
    run.progress.say = said.append  # type: ignore[method-assign]
    run._recorder._say = run.progress.say
    for _ in run.epochs():
        for x, y in run.batches():
            run.step(torch.nn.functional.cross_entropy(model(x), y))
    return (
        {k: v.clone() for k, v in model.state_dict().items()},
        torch.rand(3),
        np.random.rand(),
        said,
    )


def drawing_model() -> Draws:
    torch.manual_seed(1)
    return Draws()


@pytest.mark.parametrize("option", ["graph", "histograms:graph"])
def test_the_graph_is_that_of_the_model_and_changes_no_bit(tmp_path: Path, option: str) -> None:
    plain, drawn, number, _ = with_graph(tmp_path / "plain", None, drawing_model())
    model = drawing_model()
    weights, drawn_too, number_too, _ = with_graph(tmp_path / "run", f"tensorboard:{option}", model)
    torch.testing.assert_close(weights, plain, rtol=0, atol=0)
    assert torch.equal(drawn, drawn_too)
    assert number == number_too
    assert float(weights["passes"]) == 3
    nodes = events(tmp_path / "run").Graph().node
    operations = {node.op for node in nodes}
    assert {"aten::_convolution", "aten::batch_norm", "aten::linear"} <= operations
    assert any("Draws" in node.name and "Conv2d" in node.name for node in nodes)
    assert model.training


def test_no_graph_without_the_option(tmp_path: Path) -> None:
    with_graph(tmp_path / "run", "tensorboard", drawing_model())
    assert not events(tmp_path / "run").Tags()["graph"]


def test_a_model_that_cannot_be_traced_is_told_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    class Fails(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if not self.training:
                raise RuntimeError("only\nin training")
            return super().forward(x.flatten(1))

    *_, said = with_graph(tmp_path / "run", "tensorboard:graph", Fails(16, 3))
    out, err = capfd.readouterr()
    assert (out + err + "\n".join(said)).count(
        "no graph, and the run goes on: RuntimeError: only in training"
    ) == 1
    assert "Error occurs" not in out
    assert not events(tmp_path / "run").Tags()["graph"]
    assert (tmp_path / "run" / "model.safetensors").exists()
