"""`--compile`: the same training as without it, no graph made in the middle, and exact after a stop."""

import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flambeau.data.loading.batch_layout import BatchLayout
from flambeau.data.loading.batch_plan import share_sizes
from flambeau.data.sources.open_data import open_sources
from flambeau.trainer.fit import fit, set_up
from flambeau.trainer.parts.auto_settings import resolve
from flambeau.trainer.parts.data import Prepared
from flambeau.trainer.settings.settings import Settings
from flambeau.trainer.settings.stored_settings import canonical

Graphs = list[tuple[int, ...]]


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Iterator[Graphs]:
    """The shape of the images of each graph that is made; they run as they are, so to the same bits."""
    made: Graphs = []

    def backend(graph: Any, inputs: Sequence[Any]) -> Any:
        made.append(next(tuple(x.shape) for x in inputs if isinstance(x, Tensor) and x.ndim == 4
                         and not isinstance(x, nn.Parameter)))  # fmt: skip
        return graph.forward

    real = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda model, *, mode, dynamic: real(model, backend=backend, dynamic=dynamic),
    )
    torch.compiler.reset()
    yield made
    torch.compiler.reset()


def train(
    images: Path, folder: Path, *, stop_at: int = -1, **given: Any
) -> tuple[dict[str, Tensor], Any]:
    train, val = open_sources(images)
    settings = canonical(Settings(
        data=str(images), device="cpu", precision="fp32", epochs=2, ema=0.9, **{"batch_size": 6, **given},
    ))  # fmt: skip
    resolved, facts = resolve(settings, train, val)
    training = set_up(Prepared(resolved, facts, train, val), folder=folder, bar=False)
    if stop_at >= 0:
        loss_of = training.loss_of.with_logits

        def dies(*batch: Any, step: int) -> Any:
            if step == stop_at:
                raise KeyboardInterrupt
            return loss_of(*batch, step=step)

        training.loss_of.with_logits = dies  # type: ignore[method-assign]
    fit(training)
    return {k: v.clone() for k, v in training.model.state_dict().items()}, training.run


def test_it_is_the_same_training(graphs: Graphs, images: Path, tmp_path: Path) -> None:
    """16 images to train on and 8 to evaluate on, in batches of 6."""
    plain, _ = train(images, tmp_path / "plain")
    assert graphs == []
    compiled, run = train(images, tmp_path / "compiled", compile="default")
    # To train on, then to evaluate on; and none later.
    assert [shape[0] for shape in graphs] == [6, 4, 6, 2]
    assert {k.removeprefix("_orig_mod."): v.tolist() for k, v in compiled.items()} == {
        k: v.tolist() for k, v in plain.items()
    }
    weights = [
        (tmp_path / name / "model.safetensors").read_bytes() for name in ("plain", "compiled")
    ]
    assert weights[0] == weights[1]
    assert run.result is not None


def test_accumulated_and_stopped(graphs: Graphs, images: Path, tmp_path: Path) -> None:
    told = {"compile": "default", "accumulate": 2, "checkpoint_every": "1st"}
    whole, _ = train(images, tmp_path / "whole", **told)
    with pytest.raises(KeyboardInterrupt):
        train(images, tmp_path / "run", stop_at=1, **told)
    resumed, _ = train(images, tmp_path / "run", **told)
    assert whole.keys() == resumed.keys()
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name])


