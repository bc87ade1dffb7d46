"""What a thread is doing, by its stack: the phase of a step, the kind of work on data, the user's line."""

import functools
import re
from collections.abc import Collection, Sequence
from pathlib import Path
from types import CodeType, FrameType
from typing import NamedTuple

from flambeau.tune.watch.code_origin import Origin, origin_of, origin_of_file

_Rules = Sequence[tuple[str, str, str]]
_ANY = ".*"

# A module or its package, the function, and what runs there. The first match counts.
_PHASES: _Rules = (
    ("torch.utils.data._utils.worker", "_worker_loop", "worker"),
    ("torch.utils.data._utils.fetch", "fetch", "fetch"),
    ("torch._dynamo.convert_frame", _ANY, "compile"),
    ("torch._inductor.compile_fx", ".*(compile|compiler).*", "compile"),
    ("torch.serialization", "save", "checkpoint"),
    ("torch.distributed.checkpoint", ".*save.*", "checkpoint"),
    ("safetensors", "save.*", "checkpoint"),
    ("numpy.lib._npyio_impl", "_?save.*", "checkpoint"),
    ("joblib.numpy_pickle", "dump", "checkpoint"),
    ("flambeau.run.folder", _ANY, "checkpoint"),
    ("lightning.pytorch.loops.evaluation_loop", _ANY, "evaluation"),
    ("pytorch_lightning.loops.evaluation_loop", _ANY, "evaluation"),
    ("flambeau.run.loop.evaluation_mode", _ANY, "evaluation"),
    (
        "torch.utils.data.dataloader",
        "__init__|__iter__|__del__|_get_iterator|_shutdown_workers|_reset",
        "worker start",
    ),
    ("torch.utils.data.dataloader", _ANY, "data"),
    ("flambeau.data", _ANY, "data"),
    ("nvidia.dali", _ANY, "data"),
    ("webdataset", _ANY, "data"),
    ("ffcv", _ANY, "data"),
    ("queue|multiprocessing.queues", "get", "data"),  # of a thread or process of the script
    ("concurrent.futures", "result.*", "data"),
    ("datasets.arrow_dataset", _ANY, "data"),
    ("torch._tensor", "backward", "backward"),
    ("torch.autograd", "backward|grad", "backward"),
    ("torch.autograd.graph", "_engine_run_backward", "backward"),
    ("torch.optim.lr_scheduler", _ANY, "python"),
    ("torch.optim", _ANY, "optimizer"),
    ("timm.optim", _ANY, "optimizer"),
    ("torch.amp.grad_scaler", _ANY, "optimizer"),
    ("torch.nn.utils.clip_grad", _ANY, "optimizer"),
    ("flambeau.recipes.training.amp_step", "step", "optimizer"),
    ("torch.nn.modules.module", "_wrapped_call_impl|_call_impl", "forward"),
    ("torch.nn.functional", _ANY, "forward"),
    ("flambeau.trainer.loss", _ANY, "forward"),
    # A loader and DDP ask again and again whether there are other processes.
    ("torch.distributed.distributed_c10d", "(?!(is|get)_|_rank_not_in_group).*", "communication"),
    (
        "torch.nn.parallel.distributed",
        "_sync_buffers|_distributed_broadcast_coalesced",
        "communication",
    ),
    ("torch.profiler.profiler", _ANY, "profiler"),
)
_KINDS: _Rules = (
    ("torch.utils.data._utils.collate", _ANY, "collate"),
    ("torch.multiprocessing.reductions", _ANY, "send"),
    ("multiprocessing.queues", "get", "idle"),
    ("threading", "wait", "idle"),
    ("multiprocessing.queues", _ANY, "send"),
    ("multiprocessing.reduction", _ANY, "send"),
    ("torch.utils.data._utils.pin_memory", _ANY, "pin"),
    ("PIL.ImageFile", _ANY, "decode"),
    # convert("RGB"), the last call of many loaders, also decodes.
    ("PIL.Image", "open|load|_open|_decode.*|draft|convert|copy", "decode"),
    (".*ImagePlugin", _ANY, "decode"),
    ("PIL", _ANY, "transform"),
    ("torchvision.io", _ANY, "decode"),
    ("torchcodec", _ANY, "decode"),
    ("imageio", _ANY, "decode"),
    ("simplejpeg", _ANY, "decode"),
    ("tifffile", _ANY, "decode"),
    ("pydicom", _ANY, "decode"),
    ("flambeau.images", _ANY, "decode"),
    ("torchvision.transforms", _ANY, "transform"),
    ("albumentations", _ANY, "transform"),
    ("kornia", _ANY, "transform"),
    ("timm.data", ".*(transform|augment|__call__).*", "transform"),
    ("flambeau.data.transforms", _ANY, "transform"),
    ("pathlib", "read_.*|open", "read"),
    ("zipfile", _ANY, "read"),
    ("tarfile", _ANY, "read"),
    ("gzip", _ANY, "read"),
    ("h5py", _ANY, "read"),
    ("fsspec", _ANY, "read"),
    ("http.client", _ANY, "read"),
    ("ssl", _ANY, "read"),
    ("numpy.lib._npyio_impl", _ANY, "read"),
)
_USER_KINDS = ((re.compile("collate"), "collate"), (re.compile("transform|augment"), "transform"))
_EVALUATES = re.compile(
    "_?(run_)?(eval|evaluate|evaluation|validate|validation|val|valid|test)"
    "(_(one_)?(epoch|step|loop|model|set|fn|one))?|evaluation_loop|_evaluate"
)
# Of several phases on one stack the outermost counts, with exceptions. The first three count wherever they
# are. The last two count only alone: Lightning's optimizer.step(closure) is around the whole step.
_ABOVE_ALL = ("compile", "checkpoint", "evaluation")
_BELOW_ALL = ("optimizer", "python")


