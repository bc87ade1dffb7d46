"""Contents, order of the system calls, refusals; the faults are in test_checkpoint_faults.py."""

import argparse
import errno
import hashlib
import inspect
import io
import json
import os
import pickle
import re
import sys
import warnings
from collections import Counter, OrderedDict, defaultdict, namedtuple
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from torch.optim import lr_scheduler

from flambeau.recipes.checkpoints import atomic_checkpoint
from flambeau.recipes.checkpoints.atomic_checkpoint import (
    CheckpointDamaged,
    Disk,
    checkpoint_folders,
    from_bytes,
    latest_checkpoint,
    prune_checkpoints,
    read_checkpoint,
    remove_leftovers,
    replacing,
    save_checkpoint,
    set_aside,
    to_bytes,
    verify_checkpoint,
    write_file,
)

FILES = {"model.safetensors": bytes(range(256)) * 40, "state.pt": b"state", "empty": b""}
META = {"step": 1200, "loss": 0.1, "best": None, "names": ["a", "é"], "nested": {"x": True}}


class SpyDisk(Disk):
    """The real disk, with a list of what was called on which name."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.open_files: dict[int, str] = {}


def _spied(name: str) -> Any:
    real = getattr(Disk, name)

    def call(self: SpyDisk, *args: Any) -> Any:
        result = real(self, *args)
        first = args[0].name if isinstance(args[0], Path) else self.open_files[args[0]]
        if name in ("open", "create"):
            assert result not in self.open_files
            self.open_files[result] = first
        if name == "close":
            del self.open_files[args[0]]
        hidden = first.startswith(".")
        self.calls.append(f"{name} {'TEMPORARY' if hidden else first}")
        return result

    return call


OPERATIONS = [name for name in vars(Disk) if not name.startswith("_")]
for _name in OPERATIONS:
    setattr(SpyDisk, _name, _spied(_name))


def step(root: Path, number: int) -> Path:
    return root / f"step-{number:08d}"


def save(root: Path, number: int) -> Path:
    save_checkpoint(step(root, number), {"f": b"content %d" % number}, meta={"step": number})
    return step(root, number)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def flip(path: Path, position: int = 0) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(data)


# --- saving and reading


def test_nothing_stands_in_for_the_disk_here() -> None:
    """Elsewhere tests do not wait for it."""
    assert inspect.isbuiltin(os.fsync)
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fsync(1 << 20)


def test_what_was_saved_is_read(tmp_path: Path) -> None:
    folder = tmp_path / "run" / "checkpoints" / "step-00001200"  # no parent exists
    save_checkpoint(folder, FILES, meta=META)
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {
        **FILES,
        "manifest.json": (folder / "manifest.json").read_bytes(),
    }
    checkpoint = read_checkpoint(folder)
    assert (checkpoint.folder, checkpoint.files, checkpoint.meta) == (folder, FILES, META)
    assert verify_checkpoint(folder) == META
    assert names(folder.parent) == ["step-00001200"]


def test_the_manifest_is_json_that_anyone_can_check(tmp_path: Path) -> None:
    save_checkpoint(tmp_path / "c", FILES, meta=META)
    data = (tmp_path / "c" / "manifest.json").read_bytes()
    manifest = json.loads(data)
    assert manifest["meta"] == META
    assert manifest["format"] == 1
    assert manifest["files"] == {
        name: {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        for name, data in FILES.items()
    }
    covered = data[: data.index(manifest["sha256"].encode())]
    assert manifest["sha256"] == hashlib.sha256(covered).hexdigest()
    assert list(manifest)[-1] == "sha256"


def test_calls_of_a_save_are_in_the_only_safe_order(tmp_path: Path) -> None:
    disk = SpyDisk()
    folder = tmp_path / "run" / "step-1"
    save_checkpoint(folder, {"a": b"1", "b": b""}, meta={}, disk=disk)
    expected = ["make_folder run", f"sync_folder {tmp_path.parent.name}"]
    expected += [f"sync_folder {tmp_path.name}", "names run"]
    expected += ["make_folder TEMPORARY"]
    for name, writes in (("a", 1), ("b", 0), ("manifest.json", 1)):
        expected += [f"create {name}", *[f"write {name}"] * writes, f"sync {name}", f"close {name}"]
    expected += ["sync_folder TEMPORARY", "rename TEMPORARY", "sync_folder run"]
    assert disk.calls == expected
    assert disk.open_files == {}


def test_calls_of_a_removal_are_in_the_only_safe_order(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for number in (1, 2):
        save(root, number)
    disk = SpyDisk()
    assert prune_checkpoints(root, keep_last=1, disk=disk) == [step(root, 1)]
    changes = [c for c in disk.calls if c.split()[0] not in ("open", "read", "close", "names")]
    assert changes[:2] == ["rename step-00000001", "sync_folder root"]
    assert sorted(changes[2:4]) == ["remove f", "remove manifest.json"]
    assert changes[4:] == ["remove_folder TEMPORARY"]
    verified = disk.calls.index("read f")
    assert verified < disk.calls.index("rename step-00000001")
    assert disk.open_files == {}


def test_calls_of_write_file_are_in_the_only_safe_order(tmp_path: Path) -> None:
    disk = SpyDisk()
    write_file(tmp_path / "f", b"x", disk=disk)
    assert [call.split()[0] for call in disk.calls] == (
        ["sync_folder", "create", "write", "sync", "close", "rename", "sync_folder"]
    )
    assert disk.calls[-1] == f"sync_folder {tmp_path.name}"


def test_every_file_operation_goes_through_the_disk() -> None:
    functions = vars(atomic_checkpoint).items()
    for name, function in functions:
        if inspect.isfunction(function) and function.__module__ == atomic_checkpoint.__name__:
            used = set(function.__code__.co_names) & {"os", "read_bytes", "write_bytes", "mkdir"}
            assert not used, name


def test_a_checkpoint_is_never_overwritten(tmp_path: Path) -> None:
    save(tmp_path, 1)
    with pytest.raises(FileExistsError, match="step-00000001"):
        save_checkpoint(step(tmp_path, 1), {}, meta={})
    step(tmp_path, 2).mkdir()  # an empty folder, which a rename would replace
    with pytest.raises(FileExistsError, match="step-00000002"):
        save_checkpoint(step(tmp_path, 2), {}, meta={})
    assert read_checkpoint(step(tmp_path, 1)).meta == {"step": 1}
    assert names(tmp_path) == ["step-00000001", "step-00000002"]


def test_the_temporary_folder_is_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(atomic_checkpoint.secrets, "token_hex", lambda n: "ab" * n)
    foreign = tmp_path / f".step-00000001.{'ab' * 8}.tmp"
    foreign.mkdir()
    (foreign / "theirs").write_bytes(b"1")
    with pytest.raises(FileExistsError, match=r"\.step-00000001"):
        save(tmp_path, 1)
    assert (foreign / "theirs").read_bytes() == b"1"
    assert names(tmp_path) == [foreign.name]


def test_the_disk_creates_files_and_folders_but_never_takes_over(tmp_path: Path) -> None:
    disk = Disk()
    (tmp_path / "f").write_bytes(b"theirs")
    with pytest.raises(FileExistsError, match="f"):
        disk.create(tmp_path / "f")
    with pytest.raises(FileExistsError):
        disk.make_folder(tmp_path)
    with pytest.raises(FileNotFoundError):
        disk.open(tmp_path / "none")
    with pytest.raises(OSError, match="not empty"):
        disk.remove_folder(tmp_path)
    assert (tmp_path / "f").read_bytes() == b"theirs"


@pytest.mark.parametrize(
    "name", ["", ".", "..", "a/b", "../x", "a\\b", ".hidden", "manifest.json", "a\n", "é", "a b"]
)
def test_file_names_that_are_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ValueError, match="name"):
        save_checkpoint(tmp_path / "root" / "c", {name: b""}, meta={})
    assert names(tmp_path) == []


@pytest.mark.parametrize("data", ["text", bytearray(3), memoryview(numpy.zeros(2)), None])
def test_contents_that_are_refused(tmp_path: Path, data: Any) -> None:
    with pytest.raises(TypeError, match="content of f must be bytes"):
        save_checkpoint(tmp_path / "root" / "c", {"f": data}, meta={})
    assert names(tmp_path) == []


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), (1, 2), {1: 2}, numpy.int64(3), object(), b"", {1, 2}]
)
def test_meta_that_json_would_change_is_refused(tmp_path: Path, value: Any) -> None:
    with pytest.raises((TypeError, ValueError)):
        save_checkpoint(tmp_path / "root" / "c", {}, meta={"value": value})
    assert names(tmp_path) == []


def test_files_beside_the_listed_ones_are_ignored(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    (folder / "notes.txt").write_text("mine")
    assert read_checkpoint(folder).files == {"f": b"content 1"}


def test_a_manifest_of_another_format_is_named(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    text = (folder / "manifest.json").read_bytes().replace(b'"format": 1', b'"format": 2')
    head = text[:-68]
    seal = hashlib.sha256(head).hexdigest().encode() + text[-4:]
    (folder / "manifest.json").write_bytes(head + seal)
    with pytest.raises(CheckpointDamaged, match=r"has format 2, this program reads 1"):
        verify_checkpoint(folder)


@pytest.mark.parametrize("text", [b"[" * 100_000, b"[]\n", b'{"format": 1}', b"no JSON"])
def test_a_manifest_that_holds_something_else_is_named(tmp_path: Path, text: bytes) -> None:
    """Sealed as ours are: a checksum is no signature."""
    folder = save(tmp_path, 1)
    (folder / "manifest.json").write_bytes(atomic_checkpoint._sealed(text))
    with pytest.raises(CheckpointDamaged, match=r"manifest.json is no list of files"):
        verify_checkpoint(folder)


@pytest.mark.parametrize(
    ("meta", "files", "what"),
    [
        (None, {}, "is no list of files"),
        ({}, ["f"], "is no list of files"),
        ({}, {"f": ["size", "sha256"]}, "has no size and SHA-256 of 'f'"),
        ({}, {"f": {"size": "9", "sha256": ""}}, "has no size and SHA-256 of 'f'"),
        ({}, {"f": {"size": -1, "sha256": ""}}, "has no size and SHA-256 of 'f'"),
        ({}, {"f": {"size": 9}}, "has no size and SHA-256 of 'f'"),
    ],
)
def test_a_sealed_manifest_with_other_entries_is_damage(
    tmp_path: Path, meta: object, files: object, what: str
) -> None:
    folder = save(tmp_path, 1)
    text = json.dumps({"format": 1, "meta": meta, "files": files}).encode()
    head = text.removesuffix(b"}") + b',\n  "sha256": "'
    (folder / "manifest.json").write_bytes(atomic_checkpoint._sealed(head))
    with pytest.raises(CheckpointDamaged, match=what):
        read_checkpoint(folder)


def test_a_huge_manifest_and_a_pipe_are_damage(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    with (folder / "manifest.json").open("r+b") as file:
        file.truncate(1 << 40)  # it takes no space
    with pytest.raises(CheckpointDamaged, match=r"manifest.json is not what was saved"):
        verify_checkpoint(folder)
    folder = save(tmp_path, 2)
    (folder / "f").unlink()
    os.mkfifo(folder / "f")
    with pytest.raises(CheckpointDamaged, match=r"f has 0 of the 9 bytes saved"):
        verify_checkpoint(folder)


def test_a_large_file_is_read_in_one_piece_and_verified_in_many(tmp_path: Path) -> None:
    data = b"flambeau" * 400_000  # 3.2 MB: more than one piece of a verification
    save_checkpoint(tmp_path / "c", {"f": data}, meta={})
    reading, verifying = SpyDisk(), SpyDisk()
    assert read_checkpoint(tmp_path / "c", disk=reading).files["f"] == data
    verify_checkpoint(tmp_path / "c", disk=verifying)
    assert reading.calls.count("read f") == 2  # the content, and the end of the file
    assert verifying.calls.count("read f") == 5


def test_the_error_of_a_damaged_checkpoint_has_parts_and_can_be_pickled(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    (folder / "f").unlink()
    with pytest.raises(CheckpointDamaged) as info:
        read_checkpoint(folder)
    for error in (info.value, pickle.loads(pickle.dumps(info.value))):
        assert (error.folder, error.name, error.what) == (folder, "f", "is missing")
        assert str(error) == f"checkpoint {folder} is damaged: f is missing"


def test_a_wrong_size_is_said_and_a_grown_file_not_read_to_its_end(tmp_path: Path) -> None:
    folder = save(tmp_path, 1)
    (folder / "f").write_bytes(b"conten")
    with pytest.raises(CheckpointDamaged, match=r"f has 6 of the 9 bytes saved$"):
        read_checkpoint(folder)
    (folder / "f").write_bytes(bytes(10_000_000))
    for function in (read_checkpoint, verify_checkpoint):
        disk = SpyDisk()
        with pytest.raises(CheckpointDamaged, match=r"f is longer than the 9 bytes saved$"):
            function(folder, disk=disk)
        assert disk.calls.count("read f") == 1
        assert disk.open_files == {}


def test_a_bad_sector_is_damage(tmp_path: Path) -> None:
    class BadSector(Disk):
        def open(self, path: Path) -> int:
            self.is_bad = path == step(tmp_path, 2) / "f"
            return super().open(path)

        def read(self, file: int, size: int) -> bytes:
            if self.is_bad:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return super().read(file, size)

    for number in (1, 2):
        save(tmp_path, number)
    latest, (error,) = latest_checkpoint(tmp_path, disk=BadSector())
    assert latest is not None
    assert latest.meta == {"step": 1}
    assert (error.name, error.what) == ("f", f"cannot be read ({os.strerror(errno.EIO)})")


def test_an_error_that_says_nothing_about_the_checkpoint_is_passed_on(tmp_path: Path) -> None:
    class NoMoreFiles(Disk):
        def open(self, path: Path) -> int:
            if path.name == "f":
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return super().open(path)

    folder = save(tmp_path, 1)
    for function in (read_checkpoint, verify_checkpoint):
        with pytest.raises(OSError, match=r"Too many open files.*step-00000001/f"):
            function(folder, disk=NoMoreFiles())
    with pytest.raises(OSError, match="Too many open files"):
        latest_checkpoint(tmp_path, disk=NoMoreFiles())


@pytest.mark.skipif(sys.platform == "win32", reason="resource limits")
def test_a_file_that_the_system_cuts_short(tmp_path: Path) -> None:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:  # the first write is short, the second fails: a full disk, by the real system calls
        with pytest.raises(OSError, match=r"File too large.*/c/f'") as info:
            save_checkpoint(tmp_path / "c", {"f": bytes(10_000)}, meta={})
        with pytest.raises(OSError, match=r"File too large.*/g'"):
            write_file(tmp_path / "g", bytes(10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert info.value.errno == errno.EFBIG
    assert names(tmp_path) == []


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX modes")
def test_what_we_write_is_readable_as_the_umask_says(tmp_path: Path) -> None:
    old = os.umask(0o022)
    try:
        save(tmp_path, 1)
    finally:
        os.umask(old)
    assert step(tmp_path, 1).stat().st_mode & 0o777 == 0o755
    assert (step(tmp_path, 1) / "f").stat().st_mode & 0o777 == 0o644


# --- the folder of checkpoints


def test_checkpoint_folders_are_those_named_by_a_step(tmp_path: Path) -> None:
    for name in ["step-10", "step-9", "step-00000008", "step-100000000", "step-7.damaged",
                 "step-7.damaged-2", ".step-7.0123456789abcdef.tmp", "step-", "step-x", "xstep-1",
                 ".step-7.0123456789abcdef.removed", "step-1 ", "step--1", "step-٣"]:  # fmt: skip
        (tmp_path / name).mkdir()
    assert [path.name for path in checkpoint_folders(tmp_path)] == [
        "step-00000008",
        "step-9",
        "step-10",
        "step-100000000",
    ]


def test_no_folder_has_no_checkpoints(tmp_path: Path) -> None:
    assert checkpoint_folders(tmp_path / "none") == []
    assert latest_checkpoint(tmp_path / "none") == (None, [])
    assert remove_leftovers(tmp_path / "none") == []
    assert prune_checkpoints(tmp_path / "none", keep_last=1) == []
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError):
        latest_checkpoint(tmp_path / "file")


def test_latest_is_the_highest_step_not_the_last_name_or_time(tmp_path: Path) -> None:
    for name, number in (("step-10", 10), ("step-9", 9)):
        save_checkpoint(tmp_path / name, {}, meta={"step": number})
    latest, damaged = latest_checkpoint(tmp_path)
    assert latest is not None
    assert latest.meta == {"step": 10}
    assert damaged == []


def test_latest_passes_over_the_damaged_and_says_so(tmp_path: Path) -> None:
    for number in (1, 2, 3):
        save(tmp_path, number)
    flip(step(tmp_path, 3) / "f")
    (step(tmp_path, 2) / "manifest.json").unlink()
    step(tmp_path, 4).touch()  # a file, not a folder
    latest, damaged = latest_checkpoint(tmp_path)
    assert latest is not None
    assert latest.meta == {"step": 1}
    assert [str(error) for error in damaged] == [
        f"checkpoint {step(tmp_path, 4)} is damaged: manifest.json cannot be read (Not a directory)",
        f"checkpoint {step(tmp_path, 3)} is damaged: f is not what was saved (its SHA-256 differs)",
        f"checkpoint {step(tmp_path, 2)} is damaged: manifest.json is missing",
    ]
    assert all(error.__traceback__ is None for error in damaged)
    flip(step(tmp_path, 1) / "f")
    latest, damaged = latest_checkpoint(tmp_path)
    assert latest is None
    assert [error.folder for error in damaged] == [step(tmp_path, n) for n in (4, 3, 2, 1)]


def test_set_aside_frees_the_name_and_deletes_nothing(tmp_path: Path) -> None:
    aside = []
    for _ in range(3):
        save(tmp_path, 1)
        aside.append(set_aside(step(tmp_path, 1)).name)
    assert aside == ["step-00000001.damaged", "step-00000001.damaged-2", "step-00000001.damaged-3"]
    assert names(tmp_path) == aside
    assert all(read_checkpoint(tmp_path / name).meta == {"step": 1} for name in aside)
    with pytest.raises(FileNotFoundError, match="step-00000001"):
        set_aside(step(tmp_path, 1))


def test_remove_leftovers_removes_ours_and_nothing_else(tmp_path: Path) -> None:
    save(tmp_path, 1)
    token = "0123456789abcdef"
    ours = [f".step-2.{token}.tmp", f".step-3.{token}.removed", f".config.toml.{token}.tmp"]
    for name in ours[:2]:
        (tmp_path / name).mkdir()
        (tmp_path / name / "f").write_bytes(b"1")
    (tmp_path / ours[2]).write_bytes(b"1")
    others = [".step-2.tmp", ".git", f"step-2.{token}.tmp", f".x.{token}", "step-3.damaged"]
    for name in others:
        (tmp_path / name).mkdir()
    assert sorted(path.name for path in remove_leftovers(tmp_path)) == sorted(ours)
    assert names(tmp_path) == sorted([*others, "step-00000001"])
    assert remove_leftovers(tmp_path) == []


def test_what_killed_writes_of_a_file_have_left_is_removed_a_day_later(tmp_path: Path) -> None:
    token = "0123456789abcdef"
    old = [f".a.txt.{token}.tmp", f".a.txt.{token[::-1]}.tmp"]
    (tmp_path / old[0]).write_bytes(b"1")
    (tmp_path / old[1]).mkdir()
    (tmp_path / old[1] / "inside").write_bytes(b"1")
    others = [
        f".b.txt.{token}.tmp",
        f".a.txt.b.{token}.tmp",
        ".a.txt.tmp",
        f".a.txt.{token}.removed",
    ]
    for name in others:
        (tmp_path / name).write_bytes(b"1")
    for name in (*old, *others):
        os.utime(tmp_path / name, (0, 0))
    young = f".a.txt.{token[:-1]}0.tmp"  # of another process, perhaps
    (tmp_path / young).write_bytes(b"1")
    write_file(tmp_path / "a.txt", b"2")
    assert names(tmp_path) == sorted(["a.txt", young, *others])


def test_a_folder_is_not_listed_for_each_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Which took 18 s for 2000 masks in a folder with 4000."""
    listed = []
    iterdir = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda path: listed.append(path) or iterdir(path))
    for number in range(3):
        write_file(tmp_path / f"{number}.png", b"1")
    assert listed.count(tmp_path) == 1


