"""A sharded run is the run of one process: figures, weights, checkpoints, other numbers of ranks."""

import functools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from flambeau.parallel.gradient_sync.fsdp import shard_model
from flambeau.parallel.ranks import join_ranks
from flambeau.recipes.checkpoints.atomic_checkpoint import checkpoint_folders
from flambeau.run.run import Run
from flambeau.trainer.verify_run import verify_run

StartRanks = Callable[..., Any]


class Crash(Exception):
    """The machine is gone."""


def make_model() -> nn.Module:
    torch.manual_seed(7)

    def block() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 16))

    return nn.Sequential(nn.Linear(6, 16), nn.Sequential(block(), block()), nn.Linear(16, 2))


def rows(length: int, seed: int) -> TensorDataset:
    x = torch.randn(length, 6, generator=torch.Generator().manual_seed(seed))
    return TensorDataset(x, (x[:, 0] > 0).long())


def train(
    folder: Path,
    *,
    shard: bool,
    crash_at: int = -1,
    precision: Any = "fp32",
    prepare: Callable[[nn.Module], object] = lambda model: None,
    **settings: Any,
) -> dict[str, Any]:
    torch.set_num_threads(1)
    model = make_model()
    if shard:
        shard_model(model, join_ranks(), torch.device("cpu"), unit_bytes=1000)
    prepare(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=0.9, fused=True)
    run = Run(
        folder, model, optimizer, rows(37, 1), duration="3ep", batch_size=8, accumulate=2, log_every=2,
        seed=5, clip_norm=0.5, ema=0.9, checkpoint_every="2st", bar=False, precision=precision, **settings,
    )  # fmt: skip
    for _ in run.epochs():
        for x, y in run.batches():
            with run.autocast():
                loss = cross_entropy(model(x), y)
            run.step(loss)
            if run.state.step == crash_at:
                run._recorder.saver.wait()
                raise Crash
        for x, y in run.evaluate(rows(9, 2)):
            with run.autocast():
                run.log(val_loss=cross_entropy(model(x), y), val_accuracy=model(x).argmax(1) == y)
    return {"result": run.result, "order": run.state.order_crc, "step": run.state.step}


def crashing(folder: Path, **settings: Any) -> str:
    try:
        train(folder, shard=True, **settings)
    except Crash:
        return "crashed"
    return "ended"


def lines(folder: Path) -> list[dict[str, float]]:
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [
        {k: v for k, v in row.items() if k not in ("images_per_s", "data_wait")} for row in found
    ]


def same(one: Path, other: Path, *, rtol: float = 1e-4, atol: float = 1e-5) -> None:
    weights = [load_file(folder / "model.safetensors") for folder in (one, other)]
    torch.testing.assert_close(*weights, rtol=rtol, atol=atol)
    for a, b in zip(lines(one), lines(other), strict=True):
        assert a == pytest.approx(b, rel=10 * rtol)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_equals_one_process(tmp_path: Path, start_ranks: StartRanks, world: int) -> None:
    expected = train(tmp_path / "whole", shard=False)
    work = lambda: train(tmp_path / "pieces", shard=True)  # noqa: E731
    for found in start_ranks(world, work, group=True).results():
        assert found["order"] == expected["order"]
        assert found["result"].weights == "ema"
    same(tmp_path / "pieces", tmp_path / "whole")
    assert verify_run(tmp_path / "pieces").good
    told = [
        json.loads((tmp_path / name / "environment.json").read_text())["model"]
        for name in ("pieces", "whole")
    ]
    assert told[0] == told[1]  # not this rank's pieces of it
    assert told[0]["parts"][0] == ["0", "Linear", 112, 112]


def flip_once(model: nn.Module, wrong: int) -> None:
    """In the second step rank `wrong` computes its last layer wrong, in one micro-batch, once."""
    calls: list[int] = []

    def wrong_once(module: nn.Module, args: Any, out: torch.Tensor) -> torch.Tensor | None:
        calls.append(len(calls))
        return out * (1 + 2**-10) if len(calls) == 2 * 2 else None

    if join_ranks().rank == wrong:
        model[-1].register_forward_hook(wrong_once)  # type: ignore[index]