def test_a_resume_without_it_is_said(
    graphs: Graphs, images: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(KeyboardInterrupt):
        train(images, tmp_path / "run", stop_at=3, compile="default", checkpoint_every="1st")
    assert re.search(r"the model was compiled in \d+ s\n", capsys.readouterr().err)
    train(images, tmp_path / "run", checkpoint_every="1st")
    assert "not to the same bits: compiled yes then, no now" in capsys.readouterr().err


def test_ranks_share_a_compiled_model(
    graphs: Graphs, start_ranks: Callable[..., Any], images: Path, tmp_path: Path
) -> None:
    def work() -> list[dict[str, Tensor]]:
        modes = ("none", "default")
        return [train(images, tmp_path / mode, compile=mode, accumulate=2)[0] for mode in modes]

    for plain, compiled in start_ranks(2, work, group=True).results():
        for name, tensor in plain.items():
            assert torch.equal(compiled[f"_orig_mod.{name}"], tensor)


@pytest.mark.parametrize(
    ("length", "layout", "sizes"),
    [
        (20, BatchLayout(5), [5]),
        (23, BatchLayout(5), [5, 3]),
        (21, BatchLayout(5), [5, 1]),
        (21, BatchLayout(5, accumulate=3), [5, 6]),
        (20, BatchLayout(5, rank=0, world=2), [3]),
        (20, BatchLayout(5, rank=1, world=2), [2]),
        (22, BatchLayout(5, rank=1, world=2), [2]),
    ],
)
def test_sizes_of_batches(length: int, layout: BatchLayout, sizes: list[int]) -> None:
    assert share_sizes(length, layout) == sizes


def test_the_command(
    flambeau: Any, images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    short = f"--duration 1st --batch-size 4 --precision fp32 --out {tmp_path / 'run'}"
    answer = flambeau("train", images, short, "--compile fast")
    assert answer.code == 2
    assert (
        "compile must be one of none, default, reduce-overhead, max-autotune; got 'fast'"
        in answer.err
    )
    answer = flambeau("train", images, short, "--compile --shard fsdp")
    assert (answer.code, "do not go together" in answer.err) == (2, True)

    def fails(graph: Any, inputs: Any) -> Any:
        raise RuntimeError("no C++ compiler was found")

    real, asked = torch.compile, []

    def refuses(model: nn.Module, *, mode: str | None, dynamic: bool) -> Any:
        asked.append(mode)
        return real(model, backend=fails, dynamic=dynamic)

    monkeypatch.setattr(torch, "compile", refuses)
    for flags in ("--compile", "--compile reduce-overhead"):
        answer = flambeau("train", images, short, flags)
        assert answer.code == 2
        assert re.search(r"cannot be compiled here \(.*\); leave --compile out", answer.err)
    assert asked == [None, "reduce-overhead"]
    assert not (tmp_path / "run").exists()


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_inductor_to_the_bit(images: Path, tmp_path: Path) -> None:
    """With torch's own compiler: a run that was stopped, in mid-epoch before its smaller last batch."""
    told = {"compile": "default", "checkpoint_every": "1st", "model": "tiny_convnet"}
    whole, _ = train(images, tmp_path / "whole", **told)
    torch.compiler.reset()
    with pytest.raises(KeyboardInterrupt):
        train(images, tmp_path / "run", stop_at=2, **told)
    torch.compiler.reset()  # as a new process
    resumed, _ = train(images, tmp_path / "run", **told)
    for name, tensor in whole.items():
        assert torch.equal(tensor, resumed[name])
    plain, _ = train(images, tmp_path / "plain", checkpoint_every="1st", model="tiny_convnet")
    for name, tensor in plain.items():
        torch.testing.assert_close(whole[f"_orig_mod.{name}"], tensor, rtol=1e-2, atol=1e-3)
    rows = [json.loads(line) for line in (tmp_path / "run/metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 6


def test_graphs_that_do_not_fit_are_made_for_smaller_batches(
    monkeypatch: pytest.MonkeyPatch,
    images: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def backend(graph: Any, inputs: Sequence[Any]) -> Any:
        size = max(len(x) for x in inputs if isinstance(x, Tensor) and x.shape[1:] == (1, 8, 8))

        def run(*given: Any) -> Any:
            if size > 4:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return graph.forward(*given)

        return run

    real = torch.compile
    monkeypatch.setattr(
        torch,
        "compile",
        lambda model, *, mode, dynamic: real(model, backend=backend, dynamic=dynamic),
    )
    torch.compiler.reset()
    halved, run = train(images, tmp_path / "halved", compile="default")
    torch.compiler.reset()
    assert run.state.micro_batch == 3
    assert "for micro-batches of 3 samples: more do not fit into memory" in capsys.readouterr().err
    monkeypatch.undo()
    small, _ = train(
        images, tmp_path / "small", batch_size=3, accumulate=2, lr=run.optimizer.defaults["lr"]
    )
    for name, tensor in small.items():
        assert torch.equal(tensor, halved[f"_orig_mod.{name}"])