def test_a_folder_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    with (
        pytest.raises(OSError, match="full") as raised,
        replacing(tmp_path / "a", disk=Disk()) as new,
    ):
        new.mkdir()
        (new / "one").write_bytes(b"1")
        raise OSError(errno.ENOSPC, "full", str(new / "two"))
    assert raised.value.filename == f"{tmp_path / 'a' / 'two'}"
    assert names(tmp_path) == []
    with replacing(tmp_path / "a", disk=Disk()) as new:
        new.mkdir()
        (new / "one").write_bytes(b"1")
    assert names(tmp_path) == ["a"]
    assert names(tmp_path / "a") == ["one"]


def test_leftovers_of_every_kind_are_recognised(tmp_path: Path) -> None:
    class Dies(Disk):
        """Fails to remove too, so that cleaning up fails as well."""

        def sync(self, file: int) -> None:
            raise OSError(errno.EIO, "dying")

        def remove(self, path: Path) -> None:
            raise OSError(errno.EIO, "cannot remove")

    for number in (1, 2):
        save(tmp_path, number)
    with pytest.raises(OSError, match="dying"):  # the first error, not that of cleaning up
        save_checkpoint(step(tmp_path, 3), {"f": b"1"}, meta={}, disk=Dies())
    with pytest.raises(OSError, match="dying"):
        write_file(tmp_path / "latest.txt", b"1", disk=Dies())
    with pytest.raises(OSError, match="cannot remove"):
        prune_checkpoints(tmp_path, keep_last=1, disk=Dies())
    assert len(names(tmp_path)) == 4
    assert checkpoint_folders(tmp_path) == [step(tmp_path, 2)]
    assert len(remove_leftovers(tmp_path)) == 3
    assert names(tmp_path) == ["step-00000002"]


