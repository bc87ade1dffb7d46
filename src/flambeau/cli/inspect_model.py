"""`flambeau inspect`: one table of what a model is made of and what it costs."""

import argparse
import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flambeau.cli.inspection.checklist_table import print_checklist
from flambeau.cli.inspection.convolution_table import print_convolutions
from flambeau.cli.inspection.graph_file import write_graphs
from flambeau.cli.inspection.memory_file import write_memory
from flambeau.cli.inspection.profile_page import print_profile
from flambeau.cli.inspection.rules_table import print_findings, print_rules
from flambeau.cli.inspection.steps_here import BATCH, Source, quiet_profiler
from flambeau.cli.reading_flags import add_trust, check_at_least
from flambeau.cli.table import count_text, print_json, print_table
from flambeau.errors import InputError
from flambeau.terminal import say
from flambeau.user_code import first_line, is_function

if TYPE_CHECKING:
    from torch import nn

    from flambeau.inspection.model_summary import ModelSummary, ModuleSummary
    from flambeau.recipes.memory.memory_budget import MemoryEstimate

HELP = "show what a model is made of: shapes, parameters, operations, memory, receptive fields"

_WITHOUT = {  # which other options each has no use for
    "conv": ("input", "depth", "compile", "graph", "profile", "memory", "checklist", "rules"),
    "compile": ("depth", "graph", "profile", "memory", "checklist", "rules"),
    "profile": ("depth", "graph", "memory", "checklist", "rules"),
    "memory": ("depth", "graph", "checklist", "rules"),
    "checklist": ("depth", "graph", "rules"),
    "rules": ("depth", "graph"),
}
_DEPTH = 2
_NAMED = 10  # unused modules and shared parameters that are named in the lines below the table


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """MODEL or RUN, and the input."""
    parser.add_argument(
        "model",
        metavar="MODEL|RUN",
        nargs="?",
        help="a name as --model of train takes it (`flambeau models` lists them), FILE.py:FUNCTION that "
        "returns a torch.nn.Module, or the folder of a run",
    )
    parser.add_argument(
        "--input",
        action="append",
        metavar="SIZES",
        default=[],
        help="sizes of an input, such as 1,3,224,224; 1,77:int64 for another dtype than float32, "
        "mask=1,77:bool by name, batch.ids=1,77:int64 in a dict; once for each (default: one image of the "
        "size that the model is made for)",
    )
    parser.add_argument(
        "--depth",
        type=int,
        help=f"how deep modules inside one another are shown (default: {_DEPTH}; 0 is the model alone)",
    )
    parser.add_argument(
        "--compile",
        action="store_true",
        help="where torch.compile cannot follow the model in one graph: file, line and reason of each break",
    )
    parser.add_argument(
        "--conv",
        action="append",
        metavar="SIZES",
        help="sizes of a convolution in the place of a model: 224,k7,s2,p3 is an input of 224 with kernel 7, "
        "stride 2, padding 3; d2 a dilation, t a transposed one; again without the input for the next layer",
    )
    _add_other_views(parser)
    parser.add_argument("--json", action="store_true", help="all of it as one JSON object")
    add_trust(parser)


def _add_other_views(parser: argparse.ArgumentParser) -> None:
    """What is shown in the place of the table."""
    parser.add_argument(
        "--graph",
        type=Path,
        metavar="FILE.svg",
        help="draw the modules with the data between them, and autograd's graph with what it keeps",
    )
    parser.add_argument(
        "--profile",
        action="store_true",
        help="run training steps here, of a run on its own data, and show where their time goes: parts, "
        f"operations, modules, Python, data (default input of a model: {BATCH} images)",
    )
    parser.add_argument(
        "--trace",
        type=Path,
        metavar="FILE.json.gz",
        help="with --profile: every operation on a time line, which https://ui.perfetto.dev opens",
    )
    parser.add_argument(
        "--memory",
        type=Path,
        metavar="FILE.svg",
        help="draw the memory of a training step here over its time, and name who allocated the peak",
    )
    parser.add_argument(
        "--checklist",
        action="store_true",
        help="measure here what the usual advice changes for this model, or for a run with its "
        "data: cudnn.benchmark, pinned memory, non_blocking, del, num_workers, channels_last, bf16 ...",
    )
    parser.add_argument(
        "--rules",
        action="store_true",
        help="measure here what unequal channels, groups, branches and element-wise operations cost at equal "
        "FLOPs (the rules of ShuffleNet V2); with MODEL also where it has them",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace the file that is to be written if it exists"
    )


def trial_outputs(arguments: argparse.Namespace) -> list[Path] | None:
    """What is written besides what the user's code would write; None where no code of the user runs."""
    model = arguments.model or ""
    if ".py:" not in model and not Path(model).is_dir():
        return None
    return [one for one in (arguments.graph, arguments.trace, arguments.memory) if one is not None]


