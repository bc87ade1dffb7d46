"""The command `flambeau`: finds the subcommand, and turns a user's mistake into a message and exit code 2."""

import argparse
import contextlib
import gc
import importlib
import io
import os
import re
import shlex
import signal
import stat
import sys
import threading
from collections.abc import Iterator, MutableMapping, Sequence
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from flambeau.cli.other_words import FLAG_OF, FOR_TRAIN
from flambeau.cli.table import print_json
from flambeau.errors import (
    InputError,
    NothingFound,
    WorkerLost,
    disk_errno,
    disk_failure,
    nearest,
    shortage,
)
from flambeau.parallel.preemption import INTERRUPTED
from flambeau.provenance import TRUST, UntrustedCode
from flambeau.terminal import say
from flambeau.version import __version__

# In the order of the help.
VERBS = (
    "train", "sweep", "launch", "doctor", "tune", "lint", "runs", "report", "diff", "models", "inspect",
    "predict", "evaluate", "export", "soup", "features", "check", "pack", "convert", "verify", "certify",
    "how", "recipes", "env", "gpus", "completion",
)  # fmt: skip
# Those that compute in this process; others measure, or start programs of the user's.
_COMPUTING = "train", "predict", "evaluate", "soup", "features"
# For the help of each command, below those of all.
_EXIT_CODES = {
    "train": {
        1: "a data worker was lost: the same command goes on; --replay-step: the step was not bad",
        70: "--verify-steps: this machine computes something wrong; continue on another one",
        71: "memory ran out in one of several processes: the same command goes on",
        75: "stopped and saved: the same command goes on",
    },
    "sweep": {
        1: "no trial was trained to its end",
        75: "stopped, and every run saved: the same command goes on",
    },
    "launch": {
        1: "a process has failed; the last line names it",
        70: "--verify-steps: this machine computes something wrong; continue on another one",
        75: "stopped and saved: the same command goes on",
    },
    "check": {1: "images of --drop were found, which --out has not left out"},
    "diff": {0: "they are the same", 1: "they differ"},
    "verify": {0: "all is whole", 1: "something is damaged, differs, or is not read"},
    "how": {1: "no page knows any of the words"},
    "recipes": {1: "`find` has found nothing"},
    "lint": {0: "nothing was found", 1: "something was found"},
    "env": {1: "--selftest: a device computes something wrong"},
}
# Modules of Python that Windows does not have.
_UNIX_ALONE = "fcntl", "pwd", "resource", "termios"
OF_ALL = {0: "done", 2: "an error that you can fix; standard error says how", 130: "interrupted"}
_OF_TRAIN_IN_CHINESE = {
    0: "完成",
    1: "数据加载进程丢失；--replay-step：该步没有异常",
    2: "可以自行改正的错误；标准错误中有说明",
    70: "--verify-steps：这台机器计算出错；请换一台机器继续",
    71: "多个进程之一内存不足：用同一命令继续",
    75: "已停止并保存：用同一命令继续",
    130: "被中断",
}
_MODULES = {"inspect": "inspect_model"}  # inspect is a module of the standard library