# --- pruning


def test_prune_keeps_the_newest_and_the_named(tmp_path: Path) -> None:
    for number in range(1, 7):
        save(tmp_path, number)
    removed = prune_checkpoints(tmp_path, keep_last=2, keep=["step-00000002", "step-00000006"])
    assert removed == [step(tmp_path, n) for n in (1, 3, 4)]
    assert checkpoint_folders(tmp_path) == [step(tmp_path, n) for n in (2, 5, 6)]
    assert names(tmp_path) == [step(tmp_path, n).name for n in (2, 5, 6)]


def test_prune_reads_nothing_where_there_is_nothing_to_remove(tmp_path: Path) -> None:
    for number in range(1, 4):
        save(tmp_path, number)
    disk = SpyDisk()
    assert prune_checkpoints(tmp_path, keep_last=3, disk=disk) == []
    assert prune_checkpoints(tmp_path, keep_last=2, keep=["step-1"], disk=disk) == []
    assert {call.split()[0] for call in disk.calls} == {"names"}


def test_prune_never_removes_the_only_one_that_verifies(tmp_path: Path) -> None:
    for number in range(1, 5):
        save(tmp_path, number)
    for number in (2, 3, 4):
        flip(step(tmp_path, number) / "f")
    assert prune_checkpoints(tmp_path, keep_last=1) == []
    assert read_checkpoint(step(tmp_path, 1)).meta == {"step": 1}
    save(tmp_path, 5)
    assert prune_checkpoints(tmp_path, keep_last=1) == [step(tmp_path, n) for n in (1, 2, 3, 4)]