class CodeLocation(NamedTuple):
    """A line of a file, and its function."""

    file: str
    line: int
    function: str


class Activity(NamedTuple):
    """What a thread is doing; '' if no rule fits.

    Attributes:
        kind: of the work on data.
        location: the innermost line of the user, else of a library other than torch.
    """

    phase: str
    kind: str
    location: CodeLocation | None


class _Tag(NamedTuple):
    code: CodeType | None  # kept alive, so that no other object gets its id
    function: str
    phase: str
    kind: str
    owner: str


class _Class(NamedTuple):
    """What a stack is, whatever its lines.

    Attributes:
        located: number of the frame that gives the location.
        fetches: number of the frame whose line says whether samples are made, or a batch of them.
    """

    phase: str
    kind: str
    located: int | None
    fetches: int | None


_Stack = tuple[int, ...]
# By id, because code objects with the same text are equal even from different files.
_tags: dict[int, _Tag] = {}
_known: dict[_Stack, _Class] = {}
"""By stack, as such ids."""


def activity_of(frame: FrameType | None) -> Activity:
    """What runs in this frame, the innermost one, and in those around it."""
    frames, codes = [], []
    while frame is not None:  # must be quick: the watched thread stands still meanwhile
        frames.append(frame)
        codes.append(id(frame.f_code))
        frame = frame.f_back
    stack = tuple(codes)
    known = _known.get(stack)
    if known is None:
        known = _known[stack] = _classify([_tag_of(frame) for frame in frames])
    part = None if known.fetches is None else _location(frames[known.fetches])
    at = None if known.located is None else _location(frames[known.located])
    return Activity(known.phase, known.kind or _fetched(part), at)


def activity_of_lines(
    stack: Sequence[CodeLocation], training: Collection[tuple[str, str]] = ()
) -> Activity:
    """The same of a stack read from outside, innermost line first; `training` functions do not evaluate."""
    tags = [_tag_of_line(one.file, one.function) for one in stack]
    tags = [
        _that_trains(tag) if (one.file, one.function) in training else tag
        for tag, one in zip(tags, stack, strict=True)
    ]
    known = _classify(tags)
    part = None if known.fetches is None else stack[known.fetches]
    at = None if known.located is None else stack[known.located]
    return Activity(known.phase, known.kind or _fetched(part), at)


