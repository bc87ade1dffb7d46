"""`flambeau convert`: weights of any file or run into a new file, without running code in it."""

import argparse
from pathlib import Path

from flambeau.cli.table import print_json
from flambeau.terminal import print_text, printable

HELP = "weights of a .pth, .safetensors, run or checkpoint into a new .safetensors or .pth"

_SHOWN = 20  # names in one line


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "source",
        metavar="IN",
        help=".pth .pt .pth.tar .bin .safetensors .npz, an .index.json, or the folder of a run or checkpoint",
    )
    add("out", metavar="OUT", help="NAME.safetensors, or NAME.pth for a plain dict")
    add("--key", metavar="KEY", help="which weights, where there are several")
    add(
        "--dtype",
        choices=("fp32", "fp16", "bf16"),
        help="of all floating tensors (default: as they are)",
    )
    add("--strip", metavar="PREFIX", help="take this off the names too: 'model'")
    add(
        "--drop-objects",
        action="store_true",
        help="take the weights of a file that names other objects (a whole model); they are not made",
    )
    add("--force", action="store_true", help="replace OUT if it exists")
    add("--json", action="store_true", help="one JSON object, for programs")


def run(arguments: argparse.Namespace) -> int:
    from flambeau.weights.readers import DTYPES, open_weights, plain_names
    from flambeau.weights.writer import write_weights

    source, out = Path(arguments.source), Path(arguments.out)
    weights = open_weights(source, key=arguments.key, drop_objects=arguments.drop_objects)
    tensors = plain_names(weights.tensors, arguments.strip)
    written = write_weights(
        tensors,
        out,
        dtype=DTYPES.get(arguments.dtype),
        source=weights.source,
        force=arguments.force,
    )
    if arguments.json:
        facts = {
            "file": str(out),
            "taken": weights.source,
            "also_there": weights.others,
            "left_out": [*weights.dropped, *weights.unlisted, *weights.lost],
            "tensors": written.num_tensors,
            "shared": written.num_shared,
            "bytes": written.size_bytes,
        }
        print_json([facts])
        return 0
    print_text(f"taken: {printable(weights.source)}")
    if weights.others:
        print_text(f"also there: {_first(weights.others)} (--key)")
    if weights.dropped:
        print_text(f"left out, and not run: {_first(weights.dropped)}")
    if weights.unlisted:
        print_text(f"NOT listed by the index, and left out: {_first(weights.unlisted)}")
    if weights.lost:
        print_text(f"no tensor made of: {_first(weights.lost)}")
    # Removing prefixes drops only the counter of AveragedModel.
    gone = ["n_averaged"] * (len(weights.tensors) - len(tensors))
    if gone:
        print_text(f"left out: {gone[0]}, a counter and no weight")
    old = [name for name in weights.tensors if name not in gone]
    renamed = [pair for pair in zip(old, tensors, strict=True) if pair[0] != pair[1]]
    if renamed:
        print_text(
            f"renamed: {len(renamed)} tensors without their prefix, such as "
            f"{printable(' to '.join(renamed[0]))}"
        )
    if written.num_shared:
        how = "in full" if out.suffix == ".safetensors" else "once"
        print_text(
            f"tied: {written.num_shared} tensors are the same as others, and stand there {how}"
        )
    print_text(f"{written.num_tensors} tensors, {written.size_bytes} bytes: {out}")
    return 0


def _first(names: tuple[str, ...]) -> str:
    more = f" and {len(names) - _SHOWN} more" * (len(names) > _SHOWN)
    return printable(", ".join(names[:_SHOWN])) + more