def test_removal_takes_what_others_put_there_and_follows_no_link(tmp_path: Path) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "precious").touch()
    root = tmp_path / "root"
    for number in (2, 3):
        save(root, number)
    step(root, 1).touch()  # a file of a checkpoint's name
    (step(root, 2) / "plots" / "deep").mkdir(parents=True)
    (step(root, 2) / "plots" / "a.png").touch()
    (step(root, 2) / "link").symlink_to(outside)
    assert prune_checkpoints(root, keep_last=1) == [step(root, 1), step(root, 2)]
    assert names(root) == ["step-00000003"]
    assert names(outside) == ["precious"]


@pytest.mark.parametrize(
    ("keep_last", "keep", "message"),
    [
        (0, (), "keep_last must be at least 1, got 0"),
        (-1, (), "keep_last"),
        (1, ["best"], "'best'"),
        (1, "step-00000001", "'s'"),  # a string is a collection of letters
        (1, ["step-00000001.damaged"], "damaged"),
    ],
)
def test_prune_refuses(tmp_path: Path, keep_last: int, keep: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        prune_checkpoints(tmp_path, keep_last=keep_last, keep=keep)


# --- one file


def test_write_file_makes_and_replaces(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "config.toml"
    for data in (b"", b"1" * 100_000, b"short"):
        write_file(path, data)
        assert path.read_bytes() == data
    assert names(path.parent) == ["config.toml"]


@pytest.mark.parametrize("number", [errno.EACCES, errno.EINVAL])
def test_a_folder_above_that_cannot_be_synced_is_not_ours(tmp_path: Path, number: int) -> None:
    class Above(Disk):
        def sync_folder(self, path: Path) -> None:
            if path == tmp_path.parent:
                raise OSError(number, os.strerror(number), str(path))
            super().sync_folder(path)

    save_checkpoint(step(tmp_path, 1), {}, meta={}, disk=Above())
    save_checkpoint(tmp_path / "new" / "step-1", {}, meta={}, disk=Above())
    assert names(tmp_path) == ["new", "step-00000001"]
    with pytest.raises(OSError, match=re.escape(os.strerror(number))):
        write_file(tmp_path.parent / "file", b"", disk=Above())


def test_a_parent_that_is_a_file_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(NotADirectoryError, match="file"):
        write_file(tmp_path / "file" / "x", b"")
    with pytest.raises(NotADirectoryError, match="file"):
        save_checkpoint(tmp_path / "file" / "deep" / "step-1", {}, meta={})


# --- state to bytes


class Subclass(torch.Tensor):
    pass


Pair = namedtuple("Pair", "a b")
ordered = OrderedDict(a=1)
ordered._metadata = argparse.Namespace(version=1)  # type: ignore[attr-defined]
tagged = torch.ones(2)
tagged.tag = {"fine": numpy.float64(1)}  # type: ignore[attr-defined]


def same(a: Any, b: Any) -> None:
    assert type(a) is type(b)
    if isinstance(a, dict):
        assert list(a) == list(b)
        for key in a:
            same(a[key], b[key])
        same(getattr(a, "_metadata", None), getattr(b, "_metadata", None))
    elif isinstance(a, (list, tuple)):
        assert len(a) == len(b)
        for x, y in zip(a, b, strict=True):
            same(x, y)
    elif isinstance(a, torch.Tensor):
        assert a.requires_grad == b.requires_grad
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    else:
        assert a == b


def test_states_come_back_as_they_were() -> None:
    state = {
        "plain": [
            None,
            True,
            3,
            1 - (1 << 2039),
            (1 << 2039) - 1,
            0.1,
            "é",
            "",
            "\ud800",
            b"\x00\xff",
        ],
        "nested": {1: (), (2, 3): [[]], None: {}, 0.5: OrderedDict(), False: Counter("abb")},
        "types": [torch.bfloat16, torch.device("cuda", 1), torch.Size([2, 3])],
        "tensors": [
            torch.ones(2, dtype=dtype)
            for dtype in (
                torch.float64,
                torch.bfloat16,
                torch.float8_e4m3fn,
                torch.uint16,
                torch.bool,
                torch.complex64,
                torch.int8,
            )
        ],
        "odd": [torch.ones(()), torch.ones(0, 3), torch.full((2,), torch.nan), torch.eye(3).T],
        "leaf": torch.nn.Parameter(torch.ones(3)),
        "conj": torch.ones(2, dtype=torch.complex64).conj(),
    }
    same(from_bytes(to_bytes(state)), state)


def test_memory_that_tensors_share_stays_shared() -> None:
    flat = torch.arange(6.0)
    back = from_bytes(to_bytes({"flat": flat, "view": flat[2:4]}))
    back["flat"][2] = 100
    torch.testing.assert_close(back["view"], torch.tensor([100.0, 3.0]), rtol=0, atol=0)


def model() -> torch.nn.Module:
    return torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.BatchNorm1d(4), torch.nn.Dropout())


OPTIMIZERS = [torch.optim.SGD, torch.optim.AdamW, torch.optim.RMSprop, torch.optim.Adagrad]
SCHEDULERS: list[Any] = [
    lambda o: lr_scheduler.StepLR(o, 2),
    lambda o: lr_scheduler.MultiStepLR(o, [2, 3]),  # holds a Counter
    lr_scheduler.LinearLR,
    lambda o: lr_scheduler.CosineAnnealingLR(o, 10),
    lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 10),
    lambda o: lr_scheduler.OneCycleLR(o, 0.1, total_steps=10),
    lr_scheduler.ReduceLROnPlateau,
    lambda o: lr_scheduler.LambdaLR(o, lambda step: 0.5),
    lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o), lr_scheduler.CosineAnnealingLR(o, 5)], [3]
    ),
]


