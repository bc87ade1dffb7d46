"""Exact resume: the command is killed at random moments, and what it ends with is that of a run never killed.

The lives, the kills and the comparison are those of bench/kill_storm.py, which does any number of them.
"""

import json
import os
import shutil
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from flambeau.recipes.checkpoints.atomic_checkpoint import (
    from_bytes,
    read_checkpoint,
    save_checkpoint,
    to_bytes,
)
from load_script import load_script

MANY = 16
"""Kills, among them several of each kind."""
Storm = tuple[list[Any], list[str], Path]  # kills, differences, folder of the unkilled run

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="it watches processes in /proc")


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    return load_script(Path(__file__).parents[2] / "bench" / "kill_storm.py")


@pytest.fixture(scope="module")
def storm(
    bench: ModuleType,
    forked_command: Any,
    tmp_path_factory: pytest.TempPathFactory,
) -> Storm:
    folder = tmp_path_factory.mktemp("storm")
    cores = sorted(os.sched_getaffinity(0))[:2]
    return bench.storm(
        folder,
        kills=MANY,
        seed=0,
        arguments=bench.make_inputs(folder),
        cores=cores,
        start=forked_command,
    )


def test_runs_that_are_killed_end_with_the_bits_of_one_never_killed(storm: Storm) -> None:
    kills, differences, _ = storm
    assert not differences
    assert len(kills) >= 8


@pytest.mark.slow
@pytest.mark.parametrize("most_ranks", [1, 3])
@pytest.mark.parametrize("task", ["multilabel", "regression", "segmentation"])
def test_runs_of_other_tasks_too(
    task: str, most_ranks: int, bench: ModuleType, forked_command: Any, tmp_path: Path
) -> None:
    """With two micro-batches per step on one process; in parts, on one to three, whose number changes."""
    kills, differences, unkilled = bench.storm(
        tmp_path,
        kills=20,
        seed=most_ranks,
        arguments=bench.make_inputs(tmp_path, task=task, parts=6 if most_ranks > 1 else 0),
        cores=sorted(os.sched_getaffinity(0))[:2],
        start=forked_command,
        ranks=(1, most_ranks),
    )
    assert not differences
    assert len(kills) >= 20
    assert {kill.ranks for kill in kills} == {*range(1, most_ranks + 1)}
    facts = json.loads((unkilled / "dataset.json").read_text())
    assert facts["task_name"] == task


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sharded", "own_data"])
def test_sharded_saves_and_data_of_a_class_of_ones_own_too(
    how: str, bench: ModuleType, forked_command: Any, tmp_path: Path
) -> None:
    ranks = 2 if how == "sharded" else 1
    kills, differences, unkilled = bench.storm(
        tmp_path,
        kills=8,
        seed=0,
        arguments=bench.make_inputs(tmp_path, **{how: True}),
        cores=sorted(os.sched_getaffinity(0))[:2],
        start=forked_command,
        ranks=(ranks, ranks),
        unkilled_ranks=ranks,
    )
    assert not differences
    assert len(kills) >= 8
    files = {path.name for path in (unkilled / "checkpoints").glob("*/*")}
    assert ("shard-00001-of-00002.safetensors" in files) == (how == "sharded")


