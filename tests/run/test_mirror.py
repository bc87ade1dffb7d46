"""`mirror`: a copy of a run in a store, from which another machine goes on to the same bits."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

from flambeau.data.stores.store import Missing
from flambeau.errors import InputError
from flambeau.recipes.checkpoints.atomic_checkpoint import MANIFEST
from flambeau.run.folder import mirror
from flambeau.run.folder.mirror import fetch
from flambeau.run.run import Run

pytest.importorskip("fsspec")


@pytest.fixture
def store(tmp_path: Path) -> Path:
    return tmp_path / "store" / "mine"


def train(folder: Path, *, until: int | None = None, **options: Any) -> dict[str, torch.Tensor]:
    """The weights at the end, or after a step behind which the loop is left."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 8), nn.Dropout(0.2), nn.Linear(8, 2))
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


def files(folder: Path) -> dict[str, bytes]:
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name[0] != "."
    }


def mirrored(store: Path) -> dict[str, bytes]:
    """Without what says who writes there."""
    return {name: content for name, content in files(store).items() if name != "mirror.owner"}


def test_another_machine_goes_on_to_the_same_bits(
    tmp_path: Path, store: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = train(tmp_path / "whole")
    train(tmp_path / "a" / "run", until=11, mirror=f"file://{store}")
    shutil.rmtree(tmp_path / "a")
    capsys.readouterr()
    found = train(tmp_path / "b" / "run", mirror=f"file://{store}/")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    said = capsys.readouterr().err
    assert (
        f"the run was brought from file://{store} to {tmp_path / 'b' / 'run'}, with step-" in said
    )
    assert "going on from step" in said
    assert mirrored(store) == files(tmp_path / "b" / "run")
    numbers = [
        json.loads(line)["step"] for line in (store / "metrics.jsonl").read_text().splitlines()
    ]
    assert numbers == [
        json.loads(line)["step"]
        for line in (tmp_path / "whole" / "metrics.jsonl").read_text().splitlines()
    ]
    assert not list(tmp_path.glob("b/.run.*"))


def test_old_checkpoints_go_and_the_last_ones_stay(tmp_path: Path, store: Path) -> None:
    train(tmp_path / "run", mirror=f"file://{store}", keep=1)
    here = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    whole = {path.parent.name for path in store.glob("checkpoints/*/manifest.json")}
    assert whole == here
    assert not list(store.rglob("*.part"))


def test_a_run_that_was_made_without_a_mirror_gets_one(tmp_path: Path, store: Path) -> None:
    train(tmp_path / "run", until=8)
    train(tmp_path / "run", mirror=f"file://{store}")
    assert mirrored(store) == files(tmp_path / "run")


def test_a_finished_run_uploads_what_is_missing(tmp_path: Path, store: Path) -> None:
    train(tmp_path / "run", mirror=f"file://{store}")
    (store / "report.html").unlink()
    train(tmp_path / "run", mirror=f"file://{store}")
    assert (store / "report.html").exists()


def test_the_mirror_of_another_run_is_refused(tmp_path: Path, store: Path) -> None:
    train(tmp_path / "one", until=8, mirror=f"file://{store}")
    before = files(store)
    train(tmp_path / "two", until=8)
    with pytest.raises(InputError, match="is the mirror of another run than that in"):
        train(tmp_path / "two", mirror=f"file://{store}")
    with pytest.raises(InputError, match="nothing there is overwritten"):
        fetch(tmp_path / "two", f"file://{store}", fresh=True)
    assert files(store) == before


def test_a_run_that_was_continued_elsewhere_is_refused(tmp_path: Path, store: Path) -> None:
    train(tmp_path / "one", until=8, mirror=f"file://{store}")
    train(tmp_path / "two", until=20, mirror=f"file://{store}")
    before = files(store)
    with pytest.raises(InputError, match=r"has step-0+\d+, and .*one is not as far"):
        train(tmp_path / "one", mirror=f"file://{store}")
    assert files(store) == before


def test_a_folder_with_something_else_stays_as_it_is(tmp_path: Path, store: Path) -> None:
    train(tmp_path / "one", until=8, mirror=f"file://{store}")
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "mine.txt").write_text("mine")
    with pytest.raises(InputError, match="holds something else than a run"):
        train(tmp_path / "two", mirror=f"file://{store}")
    assert files(tmp_path / "two") == {"mine.txt": b"mine"}