def note_training(frame: FrameType | None) -> list[CodeLocation]:
    """The lines around an optimizer step, which are in no evaluation, whatever its name."""
    lines = []
    while frame is not None:
        _tags[id(frame.f_code)] = _that_trains(_tag_of(frame))
        lines.append(_location(frame))
        frame = frame.f_back
    _known.clear()
    return lines


def _that_trains(tag: _Tag) -> _Tag:
    return tag._replace(phase="") if tag.phase == "evaluation" else tag


def _fetched(location: CodeLocation | None) -> str:
    """'collate' at the line of torch's loader that calls a collate_fn, whatever its name; else ''."""
    if location is None or location.line not in _collating_lines(location.file):
        return ""
    return "collate"


@functools.cache
def _collating_lines(file: str) -> frozenset[int]:
    try:
        lines = Path(file).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return frozenset()
    return frozenset(number for number, line in enumerate(lines, 1) if "self.collate_fn(" in line)


def _classify(tags: Sequence[_Tag]) -> _Class:
    phase = kind = ""
    fetches: int | None = None
    user: int | None = None
    library: int | None = None
    is_user_code = False  # but not the step() of an optimizer that the user has written
    for number, tag in enumerate(tags):
        if tag.owner == "user":
            is_user_code = tag.function != "step"
        if tag.phase == "worker":  # the frames around it are those of the trainer when it forked
            phase = tag.phase
            break
        if fetches is None:  # what is around a loader is no work on data
            kind = kind or tag.kind
        if tag.phase == "fetch":
            fetches = number if fetches is None else fetches
            phase = "" if phase == "checkpoint" else phase  # a cache of a data set
            continue
        # Buffers and statistics are exchanged, and waited for, within a forward pass.
        stays = phase in _ABOVE_ALL or (phase == "communication" and tag.phase not in _ABOVE_ALL)
        if tag.phase and not stays and not (phase and tag.phase in _BELOW_ALL):
            # A hook or closure of the user inside of an optimizer is not the optimizer's work.
            phase = "python" if tag.phase == "optimizer" and is_user_code else tag.phase
        if user is None and tag.owner == "user":
            user = number
        elif library is None and tag.owner == "library":
            library = number
    return _Class(phase, kind, library if user is None else user, fetches)


def _location(frame: FrameType) -> CodeLocation:
    return CodeLocation(frame.f_code.co_filename, frame.f_lineno or 0, frame.f_code.co_name)


def user_line(frame: FrameType | None) -> CodeLocation | None:
    """The innermost line of the user, from a frame outwards."""
    while frame is not None:
        if _tag_of(frame).owner == "user":
            return _location(frame)
        frame = frame.f_back
    return None


def user_lines(frame: FrameType | None) -> list[CodeLocation]:
    """All lines of the user, from a frame outwards."""
    lines = []
    while frame is not None:
        if _tag_of(frame).owner == "user":
            lines.append(_location(frame))
        frame = frame.f_back
    return lines


def is_torchs(frame: FrameType) -> bool:
    return _tag_of(frame).owner == "torch"


def _tag_of(frame: FrameType) -> _Tag:
    code = frame.f_code
    return _tags.get(id(code)) or _new_tag(frame, code)


def _new_tag(frame: FrameType, code: CodeType) -> _Tag:
    _tags[id(code)] = tag = _tag(origin_of(frame), code.co_name)._replace(code=code)
    return tag


@functools.cache
def _tag_of_line(file: str, function: str) -> _Tag:
    return _tag(origin_of_file(file), function)


def _tag(origin: Origin, name: str) -> _Tag:
    owner, module = origin
    phase = _first(_PHASES, module, name)
    kind = _first(_KINDS, module, name)
    if owner != "torch" and _EVALUATES.fullmatch(name):
        phase = "evaluation"
    if owner == "user" and not kind:
        kind = next((kind for pattern, kind in _USER_KINDS if pattern.search(name)), "")
    return _Tag(None, name, phase, kind, owner)


def _first(rules: _Rules, module: str, name: str) -> str:
    for where, function, meaning in rules:
        if re.fullmatch(rf"(?:{where})(\..*)?", module) is None:
            continue
        if function == _ANY or re.fullmatch(function, name):
            return meaning
    return ""
