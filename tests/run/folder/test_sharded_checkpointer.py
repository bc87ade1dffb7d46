"""Checkpoints that several ranks write together: whole or not at all, and read by any number of ranks."""

import errno
import itertools
import json
import os
import signal
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn.functional import cross_entropy
from torch.optim import AdamW

from flambeau.errors import InputError
from flambeau.parallel.gradient_sync.fsdp import Shards, shard_model
from flambeau.parallel.ranks import FailedElsewhere, join_ranks
from flambeau.parallel.shard_layout import Layout, Piece, unsharded, weights_bytes
from flambeau.recipes.checkpoints.atomic_checkpoint import (
    CheckpointDamaged,
    Disk,
    checkpoint_folders,
    from_bytes,
    read_checkpoint,
    remove_leftovers,
    save_checkpoint,
    to_bytes,
    verify_checkpoint,
)
from flambeau.recipes.training.ema import EMA
from flambeau.run.folder.checkpointer import (
    SaveFailed,
    Snapshot,
    copies,
    copy_nested,
)
from flambeau.run.folder.sharded_checkpointer import ShardedCheckpointer, restore_pieces

StartRanks = Callable[..., Any]

PARAMETERS = ("weight", "few", "column", "none")
SHAPES = {
    "weight": (7, 3), "few": (2, 2), "column": (3, 8), "none": (0, 4),
    "number": (), "mask": (3,), "half": (4,),
}  # fmt: skip


def whole(step: int) -> Snapshot:
    """A run of one process at a step: many types and shapes, a parameter that was never stepped."""
    generator = torch.Generator().manual_seed(step)
    model = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    model["number"] = torch.tensor(step)
    model["mask"] = torch.tensor([True, False, True])
    model["half"] = model["half"].bfloat16()
    state = {
        number: {
            "step": torch.tensor(float(step)),
            "momentum": torch.randn(SHAPES[name], generator=generator),
        }
        for number, name in enumerate(PARAMETERS)
        if name != "column"
    }
    optimizer = {"state": state, "param_groups": [{"lr": 0.1, "params": [0, 1, 2, 3]}]}
    return Snapshot(
        model=model,
        ema={name: t + 1 if t.is_floating_point() else t for name, t in model.items()},
        state={"step": step, "optimizer": optimizer, "user": {"seen": [step]}},
        meta={"step": step},
    )