class _Parser(argparse.ArgumentParser):
    """Says in two lines what is wrong, and which flag or command was probably meant."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """A word such as -1ep after a flag is its value; one that may be left out may stand behind flags."""
        words = list(args or ())
        if not any(
            action.nargs in (argparse.PARSER, argparse.REMAINDER) for action in self._actions
        ):
            known = self._option_string_actions
            for index in range(len(words) - 2, -1, -1):
                flag, value = words[index : index + 2]
                takes_one = flag in known and known[flag].nargs is None
                if takes_one and re.match("-[^-]", value) and value not in known:
                    words[index : index + 2] = [f"{flag}={value}"]
        found, rest = super().parse_known_args(words, namespace)
        for action in self._actions:  # argparse before Python 3.12 leaves it out behind a flag
            is_open = getattr(found, action.dest, action.default) == action.default
            may_stand = not action.option_strings and action.nargs == "?" and is_open
            if may_stand and rest and not rest[0].startswith("-"):
                setattr(found, action.dest, rest.pop(0))
        return found, rest

    def error(self, message: str) -> NoReturn:
        message = message.replace("invalid int value:", "must be a whole number, got")
        message = message.replace("invalid float value:", "must be a number, got")
        if lacking := re.fullmatch("argument (.+): expected one argument", message):
            message = f"{lacking[1]} needs a value; {self.prog} --help says which"
        elif wrong := re.fullmatch("argument (.+): ignored explicit argument (.+)", message):
            message = f"{wrong[1]} takes no value, got {wrong[2]}"
        elif missing := re.fullmatch("the following arguments are required: (.+)", message):
            message = f"{missing[1]} is missing; see {self.prog} --help"
        message = message.removeprefix("argument ")
        flag, _, what = message.partition(": must be ")
        if what and (digits := re.search("[0-9]{4301,}", what)):  # which int() refuses
            message = f"{flag}: a number of {len(digits[0])} digits is too large"
        raise InputError(message)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; 0, 1 if a check found something, 2 for wrong input, 75 for 'start me again'."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if arguments is None:
        _open_closed_streams()
    try:
        with _ended_by_ctrl_c():
            return _dispatch(words, is_process=arguments is None)
    except UntrustedCode as error:
        command = shlex.join(["flambeau", *words, "--trust"])
        return _complain(words, str(error).replace(TRUST, command), 2)
    except InputError as error:
        return _complain(words, str(error), 2)
    except (WorkerLost, NothingFound) as error:
        return _complain(words, str(error), 1)
    except KeyboardInterrupt:
        return _complain(words, "interrupted", INTERRUPTED)
    except BrokenPipeError:
        # The reader of a pipe has gone (`| head`).
        with contextlib.suppress(OSError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        if (lacking := shortage(error)) is not None:
            return _complain(words, lacking, 2)
        if (number := disk_errno(error)) is not None:
            return _complain(words, disk_failure(error, number), 2)
        if isinstance(error, ModuleNotFoundError) and error.name in _UNIX_ALONE:
            return _complain(words, _needs_unix(words, error.name), 2)
        _print_error_event(words, f"{type(error).__name__}: {error}", 1)
        raise


def _needs_unix(words: Sequence[str], module: str) -> str:
    return (
        f"this needs Python's module {module}, which Windows does not have\n"
        f"Run it in the Windows Subsystem for Linux: {shlex.join(['flambeau', *words])}"
    )


def _open_closed_streams() -> None:
    """Open what is closed of the standard streams, so that no file of the user's takes their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    sys.stdout = sys.stdout or open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    for stream in (sys.stdout, sys.stderr):  # for what others print: argparse, warnings, tracebacks
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


@contextlib.contextmanager
def _ended_by_ctrl_c() -> Iterator[None]:
    """Ctrl-C while a package is being imported ends the process at once.

    NumPy replaces KeyboardInterrupt there by an ImportError, and torch 2.15 loses it or aborts. Files being
    written survive a kill at any time.
    """
    is_ours = threading.current_thread() is threading.main_thread()
    if not is_ours or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield
        return
    signal.signal(signal.SIGINT, _on_ctrl_c)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGINT) is _on_ctrl_c:  # a run may have set its own
            signal.signal(signal.SIGINT, signal.default_int_handler)


def _on_ctrl_c(_: int, frame: FrameType | None) -> None:
    while frame is not None and frame.f_code is not main.__code__:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            os.write(2, b"flambeau: interrupted\n")  # print is not safe in a signal handler
            os._exit(INTERRUPTED)
        frame = frame.f_back
    raise KeyboardInterrupt


def check(words: Sequence[str]) -> argparse.Namespace:
    """The flags of a command line that is not run; InputError as the command would give.

    `--help` in it is answered.
    """
    return _parse(list(words))


def _dispatch(words: list[str], *, is_process: bool) -> int:
    chosen = _parse(words)
    if chosen.verb is None:
        chosen.parser.print_help()
        return 0
    chosen.words = words
    if is_process:
        gc.freeze()  # and with it what `large_import` imports
        if chosen.verb in _COMPUTING:
            sleep_if_busy(os.environ)
            say_if_little_address_space()
    if is_process and chosen.trial_outputs is not None:
        _protect_files(chosen.trial_outputs(chosen), words)
    exit_code: int = chosen.run(chosen)
    return exit_code


