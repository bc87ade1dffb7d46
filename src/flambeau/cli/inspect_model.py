"""`flambeau inspect`: one table of what a model is made of and what it costs."""

import argparse
import contextlib
import dataclasses
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flambeau.cli.reading_flags import add_trust, check_at_least
from flambeau.cli.table import count_text, print_json, print_table
from flambeau.errors import InputError, refusing
from flambeau.sandbox.keep_off_files import outside
from flambeau.terminal import print_text, say
from flambeau.user_code import first_line

if TYPE_CHECKING:
    from torch import nn

    from flambeau.inspection.model_summary import ModelSummary, ModuleSummary
    from flambeau.recipes.memory.memory_budget import MemoryEstimate
    from flambeau.recipes.models.convolution_sizes import Window

HELP = "show what a model is made of: shapes, parameters, operations, memory, receptive fields"

_WITHOUT = {  # which other options each has no use for
    "conv": ("input", "depth", "compile", "graph"),
    "compile": ("depth", "graph"),
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
        "stride 2, padding 3; d2 a dilation, t a transposed one, o1 its output_padding, ceil a pooling with "
        "ceil_mode; again without the input for the next layer",
    )
    parser.add_argument(
        "--graph",
        type=Path,
        metavar="FILE.svg",
        help="draw the modules with the data between them, and autograd's graph with what it keeps",
    )
    parser.add_argument(
        "--force", action="store_true", help="replace the file of --graph if it exists"
    )
    parser.add_argument("--json", action="store_true", help="all of it as one JSON object")
    add_trust(parser)


def trial_outputs(arguments: argparse.Namespace) -> list[Path] | None:
    """Files that are written besides those of the user's code; None if no user code runs."""
    model = arguments.model or ""
    if ".py:" not in model and not Path(model).is_dir():
        return None
    return [] if arguments.graph is None else [arguments.graph]


def run(arguments: argparse.Namespace) -> int:
    _check(arguments)
    if arguments.conv:
        return print_convolutions(arguments.conv, as_json=arguments.json)
    from flambeau.inspection.named_model import named_model

    model, args, kwargs = named_model(
        arguments.model, arguments.input, batch=1, values=False, trust=arguments.trust, say=say
    )
    if arguments.compile:
        return _print_breaks(model, args, kwargs, as_json=arguments.json)
    if arguments.graph is not None:
        return _write_graphs(
            arguments.graph, model, args, kwargs, depth=arguments.depth, as_json=arguments.json
        )
    depth = _DEPTH if arguments.depth is None else arguments.depth
    return _print_summary(model, args, kwargs, depth=depth, as_json=arguments.json)