def test_steps_are_checked(tmp_path: Path, start_ranks: StartRanks) -> None:
    def work(name: str, wrong: int, **settings: Any) -> str:
        prepare = functools.partial(flip_once, wrong=wrong)
        train(tmp_path / name, shard=True, prepare=prepare, **settings)
        return (tmp_path / name / "events.jsonl").read_text()

    checked = functools.partial(work, verify_steps="1/2")
    start_ranks(2, work, "once", -1, group=True).results()
    calm, _ = start_ranks(2, checked, "calm", -1, group=True).results()
    assert "differ" not in calm
    assert "computes its own share of a step again, as the model is sharded" in calm
    found, _ = start_ranks(2, checked, "found", 1, group=True).results()
    assert "step 2: computations " in found and "the run goes on" in found
    assert "of the share of rank 1 differ in the gradient of " in found
    for name in ("calm", "found"):
        same(tmp_path / name, tmp_path / "once", rtol=0, atol=0)


def test_resumes_on_other_numbers_of_ranks(tmp_path: Path, start_ranks: StartRanks) -> None:
    train(tmp_path / "whole", shard=False)
    for world, crash_at in ((3, 3), (2, 5), (4, 8)):
        work = lambda at=crash_at: crashing(tmp_path / "pieces", crash_at=at)  # noqa: E731
        assert start_ranks(world, work, group=True).results() == ["crashed"] * world
        checkpoint = checkpoint_folders(tmp_path / "pieces" / "checkpoints")[-1]
        assert len(list(checkpoint.glob("shard-*"))) == world
    train(tmp_path / "pieces", shard=False)  # the last steps by one process, not sharded
    same(tmp_path / "pieces", tmp_path / "whole")


def test_bf16(tmp_path: Path, start_ranks: StartRanks) -> None:
    train(tmp_path / "whole", shard=False, precision="bf16")
    work = lambda: train(tmp_path / "pieces", shard=True, precision="bf16")  # noqa: E731
    start_ranks(2, work, group=True).results()
    same(tmp_path / "pieces", tmp_path / "whole", rtol=1e-2, atol=1e-2)


def test_sharded_goes_on_from_not_sharded(tmp_path: Path, start_ranks: StartRanks) -> None:
    train(tmp_path / "whole", shard=False)
    with pytest.raises(Crash):
        train(tmp_path / "pieces", shard=False, crash_at=5)
    start_ranks(2, lambda: train(tmp_path / "pieces", shard=True), group=True).results()
    same(tmp_path / "pieces", tmp_path / "whole")


SHARDED = """
import torch
from torch import nn

def block():
    return nn.Sequential(nn.LayerNorm(16), nn.Linear(16, 33), nn.ReLU(), nn.Linear(33, 16))

def build():
    return nn.Sequential(nn.Linear(6, 16), nn.Sequential(block(), block()), nn.Linear(16, 2))

def other():
    return nn.Sequential(nn.Linear(6, 16), nn.Linear(16, 2))
"""


def test_a_builder_makes_the_whole_model(tmp_path: Path, start_ranks: StartRanks) -> None:
    """Compared by the shapes of whole tensors: each rank holds pieces. This model takes no images."""
    (tmp_path / "net.py").write_text(SHARDED)
    preprocess = {"image_size": 8, "mean": [0.5] * 3, "std": [0.5] * 3}
    use = {"preprocess": preprocess, "classes": ["a", "b"]}

    def work(name: str) -> str:
        try:
            train(tmp_path / "run", shard=True, builder=f"{tmp_path}/net.py:{name}", **use)
        except (ValueError, SystemExit) as error:
            return str(error)
        return ""

    told = start_ranks(2, work, "other", group=True).results()
    assert "makes another model than this run trains: it has no '1.0.0.weight'" in told[0]
    told = start_ranks(2, work, "build", group=True).results()
    assert "its model fails on 1 x 3 x 8 x 8" in told[0]  # so names and shapes are the same