def _protect_files(outputs: Sequence[Path] | None, words: Sequence[str]) -> None:
    """Keep user code that a command only tries from changing the user's files.

    `outputs` are files that the command writes; None if it is no trial.
    """
    if (
        outputs is None or "RANK" in os.environ
    ):  # processes of one job share a folder for their trial
        return
    from flambeau.sandbox.keep_off_files import keep_off_files
    from flambeau.terminal import say

    reason = keep_off_files(outputs)
    if reason and any(".py:" in word for word in words):
        say(f"what your code writes is written: it cannot be held back here ({reason})")


def _parse(words: list[str]) -> argparse.Namespace:
    parser = build_parser(words)
    parser.set_defaults(parser=parser, takes_rest=False)
    verb = next((word for word in words if not word.startswith("-")), None)
    if verb is not None and verb not in VERBS:
        parser.error(f"unknown command {verb!r}{nearest(verb, VERBS)} (flambeau --help lists all)")
    chosen, rest = parser.parse_known_args(words)
    if chosen.takes_rest:
        chosen.rest = rest
    elif rest:
        parser.error(_unknown(rest[0], chosen.parser))
    if verb != "launch":  # what is launched may take what it wants
        for action in chosen.parser._actions:
            given = getattr(chosen, action.dest, None)
            if not action.option_strings:
                _check_path(given if isinstance(given, list) else [given], action)
    return chosen


def _check_path(given: Sequence[object], action: argparse.Action) -> None:
    """Refuse an empty path, which would be the current folder, and a pipe, which would be waited for."""
    if "" in given:
        name = action.metavar or action.dest
        raise InputError(f"{name} is empty: is a variable of the shell not set?")
    for word in given:
        is_pipe = False
        with contextlib.suppress(OSError, ValueError):  # no path index all
            is_pipe = isinstance(word, str) and stat.S_ISFIFO(os.stat(word).st_mode)  # noqa: PTH116
        if is_pipe:
            raise InputError(f"{word} is a pipe, and no file: write it to a file first")


