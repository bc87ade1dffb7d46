"""The folder of a run: what is taken for one, who may write in it, and how it is set aside."""

import errno
import fcntl
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from flambeau.errors import InputError
from flambeau.run.folder.events_log import EventsLog
from flambeau.run.folder.identity import Identity
from flambeau.run.folder.lock import RunLock
from flambeau.run.folder.run_folder import RunFolder
from flambeau.run.options.option import options_of
from flambeau.run.options.run_options import RunOptions

CONFIG = {"lr": 0.1, "seed": 3, "model": "resnet18", "keep": 2, "workers": 0}


def identity(values: dict[str, Any]) -> Identity:
    return Identity(values, options_of(RunOptions))


def claimed(path: Path) -> RunFolder:
    folder = RunFolder(path)
    folder.claim(identity(CONFIG), {"dataset.json": b"{}"})
    return folder


def files(path: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(path)): p.read_bytes()
        for p in path.rglob("*")
        if p.is_file() and p.name != ".lock"
    }


def test_a_new_folder(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path / "runs" / "new")
    assert folder.read_config() is None
    assert not (tmp_path / "runs").exists()
    folder.claim(identity({**CONFIG, "data": None}), {"dataset.json": b"{}"})
    assert folder.read_config() == CONFIG
    assert folder.dataset.read_bytes() == b"{}"
    assert folder.checkpoints.is_dir()
    folder.release()


def test_going_on_changes_nothing(tmp_path: Path) -> None:
    claimed(tmp_path / "run").release()
    before = files(tmp_path / "run")
    folder = RunFolder(tmp_path / "run")
    folder.claim(identity(CONFIG), {"dataset.json": b"other"})
    folder.release()
    assert files(tmp_path / "run") == before


def test_an_empty_folder_and_a_killed_start_are_free(tmp_path: Path) -> None:
    (tmp_path / ".hidden").touch()
    assert RunFolder(tmp_path).read_config() is None
    for name in ("checkpoints", "environment.json", "dataset.json"):
        (tmp_path / name).mkdir()
    assert RunFolder(tmp_path).read_config() is None


def test_a_foreign_folder_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    for action in (RunFolder.read_config, RunFolder.set_aside):
        with pytest.raises(InputError, match=r"it holds 'thesis\.tex' but no conf"):
            action(RunFolder(tmp_path))
    with pytest.raises(InputError, match=r"thesis\.tex"):
        claimed(tmp_path)
    assert [p.name for p in tmp_path.iterdir()] == ["thesis.tex"]


