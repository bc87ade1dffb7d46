"""What a stack says, on stacks of functions that are where torch, a trainer and a user have theirs."""

import sys
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from flambeau.tune.watch.stack_phases import (
    Activity,
    CodeLocation,
    activity_of,
    activity_of_lines,
    note_training,
)

TORCH = "/env/lib/site-packages/torch"
SITE = "/env/lib/site-packages"
TRAIN = ("/home/me/train.py", "main")
LOADER = (f"{TORCH}/utils/data/dataloader.py", "__next__")
FETCH = (f"{TORCH}/utils/data/_utils/fetch.py", "fetch")
CALL = (f"{TORCH}/nn/modules/module.py", "_wrapped_call_impl")
BACKWARD = (f"{TORCH}/_tensor.py", "backward")
OPTIMIZER = (f"{TORCH}/optim/optimizer.py", "wrapper")
WORKER = (f"{TORCH}/utils/data/_utils/worker.py", "_worker_loop")
ITEM = ("/home/me/data.py", "__getitem__")


def seen(*stack: tuple[str, str]) -> Activity:
    """The activity of functions that call each other, the outermost first; each is on line 2 of its file."""
    found: list[Activity] = []

    def look() -> None:
        frame: FrameType | None = sys._getframe(1)
        bottom = frame
        while bottom is not None and bottom.f_code.co_filename == __file__:
            bottom = bottom.f_back
        found.append(activity_of(frame))

    call = look
    for file, name in reversed(stack):
        space = {"inner": call}
        exec(compile(f"def {name}():\n inner()", file, "exec"), space)
        call = space[name]
    # The stack of pytest around it is no part of the question: a worker's loop hides what is outside.
    space = {"inner": call}
    exec(compile("def top():\n inner()", "<frozen importlib._bootstrap>", "exec"), space)
    space["top"]()
    return found[0]


@pytest.mark.parametrize(
    ("stack", "phase"),
    [
        ([LOADER], "data"),
        ([(f"{TORCH}/utils/data/dataloader.py", "__iter__")], "worker start"),
        ([CALL, ("/home/me/model.py", "forward")], "forward"),
        ([BACKWARD, CALL], "backward"),  # activation checkpointing computes forward again
        ([OPTIMIZER], "optimizer"),
        ([OPTIMIZER, ("/home/me/train.py", "closure"), CALL], "forward"),  # as Lightning does
        ([OPTIMIZER, ("/home/me/train.py", "closure"), BACKWARD], "backward"),
        (
            [OPTIMIZER, ("/home/me/train.py", "count_gradients")],
            "python",
        ),  # a hook on the optimizer
        ([OPTIMIZER, ("/home/me/lion.py", "step")], "optimizer"),
        ([OPTIMIZER, ("/home/me/lion.py", "step"), ("/home/me/lion.py", "sign")], "optimizer"),
        ([(f"{TORCH}/serialization.py", "save")], "checkpoint"),
        ([(f"{SITE}/numpy/lib/_npyio_impl.py", "_savez")], "checkpoint"),
        ([LOADER, FETCH, ITEM, (f"{TORCH}/serialization.py", "save")], "data"),  # a cache
        ([("/usr/lib/python3.11/queue.py", "get")], "data"),
        ([("/usr/lib/python3.11/queue.py", "put")], ""),
        ([("/home/me/train.py", "validate"), CALL], "evaluation"),
        ([("/home/me/train.py", "evaluate_model"), LOADER], "evaluation"),
        ([CALL, (f"{TORCH}/_dynamo/convert_frame.py", "_compile")], "compile"),
        ([(f"{TORCH}/distributed/distributed_c10d.py", "all_reduce")], "communication"),
        ([(f"{TORCH}/distributed/distributed_c10d.py", "is_initialized")], ""),
        ([CALL, (f"{TORCH}/nn/parallel/distributed.py", "_sync_buffers")], "communication"),
        (
            [
                ("/home/me/train.py", "validate"),
                (f"{TORCH}/distributed/distributed_c10d.py", "wait"),
            ],
            "evaluation",
        ),
        ([("/home/me/train.py", "log_figures")], ""),
        ([("/home/me/train.py", "evaluated")], ""),
    ],
)
def test_phase(stack: Sequence[tuple[str, str]], phase: str) -> None:
    assert seen(TRAIN, *stack).phase == phase