def run(arguments: argparse.Namespace) -> int:
    """Print the table, and below it the totals."""
    trains = arguments.profile or arguments.checklist or arguments.memory is not None
    if trains:
        quiet_profiler()  # before torch is imported
    from flambeau.inspection.example_input import example_inputs

    _check(arguments)
    if arguments.conv:
        return print_convolutions(arguments.conv, as_json=arguments.json)
    if arguments.rules and arguments.model is None:
        return print_rules(as_json=arguments.json)
    args, kwargs = example_inputs(arguments.input)
    if trains and not args and not kwargs and Path(arguments.model).is_dir():
        return _measure(arguments, Source(run=Path(arguments.model), trust=arguments.trust))
    shape = tuple(args[0].shape) if args else ()
    model, default = _loaded(arguments.model, shape, values=trains, trust=arguments.trust)
    if not args and not kwargs:
        batch = BATCH if trains else 1
        args, kwargs = example_inputs([",".join(map(str, (batch, *default[1:])))])
    if trains:
        return _measure(arguments, Source(None, model=model, args=args, kwargs=kwargs))
    if arguments.compile:
        return _print_breaks(model, args, kwargs, as_json=arguments.json)
    if arguments.rules:
        return print_findings(model, args, kwargs, as_json=arguments.json)
    if arguments.graph is not None:
        return write_graphs(
            arguments.graph, model, args, kwargs, depth=arguments.depth, as_json=arguments.json
        )
    depth = _DEPTH if arguments.depth is None else arguments.depth
    return _print_summary(model, args, kwargs, depth=depth, as_json=arguments.json)


def _measure(arguments: argparse.Namespace, source: Source) -> int:
    """What takes training steps."""
    if arguments.memory is not None:
        return write_memory(arguments.memory, source, as_json=arguments.json)
    if arguments.checklist:
        return print_checklist(source, as_json=arguments.json)
    return print_profile(source, trace=arguments.trace, as_json=arguments.json)


def _print_summary(
    model: "nn.Module", args: tuple[Any, ...], kwargs: dict[str, Any], *, depth: int, as_json: bool
) -> int:
    """The table, and below it the totals; returns the exit code."""
    from flambeau.inspection.model_summary import summarize

    with contextlib.redirect_stdout(sys.stderr):  # what the model itself prints
        summary = summarize(model, args, kwargs)
    memory = _training_memory(model, args, kwargs)
    if as_json:
        training = {
            "training": None if isinstance(memory, str) else dataclasses.asdict(memory),
            "no_training": memory if isinstance(memory, str) else None,
        }
        print_json([dataclasses.asdict(summary) | training])
        return 0
    _print_modules([row for row in summary.modules if row.depth <= depth])
    for line in _totals(summary, memory):
        print(line)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Refuse what does not go together, and would have no effect."""
    shown = next((name for name in _WITHOUT if getattr(arguments, name)), "")
    for name in _WITHOUT.get(shown, ()):
        if getattr(arguments, name) not in (None, False, []):
            raise InputError(f"--{name} has no effect with --{shown}: leave it out")
    if arguments.trace is not None and not arguments.profile:
        raise InputError("--trace has no effect without --profile: give that, too")
    files = ((arguments.graph, ".svg"), (arguments.memory, ".svg"), (arguments.trace, ".gz"))
    if arguments.force and not any(path for path, _ in files):
        raise InputError("--force has no effect without a file to write: leave it out")
    if arguments.conv and arguments.model is not None:
        raise InputError("--conv is without MODEL: it draws one convolution, or several in a row")
    if arguments.rules and arguments.model is None and arguments.input:
        raise InputError("--input has no effect without MODEL: leave it out")
    if not arguments.conv and not arguments.rules and arguments.model is None:
        raise InputError("name a MODEL or a RUN; see flambeau inspect --help")
    if arguments.json and arguments.depth is not None and arguments.graph is None:
        raise InputError("--depth has no effect with --json, which has every module: leave it out")
    check_at_least(arguments, depth=0)
    from flambeau.trainer.evaluation.predictions_file import refuse_existing

    for path, suffix in files:
        if path is not None:
            refuse_existing(path, suffixes=(suffix,), force=arguments.force, remedy="--force")


def _loaded(
    name: str, shape: tuple[int, ...], *, values: bool, trust: bool
) -> "tuple[nn.Module, tuple[int, ...]]":
    """A model, and the shape of an image that it is made for.

    Args:
        name: as the user wrote it.
        shape: of the first input, empty where none was given.
        values: whether it has to run.
        trust: run the file that a run names as its model, wherever the run comes from.
    """
    from flambeau.inspection.model_facts import (
        DEFAULT_SIZE,
        made_for,
        model_with_values,
        model_without_values,
    )
    from flambeau.trainer.parts.model import build_model
    from flambeau.trainer.prediction.trained_model import load_trained

    if Path(name).is_dir():
        trained = load_trained(Path(name), trust=trust, say=say)
        return trained.model, (1, trained.facts.channels, trained.image_size, trained.image_size)
    channels, side = (shape[1], shape[-1]) if len(shape) == 4 else (3, None)
    if is_function(name):
        side = side or DEFAULT_SIZE
        model = build_model(name, num_classes=1000, channels=channels, image_size=side)
    else:
        make = model_with_values if values else model_without_values
        model = make(name, channels=channels, image_size=side)
        side = side or made_for(name, model)
    return model, (1, channels, side, side)


def _training_memory(
    model: "nn.Module", args: tuple[Any, ...], kwargs: dict[str, Any]
) -> "MemoryEstimate | str":
    """Of a training step with AdamW, or why a model cannot be followed in one."""
    from torch import nn
    from torch.nn.parameter import is_lazy

    from flambeau.inspection.model_copy import with_values
    from flambeau.recipes.memory.memory_budget import estimate_memory

    class Called(nn.Module):
        """Takes inputs by name too."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model.train()

        def forward(self, *args: Any) -> Any:
            *positional, named = args
            return self.model(*positional, **named)

    try:
        with contextlib.redirect_stdout(sys.stderr):
            if any(is_lazy(leaf) for leaf in (*model.parameters(), *model.buffers())):
                model(*with_values(args), **with_values(kwargs))  # which gives them their shapes
            return estimate_memory(Called(), (*args, kwargs))
    except Exception as error:  # such as BatchNorm, which refuses one value per channel
        return first_line(error)