@pytest.mark.parametrize("below", [".", "x", "x/y"])
def test_a_file_in_the_way_is_named(below: str, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with pytest.raises(InputError, match=f"^{file} is not a folder; choose another"):
        RunFolder(file / below).read_config()
    with pytest.raises(InputError, match=r"^/dev/null is not a folder; choose"):
        RunFolder(Path("/dev/null", below)).read_config()


@pytest.mark.parametrize("content", [b"lr = ", b"\xff\xfe"])
def test_an_unreadable_configuration_is_named(content: bytes, tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_bytes(content)
    with pytest.raises(InputError, match=r"config\.toml cannot be read: .*; choose another folder"):
        RunFolder(tmp_path).read_config()


def test_another_configuration_is_refused_with_the_names(tmp_path: Path) -> None:
    claimed(tmp_path / "run").release()
    before = files(tmp_path / "run")
    with pytest.raises(
        InputError, match=r"\(lr: 0\.1 there, 0\.2 now\)\.\nGive the same .*move the folder"
    ):
        RunFolder(tmp_path / "run").claim(identity({**CONFIG, "lr": 0.2}), {})
    many = {**CONFIG, "lr": 0.2, "seed": 4, "model": "x", "mixup": 0.1, "ema": 0.9}
    with pytest.raises(InputError, match=r"\(ema: 0.0 there, 0.9 now; .* and 2 more\)"):
        RunFolder(tmp_path / "run").claim(identity(many), {})
    assert files(tmp_path / "run") == before


def test_what_a_resume_may_change_is_written_down(tmp_path: Path) -> None:
    claimed(tmp_path / "run").release()
    folder = RunFolder(tmp_path / "run")
    folder.claim(identity({**CONFIG, "workers": 2, "keep": 9}), {})
    assert folder.read_config() == CONFIG
    folder.update_config()
    folder.release()
    assert folder.read_config() == {**CONFIG, "workers": 2, "keep": 9}


def test_a_tuple_is_the_list_that_comes_back(tmp_path: Path) -> None:
    for _ in range(2):
        folder = RunFolder(tmp_path / "run")
        folder.claim(identity({"sizes": (1, 2)}), {})
        folder.release()


def test_set_aside_takes_the_next_free_name(tmp_path: Path) -> None:
    path = tmp_path / "run"
    assert RunFolder(path).set_aside() is None
    for number in (1, 2):
        claimed(path).release()
        before = files(path)
        assert RunFolder(path).set_aside() == tmp_path / f"run.old-{number}"
        assert not path.exists()
        assert files(tmp_path / f"run.old-{number}") == before


def test_set_aside_of_the_current_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    claimed(tmp_path / "run").release()
    monkeypatch.chdir(tmp_path / "run")
    assert RunFolder(Path()).set_aside() == tmp_path / "run.old-1"


def test_a_disk_without_locks_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(*_: object) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "lockf", none)
        with pytest.raises(OSError, match="No locks available") as error:
            claimed(tmp_path / "run")
    assert error.value.filename == f"{tmp_path / 'run' / '.lock'}"
    claimed(tmp_path / "run").release()


@pytest.mark.parametrize("call", ["truncate", "write"])
def test_a_lock_that_cannot_be_written_is_named_and_free(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(file: int, _: object) -> int:
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    lock = RunLock(tmp_path)
    num_open = len(list(Path("/proc/self/fd").iterdir()))
    with monkeypatch.context() as patch:
        patch.setattr(os, call, failing)
        with pytest.raises(OSError, match="Read-only") as raised:
            lock.take()
    assert raised.value.filename == f"{tmp_path / '.lock'}"
    # It is closed: another process may take it.
    assert len(list(Path("/proc/self/fd").iterdir())) == num_open
    lock.take()
    lock.release()


def test_a_lock_whose_owner_has_not_yet_written_its_number(tmp_path: Path) -> None:
    path = tmp_path / "run"
    claimed(path).release()
    with locked_by_another_process(path):
        (path / ".lock").write_text("")
        with pytest.raises(InputError, match="another process is training in"):
            claimed(path)


@contextmanager
def locked_by_another_process(path: Path) -> Iterator[int]:
    script = (
        "import fcntl, os, sys\n"
        "handle = os.open(sys.argv[1], os.O_RDWR | os.O_CREAT)\n"
        "fcntl.lockf(handle, fcntl.LOCK_EX)\n"
        "os.truncate(handle, 0)\n"
        "os.write(handle, b'%d\\n' % os.getpid())\n"
        "print(flush=True)\n"
        "sys.stdin.read()"
    )
    command = [sys.executable, "-c", script, str(path / ".lock")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid


def test_a_folder_has_one_writer(tmp_path: Path) -> None:
    path = tmp_path / "run"
    claimed(path).release()
    before = files(path)
    with locked_by_another_process(path) as pid:
        for action in (lambda: claimed(path), lambda: RunFolder(path).set_aside()):
            with pytest.raises(InputError, match=f"process {pid} is training in .*run right now"):
                action()
    assert files(path) == before
    claimed(path).release()  # the other process is gone, and its lock with it


@pytest.mark.parametrize("name", [".lock", "metrics.jsonl", "events.jsonl", "metrics.csv"])
def test_a_link_out_of_the_folder_is_not_written_through(name: str, tmp_path: Path) -> None:
    """As in a folder from elsewhere: the file would be emptied, cut or appended to."""
    path, mine = tmp_path / "run", tmp_path / "thesis.tex"
    claimed(path).release()
    mine.write_text("years of work\n")
    (path / name).unlink(missing_ok=True)
    (path / name).symlink_to(mine)
    for action in (lambda: claimed(path), lambda: RunFolder(path).set_aside()):
        with pytest.raises(InputError, match=r"is a link to .*thesis\.tex, into which"):
            action()
    EventsLog(path / "events.jsonl", lambda: 0).add("evaluated")
    assert mine.read_text() == "years of work\n"


def test_checkpoints_may_lie_on_another_disk_but_not_in_another_run(tmp_path: Path) -> None:
    path, disk = tmp_path / "run", tmp_path / "disk"
    disk.mkdir()
    for folder in (path, tmp_path / "other"):
        claimed(folder).release()
    (path / "checkpoints").rmdir()
    (path / "checkpoints").symlink_to(disk)
    claimed(path).release()
    (path / "checkpoints").unlink()
    (path / "checkpoints").symlink_to(tmp_path / "other" / "checkpoints")
    with pytest.raises(InputError, match=r"checkpoints is a link to .*other"):
        claimed(path)


def test_a_folder_has_one_writer_within_a_process(tmp_path: Path) -> None:
    path = tmp_path / "run"
    first = claimed(path)
    before = files(path)
    (tmp_path / "link").symlink_to(path)
    for name in ("run", "link"):
        for action in (claimed, lambda other: RunFolder(other).set_aside()):
            with pytest.raises(
                InputError, match=r"another Run of this process is training in .*close"
            ):
                action(tmp_path / name)
    assert files(path) == before
    script = (
        "import fcntl, sys; fcntl.lockf(open(sys.argv[1], 'r+'), fcntl.LOCK_EX | fcntl.LOCK_NB)"
    )
    command = [sys.executable, "-c", script, str(path / ".lock")]
    still_held = subprocess.run(command, check=False, stderr=subprocess.DEVNULL)
    assert still_held.returncode == 1
    first.release()
    claimed(path).release()
    aside = RunFolder(path).set_aside()
    assert aside is not None
    claimed(aside).release()
