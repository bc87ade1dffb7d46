"""What a thread is doing, by its stack: the phase of a step, the kind of work on data, the user's line."""

import re
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

_Rules = Sequence[tuple[str, str, str]]
_ANY = ".*"

# Part of a file's path, the function, and what runs there. The first that fits counts.
_PHASES: _Rules = (
    ("/torch/utils/data/_utils/worker.py", "_worker_loop", "worker"),
    ("/torch/_dynamo/convert_frame.py", _ANY, "compile"),
    ("/torch/_inductor/compile_fx.py", ".*(compile|compiler).*", "compile"),
    ("/torch/serialization.py", "save", "checkpoint"),
    ("/torch/distributed/checkpoint/", ".*save.*", "checkpoint"),
    ("/safetensors/torch.py", "save.*", "checkpoint"),
    ("/flambeau/train/checkpoints/", _ANY, "checkpoint"),
    ("/lightning/pytorch/loops/evaluation_loop.py", _ANY, "evaluation"),
    ("/pytorch_lightning/loops/evaluation_loop.py", _ANY, "evaluation"),
    ("/flambeau/train/loop/evaluation_mode.py", _ANY, "evaluation"),
    (
        "/torch/utils/data/dataloader.py",
        "__init__|__iter__|__del__|_get_iterator|_shutdown_workers|_reset",
        "worker start",
    ),
    ("/torch/utils/data/dataloader.py", _ANY, "data"),
    ("/flambeau/data/", _ANY, "data"),
    ("/nvidia/dali/", _ANY, "data"),
    ("/webdataset/", _ANY, "data"),
    ("/ffcv/", _ANY, "data"),
    ("/datasets/arrow_dataset.py", _ANY, "data"),
    ("/torch/_tensor.py", "backward", "backward"),
    ("/torch/autograd/__init__.py", "backward|grad", "backward"),
    ("/torch/autograd/graph.py", "_engine_run_backward", "backward"),
    ("/torch/optim/lr_scheduler.py", _ANY, "python"),
    ("/torch/optim/", _ANY, "optimizer"),
    ("/timm/optim/", _ANY, "optimizer"),
    ("/torch/amp/grad_scaler.py", _ANY, "optimizer"),
    ("/torch/nn/utils/clip_grad.py", _ANY, "optimizer"),
    ("/flambeau/recipes/training/amp_step.py", "step", "optimizer"),
    ("/torch/nn/modules/module.py", "_wrapped_call_impl|_call_impl", "forward"),
    ("/torch/nn/functional.py", _ANY, "forward"),
    ("/flambeau/train/loss.py", _ANY, "forward"),
    ("/torch/distributed/distributed_c10d.py", _ANY, "communication"),
    (
        "/torch/nn/parallel/distributed.py",
        "_sync_buffers|_distributed_broadcast_coalesced",
        "communication",
    ),
    ("/torch/profiler/profiler.py", _ANY, "profiler"),
)
_KINDS: _Rules = (
    ("/torch/utils/data/_utils/collate.py", _ANY, "collate"),
    ("/torch/multiprocessing/reductions.py", _ANY, "send"),
    ("/multiprocessing/queues.py", "get", "idle"),
    ("/threading.py", "wait", "idle"),
    ("/multiprocessing/queues.py", _ANY, "send"),
    ("/multiprocessing/reduction.py", _ANY, "send"),
    ("/torch/utils/data/_utils/pin_memory.py", _ANY, "pin"),
    ("/PIL/ImageFile.py", _ANY, "decode"),
    # convert("RGB"), with which loaders end, is a copy for photographs.
    ("/PIL/Image.py", "open|load|_open|_decode.*|draft|convert|copy", "decode"),
    ("ImagePlugin.py", _ANY, "decode"),
    ("/PIL/", _ANY, "transform"),
    ("/torchvision/io/", _ANY, "decode"),
    ("/torchcodec/", _ANY, "decode"),
    ("/imageio/", _ANY, "decode"),
    ("/simplejpeg/", _ANY, "decode"),
    ("/tifffile/", _ANY, "decode"),
    ("/pydicom/", _ANY, "decode"),
    ("/flambeau/data/images/", _ANY, "decode"),
    ("/torchvision/transforms/", _ANY, "transform"),
    ("/albumentations/", _ANY, "transform"),
    ("/kornia/", _ANY, "transform"),
    ("/timm/data/", ".*(transform|augment|__call__).*", "transform"),
    ("/flambeau/data/transforms/", _ANY, "transform"),
    ("/pathlib.py", "read_.*|open", "read"),
    ("/zipfile.py", _ANY, "read"),
    ("/tarfile.py", _ANY, "read"),
    ("/gzip.py", _ANY, "read"),
    ("/h5py/", _ANY, "read"),
    ("/fsspec/", _ANY, "read"),
    ("/http/client.py", _ANY, "read"),
    ("/ssl.py", _ANY, "read"),
    ("/numpy/lib/_npyio_impl.py", _ANY, "read"),
)
_USER_KINDS = (
    (re.compile("collate"), "collate"),
    (re.compile("transform|augment"), "transform"),
)
_EVALUATES = re.compile(
    "_?(run_)?(eval|evaluate|evaluation|validate|validation|val|valid|test)"
    "(_(one_)?(epoch|step|loop|model|set|fn|one))?|evaluation_loop|_evaluate"
)
# Of several phases on one stack the outermost counts, but for these: they are what the rest is done for,
# or, as Lightning's optimizer.step(closure), around all of the step.
_ABOVE_ALL = ("compile", "checkpoint", "evaluation")
_BELOW_ALL = ("optimizer", "python")
_STDLIB = tuple(f"{Path(sysconfig.get_path(name)).resolve()}/" for name in ("stdlib", "platstdlib"))
_OURS = f"{Path(__file__).resolve().parents[2]}/"


