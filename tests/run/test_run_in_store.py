"""A run whose folder is an address: trained here in a folder, read from a copy, continued elsewhere."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import flambeau
from flambeau.cli.command import main
from flambeau.errors import InputError
from flambeau.run.folder import store_run
from flambeau.run.folder.lock import RunLock
from flambeau.run.folder.store_run import (
    folder_and_mirror,
    is_run_in_store,
    run_here,
    working_folder,
)
from flambeau.run.run import Run
from object_server import Fault, serving

pytest.importorskip("fsspec")

SETTINGS = [
    "--epochs",
    "2",
    "--model",
    "tiny_convnet",
    "--image-size",
    "16",
    "--batch-size",
    "512",
    "--warmup",
    "10%",
]


@pytest.fixture(autouse=True)
def _own_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FLAMBEAU_CACHE", f"{tmp_path}/cache")
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def address(tmp_path: Path) -> str:
    return f"file://{tmp_path}/bucket/runs/mine"


def train(folder: str | Path, *, until: int | None = None) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Linear(8, 2))
    x = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
    run = Run(
        folder, model, torch.optim.SGD(model.parameters(), lr=0.1), TensorDataset(x, (x[:, 0] > 0).long()),
        duration="3ep", batch_size=4, checkpoint_every="3st", bar=False,
    )  # fmt: skip
    for _ in run.epochs():
        for rows, targets in run.batches():
            run.step(cross_entropy(model(rows), targets))
            if run.state.step == until:
                run.close()
                break
        if run.state.step == until:
            break
    return model.state_dict()


def test_a_loop_whose_folder_is_an_address(
    tmp_path: Path, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Killed here and continued there, with the folder of neither; to the bits of a folder."""
    expected = train(tmp_path / "near")
    train(address, until=8)
    shutil.rmtree(tmp_path / "cache")
    found = train(address)
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert f"the run was brought from {address}" in capsys.readouterr().err
    near, far = (tmp_path / "near", tmp_path / "bucket" / "runs" / "mine")
    assert (far / "metrics.jsonl").read_text().count("\n") == (
        near / "metrics.jsonl"
    ).read_text().count("\n")


