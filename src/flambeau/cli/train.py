"""`flambeau train`: turns the flags of trainer/settings/settings.py into a trained model in a run folder."""

import argparse
import contextlib
import os
import shlex
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flambeau.cli.flags_from_settings import add_flags, flag_of
from flambeau.cli.launch import number_of_procs
from flambeau.cli.table import print_json
from flambeau.errors import InputError
from flambeau.optional_packages import large_import
from flambeau.parallel.preemption import EXIT_CODE, FLAG, Preempted
from flambeau.provenance import ask_for_config
from flambeau.run.folder.store_run import folder_and_mirror, in_store
from flambeau.run.options.portable_bits import hold, hold_for
from flambeau.sandbox.inside_trial import folder_for_run
from flambeau.sandbox.keep_off_files import outside
from flambeau.terminal import print_text, say
from flambeau.trainer.settings.default_folder import default_folder, given_settings
from flambeau.trainer.settings.settings import FIELDS, Settings
from flambeau.trainer.settings.stored_settings import (
    canonical,
    overridden,
    read_config,
    with_preset,
)

if TYPE_CHECKING:
    from flambeau.recipes.training.lr_range import LRCurve

HELP = "train an image classifier; the same command again continues its run"


def add_arguments(parser: argparse.ArgumentParser, *, chinese: bool = False) -> None:
    add_flags(parser, chinese=chinese)


def run(arguments: argparse.Namespace) -> int:
    if arguments.local_rank is not None:
        os.environ.setdefault("LOCAL_RANK", str(arguments.local_rank))
    # cuBLAS reads it when CUDA starts, as when a device is looked up: see recipes/setup/determinism.py.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    if "RANK" in os.environ:
        # Torch's sockets print warnings on lost peers and unknown hosts; the watchdog reports what matters.
        os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if arguments.replay_step is not None:
        return _replay(arguments, _flags(arguments))
    _check_trial(arguments)
    if arguments.out == "":
        raise InputError("--out is empty; name a folder")
    given = with_preset(given_settings_of(arguments))
    folder, mirror = folder_and_mirror(arguments.out or "", given.get("mirror"))
    if mirror is not None:
        given["mirror"] = mirror
    settings = canonical(Settings(**given))
    hold(settings.portable_bits)
    if arguments.procs is not None and (procs := _procs(arguments.procs)) > 1:
        return _launch(arguments, procs)
    shown = given_settings(settings, given)
    folder = folder_for_run(default_folder(settings, shown) if arguments.out is None else folder)
    if not arguments.fresh:
        hold_for(folder)
    FLAG.install(run, is_command=True)  # before the seconds that torch takes to load
    try:
        with large_import():
            from flambeau.trainer.start import ProgressOptions, start

        with _event_listener(arguments.json_lines, folder) as listener:
            was_finished = start(
                settings,
                shown,
                folder,
                say=say,
                fresh=arguments.fresh,
                dry_run=arguments.dry_run,
                find_lr=_draw_curve(arguments.find_lr, listener),
                trust=arguments.trust,
                progress=ProgressOptions(listener=listener),
            )
            if not (arguments.dry_run or arguments.find_lr):
                _report(folder, already=was_finished, listener=listener)
        return 0
    finally:
        FLAG.restore(run)


def _flags(arguments: argparse.Namespace) -> dict[str, Any]:
    return {name: getattr(arguments, name) for name in FIELDS if hasattr(arguments, name)}


