"""`flambeau verify`: whether a run, packed images or weights are intact, and a resume would be exact."""

import argparse
import itertools
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flambeau.cli.reading_flags import add_data_copy, add_trust, check_at_least
from flambeau.cli.table import print_json
from flambeau.data.stores.address import is_address
from flambeau.errors import InputError
from flambeau.run.folder.store_run import is_run_in_store, run_here
from flambeau.run.options.portable_bits import hold_for
from flambeau.terminal import print_text, printable, say

if TYPE_CHECKING:
    from flambeau.data.pack.verify import Damage, FileReport
    from flambeau.weights.weights_summary import WeightsReport

HELP = "check a run and whether a resume would be exact, an export, packed images, or weights"

_RUN_FILES = (
    "config.toml",
    "dataset.json",
    "environment.json",
    "metrics.jsonl",
    "result.json",
    "checkpoints",
)
_SHOWN = 20  # damaged records, names and tensors of a file; --json has all


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "path",
        metavar="RUN|FILE",
        help="folder of a run or an export, packed images, here or in a store, a folder of images, or "
        "weights: .safetensors .pth",
    )
    data = parser.add_argument_group("packed images")
    data.add_argument("--deep", action="store_true", help="decode every pixel, not headers alone")
    data.add_argument(
        "--salvage", metavar="DST", help="save all good records in a new file of the same format"
    )
    data.add_argument(
        "--workers", type=int, metavar="N", help="threads (default: one for each usable CPU)"
    )
    add_audit_flags(parser)
    parser.add_argument("--json", action="store_true", help="one JSON object per file or folder")


def add_audit_flags(parser: argparse.ArgumentParser) -> None:
    """Of an audit of a run: see docs/en/certify.md."""
    audit = parser.add_argument_group("whether a run is what it says")
    add = audit.add_argument
    add(
        "--replay",
        type=int,
        metavar="N",
        help="train N intervals between kept checkpoints again, chosen at random, in a place of their own, "
        "and compare bit for bit; runs code that the run names, such as --model FILE.py:FUNCTION",
    )
    add(
        "--certificate",
        metavar="FILE",
        help="compare folder and data with the hashes of a file of `flambeau certify`",
    )
    add_data_copy(audit)
    add(
        "--seed",
        type=int,
        metavar="S",
        help="which intervals are chosen (default: a new one each time)",
    )
    add_trust(audit)


def trial_outputs(arguments: argparse.Namespace) -> list[Path] | None:
    """A replay runs the code that the run names, and writes nothing."""
    return [] if arguments.replay else None


def run(arguments: argparse.Namespace) -> int:
    """Print what is damaged, and a summary; 1 if anything is, or a resume would not be exact."""
    audits = arguments.replay is not None or arguments.certificate is not None
    for flag in () if audits else ("data", "seed", "trust"):
        if getattr(arguments, flag) not in (None, False):
            raise InputError(f"--{flag} is for --replay N or --certificate FILE: give one of them")
    if is_address(arguments.path) and not is_run_in_store(arguments.path):
        return _verify_store(arguments)
    path = run_here(arguments.path, say)
    hold_for(path)  # before torch is loaded, as by the next line
    from flambeau.run.folder.run_folder import run_around

    if audits:
        return _audit(path, arguments)
    is_export = (path / "export.json").is_file()
    flags = [flag for flag in ("deep", "salvage", "workers", "json") if getattr(arguments, flag)]
    is_checkpoint = (path / "manifest.json").exists()
    if is_checkpoint or is_export or (path / "config.toml").exists() or _is_no_data(path):
        if flags not in ([], ["json"]):
            raise InputError(f"--{flags[0]} is for packed images, and {path} is no such file")
        kind = "export" if is_export else "checkpoint" if is_checkpoint else "run"
        verify = {"export": _verify_export, "checkpoint": _verify_checkpoint, "run": _verify_run}[
            kind
        ]
        lines, good = verify(path)
        if arguments.json:
            print_json(
                [{"folder": str(path), "kind": kind, "good": good, "lines": lines}], readable=True
            )
        else:
            for line in lines:
                print_text(line)
        return 0 if good else 1
    if path.name in _RUN_FILES and path.exists() and (run := run_around(path)) is not None:
        raise InputError(
            f"{path} is a part of the run {run}\nCheck all of it: flambeau verify {run}"
        )
    return _verify_file(path, flags, arguments)


def _audit(path: Path, arguments: argparse.Namespace) -> int:
    check_at_least(arguments, replay=1, seed=0)
    for flag in ("deep", "salvage", "workers"):
        if getattr(arguments, flag):
            raise InputError(
                f"--{flag} is for packed images, and --replay and --certificate for a run"
            )
    from flambeau.compare.audit import AuditOptions, audit

    options = AuditOptions(
        replays=arguments.replay or 0,
        seed=secrets.randbelow(2**32) if arguments.seed is None else arguments.seed,
        certificate=None if arguments.certificate is None else Path(arguments.certificate),
        data=arguments.data,
        trust=arguments.trust,
    )
    result = audit(path, options, say=say)
    if arguments.json:
        facts = {"folder": str(path), "kind": "audit", "seed": options.seed, **result.as_json()}
        print_json([facts], readable=True)
    else:
        for line in result.lines:
            print_text(printable(line))
    return 0 if result.good else 1


