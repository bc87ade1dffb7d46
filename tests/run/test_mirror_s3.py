"""`mirror` in a real S3, moto's server on loopback: upload, prune, restore; a bucket that is not there."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from flambeau.run.folder.store_run import run_here, working_folder
from flambeau.run.run import Run


@pytest.fixture
def client(s3: Any) -> Any:
    s3.create_bucket(Bucket="runs")
    return s3


def train(
    folder: str | Path, *, until: int | None = None, **options: Any
) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Linear(3, 2)
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
    run = Run(
        folder, model, torch.optim.SGD(model.parameters(), lr=0.1), TensorDataset(x, (x[:, 0] > 0).long()),
        duration="4ep", batch_size=4, checkpoint_every="3st", bar=False, **options,
    )  # fmt: skip
    for _ in run.epochs():
        for rows, targets in run.batches():
            run.step(cross_entropy(model(rows), targets))
            if run.state.step == until:
                run.close()
                return model.state_dict()
    return model.state_dict()


def names(client: Any) -> set[str]:
    return {one["Key"] for one in client.list_objects_v2(Bucket="runs").get("Contents", [])}


def test_a_bucket_holds_a_run_for_another_machine(
    tmp_path: Path, client: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    expected = train(tmp_path / "whole")
    train(tmp_path / "a" / "run", until=11, mirror="s3://runs/mine", keep=1)
    before = names(client)
    assert {"mine/mirror.json", "mine/config.toml", "mine/metrics.jsonl"} <= before
    found = train(tmp_path / "b" / "run", mirror="s3://runs/mine", keep=1)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    here = {path.name for path in (tmp_path / "b" / "run" / "checkpoints").iterdir()}
    there = {name.split("/")[2] for name in names(client) if name.startswith("mine/checkpoints/")}
    assert there == here
    assert "mine/model.safetensors" in names(client)
    told = capfd.readouterr()
    for path in tmp_path.rglob("*"):
        assert not path.is_file() or b"hunter2" not in path.read_bytes()
    assert "hunter2" not in told.out + told.err
    # Objects of others beside it stay.
    client.put_object(Bucket="runs", Key="mine2/other.txt", Body=b"other")
    train(tmp_path / "b" / "run", mirror="s3://runs/mine", keep=1)
    assert "mine2/other.txt" in names(client)


def test_a_bucket_that_is_not_there_stops_no_training(
    tmp_path: Path, client: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "run", mirror="s3://no-such-bucket/mine")
    said = capfd.readouterr().err
    assert "no-such-bucket" in said
    assert "not all of the run is in its mirror" in said
    assert (tmp_path / "run" / "model.safetensors").exists()


def test_a_run_in_a_bucket(tmp_path: Path, client: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLAMBEAU_CACHE", f"{tmp_path}/cache")
    expected = train(tmp_path / "near")
    train("s3://runs/whole", until=11)
    copy = run_here("s3://runs/whole")
    steps = sorted(path.name for path in (copy / "checkpoints").iterdir())
    working_folder("s3://runs/whole").rename(tmp_path / "taken away")
    found = train("s3://runs/whole")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert run_here("s3://runs/whole") == copy
    assert (copy / "result.json").read_bytes() == (tmp_path / "near" / "result.json").read_bytes()
    now = sorted(path.name for path in (copy / "checkpoints").iterdir())
    assert now[-1] > steps[-1] and len(now) == len(steps)
    for name in (one for one in names(client) if one.startswith("whole/")):
        path = copy / name.removeprefix("whole/")
        assert path.stat().st_size == client.head_object(Bucket="runs", Key=name)["ContentLength"]