def given_settings_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The settings of a command line of `train`, with those of its --config."""
    given = _flags(arguments)
    if arguments.config is None:
        return given
    return _with_file(arguments.config, given, trust=arguments.trust)


def trial_outputs(arguments: argparse.Namespace) -> list[Path] | None:
    """Files that a trial writes; None for a training."""
    if arguments.find_lr:
        return [Path(arguments.find_lr)]
    return [] if arguments.dry_run or arguments.replay_step else None


def _check_trial(arguments: argparse.Namespace) -> None:
    """Refuse flags that contradict a trial."""
    trials = [flag_of(name) for name in ("dry_run", "find_lr") if getattr(arguments, name)]
    if len(trials) > 1:
        raise InputError("--dry-run and --find-lr are two trials; leave one of them out")
    if arguments.find_lr is not None:
        from flambeau.trainer.evaluation.predictions_file import refuse_existing

        refuse_existing(Path(arguments.find_lr), suffixes=(".svg",), force=False, remedy="")


def _draw_curve(
    file: str | None, listener: Callable[[Mapping[str, Any]], None] | None
) -> "Callable[[LRCurve], None] | None":
    """Draws the curve of a range test and prints the suggested rate."""
    if file is None:
        return None

    def draw(curve: "LRCurve") -> None:
        from flambeau.recipes.checkpoints.atomic_checkpoint import write_file
        from flambeau.trainer.find_lr import svg_of_rates

        write_file(outside(Path(file)), svg_of_rates(curve).encode())
        rates, best = curve.rates, curve.suggested
        tried = f"{len(rates)} steps"
        if rates:
            tried += f" with rates from {rates[0]:.2g} to {rates[-1]:.2g}"
        if best is None:
            print_text(f"in {tried} the loss has hardly fallen: there is no rate to propose")
        else:
            print_text(
                f"in {tried} the loss was lowest around {2 * best:.2g}; half of it: --lr {best:.2g}"
            )
        print_text(f"curve: {file}")
        if listener is not None:
            listener(
                {
                    "event": "find_lr",
                    "file": file,
                    "suggested": best,
                    "rates": rates,
                    "losses": curve.losses,
                }
            )

    return draw


def _with_file(path: str, given: Mapping[str, Any], *, trust: bool) -> dict[str, Any]:
    """The settings of a file, overridden by those of the command line."""
    from_file = read_config(Path(path))
    ask_for_config(Path(path), from_file, given, trust=trust, say=say)
    return overridden(from_file, given)


@contextlib.contextmanager
def _event_listener(
    wanted: bool, folder: Path, /
) -> Iterator[Callable[[Mapping[str, Any]], None] | None]:
    """Prints events on standard output; everything else goes to standard error meanwhile."""
    if not wanted:
        yield None
        return
    output = sys.stdout
    is_read = True

    def listener(event: Mapping[str, Any]) -> None:
        nonlocal is_read
        if not is_read:
            return
        try:
            print_json([event], file=output)
        except BrokenPipeError:
            is_read = False
            os.dup2(os.open(os.devnull, os.O_WRONLY), output.fileno())
            say("nobody reads standard output any more; the training continues")

    with contextlib.redirect_stdout(sys.stderr):
        try:
            yield listener
        except Preempted as stop:
            if os.environ.get("RANK", "0") == "0":
                listener({"event": "stopped", "folder": str(folder), "exit_code": stop.code})
            raise


def _procs(text: str) -> int:
    """The number of processes that --procs requests."""
    if "RANK" in os.environ:
        raise InputError(
            "--procs starts processes itself; leave it out under torchrun or `flambeau launch`"
        )
    return number_of_procs(text)


def _launch(arguments: argparse.Namespace, procs: int) -> int:
    """Run this command, without --procs, in several processes on this machine."""
    from flambeau.parallel.launcher.job_spec import JobSpec
    from flambeau.parallel.launcher.launch import launch
    from flambeau.run.folder.events_log import note_lost_rank

    kept = []
    skip = False
    for word in arguments.words:
        if not skip and word != "--procs" and not word.startswith("--procs="):
            kept.append(word)
        skip = word == "--procs"
    command = [sys.executable, "-m", "flambeau", *kept]
    code = launch(JobSpec(command=command, procs=procs), say=say, note_lost_rank=note_lost_rank)
    if arguments.json_lines and code not in (0, 2, EXIT_CODE):  # the first process has reported 2
        why = "a process has ended; standard error says why"
        print_json([{"event": "error", "message": why, "exit_code": code}])
    return code


def _replay(arguments: argparse.Namespace, given: Mapping[str, Any]) -> int:
    others = [
        f
        for f in ("out", "config", "fresh", "dry_run", "find_lr", "json_lines")
        if getattr(arguments, f)
    ]
    if given or others:
        flag = flag_of([*given, *others][0])
        raise InputError(f"--replay-step takes its settings from the run; leave {flag} out")
    hold_for(Path(arguments.replay_step).parent)
    from flambeau.trainer.replay_nan_step import replay_nan_step

    return replay_nan_step(Path(arguments.replay_step), trust=arguments.trust, say=say)


def _report(
    folder: Path, *, already: bool, listener: Callable[[Mapping[str, Any]], None] | None
) -> None:
    """Print where the run ended, and what to do next, in the first process."""
    from flambeau.parallel.ranks import join_ranks
    from flambeau.report.evaluated import evaluated
    from flambeau.run.folder.json_file import json_table
    from flambeau.run.folder.published_weights import published
    from flambeau.run.folder.run_folder import RunFolder

    if not join_ranks().is_first:
        return
    run_folder = RunFolder(folder)
    result = published(run_folder)
    assert result is not None
    embedded = Path(__file__).parents[1] / "data" / "embedded" / "fashion_mnist_val.rec"
    which = {"ema": "averaged", "best": "best", "last": "last"}[result.weights]
    figures = ", ".join(
        f"{k} {'nan' if v is None else format(v, '.4f')}" for k, v in result.metrics.items()
    )
    figures = figures or "nothing was evaluated"
    if listener is not None:
        listener(
            {
                "event": "end",
                "folder": str(run_folder.path),
                "file": str(run_folder.weights),
                "weights": result.weights,
                "step": result.step,
                "metrics": result.metrics,
                "already": already,
            }
        )
    evaluation = evaluated(json_table(run_folder.path / "evaluation.json"))
    if evaluation is not None and evaluation.largest_class is not None:
        name, share = evaluation.largest_class
        figures += f"; always {name!r} would be {share:.4f}"
    config = run_folder.read_config() or {}
    shown = in_store(folder, config.get("mirror")) or str(run_folder.path)
    quoted = shlex.quote(shown)  # these lines are copied to a shell
    if already:
        run_folder.tidy()
        print_text(
            f"this run is finished ({figures}); --fresh starts it again, --extend 10ep trains it on,"
        )
        print_text(f"--weights {quoted} --out NEW begins another one from its weights")
    else:
        print_text(f"finished: {figures} ({which} weights, step {result.step})")
    weights = run_folder.weights
    where = weights if weights.exists() else f"{weights.name} is MISSING, see `verify` below"
    print_text(f"run folder: {shown}    weights: {where}")
    print_text(f"next: flambeau predict {quoted} IMAGE...")
    data = "DATA" if "data" in config else shlex.quote(str(embedded))
    print_text(f"      flambeau evaluate {quoted} {data}")
    print_text(f"      flambeau verify {quoted}")
