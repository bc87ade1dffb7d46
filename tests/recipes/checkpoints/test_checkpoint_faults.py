"""The fault campaign of atomic_checkpoint: death, full and failing disks, damage. Nothing is lost.

Death is played on `ModelDisk`, a disk in memory that knows what was synced. After a crash it keeps
that, and of the rest what a real disk may keep: any part of the changes of names, and each file that
was not synced absent, empty, cut short, zeroed or whole. (Prior art for the idea: the crash states
of ALICE, in the paper that atomic_checkpoint.py names.)
"""

import errno
import hashlib
import itertools
import json
import os
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from flambeau.recipes.checkpoints.atomic_checkpoint import (
    CheckpointDamaged,
    Disk,
    checkpoint_folders,
    latest_checkpoint,
    prune_checkpoints,
    read_checkpoint,
    remove_leftovers,
    save_checkpoint,
    set_aside,
    verify_checkpoint,
    write_file,
)

RUN = Path("/no-such-disk/run")  # a call that went past the model would fail
ROOT = RUN / "checkpoints"
CONFIG = RUN / "config.toml"
KEEP_LAST = 2


# ------------------------------------------------------------------ the model of a disk


@dataclass(eq=False)
class FileNode:
    data: bytearray = field(default_factory=bytearray)
    synced: bytes = b""


@dataclass(eq=False)
class FolderNode:
    names: dict[str, Any] = field(default_factory=dict)
    synced: dict[str, Any] = field(default_factory=dict)
    unsynced: list[dict[str, Any]] = field(default_factory=list)  # atomic changes, None removes

    def change(self, **names: Any) -> None:
        self.unsynced.append(names)
        _apply(self.names, names)

    def sync(self) -> None:
        self.synced = dict(self.names)
        self.unsynced.clear()


def _apply(names: dict[str, Any], change: dict[str, Any]) -> None:
    for name, node in change.items():
        if node is None:
            names.pop(name, None)
        else:
            names[name] = node


class Killed(BaseException):
    """The process is dead; no handler of its own runs any more."""


def failure(number: int, path: Path | None = None) -> OSError:
    return OSError(number, os.strerror(number), *([str(path)] if path else []))