def build_parser(words: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser of the command line.

    With a command in front only its parser is built, in a fifth of the time; `train --zh` makes the help
    Chinese.
    """
    parser = _Parser(
        prog="flambeau",
        description="Train an image classifier, check its run, copy recipes.",
        epilog="'flambeau COMMAND --help' says more. With no data named, train uses a small real data set.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"flambeau {__version__}")
    verbs = parser.add_subparsers(dest="verb", metavar="COMMAND", parser_class=_Parser)
    for name in words[:1] if words and words[0] in VERBS else VERBS:
        verb = importlib.import_module(f"flambeau.cli.{_MODULES.get(name, name)}")
        child = verbs.add_parser(
            name,
            help=verb.HELP,
            description=verb.HELP,
            allow_abbrev=False,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        if name == "train":
            verb.add_arguments(child, chinese="train" in words and "--zh" in words)
        else:
            verb.add_arguments(child)
        child.epilog = "\n\n".join(filter(None, (child.epilog, _exit_code_lines(name, words))))
        child.set_defaults(
            run=verb.run,
            parser=child,
            takes_rest=getattr(verb, "TAKES_REST", False),
            trial_outputs=getattr(verb, "trial_outputs", None),
        )
    return parser


def exit_codes(verb: str) -> dict[int, str]:
    """What each exit code of a command means."""
    return OF_ALL | _EXIT_CODES.get(verb, {})


def _exit_code_lines(verb: str, words: Sequence[str]) -> str:
    """The list of exit codes at the end of a command's help."""
    title = "exit codes"
    meanings = exit_codes(verb)
    if verb == "train" and "--zh" in words:
        title = "退出码"
        meanings = _OF_TRAIN_IN_CHINESE
    return "\n".join([f"{title}:", *(f"  {code:<4} {meanings[code]}" for code in sorted(meanings))])


def _unknown(word: str, parser: argparse.ArgumentParser) -> str:
    flags = [flag for action in parser._actions for flag in action.option_strings]
    if not word.startswith("-"):
        several = " (several runs are given by --with)" if "--with" in flags else ""
        return f"unexpected argument {word!r}{several}; see {parser.prog} --help"
    name = word.split("=")[0]
    theirs = name.lower().replace("_", "-")
    if parser.prog.endswith(" train") and theirs in FOR_TRAIN:
        return f"unknown flag {name}: {FOR_TRAIN[theirs]}"
    meant = FLAG_OF.get(theirs, "")
    guess = (
        f"; did you mean '{meant}'?" if meant.partition(" ")[0] in flags else nearest(name, flags)
    )
    return f"unknown flag {name}{guess} ({parser.prog} --help lists all)"


def _complain(words: Sequence[str], message: str, exit_code: int) -> int:
    if _is_for_programs(words):
        error, _, hint = message.partition("\n")
        if error.endswith(":"):  # what follows says what happened, not what to do
            error = message
            hint = ""
        hint = hint or " ".join(["flambeau", *(words[:1] if words[0] in VERBS else ()), "--help"])
        print_json([{"error": error, "hint": hint, "exit_code": exit_code}], file=sys.stderr)
    else:
        say(f"flambeau: {message}")
    _print_error_event(words, message, exit_code)
    return exit_code


def _is_for_programs(words: Sequence[str]) -> bool:
    """Whether `--json` is a flag of the command, not of a script that it starts."""
    own = words[: words.index("--")] if "--" in words else words
    return words[:1] != ["launch"] and "--json" in own


def _print_error_event(words: Sequence[str], message: str, exit_code: int) -> None:
    """The last line of `flambeau train --json-lines`, by the first process only."""
    if "--json-lines" in words and os.environ.get("RANK", "0") == "0":
        with contextlib.suppress(OSError):  # the reader has gone
            print_json([{"event": "error", "message": message, "exit_code": exit_code}])


_LOAD = Path("/proc/loadavg")
_PRESSURE = Path("/proc/pressure/cpu")
_CHOSEN_BY_USER = "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME"
_BUSY_LOAD = 0.75  # runnable threads per processor, in the mean of a minute; chosen
_BUSY_WAITS = 20.0  # percent of ten seconds in which something waited for a processor; chosen


def sleep_if_busy(
    environment: MutableMapping[str, str], *, load: Path = _LOAD, pressure: Path = _PRESSURE
) -> None:
    """Set OMP_WAIT_POLICY, which OpenMP reads when torch is loaded, unless the user has chosen how to wait.

    No result depends on it.
    """
    # Waiting threads spin for milliseconds, in which another one could compute where all processors are
    # taken: asleep, an epoch of the embedded data took 0.30 of the time on two busy cores (median of 5
    # rounds, 0.23 to 0.54). On free processors spinning is faster, and stays.
    if not environment.keys().isdisjoint(_CHOSEN_BY_USER):
        return
    if _load_per_cpu(load) >= _BUSY_LOAD and _waits(pressure) >= _BUSY_WAITS:
        environment["OMP_WAIT_POLICY"] = "passive"


# Bytes; `import torch` takes 3.1 GiB (2.14, Linux), a training some 3.8.
_ADDRESSES_OF_TORCH = 4 * 2**30


def say_if_little_address_space() -> None:
    """Name `ulimit -v` before torch is loaded, which aborts silently if that is too little."""
    try:
        import resource
    except ImportError:  # Windows
        return
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    if limit != resource.RLIM_INFINITY and limit < _ADDRESSES_OF_TORCH:
        say(
            f"this process may have {limit / 2**30:.1f} GiB of memory addresses (`ulimit -v`), and torch "
            "alone takes more than 3: if it fails, raise the limit and run the command again"
        )


def _load_per_cpu(file: Path) -> float:
    try:
        return float(file.read_text(encoding="ascii").split()[0]) / (os.cpu_count() or 1)
    except (OSError, ValueError, IndexError):
        return 0.0


def _waits(file: Path) -> float:
    """`some avg10`, in percent."""
    try:
        words = file.read_text(encoding="ascii").split()
        return float(words[1].removeprefix("avg10=")) if words[0] == "some" else 0.0
    except (OSError, ValueError, IndexError):
        return 0.0