@pytest.mark.slow
def test_runs_that_are_extended_too(bench: ModuleType, forked_command: Any, tmp_path: Path) -> None:
    first, rest = bench.in_two_halves(bench.make_inputs(tmp_path))
    kills, differences, unkilled = bench.storm(
        tmp_path,
        kills=12,
        seed=0,
        arguments=rest,
        first_arguments=first,
        cores=sorted(os.sched_getaffinity(0))[:2],
        start=forked_command,
    )
    assert not differences
    assert len(kills) >= 12
    assert all(kill.step >= bench.TOTAL_STEPS // 2 for kill in kills)
    assert json.loads((unkilled / "result.json").read_text())["step"] > bench.TOTAL_STEPS // 2


def test_the_kills_hit_what_they_are_meant_to_hit(storm: Storm, bench: ModuleType) -> None:
    kills, _, _ = storm
    moments = Counter(kill.moment for kill in kills)
    assert moments.keys() == {"start", "claim", "steps", "save", "end"}
    assert sum(kill.in_save for kill in kills) >= len(kills) // 12
    assert sum(kill.parent_alone for kill in kills) >= len(kills) // MANY
    in_mid_run = {kill.step for kill in kills if 0 < kill.step < bench.TOTAL_STEPS}
    assert len(in_mid_run) >= len(kills) // 4


def test_the_unkilled_run_is_as_it_was_planned(storm: Storm, bench: ModuleType) -> None:
    _, _, unkilled = storm
    steps = [row["step"] for row in bench.journal(unkilled) if "train_loss" in row]
    ends = range(26, bench.TOTAL_STEPS + 1, 26)
    assert steps == sorted({*range(3, bench.TOTAL_STEPS + 1, 3), *ends})
    assert [row["step"] for row in bench.journal(unkilled) if "val_loss" in row] == list(ends)
    result = json.loads((unkilled / "result.json").read_text())
    assert (result["weights"], result["step"]) == ("ema", bench.TOTAL_STEPS)


def flip_weight(files: dict[str, bytes], state: dict[str, Any]) -> None:
    files["model.safetensors"] = files["model.safetensors"][:-1] + b"\x00"


def flip_average(files: dict[str, bytes], state: dict[str, Any]) -> None:
    files["ema.safetensors"] = files["ema.safetensors"][:-1] + b"\x00"


def nudge_momentum(files: dict[str, bytes], state: dict[str, Any]) -> None:
    nudge(state["optimizer"]["state"][0]["momentum_buffer"])


def draw_from_python(files: dict[str, bytes], state: dict[str, Any]) -> None:
    state["rng"]["python"][1][-1] += 1


def draw_from_numpy(files: dict[str, bytes], state: dict[str, Any]) -> None:
    state["rng"]["numpy"][2] += 1


def draw_from_torch(files: dict[str, bytes], state: dict[str, Any]) -> None:
    state["rng"]["torch"][0] ^= 1


def swap_samples(files: dict[str, bytes], state: dict[str, Any]) -> None:
    state["order_crc"] ^= 1


def nudge_open_loss(files: dict[str, bytes], state: dict[str, Any]) -> None:
    nudge(state["window"]["losses"][0])


def nudge(tensor: torch.Tensor) -> None:
    """Move the first number to the next one that its dtype has."""
    first = (0,) * tensor.dim()
    tensor[first] = torch.nextafter(tensor[first], torch.tensor(torch.inf))


@pytest.mark.parametrize(
    ("tamper", "place"),
    [
        (flip_weight, "model.safetensors"),
        (flip_average, "ema.safetensors"),
        (nudge_momentum, "optimizer state 0 momentum_buffer"),
        (draw_from_python, "rng python 1"),
        (draw_from_numpy, "rng numpy 2"),
        (draw_from_torch, "rng torch"),
        (swap_samples, "order_crc"),
        (nudge_open_loss, "window losses 0"),
    ],
)
def test_the_comparison_sees_one_bit_of_a_checkpoint(
    storm: Storm,
    bench: ModuleType,
    tmp_path: Path,
    tamper: Callable[[dict[str, bytes], dict[str, Any]], None],
    place: str,
) -> None:
    unkilled = copy_of(storm[2], tmp_path)
    folder = unkilled / "checkpoints" / "step-00000205"  # between two lines of metrics.jsonl
    found = read_checkpoint(folder)
    state = from_bytes(found.files["training_state.pt"])
    files = dict(found.files)
    tamper(files, state)
    shutil.rmtree(folder)
    save_checkpoint(folder, {**files, "training_state.pt": to_bytes(state)}, meta=found.meta)
    (difference,) = bench.differences(storm[2], unkilled)
    assert place in difference


def test_the_comparison_sees_files_and_lines(
    storm: Storm, bench: ModuleType, tmp_path: Path
) -> None:
    other = copy_of(storm[2], tmp_path)
    assert bench.differences(storm[2], other) == []
    metrics = (other / "metrics.jsonl").read_text().replace('"step": 6,', '"step": 7,')
    (other / "metrics.jsonl").write_text(metrics)
    (other / ".model.safetensors.0123456789abcdef.tmp").touch()
    with (other / "model.safetensors").open("ab") as file:
        file.write(b" ")
    bench.log_of(other).write_text("lines are lost\n")
    shutil.rmtree(max((other / "checkpoints").iterdir()))
    places = [difference.partition(":")[0] for difference in bench.differences(storm[2], other)]
    assert places[:2] == ["it said", "length of files"]
    assert places[-3:] == ["newest checkpoint", "model.safetensors", "metrics.jsonl 1 step"]


@pytest.mark.parametrize(
    ("expected", "actual"),
    [
        (0.0, -0.0),
        (1, True),
        (b"a", b"b"),
        ([1], [1, 2]),
        ({"a": 1, "b": 2}, {"b": 2, "a": 1}),
        (torch.zeros(2), torch.zeros(2, 1)),
        (torch.zeros(2), torch.zeros(2, dtype=torch.int32)),
        (torch.zeros(()), -torch.zeros(())),
    ],
)
def test_the_comparison_is_strict(bench: ModuleType, expected: Any, actual: Any) -> None:
    assert bench.compare("here", expected, expected) == []
    assert bench.compare("here", expected, actual)


def test_the_comparison_takes_nan_as_equal_to_itself(bench: ModuleType) -> None:
    nan = float("nan")
    assert bench.compare("here", [nan, torch.tensor(nan)], [nan, torch.tensor(nan)]) == []


def copy_of(run: Path, folder: Path) -> Path:
    """A finished run and its log in another place."""
    shutil.copytree(run, folder / run.name)
    shutil.copy(run.with_name(f"{run.name}.log"), folder)
    return folder / run.name