@pytest.mark.parametrize("make_optimizer", OPTIMIZERS)
def test_states_of_models_and_optimizers_come_back(make_optimizer: Any) -> None:
    net = model()
    optimizer = make_optimizer(net.parameters(), lr=0.1)
    net(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    scaler = torch.amp.GradScaler("cpu")
    state = {
        "model": net.state_dict(),
        "optimizer": optimizer.state_dict(),
        "scaler": scaler.state_dict(),
        "rng": torch.get_rng_state(),
    }
    same(from_bytes(to_bytes(state)), state)


@pytest.mark.parametrize("make_scheduler", SCHEDULERS)
def test_states_of_torch_schedulers_come_back(make_scheduler: Any) -> None:
    optimizer = torch.optim.SGD(model().parameters(), lr=0.1)
    scheduler = make_scheduler(optimizer)
    state = {"scheduler": scheduler.state_dict()}
    same(from_bytes(to_bytes(state)), state)


REFUSED = [
    ({"best": numpy.float64(0.5)}, "best is of type numpy.float64"),
    ({"a": numpy.zeros(2)}, "a is of type numpy.ndarray"),
    ({"args": argparse.Namespace(lr=1)}, "args is of type argparse.Namespace"),
    ({"f": len}, "f is of type builtins.builtin_function_or_method"),
    ({"o": {"groups": [{}, {"lr": numpy.float32(1)}]}}, "o.groups[1].lr is of type numpy.float32"),
    ({"p": Pair(1, 2)}, "Pair"),
    ({"s": frozenset([1])}, "s is of type builtins.frozenset"),
    ({"d": defaultdict(int)}, "d is of type collections.defaultdict"),
    ({"b": b""}, "b is empty bytes"),
    ({"i": [0, 1 << 2039]}, "i[1] is empty bytes or an int of over 2039 bits"),
    ({"i": -(1 << 2039) - 1}, "over 2039 bits"),
    ({"r": range(3)}, "r is of type builtins.range"),
    ({"g": torch.Generator()}, "g is of type torch"),
    ({"k": {frozenset([1]): 0}}, "k (a key) is of type builtins.frozenset"),
    ({"m": ordered}, "m._metadata is of type argparse.Namespace"),
    ({"t": tagged}, "t.tag.fine is of type numpy.float64"),
    ({"n": torch.nn.Linear(2, 2)}, "n is of type torch.nn.modules.linear.Linear"),
]


@pytest.mark.parametrize(("state", "message"), REFUSED)
def test_what_torch_would_not_load_is_refused_with_its_place(state: Any, message: str) -> None:
    with pytest.raises(TypeError) as info:
        to_bytes(state)
    assert message in str(info.value)
    assert "weights_only=True" in str(info.value)
    file = io.BytesIO()  # ... and torch indeed does not
    torch.save(state, file)
    file.seek(0)
    with pytest.raises(pickle.UnpicklingError):
        torch.load(file, weights_only=True)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.ones(2, device="meta"),  # torch loads it, without data
        torch.eye(2).to_sparse(),  # torch loads it, with a warning
        torch.ones(2).as_subclass(Subclass),
    ],
)
def test_tensors_that_would_not_come_back_whole_are_refused(tensor: torch.Tensor) -> None:
    with pytest.raises(TypeError, match=r"weights\[0\] is "):
        to_bytes({"weights": [tensor]})