class Place(NamedTuple):
    """A line of a file, and the function it is in."""

    file: str
    line: int
    function: str


class Activity(NamedTuple):
    """What a thread is doing.

    Attributes:
        phase: of the training step; '' where no rule fits.
        kind: of the work on data; '' likewise.
        place: the innermost line of the user's, else of a library other than torch's core; None for neither.
    """

    phase: str
    kind: str
    place: Place | None


class _Tag(NamedTuple):
    code: CodeType  # kept alive, so that nothing else gets its number
    phase: str
    kind: str
    is_user: bool
    is_library: bool


_Stack = tuple[int, ...]
# By number, for code of the same text is equal whatever file it is of.
_tags: dict[int, _Tag] = {}
# Phase, kind, and which frame is the place, of a stack of such numbers.
_known: dict[_Stack, tuple[str, str, int | None]] = {}


def activity_of(frame: FrameType | None) -> Activity:
    """What runs in a frame and those around it.

    Args:
        frame: the innermost one.
    """
    frames, codes = [], []
    while frame is not None:  # a look costs what the watched thread cannot do meanwhile
        frames.append(frame)
        codes.append(id(frame.f_code))
        frame = frame.f_back
    stack = tuple(codes)
    found = _known.get(stack)
    if found is None:
        found = _known[stack] = _of_stack([one.f_code for one in frames])
    phase, kind, number = found
    return Activity(phase, kind, None if number is None else _place(frames[number]))


def _of_stack(codes: Sequence[CodeType]) -> tuple[str, str, int | None]:
    phase = kind = ""
    mine: int | None = None
    library: int | None = None
    is_own = False  # code of the user's, and no step() of an optimizer that the user has written
    for number, code in enumerate(codes):
        tag = _tags.get(id(code)) or _tag_of(code)
        if tag.is_user:
            is_own = code.co_name != "step"
        if tag.phase == "worker":  # what is around was going on in the trainer when it forked
            phase = tag.phase
            break
        kind = kind or tag.kind
        # Buffers and statistics are exchanged within a forward pass, and it is there that a rank waits.
        stays = phase in _ABOVE_ALL or (phase == "communication" and tag.phase not in _ABOVE_ALL)
        if tag.phase and not stays and not (phase and tag.phase in _BELOW_ALL):
            # A hook or closure of the user's within an optimizer is none of its work.
            phase = "python" if tag.phase == "optimizer" and is_own else tag.phase
        if mine is None and tag.is_user:
            mine = number
        elif library is None and tag.is_library:
            library = number
    return phase, kind, library if mine is None else mine


def _place(frame: FrameType) -> Place:
    return Place(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name)


def user_line(frame: FrameType | None) -> Place | None:
    """The innermost line of the user's, from a frame outwards."""
    while frame is not None:
        if (_tags.get(id(frame.f_code)) or _tag_of(frame.f_code)).is_user:
            return _place(frame)
        frame = frame.f_back
    return None


def _tag_of(code: CodeType) -> _Tag:
    file, name = code.co_filename, code.co_name
    is_user, is_library = _owner(file)
    phase = _first(_PHASES, file, name)
    kind = _first(_KINDS, file, name)
    if "/torch/" not in file and _EVALUATES.fullmatch(name):
        phase = "evaluation"
    if is_user and not kind:
        kind = next((kind for pattern, kind in _USER_KINDS if pattern.search(name)), "")
    _tags[id(code)] = tag = _Tag(code, phase, kind, is_user, is_library)
    return tag


def _owner(file: str) -> tuple[bool, bool]:
    """Whether a file is the user's, and whether it is of a library that the user has chosen."""
    if file.startswith(("<", _OURS)) or "torchinductor_" in file:
        return False, False
    if "/site-packages/" in file or "/dist-packages/" in file:
        return False, "/torch/" not in file
    return not file.startswith(_STDLIB), False


def _first(rules: _Rules, file: str, name: str) -> str:
    for part, function, meaning in rules:
        if part in file and (function == _ANY or re.fullmatch(function, name)):
            return meaning
    return ""