def _print_breaks(
    model: "nn.Module", args: tuple[Any, ...], kwargs: dict[str, Any], *, as_json: bool
) -> int:
    """What torch.compile would make of the model; returns the exit code."""
    from flambeau.inspection.graph_breaks import graph_breaks

    found = graph_breaks(model, args, kwargs)
    if as_json:
        print_json([dataclasses.asdict(found)])
        return 0
    if not found.breaks:
        print(f"one graph of {found.operations} operations, no breaks")
        return 0
    print(f"{found.graphs} graphs of {found.operations} operations, broken at:")
    for place in found.breaks:
        print(f"{place.file}:{place.line}  {place.code}\n    {place.reason}")
    return 0


def _print_modules(rows: "list[ModuleSummary]") -> None:
    columns = ("module", "kind", "output", "parameters", "FLOPs", "kept MiB", "receptive field")
    right = columns[3:]
    cells = (
        (
            row.name or "(model)",
            row.kind if row.same_as is None else f"{row.kind}, same as {row.same_as}",
            " ".join("x".join(map(str, shape)) or "number" for shape in row.output) or None,
            count_text(row.parameters),
            count_text(row.flops),
            f"{row.kept_bytes / 2**20:.2f}",
            _field(row.receptive_field),
        )
        for row in rows
    )
    print_table(columns, cells, right=right)


def _field(field: tuple[int, ...] | None) -> str | None:
    if field is None:
        return None
    return "x".join(map(str, field)) or "all"


def _totals(summary: "ModelSummary", memory: "MemoryEstimate | str") -> list[str]:
    """What holds for the whole model, in lines."""
    whole = summary.modules[0]
    lines = [
        f"{whole.parameters:,} parameters ({whole.trainable:,} trainable), "
        f"{whole.buffers:,} numbers in buffers",
        f"{whole.flops:,} FLOPs of matrix products and convolutions (a multiply and an add are two)",
        f"{whole.accessed_bytes / 2**20:.1f} MiB read and written, "
        f"{whole.kept_bytes / 2**20:.1f} MiB kept for a backward pass",
    ]
    if isinstance(memory, str):
        lines.append(f"no training step can be followed, so its memory is not known: {memory}")
    else:
        lines.append(
            f"a training step of this input with AdamW: {memory.peak / 2**20:.1f} MiB at its peak, "
            f"{memory.activations / 2**20:.1f} MiB of it activations"
        )
    if summary.shared:
        lines.append(f"one tensor: {_some([' = '.join(names) for names in summary.shared])}")
    parameters = {row.name: row.parameters for row in summary.modules}
    unused = [
        f"{name} ({parameters[name]:,} parameters)" for name in summary.unused if parameters[name]
    ]
    if unused:
        lines.append(f"not used in evaluation: {_some(unused)}")
    if idle := len(summary.unused) - len(unused):
        lines.append(f"{idle} more are not called, and have no parameters (--json names them)")
    if summary.ran:
        lines.append(
            "the model ran on random values, as it reads some or has lazy layers: another input may differ"
        )
    return ["", *lines]


def _some(names: list[str]) -> str:
    more = len(names) - _NAMED
    return ", ".join(names[:_NAMED]) + (f" and {more} more" if more > 0 else "")