class Malicious:
    def __reduce__(self) -> tuple[Any, ...]:
        return (os.mkdir, (str(Malicious.target),))

    target = Path()


def test_reading_runs_no_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Malicious.target = tmp_path / "pwned"
    monkeypatch.setenv("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", "1")
    new, old = io.BytesIO(), io.BytesIO()
    torch.save({"a": Malicious()}, new)
    torch.save({"a": Malicious()}, old, _use_new_zipfile_serialization=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch says that the variable is overruled
        for data in (new.getvalue(), old.getvalue(), pickle.dumps(Malicious())):
            with pytest.raises(pickle.UnpicklingError):
                from_bytes(data)
    assert not Malicious.target.exists()
    pickle.loads(pickle.dumps(Malicious()))  # the trap works
    assert Malicious.target.exists()


def test_a_file_that_holds_no_dict_is_refused() -> None:
    file = io.BytesIO()
    torch.save(torch.ones(2), file)
    with pytest.raises(TypeError, match="holds a Tensor"):
        from_bytes(file.getvalue())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_tensors_of_a_gpu_come_back_on_the_cpu() -> None:
    state = from_bytes(to_bytes({"w": torch.arange(3.0, device="cuda")}))
    torch.testing.assert_close(state["w"], torch.arange(3.0), rtol=0, atol=0)


@pytest.mark.parametrize("of", ["itself", "another"])
def test_an_error_names_the_file_that_it_is_of(tmp_path: Path, of: str) -> None:
    """Also where a block that writes one file writes another one, too."""
    outer, inner = tmp_path / "table.csv", tmp_path / "mask.png"

    class Full(Disk):
        def write(self, file: int, data: Any) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    with (
        pytest.raises(OSError, match="No space") as failed,
        atomic_checkpoint.replacing(outer, disk=Disk()) as hidden,
    ):
        hidden.write_bytes(b"path\n")
        if of == "itself":
            raise OSError(errno.ENOSPC, "No space left on device")
        write_file(inner, b"png", disk=Full())
    assert failed.value.filename == str(outer if of == "itself" else inner)
    assert [*tmp_path.iterdir()] == []