class ModelDisk(Disk):
    """A disk in memory; call number `at` meets the fault `what`.

    what: 'die' before the call, 'die half-way' through a write, 'short' for a write of half the
    data and then ENOSPC, a number for that OSError, a negative one for that from here on.
    """

    def __init__(self, top: FolderNode | None = None) -> None:
        self.top = top or FolderNode()
        self.reset()

    def reset(self, at: int | None = None, what: str | int = "die") -> "ModelDisk":
        """The process starts anew; the machine has not stopped."""
        self.at, self.what, self.dead = at, what, False
        self.calls: list[str] = []
        self.open_files: dict[int, list[Any]] = {}
        return self

    def _call(self, kind: str, path: Path | None = None) -> bool:
        number = len(self.calls)
        self.calls.append(kind)
        if self.dead:
            raise Killed
        if isinstance(self.what, int):
            if number == self.at or (self.what < 0 and self.at is not None and number >= self.at):
                raise failure(abs(self.what), path)
        elif number == self.at:
            if self.what == "die":
                self.dead = True
                raise Killed
            return True
        return False

    def _node(self, path: Path) -> Any:
        node: Any = self.top
        for part in path.parts[1:]:
            if isinstance(node, FileNode):
                raise failure(errno.ENOTDIR, path)
            if part not in node.names:
                raise failure(errno.ENOENT, path)
            node = node.names[part]
        return node

    def _folder(self, path: Path) -> FolderNode:
        node = self._node(path)
        if not isinstance(node, FolderNode):
            raise failure(errno.ENOTDIR, path)
        return node

    def _new(self, path: Path, node: Any) -> None:
        parent = self._folder(path.parent)
        if path.name in parent.names:
            raise failure(errno.EEXIST, path)
        parent.change(**{path.name: node})

    def _open(self, node: Any) -> int:
        self.open_files[len(self.calls)] = [node, 0]
        return len(self.calls)

    def make_folder(self, path: Path) -> None:
        self._call("make_folder", path)
        self._new(path, FolderNode())

    def create(self, path: Path) -> int:
        self._call("create", path)
        self._new(path, FileNode())
        return self._open(self._node(path))

    def write(self, file: int, data: memoryview) -> int:
        fault = self._call("write")
        size = (len(data) + 1) // 2 if fault else len(data)
        self.open_files[file][0].data += data[:size]
        if fault and self.what == "die half-way":
            self.dead = True
            raise Killed
        if fault:
            self.at, self.what = len(self.calls), errno.ENOSPC
        return size

    def sync(self, file: int) -> None:
        self._call("sync")
        node = self.open_files[file][0]
        node.synced = bytes(node.data)

    def open(self, path: Path) -> int:
        self._call("open", path)
        return self._open(self._node(path))

    def read(self, file: int, size: int) -> bytes:
        self._call("read")
        node, position = self.open_files[file]
        if isinstance(node, FolderNode):
            raise failure(errno.EISDIR)
        self.open_files[file][1] += size
        return bytes(node.data[position : position + size])

    def close(self, file: int) -> None:
        del self.open_files[file]
        self._call("close")

    def sync_folder(self, path: Path) -> None:
        self._call("sync_folder", path)
        self._folder(path).sync()

    def rename(self, source: Path, target: Path) -> None:
        self._call("rename", source)
        assert source.parent == target.parent, "only this is atomic in the model"
        parent, node = self._folder(source.parent), self._node(source)
        old = parent.names.get(target.name)
        assert old is None or (type(old), type(node)) == (FileNode, FileNode)
        parent.change(**{source.name: None, target.name: node})

    def remove(self, path: Path) -> None:
        self._call("remove", path)
        if not isinstance(self._node(path), FileNode):
            raise failure(errno.EISDIR, path)
        self._folder(path.parent).change(**{path.name: None})

    def remove_folder(self, path: Path) -> None:
        self._call("remove_folder", path)
        if self._folder(path).names:
            raise failure(errno.ENOTEMPTY, path)
        self._folder(path.parent).change(**{path.name: None})

    def names(self, path: Path) -> list[str]:
        self._call("names", path)
        return list(self._folder(path).names)


# What a crash leaves of the changes of a folder, and of a file that was not synced.
KeepChanges = Callable[[list[dict[str, Any]]], list[dict[str, Any]]]
KeepData = Callable[[bytes, bytes], bytes]


def crash(disk: ModelDisk, changes: KeepChanges, data: KeepData) -> ModelDisk:
    def kept(node: Any) -> Any:
        if isinstance(node, FileNode):
            is_synced = node.data == node.synced
            content = node.synced if is_synced else data(node.synced, bytes(node.data))
            return FileNode(bytearray(content), content)
        names = dict(node.synced)
        for change in changes(node.unsynced):
            _apply(names, change)
        names = {name: kept(child) for name, child in names.items()}
        return FolderNode(names, dict(names))

    return ModelDisk(kept(disk.top))


def everything(changes: list[Any]) -> list[Any]:
    return changes


def nothing(changes: list[Any]) -> list[Any]:
    return []


def some(rng: random.Random) -> KeepChanges:
    """A journal keeps the first of them; a disk without one keeps any."""
    if rng.random() < 0.5:
        return lambda changes: changes[: rng.randint(0, len(changes))]
    return lambda changes: [change for change in changes if rng.random() < 0.5]


def some_data(rng: random.Random) -> KeepData:
    def choose(synced: bytes, data: bytes) -> bytes:
        cut = rng.randint(0, len(data))
        hole = data[:cut] + bytes(len(data[cut : cut + 32])) + data[cut + 32 :]
        stale = rng.randbytes(len(data))  # what lay on these blocks before
        choices = [synced, b"", data[:cut], bytes(len(data)), data[:cut] + bytes(len(data) - cut)]
        return rng.choice([*choices, hole, data, stale, data[:cut] + stale[cut:]])

    return choose