def test_a_store_that_takes_nothing_stops_no_training(
    tmp_path: Path, store: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    store.parent.write_text("a file where a folder would be")
    train(tmp_path / "run", mirror=f"file://{store}")
    said = capfd.readouterr().err
    assert said.count("; the training goes on") == 1
    assert "not all of the run is in its mirror" in said
    assert (tmp_path / "run" / "model.safetensors").exists()
    store.parent.unlink()
    train(tmp_path / "run", mirror=f"file://{store}")
    assert mirrored(store) == files(tmp_path / "run")


@pytest.mark.parametrize(
    ("address", "message"),
    [
        ("http://host/runs/a", "no address that can be written"),
        ("runs/a", "no address that can be written"),
        ("s3://me:secret@bucket/a", "holds a user name or a password"),
    ],
)
def test_other_addresses_are_refused(tmp_path: Path, address: str, message: str) -> None:
    with pytest.raises(InputError, match=message) as refused:
        train(tmp_path / "run", mirror=address)
    assert "secret" not in str(refused.value)
    assert not (tmp_path / "run").exists()


# ---------------------------------------------------------------- the command


def test_the_command_goes_on_from_its_mirror(
    tmp_path: Path, store: Path, flambeau: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    short = f"train --model tiny_convnet --epochs 1 --mirror file://{store}"
    assert flambeau(f"{short} --out one").code == 0
    again = flambeau(f"{short} --out two")
    assert again.code == 0
    assert f"the run was brought from file://{store} to two, with step-" in again.err
    assert Path("one/model.safetensors").read_bytes() == Path("two/model.safetensors").read_bytes()
    fresh = flambeau(f"{short} --out two --fresh")
    assert fresh.code == 2
    assert "nothing there is overwritten" in fresh.err
    assert not list(tmp_path.glob("two.old*"))
    other = flambeau(f"{short} --out three --lr 0.3")
    assert other.code == 2
    assert "another configuration" in other.err
    (store / "report.html").unlink()
    assert flambeau("train --model tiny_convnet --epochs 1 --out two").code == 0  # finished before
    assert (store / "report.html").exists()
    before = files(store)
    assert flambeau(f"{short} --out four --dry-run").code == 0
    assert files(store) == before
    assert not Path("four").exists()


# ---------------------------------------------------------------- what a mirror from elsewhere may hold


class Listing:
    """A store of objects by address, whose names no disk would allow."""

    def __init__(self, objects: dict[str, bytes]) -> None:
        self.objects = objects

    def listed(self, folder: str) -> list[str]:
        start = folder.rstrip("/") + "/"
        below = [one.removeprefix(start) for one in self.objects if one.startswith(start)]
        if not below:
            raise Missing(folder)
        return sorted({start + name.partition("/")[0] + "/" * ("/" in name) for name in below})

    def read_whole(self, address: str) -> bytes:
        if address not in self.objects:
            raise Missing(address)
        return self.objects[address]


@pytest.mark.parametrize("name", ["checkpoints/step-00000001/../../../.bashrc", "../evil", "./x"])
def test_names_that_lead_out_of_the_folder_are_refused(tmp_path: Path, name: str) -> None:
    objects = {"mirror.json": b'{"run": "a"}', "config.toml": b"", name: b"x"}
    store: Any = Listing({f"s3://b/r/{key}": content for key, content in objects.items()})
    with pytest.raises(InputError, match="a name that leads elsewhere"):
        mirror._fetched(tmp_path / "run", "s3://b/r", store, fresh=False)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("content", [b"", b"[]", b'{"run": 3}', b"[" * 100_000])
def test_a_damaged_identity_is_refused(tmp_path: Path, content: bytes) -> None:
    store: Any = Listing({"s3://b/r/mirror.json": content})
    with pytest.raises(InputError, match=r"s3://b/r/mirror\.json is damaged"):
        mirror._fetched(tmp_path / "run", "s3://b/r", store, fresh=False)


class Noting(Listing):
    """A store in memory that notes in which order it is changed."""

    def __init__(self) -> None:
        super().__init__({})
        self.done: list[str] = []

    def put(self, path: Path, address: str) -> None:
        self.done.append(address)
        self.objects[address] = path.read_bytes()

    def remove(self, address: str) -> None:
        self.done.append(f"remove {address}")
        del self.objects[address]


def followed(folder: Path) -> tuple[Noting, Any]:
    store: Any = Noting()
    follower = mirror._Follower(folder, "s3://b/r", store)
    follower._upload()
    return store, follower


def test_the_order_of_what_is_written_makes_each_moment_whole(tmp_path: Path) -> None:
    """The lines come before the checkpoint that counts them, and its manifest last; it goes first."""
    folder = tmp_path / "run"
    train(folder, until=8)
    store, follower = followed(folder)
    done = store.done
    steps = sorted(path.name for path in (folder / "checkpoints").iterdir())
    assert done.index("s3://b/r/metrics.jsonl") < done.index(
        f"s3://b/r/checkpoints/{steps[0]}/manifest.json"
    )
    assert done[0] == "s3://b/r/mirror.json"
    for step in steps:
        mine = [one for one in done if f"/{step}/" in one]
        assert len(mine) == 3
        assert mine[-1].endswith("/manifest.json")
    before = len(done)
    follower._upload()
    assert len(done) == before  # nothing has changed
    shutil.rmtree(folder / "checkpoints" / steps[0])
    follower._upload()
    assert done[before] == f"remove s3://b/r/checkpoints/{steps[0]}/manifest.json"
    assert mirror._steps_there("s3://b/r", store) == set(steps[1:])


@pytest.mark.parametrize("how", ["renamed", "removed", "checkpoints", "newest", "another"])
def test_a_folder_that_is_gone_takes_nothing_with_it(tmp_path: Path, how: str) -> None:
    """The mirror may then be all that is left."""
    folder = tmp_path / "run"
    train(folder, until=8)
    store, follower = followed(folder)
    before = dict(store.objects)
    if how == "renamed":
        folder.rename(tmp_path / "other")
    elif how == "removed":
        shutil.rmtree(folder)
    elif how == "checkpoints":
        shutil.rmtree(folder / "checkpoints")
    elif how == "newest":  # as while a folder is being removed
        for path in (folder / "checkpoints").iterdir():
            (path / "manifest.json").unlink()
        shutil.rmtree(sorted((folder / "checkpoints").iterdir())[0])
    else:
        (folder / "mirror.json").write_text('{"run": "another"}')
    follower._tries()
    assert store.objects == before


def test_a_checkpoint_that_is_made_again_is_uploaded_again(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder, until=8)
    store, follower = followed(folder)
    newest = sorted((folder / "checkpoints").iterdir())[-1]
    for path in (newest / "manifest.json", newest / "model.safetensors"):
        path.write_bytes(path.read_bytes() + b" ")
    again: Any = mirror._Follower(folder, "s3://b/r", store)  # of the next start, too
    for one in (follower, again):
        one._owner = store.objects["s3://b/r/mirror.owner"].decode()
        one._upload()
        for path in newest.iterdir():
            address = f"s3://b/r/checkpoints/{newest.name}/{path.name}"
            assert store.objects[address] == path.read_bytes()
    start = len(store.done)
    again._upload()
    assert not [one for one in store.done[start:] if newest.name in one]


def test_what_was_cut_off_is_removed_when_it_is_old(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    train(folder, until=8)
    store, _ = followed(folder)
    part = "s3://b/r/checkpoints/step-00000001/model.safetensors"
    store.objects[part] = b"half"
    again: Any = mirror._Follower(folder, "s3://b/r", store)
    again._upload()
    assert part not in store.objects


def test_the_second_of_two_machines_writes_alone(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(tmp_path / "one", until=8)
    store, first = followed(tmp_path / "one")
    shutil.copytree(tmp_path / "one", tmp_path / "two")
    second: Any = mirror._Follower(tmp_path / "two", "s3://b/r", store)
    second._upload()
    before = dict(store.objects)
    (tmp_path / "one" / "metrics.jsonl").write_text("of the first\n")
    assert not first._tries()
    assert not first._tries()
    assert store.objects == before
    assert capsys.readouterr().err.count("another training writes to s3://b/r now") == 1


def test_the_process_that_copies_needs_no_torch() -> None:
    """It is there as long as the training is; so two names stand twice."""
    program = "import sys, flambeau.run.folder.mirror; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0
    assert mirror._MANIFEST == MANIFEST


# ---------------------------------------------------------------- kills


SCRIPT = """
import sys, time
import torch
from torch.utils.data import TensorDataset
from flambeau import Run
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Dropout(0.2), torch.nn.Linear(8, 2))
x = torch.randn(24, 3, generator=torch.Generator().manual_seed(1))
run = Run(sys.argv[1], model, torch.optim.SGD(model.parameters(), lr=0.1),
          TensorDataset(x, (x[:, 0] > 0).long()), duration="4ep", batch_size=4, checkpoint_every="3st",
          bar=False, mirror=sys.argv[2])
for _ in run.epochs():
    for rows, targets in run.batches():
        run.step(torch.nn.functional.cross_entropy(model(rows), targets))
        time.sleep(float(sys.argv[3]))
"""


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "script.py"
    path.write_text(SCRIPT)
    return path


def started(script: Path, folder: Path, store: Path, pause: float) -> "subprocess.Popen[bytes]":
    return subprocess.Popen([sys.executable, script, folder, f"file://{store}", str(pause)])


@pytest.mark.slow
def test_a_killed_training_is_in_its_mirror(tmp_path: Path, store: Path, script: Path) -> None:
    """Twice, each time on a machine of its own; the process that copies outlives the training."""
    expected = train(tmp_path / "whole")
    for number in range(2):
        folder = tmp_path / str(number) / "run"
        running = started(script, folder, store, 0.2)
        enough = [f"checkpoints/step-{step:08d}" for step in (3 + 6 * number, 6 + 6 * number)]
        while not any((folder / name).exists() for name in enough):
            time.sleep(0.05)
            assert running.poll() is None
        running.kill()
        running.wait()
        newest = max(path.name for path in (folder / "checkpoints").glob("step-*"))
        while not (store / "checkpoints" / newest / "manifest.json").exists():
            time.sleep(0.05)
    folder = tmp_path / "last" / "run"
    assert started(script, folder, store, 0).wait() == 0
    found = torch.load(
        next(iter(sorted((folder / "checkpoints").glob("step-00000024/training_state.pt")))),
        weights_only=True,
    )
    assert found is not None
    from safetensors.torch import load_file

    weights = load_file(folder / "checkpoints" / "step-00000024" / "model.safetensors")
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


def test_ctrl_c_lets_the_copy_be_finished(tmp_path: Path, store: Path, script: Path) -> None:
    folder = tmp_path / "run"
    running = started(script, folder, store, 0.2)
    while not (folder / "checkpoints" / "step-00000003").exists():
        time.sleep(0.05)
    os.kill(running.pid, signal.SIGINT)
    assert running.wait() == 75
    here = {path.name for path in (folder / "checkpoints").glob("step-*")}
    assert {path.parent.name for path in store.glob("checkpoints/*/manifest.json")} == here