def layout_of(rank: int, world: int) -> Layout:
    """As FSDP lays it out: ceil(n / world) rows a rank; 'column' is cut along its second dimension."""
    model = {name: Piece.whole(shape) for name, shape in SHAPES.items()}
    for name in PARAMETERS:
        shape, dim = SHAPES[name], int(name == "column")
        rows = -(-shape[dim] // world)
        low, high = (min(rows * k, shape[dim]) for k in (rank, rank + 1))
        offsets, sizes = [0, 0], list(shape)
        offsets[dim], sizes[dim] = low, high - low
        model[name] = Piece(shape, tuple(offsets), tuple(sizes))
    return Layout(model=model, parameters=[model[name] for name in PARAMETERS])


def part(snapshot: Snapshot, layout: Layout) -> Snapshot:
    """What one rank holds of it."""

    def cut(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {name: layout.model[name].of(t).clone() for name, t in tensors.items()}

    state = copy_nested(snapshot.state)
    for number, entries in state["optimizer"]["state"].items():
        entries["momentum"] = layout.parameters[number].of(entries["momentum"])
    assert snapshot.ema is not None
    return Snapshot(cut(snapshot.model), cut(snapshot.ema), state, snapshot.meta)


def name_of(step: int) -> str:
    return f"step-{step:08d}"


def save(root: Path, steps: list[int], disks: Mapping[int, Disk] | None = None, **more: Any) -> Any:
    """Save several steps on this rank; what the last of them gave: an error's text, or its name."""
    torch.set_num_threads(1)
    ranks = join_ranks()
    layout = layout_of(ranks.rank, ranks.world)
    disk = (disks or {}).get(ranks.rank)
    saver = ShardedCheckpointer(root, layout, ranks, keep=more.pop("keep", 9), disk=disk)
    more = {"best": None, "before": lambda: None, **more}
    try:
        for step in steps:
            saver.save(name_of(step), part(whole(step), layout), **more)
        saver.wait()
    except (SaveFailed, FailedElsewhere) as error:
        text = error.cause if isinstance(error, FailedElsewhere) else str(error)
        return f"{type(error).__name__}: {text}"
    return saver.last_good


def load(root: Path) -> tuple[Any, list[str]]:
    torch.set_num_threads(1)
    ranks, said = join_ranks(), []
    layout = layout_of(ranks.rank, ranks.world)
    try:
        found = ShardedCheckpointer(root, layout, ranks, keep=9).restore_latest(say=said.append)
    except (InputError, FailedElsewhere, OSError) as error:
        return f"{type(error).__name__}: {error}", said
    return found, said


def check(found: Any, snapshot: Snapshot, layout: Layout) -> None:
    expected = part(snapshot, layout)
    equal: Any = torch.testing.assert_close
    equal(found.model, dict(expected.model), rtol=0, atol=0)
    equal(found.ema, dict(expected.ema or {}), rtol=0, atol=0)
    equal(found.state["optimizer"]["state"], expected.state["optimizer"]["state"], rtol=0, atol=0)
    assert found.state["optimizer"]["param_groups"] == expected.state["optimizer"]["param_groups"]
    assert {k: v for k, v in found.state.items() if k != "optimizer"} == {
        k: v for k, v in expected.state.items() if k != "optimizer"
    }
    assert found.meta == snapshot.meta
    assert found.name == name_of(snapshot.meta["step"])


@pytest.fixture
def root(tmp_path: Path) -> Path:
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    return folder


@pytest.fixture
def saved(root: Path, start_ranks: StartRanks) -> Path:
    """Steps 1 and 2, saved by 3 ranks."""
    assert start_ranks(3, save, root, [1, 2], group=True).results() == [name_of(2)] * 3
    return root


# ---------------------------------------------------------------- what is written, and by whom read


def test_saved_by_four_read_by_any_number(root: Path, start_ranks: StartRanks) -> None:
    assert start_ranks(4, save, root, [1, 2], group=True).results() == [name_of(2)] * 4
    for world in (1, 2, 3, 4):
        answers = start_ranks(world, load, root, group=True).results()
        for rank, (found, said) in enumerate(answers):
            assert said == []
            check(found, whole(2), layout_of(rank, world))


def test_folder_keeps_the_contract(saved: Path) -> None:
    folder = saved / name_of(2)
    assert verify_checkpoint(folder) == {"step": 2}
    shards = [f"shard-0000{rank}-of-00003.safetensors" for rank in range(3)]
    names = {*shards, "sharding.json", "training_state.pt"}
    assert {path.name for path in folder.iterdir()} == names | {"manifest.json"}
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["files"].keys() == names
    for name, entry in manifest["files"].items():
        assert entry["size"] == (folder / name).stat().st_size
    held = [safetensors.torch.load_file(folder / name) for name in shards]
    assert torch.equal(torch.cat([t["model/weight"] for t in held]), whole(2).model["weight"])
    assert torch.equal(
        torch.cat([t["ema/column"] for t in held], 1), (whole(2).ema or {})["column"]
    )
    # Rank 0 alone writes what all hold, and nobody writes an empty piece.
    assert [("model/mask" in t, "model/few" in t) for t in held] == [
        (True, True), (False, True), (False, False),
    ]  # fmt: skip
    assert {path.name for path in saved.iterdir()} == {name_of(1), name_of(2)}


def test_one_process_reads_it(saved: Path) -> None:
    files = unsharded(read_checkpoint(saved / name_of(2)).files)
    expected = whole(2)
    equal: Any = torch.testing.assert_close
    found = {name: safetensors.torch.load(data) for name, data in files.items() if "safe" in name}
    equal(found["model.safetensors"], dict(expected.model), rtol=0, atol=0)
    equal(found["ema.safetensors"], dict(expected.ema or {}), rtol=0, atol=0)
    assert files["model.safetensors"] == weights_bytes(expected.model)
    state = from_bytes(files["training_state.pt"])
    equal(state, dict(expected.state), rtol=0, atol=0)
    assert unsharded(files) is files


def test_ranks_read_what_one_process_wrote(root: Path, start_ranks: StartRanks) -> None:
    snapshot = whole(3)
    save_checkpoint(
        root / name_of(3),
        {
            "model.safetensors": weights_bytes(snapshot.model),
            "ema.safetensors": weights_bytes(snapshot.ema or {}),
            "training_state.pt": to_bytes(snapshot.state),
        },
        meta=snapshot.meta,
    )
    for rank, (found, _) in enumerate(start_ranks(3, load, root, group=True).results()):
        check(found, snapshot, layout_of(rank, 3))


def test_rank_reads_no_more_than_its_part(root: Path, start_ranks: StartRanks) -> None:
    start_ranks(4, save, root, [1], group=True).results()

    class Counting(Disk):
        def __init__(self) -> None:
            self.opened: list[str] = []

        def open(self, path: Path) -> int:
            self.opened.append(path.name)
            return super().open(path)

    seen = []
    for rank in range(2):
        disk = Counting()
        restore_pieces(root / name_of(1), layout_of(rank, 2), rank=rank, world=2, disk=disk)
        seen.append({int(name[6:11]) for name in disk.opened if name.startswith("shard-")})
    # Two of four files have its part; together they verify them all. 'few' has its rows in files 0 and 1.
    assert len(seen[0]) < 4
    assert seen[0] | seen[1] == {0, 1, 2, 3}
    disk = Counting()
    restore_pieces(root / name_of(1), layout_of(0, 4), rank=1, world=2, disk=disk)
    # File 0 has its part; 1 and 3 are the ones that it verifies for all.
    assert {int(name[6:11]) for name in disk.opened if name.startswith("shard-")} == {0, 1, 3}


def test_another_model_is_left_to_be_refused(saved: Path) -> None:
    layout = layout_of(0, 1)
    model = {**layout.model, "weight": Piece.whole((7, 4))}
    del model["few"]
    found = restore_pieces(
        saved / name_of(2), Layout(model, layout.parameters[:1]), rank=0, world=1
    )
    assert {name: tuple(t.shape) for name, t in found.model.items()} == SHAPES


def test_state_that_has_no_place_is_refused(root: Path, start_ranks: StartRanks) -> None:
    def work() -> str:
        torch.set_num_threads(1)
        ranks = join_ranks()
        layout = layout_of(ranks.rank, ranks.world)
        snapshot = part(whole(1), layout)
        if ranks.rank:
            snapshot.state["optimizer"]["state"][0]["row"] = torch.ones(5)
        saver = ShardedCheckpointer(root, layout, ranks, keep=1)
        saver.save(name_of(1), snapshot, best=None, before=lambda: None)
        try:
            saver.wait()
        except (RuntimeError, FailedElsewhere) as error:
            return f"{type(error).__name__}: {error}"
        return "saved"

    first, second = start_ranks(2, work, group=True).results()
    assert first.startswith("RuntimeError: checkpoint ")
    assert "was not written by rank 1: ValueError('optimizer/0/row has the shape (5,)" in first
    assert second.startswith("FailedElsewhere")
    assert list(root.iterdir()) == []


# ---------------------------------------------------------------- older ones, and the best


def test_keeps_last_and_best(root: Path, start_ranks: StartRanks) -> None:
    work = lambda: save(root, [1, 2, 3, 4], keep=2, best=name_of(1))  # noqa: E731
    assert start_ranks(2, work, group=True).results() == [name_of(4)] * 2
    assert [folder.name for folder in checkpoint_folders(root)] == [name_of(s) for s in (1, 3, 4)]


def test_one_that_is_there_is_left_as_it_is(saved: Path, start_ranks: StartRanks) -> None:
    before = (saved / name_of(2) / "manifest.json").stat().st_mtime_ns
    assert start_ranks(2, save, saved, [2], group=True).results() == [name_of(2)] * 2
    assert (saved / name_of(2) / "manifest.json").stat().st_mtime_ns == before


def test_before_runs_on_rank_0_alone_and_its_failure_is_everyones(
    root: Path, start_ranks: StartRanks
) -> None:
    def journal() -> None:
        (root.parent / f"journal-{os.environ['RANK']}").touch()
        raise OSError(errno.EIO, "Input/output error")

    first, *others = start_ranks(3, lambda: save(root, [1], before=journal), group=True).results()
    assert first.startswith("SaveFailed: checkpoint ")
    assert "could not be written: Input/output error; the last good one is none" in first
    assert others == ["FailedElsewhere: OSError: [Errno 5] Input/output error"] * 2
    assert [path.name for path in root.parent.glob("journal*")] == ["journal-0"]
    assert list(root.iterdir()) == []


# ---------------------------------------------------------------- faults


class FailsAt(Disk):
    """Operation number `at` raises, and so do all that follow it if the disk `dies`."""

    def __init__(self, at: int, *, code: int, dies: bool = False) -> None:
        self.left, self.code, self.dies = at, code, dies

    def _count(self) -> None:
        self.left -= 1
        if self.left == 0 or (self.dies and self.left < 0):
            raise OSError(self.code, os.strerror(self.code))


for _verb in (
    "make_folder", "create", "write", "sync", "open", "read", "sync_folder", "rename", "remove",
    "remove_folder", "names",
):  # fmt: skip

    def _failing(self: Any, *args: Any, _verb: str = _verb) -> Any:
        self._count()
        return getattr(Disk, _verb)(self, *args)

    setattr(FailsAt, _verb, _failing)


def state_of(root: Path) -> tuple[list[str], list[str], list[str]]:
    """Checkpoints that are whole, those that are not, and hidden leftovers."""
    good, bad = [], []
    for folder in checkpoint_folders(root):
        try:
            verify_checkpoint(folder)
            good.append(folder.name)
        except CheckpointDamaged:
            bad.append(folder.name)
    return good, bad, [path.name for path in root.iterdir() if path.name[0] == "."]


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("rank", [0, 1])
def test_disk_that_fails_at_any_operation(
    saved: Path, start_ranks: StartRanks, rank: int, dies: bool
) -> None:
    """Nothing is lost or half there, both ranks learn of it, and the next save works."""

    def work() -> list[tuple[str, Any]]:
        torch.set_num_threads(1)
        ranks, seen = join_ranks(), []
        for at in itertools.count(1):
            code = errno.ENOSPC if at % 2 else errno.EIO
            disks = {rank: FailsAt(at, code=code, dies=dies)}
            outcome = save(saved, [2 + at], disks, keep=2)
            seen.append((outcome, ranks.first(lambda: state_of(saved))))
            if outcome == name_of(2 + at):
                return seen
            ranks.first(lambda: remove_leftovers(saved))
        raise AssertionError("unreachable")

    first, second = start_ranks(2, work, group=True).results(timeout=100)
    assert len(first) == len(second) > (5 if rank else 20)
    kept = [name_of(1), name_of(2)]
    for step, (told, (good, bad, hidden)), (silent, _) in zip(
        itertools.count(3), first[:-1], second[:-1], strict=False
    ):
        assert told.startswith("SaveFailed: checkpoint ")
        assert ("by rank 1: " in told) == (rank == 1)
        assert "Free some space" in told or "Repair the disk" in told
        assert silent.startswith("FailedElsewhere: ")
        assert bad == []
        assert len(good) >= 2
        # It is there if only the removal of older ones has failed, or if its renaming could not be undone.
        is_kept = f"the last good one is {name_of(step)}" in told
        assert (good[-1] == name_of(step)) == is_kept or dies
        assert hidden == [] or (rank == 0 and (dies or is_kept))
        kept = good
    good, *rest = first[-1][1]
    assert good[-2:] == [kept[-1], first[-1][0]]
    assert rest == [[], []]


def test_rank_killed_while_it_saves(saved: Path, start_ranks: StartRanks) -> None:
    class Dies(Disk):
        def write(self, file: int, data: memoryview) -> int:
            super().write(file, data[:10])
            os.kill(os.getpid(), signal.SIGKILL)
            return 10

    def work() -> str:
        with pytest.raises(Exception, match=r"onnect|losed|reset") as caught:
            save(saved, [3], {1: Dies()})
        return type(caught.value).__name__

    job = start_ranks(2, work, group=True)
    assert job.codes(timeout=300)[1] == -signal.SIGKILL
    remove_leftovers(saved)
    assert sorted(path.name for path in saved.iterdir()) == [name_of(1), name_of(2)]
    for rank, (found, _) in enumerate(start_ranks(2, load, saved, group=True).results()):
        check(found, whole(2), layout_of(rank, 2))


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "missing":
        path.unlink()
        return
    if how == "flip":
        data[len(data) // 2] ^= 16
    path.write_bytes(data[:-1] if how == "truncate" else data)


@pytest.mark.parametrize("how", ["flip", "truncate", "missing"])
def test_damage_of_any_file_is_found(saved: Path, start_ranks: StartRanks, how: str) -> None:
    """By all ranks alike, whoever reads the file; they go on from the one before."""
    for name in sorted(path.name for path in (saved / name_of(2)).iterdir()):
        good = (saved / name_of(2) / name).read_bytes()
        damage(saved / name_of(2) / name, how)
        with pytest.raises(CheckpointDamaged):
            verify_checkpoint(saved / name_of(2))
        (first, said), (second, silence) = start_ranks(2, load, saved, group=True).results()
        check(first, whole(1), layout_of(0, 2))
        check(second, whole(1), layout_of(1, 2))
        assert len(said) == 1
        assert silence == []
        assert said[0].startswith(f"damaged checkpoint set aside: checkpoint {saved / name_of(2)} ")
        assert f"is damaged: {name} " in said[0]
        assert said[0].endswith(f"going on from {name_of(1)}")
        (saved / f"{name_of(2)}.damaged").rename(saved / name_of(2))
        (saved / name_of(2) / name).write_bytes(good)
    assert verify_checkpoint(saved / name_of(2)) == {"step": 2}


def test_none_is_whole(saved: Path, start_ranks: StartRanks) -> None:
    for step in (1, 2):
        damage(saved / name_of(step) / "shard-00001-of-00003.safetensors", "flip")
    (first, _), (second, _) = start_ranks(2, load, saved, group=True).results()
    assert first.startswith(f"InputError: none of the 2 checkpoints in {saved} is whole (")
    assert second.startswith("FailedElsewhere")
    assert {path.name for path in saved.iterdir()} == {name_of(1), name_of(2)}


def test_no_checkpoint_yet(root: Path, start_ranks: StartRanks) -> None:
    assert start_ranks(2, load, root, group=True).results() == [(None, [])] * 2


def test_file_that_may_not_be_read_says_nothing_about_it(
    saved: Path, start_ranks: StartRanks
) -> None:
    def work() -> str:
        torch.set_num_threads(1)
        ranks = join_ranks()
        disk = FailsAt(9, code=errno.EACCES) if ranks.rank else None
        saver = ShardedCheckpointer(
            saved, layout_of(ranks.rank, ranks.world), ranks, keep=9, disk=disk
        )
        try:
            saver.restore_latest(say=print)
        except (OSError, FailedElsewhere) as error:
            return type(error).__name__
        return "no error"

    assert start_ranks(2, work, group=True).results() == ["PermissionError", "FailedElsewhere"]
    assert {path.name for path in saved.iterdir()} == {name_of(1), name_of(2)}


def test_folder_that_is_not_shared(tmp_path: Path, start_ranks: StartRanks) -> None:
    def work() -> str:
        ranks = join_ranks()
        folder = tmp_path / f"machine{ranks.rank // 2}"
        folder.mkdir(exist_ok=True)
        try:
            ShardedCheckpointer(folder, layout_of(ranks.rank, ranks.world), ranks, keep=1)
        except (InputError, FailedElsewhere) as error:
            return f"{type(error).__name__}: {error}"
        ranks.gather(None)  # one that ended now would be gone while another still connects to it
        return "shared"

    assert start_ranks(2, work, group=True).results() == ["shared"] * 2
    first, *others = start_ranks(4, work, group=True).results()
    assert f"{tmp_path}/machine0 of rank 0 (" in first
    assert "is not there for rank 2 (" in first
    assert "rank 1" not in first
    assert [text[:15] for text in others] == ["FailedElsewhere"] * 3
    assert list(tmp_path.glob("machine*/.*")) == []


# ---------------------------------------------------------------- with a model


def train(root: Path, start: int, stop: int) -> dict[str, Tensor]:
    """Steps of a sharded model from the newest checkpoint on; saves at the end; the whole weights."""
    torch.set_num_threads(1)
    ranks = join_ranks()
    torch.manual_seed(
        start
    )  # another start of the weights each time: the checkpoint has to bring them
    block = nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6), nn.BatchNorm1d(6))
    model = nn.Sequential(nn.Sequential(block), nn.Linear(6, 3)).eval()
    shard_model(model, ranks, torch.device("cpu"), unit_bytes=1)
    optimizer = AdamW(model.parameters(), lr=0.05, fused=True)
    shards = Shards(model, ranks)
    layout = shards.adopt(optimizer)
    ema = EMA(shards.pieces, decay=0.9)
    saver = ShardedCheckpointer(root, layout, ranks, keep=2)
    found = saver.restore_latest(say=print)
    assert (found is None) == (start == 0)
    if found is not None:
        shards.pieces.load_state_dict(found.model)
        optimizer.load_state_dict(found.state["optimizer"])
        ema.load_state_dict({"shadow": found.ema, "num_updates": found.state["updates"]})
    generator = torch.Generator().manual_seed(0)
    for step in range(stop):
        x, y = torch.randn(8, 6, generator=generator), torch.arange(8) % 3
        if step < start:
            continue
        cross_entropy(model(x), y).backward()
        shards.after_backward()
        optimizer.step()
        optimizer.zero_grad()
        ema.update()
    state = {"optimizer": optimizer.state_dict(), "updates": ema.num_updates}
    snapshot = Snapshot(
        model=copies(shards.pieces.state_dict()), ema=copies(ema.shadow),
        state=copy_nested(state), meta={"step": stop},
    )  # fmt: skip
    saver.save(name_of(stop), snapshot, best=None, before=lambda: None)
    saver.wait()
    with ema.applied():
        averages = {f"ema {n}": p for n, p in gathered(model).items()}
    return gathered(model) | averages


def gathered(model: nn.Module) -> dict[str, Tensor]:
    return {
        name: p.detach().full_tensor().clone()
        for name, p in model.named_parameters()
        if isinstance(p, DTensor)
    }


def test_training_goes_on_with_another_number_of_ranks(
    tmp_path: Path, start_ranks: StartRanks
) -> None:
    for name in ("never", "often"):
        (tmp_path / name).mkdir()
    (expected,) = start_ranks(1, train, tmp_path / "never", 0, 9, group=True).results()
    plan = [(3, 0, 3), (2, 3, 5), (1, 5, 6), (4, 6, 9)]
    for world, start, stop in plan:
        *_, found = start_ranks(world, train, tmp_path / "often", start, stop, group=True).results()
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)
    files = unsharded(read_checkpoint(tmp_path / "often" / name_of(9)).files)
    weights = safetensors.torch.load(files["model.safetensors"])
    plain = nn.Sequential(
        nn.Sequential(
            nn.Sequential(nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6), nn.BatchNorm1d(6))
        ),
        nn.Linear(6, 3),
    )
    plain.load_state_dict(weights)  # names and shapes are those of the model itself
    torch.testing.assert_close(weights["1.weight"], expected["1.weight"], rtol=1e-4, atol=1e-6)