def _verify_file(path: Path, flags: list[str], arguments: argparse.Namespace) -> int:
    if path.is_file() or path.is_symlink():
        from flambeau.weights.weights_summary import is_weights, report_weights

        if is_weights(path):
            if flags not in ([], ["json"]):
                what = f"{path} holds weights or is damaged"
                raise InputError(f"--{flags[0]} is for packed images, and {what}")
            report = report_weights(path)
            if arguments.json:
                print_json([_weights_facts(report)])  # ASCII: names may hold anything
            else:
                print_text("\n".join(map(printable, _weights_lines(report))))
            return 0 if report.good else 1
    return _verify_data(path, arguments)


def _weights_lines(report: "WeightsReport") -> Iterator[str]:
    yield from (f"{report.path}, DAMAGED: {what}" for what in report.damaged[:_SHOWN])
    if report.other:
        yield f"{report.path}, NOT READ: this is {report.other}"
    yield from (f"not read here: {what}" for what in report.not_read[:_SHOWN])
    yield from (f"would run or import: {name}" for name in report.names[:_SHOWN])
    if len(report.names) > _SHOWN:
        yield f"... and {len(report.names) - _SHOWN} more names"
    for name, (nan, infinite) in list(report.not_finite.items())[:_SHOWN]:
        yield f"{name}: {nan} NaN, {infinite} infinite"
    if len(report.not_finite) > _SHOWN:
        yield f"... and {len(report.not_finite) - _SHOWN} more tensors that are not finite"
    is_named = report.path.suffix == ".safetensors"
    is_one = report.container == "safetensors"
    if report.num_tensors and is_named != is_one:
        kind = "a safetensors file" if is_one else "a pickle, and no safetensors file"
        yield f"this is {kind}, whatever its name says: rename it, as others go by the name"
    size = f"{report.num_tensors} tensors, {report.num_bytes} bytes ({report.container})"
    yield f"{report.path}: {size}, {_verdict(report)}"


def _verdict(report: "WeightsReport") -> str:
    if report.damaged or report.other:
        return "DAMAGED" if report.damaged else "NOT READ"
    if report.names:
        takes = "`flambeau convert --drop-objects` takes the weights out"
        if report.container == "TorchScript":
            takes = f"a TorchScript program, which torch.jit.load reads; {takes}"
        return (
            f"NOT safe to unpickle: {takes if report.convertible else 'no weights in it by name'}"
        )
    no_sums = "no checksums in this file: changed bytes inside tensors cannot be seen"
    return _whole(report) if report.checksums else f"{_whole(report)} ({no_sums})"


def _whole(report: "WeightsReport") -> str:
    if report.container == "safetensors":
        return "whole, runs no code"
    if report.weights_only:
        return "whole, safe to load with weights_only=True"
    if not report.convertible:
        return "whole, runs no code: no weights in it by name"
    how = "convert --drop-objects` reads the rest" if report.not_read else "convert` reads it"
    other = "" if report.container == "npz" else ", torch.load(weights_only=True) does not"
    return f"whole, runs no code: `flambeau {how}{other}"


def _weights_facts(report: "WeightsReport") -> dict[str, Any]:
    return {
        "file": str(report.path),
        "format": report.container,
        "tensors": report.num_tensors,
        "bytes": report.num_bytes,
        "damaged": report.damaged,
        "other": report.other,
        "checksums": report.checksums,
        "not_read": report.not_read,
        "would_run": report.names,
        "weights_only": report.weights_only,
        "not_finite": {
            name: {"nan": nan, "infinite": infinite}
            for name, (nan, infinite) in report.not_finite.items()
        },
        "good": report.good,
    }


def _is_no_data(path: Path) -> bool:
    """Whether it can only be a run folder, if a damaged or misspelt one."""
    from flambeau.data.sources.folder import class_folders
    from flambeau.data.sources.path_format import kind_of, shards_in

    if not path.exists() and not path.suffix and not path.is_symlink():
        what = "the folder of a run, packed images, or a file of weights"
        raise InputError(
            f"{path} does not exist\nGive {what}; a relative path starts at {Path.cwd()}"
        )
    if not path.exists():
        return False
    if (path / "checkpoints").is_dir() and (path / "environment.json").is_file():
        return True
    return path.is_dir() and not (kind_of(path) or class_folders(path) or shards_in(path))