@pytest.mark.parametrize(
    ("stack", "kind"),
    [
        ([ITEM, (f"{SITE}/PIL/ImageFile.py", "load")], "decode"),
        ([ITEM, (f"{SITE}/PIL/JpegImagePlugin.py", "load_read")], "decode"),
        ([ITEM, (f"{SITE}/PIL/Image.py", "convert"), (f"{SITE}/PIL/Image.py", "copy")], "decode"),
        ([ITEM, (f"{SITE}/PIL/Image.py", "resize")], "transform"),
        ([ITEM, (f"{SITE}/torchvision/transforms/functional.py", "crop")], "transform"),
        ([ITEM, ("/home/me/data.py", "augment")], "transform"),
        ([("/home/me/data.py", "my_collate")], "collate"),
        ([(f"{TORCH}/utils/data/_utils/collate.py", "collate")], "collate"),
        ([("/usr/lib/python3.11/multiprocessing/queues.py", "get")], "idle"),
        ([ITEM, ("/usr/lib/python3.11/pathlib.py", "read_bytes")], "read"),
        ([ITEM], ""),
    ],
)
def test_kind_of_work_in_a_worker(stack: Sequence[tuple[str, str]], kind: str) -> None:
    found = seen(TRAIN, LOADER, WORKER, *stack)
    assert (found.phase, found.kind) == ("worker", kind)


def test_what_a_loader_calls_to_make_a_batch_is_collating_whatever_its_name() -> None:
    """In the fetchers of the torch that is installed, read as text."""
    file = Path(torch.__file__).parent / "utils/data/_utils/fetch.py"
    lines = file.read_text(encoding="utf-8").splitlines()
    kinds = {}
    for number, line in enumerate(lines, 1):
        if (
            "self.collate_fn(" in line
            or "self.dataset[" in line
            or "next(self.dataset_iter)" in line
        ):
            fetch = CodeLocation(f"{file}", number, "fetch")
            user = CodeLocation("/home/me/data.py", 2, "cleaned")
            kinds[line.strip()] = activity_of_lines([user, fetch]).kind
    collating = {line for line, kind in kinds.items() if kind == "collate"}
    assert collating and collating == {line for line in kinds if "self.collate_fn(" in line}
    assert collating < kinds.keys()


def test_a_loader_with_a_collate_fn_of_any_name() -> None:
    seen: list[str] = []

    def cleaned(samples: list[int]) -> list[int]:
        seen.append(activity_of(sys._getframe()).kind)
        return samples

    class Numbers(Dataset[int]):
        def __len__(self) -> int:
            return 2

        def __getitem__(self, index: int) -> int:
            seen.append(activity_of(sys._getframe()).kind)
            return index

    list(DataLoader(Numbers(), batch_size=2, collate_fn=cleaned))
    assert seen == ["", "", "collate"]


def test_the_line_is_the_users() -> None:
    library = (f"{SITE}/PIL/ImageFile.py", "load")
    assert seen(TRAIN, LOADER, ITEM, library).location == CodeLocation(
        "/home/me/data.py", 2, "__getitem__"
    )


def test_a_worker_that_was_forked_shows_no_line_of_the_trainer() -> None:
    library = (f"{SITE}/torchvision/datasets/folder.py", "pil_loader")
    found = seen(TRAIN, LOADER, WORKER, library)
    assert found.location == CodeLocation(library[0], 2, "pil_loader")


def test_two_files_with_the_same_function() -> None:
    """Code objects are equal whatever file they are of."""
    for file in (f"{SITE}/timm/read.py", "/home/me/read.py", f"{SITE}/timm/read.py"):
        found = seen(TRAIN, LOADER, (file, "one_of_two"))
        assert found.location == CodeLocation(
            *((TRAIN[0], 2, TRAIN[1]) if SITE in file else (file, 2, "one_of_two"))
        )


def test_a_function_that_trains_is_no_evaluation_whatever_its_name() -> None:
    found: list[tuple[Activity, Activity]] = []

    def step() -> None:
        frame = sys._getframe(1)
        before = activity_of(frame)
        note_training(frame)
        found.append((before, activity_of(frame)))

    space = {"step": step}
    exec(compile("def test():\n step()", "/home/me/trains.py", "exec"), space)
    space["test"]()
    ((before, after),) = found
    assert (before.phase, after.phase) == ("evaluation", "")
    assert seen(("/home/me/trains.py", "test")).phase == "evaluation", "another function is"