def crashes(disk: ModelDisk, rng: random.Random, samples: int) -> Iterator[ModelDisk]:
    yield crash(disk, nothing, lambda synced, data: synced)
    yield crash(disk, everything, lambda synced, data: data)
    yield crash(
        disk, everything, lambda synced, data: b""
    )  # ext4: the rename is kept, not the data
    yield crash(disk, everything, lambda synced, data: bytes(len(data)))
    yield crash(disk, everything, lambda synced, data: data[: len(data) // 2])
    for _ in range(samples):
        yield crash(disk, some(rng), some_data(rng))


# ------------------------------------------------------------------ the life of a run


def name(step: int) -> str:
    return f"step-{step:08d}"


def content(step: int) -> dict[str, bytes]:
    rng = random.Random(step)
    return {"model.safetensors": rng.randbytes(200), "state.pt": rng.randbytes(90), "empty": b""}


def save(disk: Disk, step: int, root: Path = ROOT) -> None:
    save_checkpoint(root / name(step), content(step), meta={"step": step}, disk=disk)


def is_right(disk: Disk, step: int, root: Path = ROOT) -> bool:
    checkpoint = read_checkpoint(root / name(step), disk=disk)
    return checkpoint.files == content(step) and checkpoint.meta == {"step": step}


@dataclass
class Past:
    """What the process knew when it died: what it may count on."""

    saved: list[int] = field(default_factory=list)  # their save has returned
    flying: int | None = None  # its save was called
    best: int | None = None
    config: set[bytes | None] = field(default_factory=lambda: {None})
    unsure: list[int] = field(default_factory=list)  # seen, but its name is perhaps not synced

    def promised(self) -> set[int]:
        return {*self.saved[-KEEP_LAST:], *([self.best] if self.best else [])}

    def returned(self) -> None:
        assert self.flying is not None
        self.saved += [*self.unsure, self.flying]  # one sync serves all names of the folder
        self.unsure = []
        if self.flying % 3 == 1:
            self.best = self.flying
        self.flying = None


def live(disk: Disk, past: Past, steps: range) -> None:
    for step in steps:
        past.flying = step
        save(disk, step)
        past.returned()
        past.config.add(b"after %d" % step)
        write_file(CONFIG, b"after %d" % step, disk=disk)
        past.config = {b"after %d" % step}
        keep = [name(past.best)] if past.best else []
        prune_checkpoints(ROOT, keep_last=KEEP_LAST, keep=keep, disk=disk)


def check(disk: ModelDisk, past: Past) -> int:
    """All that was promised is there and right; the step that a restart would go on from."""
    latest, damaged = latest_checkpoint(ROOT, disk=disk)
    assert [str(error) for error in damaged] == []  # death damages nothing
    step = latest.meta["step"] if latest else 0
    assert step in {past.saved[-1] if past.saved else 0, past.flying}
    there = {int(folder.name[5:]) for folder in checkpoint_folders(ROOT, disk=disk)}
    assert past.promised() <= there
    assert all(is_right(disk, number) for number in there)
    try:
        config = bytes(disk._node(CONFIG).data)
    except FileNotFoundError:
        config = None
    assert config in past.config
    return step


def check_and_go_on(disk: ModelDisk, past: Past) -> None:
    step = check(disk, past)
    for root in (RUN, ROOT):
        remove_leftovers(root, disk=disk)
    assert check(disk, past) == step
    if step:
        assert set(disk._folder(RUN).names) <= {"checkpoints", "config.toml"}
        assert set(disk._folder(ROOT).names) <= {name(n) for n in range(20)}
    # What has returned outlives a crash at once.
    save(disk, step + 1)
    past = Past([*past.saved, step + 1], config=past.config)
    assert check(crash(disk, nothing, lambda synced, data: synced), past) == step + 1
    write_file(CONFIG, b"new", disk=disk)
    past.config = {b"new"}
    assert check(crash(disk, nothing, lambda synced, data: synced), past) == step + 1


def test_the_model_forgets_what_was_not_synced() -> None:
    """The campaign is worth what its disk is worth."""
    disk = ModelDisk()
    disk.make_folder(Path("/a"))
    disk.sync_folder(Path("/"))
    file = disk.create(Path("/a/f"))
    disk.write(file, memoryview(b"0123456789"))
    lost = crash(disk, nothing, lambda synced, data: synced)
    assert (list(lost.top.names), list(lost._folder(Path("/a")).names)) == (["a"], [])
    empty = crash(disk, everything, lambda synced, data: b"")
    assert empty._node(Path("/a/f")).data == b""
    disk.sync(file)
    assert (
        crash(disk, everything, lambda synced, data: b"")._node(Path("/a/f")).data == b"0123456789"
    )
    assert crash(disk, nothing, lambda synced, data: synced)._folder(Path("/a")).names == {}
    disk.sync_folder(Path("/a"))
    disk.rename(Path("/a/f"), Path("/a/g"))
    assert list(crash(disk, nothing, lambda synced, data: b"")._folder(Path("/a")).names) == ["f"]
    assert list(crash(disk, everything, lambda synced, data: b"")._folder(Path("/a")).names) == [
        "g"
    ]


def deaths() -> Iterator[tuple[ModelDisk, Past]]:
    """A run of six checkpoints, killed at every call and in the middle of every write."""
    whole = ModelDisk()
    live(whole, Past(), range(1, 7))
    for at, kind in enumerate([*whole.calls, "the end"]):
        for what in ("die", "die half-way") if kind == "write" else ("die",):
            disk, past = ModelDisk().reset(at, what), Past()
            try:
                live(disk, past, range(1, 7))
            except Killed:
                pass
            else:
                assert kind == "the end"
            yield disk, past


@pytest.mark.parametrize("samples", [1, pytest.param(6, marks=pytest.mark.slow)])
def test_death_of_the_machine_at_every_call(samples: int) -> None:
    rng = random.Random(0)
    num_deaths = num_disks = 0
    for disk, past in deaths():
        num_deaths += 1
        for rest in crashes(disk, rng, samples=samples):
            num_disks += 1
            check_and_go_on(rest, past)
    assert num_deaths > 250
    assert num_disks > 400 * samples


def test_death_of_the_process_at_every_call() -> None:
    """The machine goes on, with what was not synced still in its memory."""
    num_deaths = 0
    for disk, past in deaths():
        num_deaths += 1
        check_and_go_on(disk.reset(), past)
    assert num_deaths > 250


def test_many_deaths_in_one_run() -> None:
    """Killed at random again and again, in recoveries too; now the process, now the machine."""
    num_deaths = num_saved = 0
    for seed in range(40):
        rng, disk, past = random.Random(seed), ModelDisk(), Past()
        for _ in range(20):
            disk.reset(rng.randrange(120), rng.choice(["die", "die half-way"]))
            try:
                for root in (RUN, ROOT):
                    remove_leftovers(root, disk=disk)
                latest, _ = latest_checkpoint(ROOT, disk=disk)
                first = latest.meta["step"] + 1 if latest else 1
                live(disk, past, range(first, first + 3))
                num_saved += 3
            except Killed:
                num_deaths += 1
            is_machine = rng.random() < 0.5
            rests = list(crashes(disk, rng, samples=5)) if is_machine else [disk.reset()]
            disk = rng.choice(rests)
            there = {int(folder.name[5:]) for folder in checkpoint_folders(ROOT, disk=disk)}
            candidates = {*past.unsure, past.flying}
            assert past.promised() <= there <= {*past.saved, *candidates}
            assert all(is_right(disk, step) for step in there)
            past.unsure, past.flying = sorted(candidates & there), None
            if is_machine:
                past.saved, past.unsure = past.saved + past.unsure, []
    assert num_deaths > 400
    assert num_saved > 400


# ------------------------------------------------------------------ full and failing disks

FAULTS: list[str | int] = [errno.ENOSPC, errno.EIO, "short", -errno.EIO, -errno.ENOSPC]


def faults(
    prepare: Callable[[Disk], None], act: Callable[[Disk], Any]
) -> Iterator[tuple[ModelDisk, str | int, str, OSError | None]]:
    """`act` with every fault at every one of its calls: the disk, the fault, the call, the error."""
    whole = ModelDisk()
    prepare(whole)
    act(whole.reset())
    for at, kind in enumerate(whole.calls):
        for what in FAULTS:
            if what == "short" and kind != "write":
                continue
            disk = ModelDisk()
            prepare(disk)
            disk.reset(at, what)
            error = None
            try:
                act(disk)
            except OSError as caught:
                error = caught
            assert disk.open_files == {}
            yield disk.reset(), what, kind, error


def three_saved(disk: Disk) -> None:
    for step in (1, 2, 3):
        save(disk, step)
    write_file(CONFIG, b"old", disk=disk)


def errno_of(what: str | int) -> int:
    return errno.ENOSPC if isinstance(what, str) else abs(what)


def test_failure_of_every_call_of_a_save() -> None:
    num_faults = 0
    for disk, what, kind, error in faults(three_saved, lambda disk: save(disk, 4)):
        num_faults += 1
        assert error is not None, (kind, what)
        assert error.errno == errno_of(what)
        assert "/no-such-disk/run" in str(error)
        latest, damaged = latest_checkpoint(ROOT, disk=disk)
        assert latest is not None
        assert damaged == []
        assert all(is_right(disk, step) for step in (1, 2, 3))
        if isinstance(what, str) or what > 0:  # it can still remove: nothing is left
            assert set(disk._folder(ROOT).names) == {name(1), name(2), name(3)}
        elif latest.meta["step"] == 4:  # its last sync failed, and the way back too
            assert is_right(disk, 4)
            set_aside(ROOT / name(4), disk=disk)
        remove_leftovers(ROOT, disk=disk)
        save(disk, 4)
        rest = crash(disk, nothing, lambda synced, data: synced)
        assert all(is_right(rest, step) for step in (1, 2, 3, 4))
    assert num_faults > 80


def test_failure_of_every_call_of_the_first_save() -> None:
    """Here the folders above are made too."""
    num_faults = 0
    for disk, what, kind, error in faults(lambda disk: None, lambda disk: save(disk, 1)):
        num_faults += 1
        assert error is not None, (kind, what)
        assert error.errno == errno_of(what)
        if checkpoint_folders(ROOT, disk=disk):
            assert isinstance(what, int)
            assert what < 0
            set_aside(ROOT / name(1), disk=disk)
        save(disk, 1)
        assert is_right(disk, 1)
    assert num_faults > 80


def test_failure_of_every_call_of_a_prune() -> None:
    num_faults = 0

    def prune(disk: Disk) -> None:
        prune_checkpoints(ROOT, keep_last=1, keep=[name(1)], disk=disk)

    def five_saved(disk: Disk) -> None:
        for step in range(1, 6):
            save(disk, step)

    for disk, what, kind, error in faults(five_saved, prune):
        num_faults += 1
        if error is None:  # a bad sector: that checkpoint does not count, another must verify
            assert kind in ("open", "read", "close")
            assert errno_of(what) == errno.EIO
        else:
            assert error.errno == errno_of(what)
        there = {int(folder.name[5:]) for folder in checkpoint_folders(ROOT, disk=disk)}
        assert there >= {1, 5}
        assert all(is_right(disk, step) for step in there)
        remove_leftovers(ROOT, disk=disk)
        prune(disk)
        assert set(disk._folder(ROOT).names) == {name(1), name(5)}
        save(disk, 6)
        rest = crash(disk, nothing, lambda synced, data: synced)
        assert all(is_right(rest, step) for step in (1, 5, 6))
    assert num_faults > 80


def test_failure_of_every_call_of_write_file() -> None:
    num_faults = 0
    for disk, what, kind, error in faults(
        three_saved, lambda disk: write_file(CONFIG, b"new content", disk=disk)
    ):
        num_faults += 1
        assert error is not None, (kind, what)
        assert error.errno == errno_of(what)
        assert disk._node(CONFIG).data in (b"old", b"new content")
        if disk._node(CONFIG).data == b"new content":
            assert kind == "sync_folder"  # the last call
        if isinstance(what, str) or what > 0:
            assert set(disk._folder(RUN).names) == {"checkpoints", "config.toml"}
        remove_leftovers(RUN, disk=disk)
        assert set(disk._folder(RUN).names) == {"checkpoints", "config.toml"}
        write_file(CONFIG, b"newer", disk=disk)
        assert disk._node(CONFIG).data == b"newer"
    assert num_faults > 25


def test_failure_of_every_call_of_set_aside() -> None:
    for disk, what, _, error in faults(
        three_saved, lambda disk: set_aside(ROOT / name(3), disk=disk)
    ):
        assert error is not None
        assert error.errno == errno_of(what)
        there = set(disk._folder(ROOT).names)
        assert there in ({name(1), name(2), name(3)}, {name(1), name(2), f"{name(3)}.damaged"})
        assert all(verify_checkpoint(ROOT / folder, disk=disk) for folder in there)


def test_what_was_set_aside_outlives_a_crash() -> None:
    disk = ModelDisk()
    three_saved(disk)
    set_aside(ROOT / name(3), disk=disk)
    rest = crash(disk, nothing, lambda synced, data: synced)
    assert set(rest._folder(ROOT).names) == {name(1), name(2), f"{name(3)}.damaged"}


class FailingDisk(Disk):
    """The real disk; call number `at` fails."""

    def __init__(self, at: int, number: int) -> None:
        self.calls, self.at, self.number = 0, at, number


def _failing(operation: str) -> Any:
    def call(self: FailingDisk, *args: Any) -> Any:
        self.calls += 1
        if self.calls - 1 != self.at:
            return getattr(Disk, operation)(self, *args)
        if operation == "close":
            os.close(args[0])  # Linux closes it, whatever it answers
        raise failure(self.number)

    return call


for _operation in [operation for operation in vars(Disk) if not operation.startswith("_")]:
    setattr(FailingDisk, _operation, _failing(_operation))


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_failure_of_every_call_of_a_save_on_a_real_disk(tmp_path: Path, number: int) -> None:
    save(Disk(), 1, tmp_path)
    for at in itertools.count():
        disk = FailingDisk(at, number)
        try:
            save(disk, 2, tmp_path)
        except OSError as error:
            assert error.errno == number
            assert [path.name for path in tmp_path.iterdir()] == [name(1)]
            assert is_right(Disk(), 1, tmp_path)
        else:
            assert at == disk.calls > 20
            break
    assert is_right(Disk(), 2, tmp_path)


# ------------------------------------------------------------------ damage, on a real disk

SMALL, LARGE = random.Random(1).randbytes(24), random.Random(2).randbytes(20_000)
MANIFEST = "manifest.json"


@pytest.fixture
def two(tmp_path: Path) -> Path:
    """Two checkpoints, of which the tests damage the newer one."""
    for step in (1, 2):
        files = {"small": SMALL[step:], "large": LARGE[step:]}
        save_checkpoint(tmp_path / name(step), files, meta={"step": step})
    return tmp_path


def assert_seen(root: Path, damaged_file: str, also_by_latest: bool = True) -> None:
    folder = root / name(2)
    with pytest.raises(CheckpointDamaged) as info:
        verify_checkpoint(folder)
    message = str(info.value)
    assert message.startswith(f"checkpoint {folder} is damaged: {damaged_file} ")
    assert "\n" not in message
    if not also_by_latest:
        return
    latest, passed_over = latest_checkpoint(root)
    assert latest is not None
    assert latest.meta == {"step": 1}
    assert latest.files == {"small": SMALL[1:], "large": LARGE[1:]}
    assert [str(error) for error in passed_over] == [message]


def assert_each_seen(root: Path, damaged_file: str, contents: Iterator[bytes]) -> int:
    path = root / name(2) / damaged_file
    original = path.read_bytes()
    number = 0
    for number, damaged in enumerate(contents, 1):
        assert damaged != original
        path.unlink()  # a file that is opened to be emptied is flushed by ext4: 3 ms each
        path.write_bytes(damaged)
        assert_seen(root, damaged_file, also_by_latest=number % 20 == 1)
    path.write_bytes(original)
    assert verify_checkpoint(root / name(2)) == {"step": 2}
    return number


def bit_flips(data: bytes, bits: range | list[int]) -> Iterator[bytes]:
    for bit in bits:
        yield data[: bit // 8] + bytes([data[bit // 8] ^ 1 << bit % 8]) + data[bit // 8 + 1 :]


def test_every_bit_of_the_manifest_counts(two: Path) -> None:
    data = (two / name(2) / MANIFEST).read_bytes()
    flips = bit_flips(data, range(8 * len(data)))
    assert assert_each_seen(two, MANIFEST, flips) == 8 * len(data) > 3000


def test_every_bit_of_a_file_counts(two: Path) -> None:
    small = (two / name(2) / "small").read_bytes()
    assert assert_each_seen(two, "small", bit_flips(small, range(8 * len(small)))) == 176
    large = (two / name(2) / "large").read_bytes()
    bits = random.Random(3).sample(range(8 * len(large)), 300)
    assert assert_each_seen(two, "large", bit_flips(large, [0, 8 * len(large) - 1, *bits])) == 302


@pytest.mark.parametrize("damaged_file", [MANIFEST, "small", "large"])
def test_every_truncation_and_zeroed_page_is_seen(two: Path, damaged_file: str) -> None:
    data = (two / name(2) / damaged_file).read_bytes()
    lengths = range(len(data))
    if len(data) > 1000:
        pages = range(0, len(data), 4096)
        near = {max(0, page + offset) for page in pages for offset in (-1, 0, 1)}
        lengths = sorted({*near, *random.Random(4).sample(lengths, 100), len(data) - 1})
    cut = [data[:length] for length in lengths]
    cut_and_filled = [data[:length] + bytes(len(data) - length) for length in lengths]
    holes = [
        data[:start] + bytes(len(data[start : start + size])) + data[start + size :]
        for size in (512, 4096)
        for start in range(0, len(data), size)
    ]
    longer = [data + b"\0", data + data, data + b"\n"]
    contents = [c for c in [*cut, *cut_and_filled, *holes, *longer] if c != data]
    assert assert_each_seen(two, damaged_file, iter(contents)) == len(contents) > 40


def test_files_that_are_gone_or_not_files_are_seen(two: Path) -> None:
    for damaged_file in (MANIFEST, "small", "large"):
        path = two / name(2) / damaged_file
        moved = path.rename(two / "moved")
        assert_seen(two, damaged_file)  # missing
        path.mkdir()
        assert_seen(two, damaged_file)  # a folder
        path.rmdir()
        path.symlink_to(path)
        with pytest.raises(OSError, match="symbolic link"):  # no damage of ours: passed on
            verify_checkpoint(two / name(2))
        path.unlink()
        moved.rename(path)
    assert verify_checkpoint(two / name(2)) == {"step": 2}


def test_an_emptied_checkpoint_is_seen(two: Path) -> None:
    for path in (two / name(2)).iterdir():
        path.unlink()
    assert_seen(two, MANIFEST)


def test_files_of_another_checkpoint_are_seen(two: Path) -> None:
    """Whole files, each right in its own place: sizes cannot tell, checksums can."""
    older, newer = two / name(1), two / name(2)
    save_checkpoint(two / name(3), {"small": SMALL[3:], "large": LARGE[3:]}, meta={"step": 3})
    for damaged_file, seen in (("small", "small"), ("large", "large"), (MANIFEST, "small")):
        mine = (newer / damaged_file).read_bytes()
        (newer / damaged_file).write_bytes((older / damaged_file).read_bytes())
        with pytest.raises(CheckpointDamaged, match=f": {seen} "):
            read_checkpoint(newer)
        (newer / damaged_file).write_bytes(mine)
    same_size = {"a": b"0123", "b": b"4567"}
    save_checkpoint(two / name(4), same_size, meta={})
    (two / name(4) / "a").rename(two / "a")
    (two / name(4) / "b").rename(two / name(4) / "a")
    (two / "a").rename(two / name(4) / "b")
    with pytest.raises(CheckpointDamaged, match=r": a is not what was saved \(its SHA-256 differs"):
        read_checkpoint(two / name(4))


@pytest.mark.parametrize("path", ["../../x", "/etc/passwd", "..", "a/b", "", "x\n"])
def test_a_manifest_that_leads_out_of_the_folder_is_seen(two: Path, path: str) -> None:
    """With the right checksum of its own, so that someone meant it."""
    outside = (two.parent / "x").resolve()
    outside.write_bytes(b"secret")
    folder = two / name(2)
    manifest = json.loads((folder / MANIFEST).read_bytes())
    del manifest["sha256"]
    sha256 = hashlib.sha256(b"secret").hexdigest()
    manifest["files"][path] = {"size": 6, "sha256": sha256}
    head = json.dumps(manifest, indent=2).removesuffix("\n}") + ',\n  "sha256": "'
    sealed = head + hashlib.sha256(head.encode()).hexdigest() + '"\n}\n'
    (folder / MANIFEST).write_text(sealed)
    assert_seen(two, MANIFEST)
    assert "lists a file that may not be" in str(latest_checkpoint(two)[1][0])


# ------------------------------------------------------------------ keep-last-k and keep-best


def damage(disk: ModelDisk, step: int, rng: random.Random) -> None:
    """At rest, and on the disk itself."""
    folder = disk._folder(ROOT / name(step))
    victim = rng.choice([MANIFEST, "model.safetensors", "state.pt"])
    if rng.random() < 0.3:
        del folder.names[victim]
        del folder.synced[victim]
        return
    node = folder.names[victim]
    node.data[rng.randrange(len(node.data))] ^= 1 << rng.randrange(8)
    node.synced = bytes(node.data)


def five_of_which(damaged: tuple[int, ...], seed: int) -> ModelDisk:
    disk = ModelDisk()
    for step in range(1, 6):
        save(disk, step)
    for step in damaged:
        damage(disk, step, random.Random(f"{seed} {step}"))
    return disk.reset()


def verified(disk: ModelDisk) -> set[int]:
    found = set()
    for folder in checkpoint_folders(ROOT, disk=disk):
        try:
            found.add(verify_checkpoint(folder, disk=disk)["step"])
        except CheckpointDamaged:
            continue
    return found


SUBSETS = [
    subset for size in range(6) for subset in itertools.combinations(range(1, 6), size)
]  # of five checkpoints, those that are damaged: 32


@pytest.mark.parametrize("keep_last", [1, 2, 3])
def test_prune_keeps_what_it_promises_among_damaged_ones(keep_last: int) -> None:
    num_cases = 0
    for seed, (damaged, best) in enumerate(itertools.product(SUBSETS, (None, 1, 3, 5))):
        num_cases += 1
        whole = [step for step in range(1, 6) if step not in damaged]
        newest = whole[-keep_last:]
        # The rule in words: nothing goes unless enough verify; then what is older than those goes.
        oldest_kept = min(newest) if len(newest) == keep_last else 1
        expected = {step for step in range(1, 6) if step >= oldest_kept or step == best}
        disk = five_of_which(damaged, seed)
        keep = [name(best)] if best else []
        removed = prune_checkpoints(ROOT, keep_last=keep_last, keep=keep, disk=disk)
        assert set(disk._folder(ROOT).names) == {name(step) for step in expected}
        assert {int(folder.name[5:]) for folder in removed} == set(range(1, 6)) - expected
        assert verified(disk) == expected & set(whole)
    assert num_cases == 128


def test_prune_keeps_what_it_promises_when_killed_among_damaged_ones() -> None:
    rng = random.Random(5)
    num_deaths = 0
    for seed, damaged in enumerate(SUBSETS):
        keep_last, best = rng.choice([1, 2]), rng.choice([None, 1, 2])
        keep = [name(best)] if best else []
        whole = [step for step in range(1, 6) if step not in damaged]
        promised = {*whole[-keep_last:], *({best} & set(whole))}
        calls = five_of_which(damaged, seed)
        prune_checkpoints(ROOT, keep_last=keep_last, keep=keep, disk=calls)
        for at, kind in enumerate(calls.calls):
            if kind in ("open", "read", "close"):
                continue
            disk = five_of_which(damaged, seed).reset(at, "die")
            with pytest.raises(Killed):
                prune_checkpoints(ROOT, keep_last=keep_last, keep=keep, disk=disk)
            num_deaths += 1
            for rest in [*crashes(disk, rng, samples=2), disk.reset()]:
                there = {int(folder.name[5:]) for folder in checkpoint_folders(ROOT, disk=rest)}
                assert promised <= verified(rest)
                assert there - verified(rest) <= set(damaged)  # death damages no other
                remove_leftovers(ROOT, disk=rest)
                prune_checkpoints(ROOT, keep_last=keep_last, keep=keep, disk=rest)
                assert promised <= verified(rest)
                latest, _ = latest_checkpoint(ROOT, disk=rest)
                assert (latest.meta["step"] if latest else None) == max(whole, default=None)
    assert num_deaths > 100