def _verify_checkpoint(path: Path) -> tuple[list[str], bool]:
    """Lines on a checkpoint, and whether it is whole; so do the next two."""
    from flambeau.recipes.checkpoints.atomic_checkpoint import CheckpointDamaged, verify_checkpoint

    try:
        meta = verify_checkpoint(path)
    except CheckpointDamaged as error:
        return [str(error)], False
    return [f"{path}: whole, step {meta['step']}" if "step" in meta else f"{path}: whole"], True


def _verify_export(path: Path) -> tuple[list[str], bool]:
    from flambeau.exports.load_export import verify_export

    report = verify_export(path)
    if report.wrong:
        return list(map(printable, report.wrong)), False
    lines = [
        f"{path}: whole: its bytes are those of its own list; where they come from is not known"
    ]
    if report.is_code:
        lines.append(f"{report.file} is a program for this kind of processor: it was not loaded")
    return lines, True


def _verify_run(path: Path) -> tuple[list[str], bool]:
    from flambeau.trainer.verify_run import verify_run

    report = verify_run(path)
    return list(report.lines), report.good


def _verify_data(path: Path, arguments: argparse.Namespace) -> int:
    from flambeau.data.pack.verify import check_salvage, packed_files, verify_file
    from flambeau.recipes.setup.environment import usable_cpus

    check_at_least(arguments, workers=1)
    workers = arguments.workers or usable_cpus()
    files = packed_files(path)
    salvage = None if arguments.salvage is None else Path(arguments.salvage)
    if salvage is not None:
        if len(files) > 1:
            raise InputError(f"--salvage takes one file at a time; {path} holds {len(files)}")
        check_salvage(*files[0], salvage)
    reports = []
    for file, kind in files:
        say = _shown(file, arguments)
        report = verify_file(
            file, kind, deep=arguments.deep, workers=workers, say=say, salvage=salvage
        )
        reports.append(report)
        _print_report(report, arguments)
    if salvage is not None and not arguments.json:
        saved = f"they are in {salvage}" if reports[0].saved else "nothing was saved"
        print_text(saved)
    return 1 if any(report.damaged or report.not_read for report in reports) else 0


def _verify_store(arguments: argparse.Namespace) -> int:
    from flambeau.data.pack.verify_store import verify_shard
    from flambeau.data.sources.open_store import indexed_shards
    from flambeau.recipes.setup.environment import usable_cpus

    check_at_least(arguments, workers=1)
    if arguments.salvage is not None:
        raise InputError(
            f"--salvage takes a file of a disk, and {arguments.path} is in a store: copy it first"
        )
    reports = []
    for shard in indexed_shards(arguments.path):
        report = verify_shard(
            shard,
            deep=arguments.deep,
            workers=arguments.workers or usable_cpus(),
            say=_shown(shard.address, arguments),
        )
        reports.append(report)
        _print_report(report, arguments)
    return 1 if any(report.damaged or report.not_read for report in reports) else 0


def _shown(file: Path | str, arguments: argparse.Namespace) -> "Callable[[Damage], None]":
    """What prints the first damages of a file."""
    numbers = itertools.count()

    def say(damage: "Damage") -> None:
        if not arguments.json and next(numbers) < _SHOWN:
            where = "" if damage.offset is None else f", byte {damage.offset}"
            print_text(printable(f"{file}, {damage.record}{where}: {damage.what}"))

    return say


def _print_report(report: "FileReport", arguments: argparse.Namespace) -> None:
    if arguments.json:
        print_json([_facts(report, arguments)], readable=True)
    else:
        print_text(_summary(report, arguments.deep))


def _summary(report: "FileReport", deep: bool) -> str:
    how = ["pixels decoded" if deep else "headers read"]
    if report.checksums:
        how += ["compared with what was packed"]
    elif not report.format_checksums and report.kind != "folder":
        how += ["no checksums in this format"]
    if not report.damaged and not report.not_read:
        whole = f"{report.path}: {report.good} images, all whole ({', '.join(how)})"
        return "; ".join([whole, *report.absent])
    verdicts = (("DAMAGED", report.damaged), ("NOT READ", report.not_read))
    text = " and ".join(
        f"{verdict} in {len(damages)} place{'s' * (len(damages) > 1)}"
        for verdict, damages in verdicts
        if damages
    )
    if len(report.damaged) + len(report.not_read) > _SHOWN:
        text += f", of which the first {_SHOWN} are shown (--json lists all)"
    return f"{report.path}: {text}; {report.good} images are good"


def _facts(report: "FileReport", arguments: argparse.Namespace) -> dict[str, Any]:
    return {
        "file": str(report.path),
        "format": report.kind,
        "good": report.good,
        "damaged": [damage._asdict() for damage in report.damaged],
        "not_read": [damage._asdict() for damage in report.not_read],
        "decoded": arguments.deep,
        "checksums": report.checksums,
        "own_checksums": report.format_checksums,
        "absent": report.absent,
        "salvaged": arguments.salvage if report.saved else None,
    }