def _print_summary(
    model: "nn.Module", args: tuple[Any, ...], kwargs: dict[str, Any], *, depth: int, as_json: bool
) -> int:
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
        print_text(line)
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Refuse flags that contradict each other or have no effect."""
    shown = next((name for name in _WITHOUT if getattr(arguments, name)), "")
    for name in _WITHOUT.get(shown, ()):
        if getattr(arguments, name) not in (None, False, []):
            raise InputError(f"--{name} has no effect with --{shown}: leave it out")
    if arguments.force and arguments.graph is None:
        raise InputError("--force has no effect without --graph: leave it out")
    if arguments.conv and arguments.model is not None:
        raise InputError("--conv is without MODEL: it draws one convolution, or several in a row")
    if not arguments.conv and arguments.model is None:
        raise InputError("name a MODEL or a RUN; see flambeau inspect --help")
    if arguments.json and arguments.depth is not None and arguments.graph is None:
        raise InputError("--depth has no effect with --json, which has every module: leave it out")
    check_at_least(arguments, depth=0)
    if arguments.graph is not None:
        from flambeau.trainer.evaluation.predictions_file import refuse_existing

        refuse_existing(
            arguments.graph, suffixes=(".svg",), force=arguments.force, remedy="--force"
        )


def _training_memory(
    model: "nn.Module", args: tuple[Any, ...], kwargs: dict[str, Any]
) -> "MemoryEstimate | str":
    """Of a training step with AdamW, or why it cannot be estimated."""
    from torch import nn
    from torch.nn.parameter import is_lazy

    from flambeau.inspection.watched_forward import with_values
    from flambeau.recipes.memory.memory_budget import estimate_memory

    class Called(nn.Module):
        """Also takes inputs by name."""

        def __init__(self) -> None:
            super().__init__()
            self.model = model.train()

        def forward(self, *args: Any) -> Any:
            *positional, named = args
            return self.model(*positional, **named)

    try:
        with contextlib.redirect_stdout(sys.stderr):
            if any(is_lazy(leaf) for leaf in (*model.parameters(), *model.buffers())):
                model(*with_values(args), **with_values(kwargs))  # gives lazy layers their shapes
            return estimate_memory(Called(), (*args, kwargs))
    except Exception as error:  # such as BatchNorm, which refuses one value per channel
        return first_line(error)


def _print_breaks(
    model: "nn.Module", args: tuple[Any, ...], kwargs: dict[str, Any], *, as_json: bool
) -> int:
    from flambeau.inspection.graph_breaks import graph_breaks

    found = graph_breaks(model, args, kwargs)
    if as_json:
        print_json([dataclasses.asdict(found)])
        return 0
    if not found.breaks:
        print_text(f"one graph of {found.operations} operations, no breaks")
        return 0
    print_text(f"{found.graphs} graphs of {found.operations} operations, broken at:")
    for place in found.breaks:
        print_text(f"{place.file}:{place.line}  {place.code}\n    {place.reason}")
    return 0


def _write_graphs(
    path: Path,
    model: "nn.Module",
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    depth: int | None,
    as_json: bool,
) -> int:
    from flambeau.inspection.graphs.picture import model_graphs, size_text, svg_of_graphs
    from flambeau.recipes.checkpoints.atomic_checkpoint import write_file

    with contextlib.redirect_stdout(sys.stderr):  # what the model itself prints
        graphs = model_graphs(model, args, kwargs, depth=depth)
    write_file(outside(path), svg_of_graphs(graphs).encode())
    if as_json:
        more = {"kept_bytes": graphs.kept_bytes, "file": str(path)}
        print_json([dataclasses.asdict(graphs) | more])
        return 0
    nodes = graphs.autograd.nodes
    leaves = sum(node.leaves for node in nodes)
    operations = sum(node.nodes for node in nodes) - leaves
    print_text(f"{path}: {len(graphs.modules.nodes):,} nodes of modules and data,")
    print_text(
        f"{operations:,} operations of autograd and {leaves:,} leaves in {len(nodes):,} nodes"
    )
    print_text(f"{size_text(graphs.kept_bytes)} kept for a backward pass; the largest:")
    for node in sorted(nodes, key=lambda node: -node.kept_bytes)[:5]:
        if node.kept_bytes:
            where = f" in {node.module}" if node.module and node.module != node.name else ""
            print_text(f"  {size_text(node.kept_bytes):>10}  {node.name or '(model)'}{where}")
    for note in graphs.notes:
        print_text(note)
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


_NUMBERS = {
    "k": "kernel",
    "s": "stride",
    "p": "padding",
    "d": "dilation",
    "o": "output_padding",
}
_WORDS = {"t": "transposed", "ceil": "ceil_mode"}


def print_convolutions(words: list[str], *, as_json: bool) -> int:
    """Print sizes of successive convolutions, and where their windows are; returns the exit code."""
    from flambeau.recipes.models.convolution_sizes import chain, picture

    size, windows = _windows(words)
    with refusing("--conv"):
        stages = chain(size, windows)
    if as_json:
        print_json([{"input": size, "stages": [dataclasses.asdict(stage) for stage in stages]}])
        return 0
    columns = ("window", "input", "output", "unused", "receptive field", "jump")
    sizes = [size, *(stage.size for stage in stages)]
    cells = (
        (
            word,
            str(before),
            str(stage.size),
            str(stage.unused),
            f"{stage.sees:g}",
            f"{stage.jump:g}",
        )
        for word, before, stage in zip(words, sizes, stages, strict=False)
    )
    print_table(columns, cells, right=columns[1:])
    for before, window in zip(sizes, windows, strict=False):
        print_text(f"\n{picture(before, window)}")
    return 0


def _windows(words: list[str]) -> "tuple[int, list[Window]]":
    """The size of the input, and the windows of --conv."""
    from flambeau.recipes.models.convolution_sizes import Window

    size = 0
    windows = []
    for number, word in enumerate(words):
        head, _, parts = word.partition(",") if number == 0 else ("0", "", word)
        given = _arguments(parts)
        if given is None or not re.fullmatch(r"\d{1,6}", head):
            example = "k3,s2,p1 (the input comes from the one before)" if number else "224,k7,s2,p3"
            raise InputError(
                f"--conv {word}: give it as {example}, with d2 for a dilation, t for transposed, "
                "o1 for its output_padding, ceil for a pooling with ceil_mode"
            )
        size = size if number else int(head)
        with refusing(f"--conv {word}"):
            windows.append(Window(**given))
    return size, windows


def _arguments(text: str) -> dict[str, Any] | None:
    """Arguments of Window from text such as k3,s2,p1; None if it is not so written."""
    given: dict[str, Any] = {}
    for part in text.split(","):
        match = re.fullmatch(r"([kspdo])(\d{1,6})", part)
        name = _NUMBERS[match[1]] if match else _WORDS.get(part)
        if name is None or name in given:
            return None
        given[name] = int(match[2]) if match else True
    return given if "kernel" in given else None
