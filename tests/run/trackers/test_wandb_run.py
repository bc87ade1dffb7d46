"""Runs of Weights & Biases without a network, read back from the files that `wandb sync` uploads."""

import json
import os
import re
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from flambeau.run.trackers import wandb_run
from flambeau.run.trackers.tracker import TrackedRun
from flambeau.run.trackers.wandb_run import WandbRun

pytest.importorskip("wandb")
pytestmark = pytest.mark.filterwarnings(
    "ignore::DeprecationWarning",  # of pydantic and others in wandb's own import
    "ignore::ResourceWarning",  # its sockets and the log files of its process
    "ignore::pytest.PytestUnraisableExceptionWarning",
)

Points = list[tuple[int, dict[str, float]]]


@pytest.fixture(autouse=True)
def no_account(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("WANDB_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HOME", str(tmp_path_factory.mktemp("home")))
    monkeypatch.setenv("NETRC", "/nonexistent")
    # On a busy machine its process takes longer than the end of a run waits for it.
    monkeypatch.setattr(wandb_run, "_FINISH_S", 60.0)


def records(path: Path) -> Iterator[Any]:
    """What a .wandb file holds: LevelDB's log format, behind a header of 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record  # type: ignore[import-untyped]

    data, part, place = path.read_bytes(), b"", 7
    assert data[:4] == b":W&B"
    while place + 7 <= len(data):
        left = 2**15 - place % 2**15
        if left < 7:
            place += left
            continue
        _, size, kind = struct.unpack("<IHB", data[place : place + 7])
        if kind == 0:
            return
        part += data[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield Record.FromString(part)
            part = b""


def rows(path: Path, timeless: Any) -> Points:
    """The history, without what W&B adds."""
    found = []
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            items = {
                item.key or ".".join(item.nested_key): json.loads(item.value_json)
                for item in record.history.item
            }
            figures = {k: v for k, v in items.items() if not k.startswith("_")}
            found.append((record.history.step.num, timeless(figures)))
    return found


def merged(lines: Points) -> Points:
    """The lines of a step as the one row that W&B makes of them."""
    found: dict[int, dict[str, float]] = {}
    for step, figures in lines:
        found[step] = {**found.get(step, {}), **figures}
    return [*found.items()]


def processes() -> str:
    command = ["ps", "-eo", "ppid,pid,args"]
    listed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return "\n".join(line for line in listed.splitlines() if f"--pid {os.getpid()}" in line)


def test_after_a_kill_the_newest_folder_holds_the_whole_run(
    tmp_path: Path,
    train: Callable[..., Any],
    killed: Callable[..., None],
    points: Callable[[Path], Points],
    timeless: Any,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = tmp_path / "run"
    files = folder / "wandb"

    def has_begun() -> bool:
        return (folder / "trackers" / "wandb.json").exists()

    killed(folder, "wandb", kill_at=6, until=has_begun)
    run = train(folder, "wandb", config={})
    err = capsys.readouterr().err
    (named,) = re.findall(r"wandb is offline: wandb sync (\S+) uploads the run", err)
    assert Path(named).is_dir()
    first, second = sorted(
        files.glob("offline-run-*/*.wandb"), key=lambda path: str(path.parent) == named
    )
    assert first.name == second.name  # of one id
    assert rows(second, timeless) == merged(points(folder)), err
    assert len(rows(second, timeless)) == 16
    kinds = {record.WhichOneof("record_type"): record for record in records(second)}
    config = {
        item.key: json.loads(item.value_json)
        for record in records(second)
        if record.WhichOneof("record_type") == "run"
        for item in record.run.config.update
    }
    assert config["duration"] == "4ep" and kinds["exit"].exit.exit_code == 0
    summary = {
        item.key or ".".join(item.nested_key): json.loads(item.value_json)
        for record in records(second)
        if record.WhichOneof("record_type") == "summary"
        for item in record.summary.update
    }
    assert summary["result/val_accuracy"] == run.result.metrics["val_accuracy"]
    assert "gets no" not in err and processes() == ""


def test_the_environment_decides(
    tmp_path: Path, train: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("WANDB_MODE", "disabled")
    run = train(tmp_path / "run", "wandb")
    assert run.result is not None and not (tmp_path / "run" / "wandb").exists()


@pytest.mark.parametrize(("account", "mode"), [(True, None), (False, "offline")])
def test_with_an_account_it_goes_online(
    account: bool, mode: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a stand-in for wandb's two functions: there is no network here."""
    asked: dict[str, Any] = {}

    class Online:
        id, offline, url, starting_step = "abcd1234", False, "https://wandb.ai/me/runs/abcd1234", 8

    def init(**settings: Any) -> Online:
        asked.update(settings)
        return Online()

    said: list[str] = []
    tracker = WandbRun(TrackedRun(tmp_path, {"lr": 1}, tmp_path / "metrics.jsonl", 0, said.append))
    monkeypatch.setattr("wandb.login", lambda *, prompt, verify: account and not (prompt or verify))
    monkeypatch.setattr("wandb.init", init)
    assert tracker.start() == (8, 0)  # what W&B has of a resumed run
    assert (asked["mode"], asked["id"], asked["project"]) == (mode, None, "flambeau")
    assert said == ["wandb: https://wandb.ai/me/runs/abcd1234"]
    tracker.start()
    assert asked["id"] == "abcd1234" and asked["resume"] == "allow"