def test_what_is_not_as_far_is_set_aside(
    tmp_path: Path, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Another machine has continued the run: nothing of the older folder here is removed."""
    train(address, until=5)
    folder = working_folder(address)
    shutil.copytree(folder, tmp_path / "before")
    train(address, until=14)
    shutil.rmtree(folder)
    shutil.copytree(tmp_path / "before", folder)
    capsys.readouterr()
    train(address)
    old = folder.with_name(f"{folder.name}.old-1")
    assert f"{old}" in capsys.readouterr().err
    assert (old / "metrics.jsonl").read_bytes() == (
        tmp_path / "before" / "metrics.jsonl"
    ).read_bytes()
    assert (folder / "result.json").exists()


def test_commands_and_python_read_a_run_by_its_address(
    tmp_path: Path, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["train", "--out", address, *SETTINGS]) == 0
    out = capsys.readouterr()
    assert f"next: flambeau predict {address} IMAGE" in out.out
    assert f"and in {address}" in out.err
    shutil.rmtree(tmp_path / "cache")
    embedded = str(Path(flambeau.__file__).parent / "data" / "embedded" / "fashion_mnist_val.rec")
    assert main(["verify", address]) == 0
    assert main(["evaluate", address, embedded, "--json"]) == 0
    assert main(["report", address]) == 0
    assert main(["inspect", address]) == 0
    assert main(["export", address, "--out", "made", "--images", "32"]) == 0
    assert main(["features", address, embedded, "f.npy"]) == 0
    assert main(["diff", address, f"{tmp_path}/bucket/runs/mine", "--json"]) == 0
    assert (tmp_path / "report.html").exists() and (tmp_path / "made").is_dir()
    assert not working_folder(address).exists()  # who reads makes no folder to train in
    for flag in ("--weights", "--teacher"):
        assert main(["train", flag, address, "--out", f"run{flag}", *SETTINGS]) == 0
        shown = (tmp_path / f"run{flag}" / "config.toml").read_text()
        assert f'{flag[2:]} = "{address}"' in shown
    capsys.readouterr()
    assert main(["doctor", address, "--rounds", "1", "--budget", "1s", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["about"].startswith("tiny_convnet")
    found = flambeau.load(address)
    assert found.trained.model.state_dict().keys()


def test_a_teacher_is_brought_up_to_date_once(
    tmp_path: Path, address: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All parts of a training see the weights of one moment; the next training sees the next one's."""
    assert main(["train", "--out", address, *SETTINGS]) == 0
    updated: list[str] = []
    update = store_run._update
    monkeypatch.setattr(
        store_run, "_update", lambda folder, run: (updated.append(run), update(folder, run))
    )
    for name in ("one", "two"):
        words = ["--teacher", address, "--weights", address, "--out", name]
        assert main(["train", *words, *SETTINGS]) == 0
    assert updated == [address, address]


def test_runs_of_a_store_are_listed_without_their_weights(
    tmp_path: Path, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bucket = tmp_path / "bucket"
    train(address, until=8)
    working_folder(address).rename(tmp_path / "elsewhere")  # as if another machine had trained it
    assert main(["train", "--out", f"{tmp_path}/bucket/runs/of-a-day/done", *SETTINGS]) == 0
    (bucket / "runs" / "photos" / "1" / "2" / "3" / "4").mkdir(
        parents=True
    )  # deeper than is searched
    (bucket / "runs" / "photos" / "a.jpg").write_bytes(b"x")
    capsys.readouterr()

    def rows(place: str, *words: str) -> list[dict[str, object]]:
        assert main(["runs", place, "--json", *words]) == 0
        return [json.loads(line) for line in capsys.readouterr().out.splitlines()]

    near = rows(f"{bucket}/runs")
    assert {row["name"] for row in near} == {"mine", "of-a-day/done"}
    expected = [{**row, "path": f"file://{row['path']}"} for row in near]
    assert rows(f"file://{bucket}/runs") == expected
    with serving(bucket, lists=True) as server:
        found = rows(f"{server.url}/runs/")
        asked = {request.name for request in server.requests if request.method == "GET"}
    unknown = {"path": None, "when": None}  # a list of a web server tells no times
    assert sorted([{**row, **unknown} for row in found], key=str) == sorted(
        [{**row, **unknown} for row in near], key=str
    )
    assert not [name for name in asked if name.endswith(".safetensors")]
    assert rows(f"{address}/")[0]["name"] == "mine"
    assert rows(f"file://{bucket}/runs", "--state", "finished")[0]["name"] == "of-a-day/done"
    assert main(["runs", f"file://{bucket}/runs"]) == 0
    out = capsys.readouterr()
    assert "stopped, step 6" in out.out and "of-a-day/done" in out.out
    assert "another machine" in out.err and "not all folders below" in out.err
    assert main(["runs", f"file://{bucket}/nothing"]) == 2
    assert "nothing is not there" in capsys.readouterr().err


def test_a_run_that_is_trained_here_runs(
    tmp_path: Path, address: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train(address, until=8)
    lock = RunLock(working_folder(address))
    lock.take()
    assert main(["runs", f"file://{tmp_path}/bucket/runs", "--json"]) == 0
    lock.release()
    assert json.loads(capsys.readouterr().out)["state"] == "running"


def test_a_copy_for_reading_follows_the_run(tmp_path: Path, address: str) -> None:
    train(address, until=6)
    said: list[str] = []
    copy = run_here(address, said.append)
    assert said == [f"{address} is read from its copy in {copy}"]
    before = {path.relative_to(copy) for path in copy.rglob("*") if path.name[0] != "."}
    (copy / "mine.txt").write_text("of the user")
    train(address)
    assert run_here(address) == copy
    after = {path.relative_to(copy) for path in copy.rglob("*") if path.name[0] != "."}
    assert Path("result.json") in after - before
    bucket = tmp_path / "bucket" / "runs" / "mine"
    for path in bucket.rglob("*"):
        if path.is_file():
            assert (copy / path.relative_to(bucket)).read_bytes() == path.read_bytes()
    gone = {path for path in before - after if path.name == "manifest.json"}
    assert gone and not any((bucket / path).exists() for path in gone)
    assert (copy / "mine.txt").exists()


def test_a_run_that_names_files_elsewhere_removes_none(tmp_path: Path, address: str) -> None:
    """Neither by an object called like our own list, nor by such a list that a kill has left."""
    train(address, until=6)
    victim = tmp_path / "mine.txt"
    victim.write_text("of the user")
    copy = run_here(address)
    lies = json.dumps({os.path.relpath(victim, copy): [1, ""], f"{victim}": [1, ""]})
    bucket = tmp_path / "bucket" / "runs" / "mine"
    for folder in (bucket, copy):
        (folder / ".copied.json").write_text(lies)
    (bucket / ".lock").mkdir()
    (bucket / ".lock" / "a").write_text("x")
    run_here(address)
    assert victim.read_text() == "of the user"
    assert not (copy / ".lock").exists()


def test_what_is_refused(tmp_path: Path, address: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(InputError, match="leave one of them out"):
        folder_and_mirror(address, f"file://{tmp_path}/elsewhere")
    assert folder_and_mirror(address, f"{address}/") == (working_folder(address), address)
    with pytest.raises(InputError, match="is no address that can be written"):
        folder_and_mirror("https://example.org/runs/a", None)
    (tmp_path / "bucket" / "runs" / "mine").mkdir(parents=True)
    (tmp_path / "bucket" / "runs" / "mine" / "photo.jpg").write_bytes(b"x")
    for command in (["evaluate", address, "x"], ["report", address], ["diff", address, address]):
        assert main(command) == 2
        assert f"{address} holds no run" in capsys.readouterr().err


@pytest.mark.parametrize("status", [403, 404])
def test_a_shard_is_no_run_where_a_store_does_not_say_what_is_not_there(
    tmp_path: Path, status: int
) -> None:
    """S3 answers with 403 for a missing object to whom it does not show lists."""
    (tmp_path / "data").mkdir()
    with serving(tmp_path / "data") as server:
        server.fault = lambda request: Fault(status=status)
        assert not is_run_in_store(f"{server.url}/pets.tar")
