"""The flags of `flambeau train`: one per setting, below headings, with their help in two languages."""

import argparse
import functools
import re
import shutil
import sys
import unicodedata
from collections.abc import Callable
from typing import Any

from flambeau.errors import InputError
from flambeau.train.settings import chinese_help
from flambeau.train.settings.chinese_help import HEADINGS
from flambeau.train.settings.field_checks import allowed_types, parse_batch_size
from flambeau.train.settings.settings import FIELDS

Texts = Callable[[str], str]
"""Takes the name of a flag; gives its help."""

_HEADINGS = {"main": "what matters first"}
_IMPORTANT = (
    "model", "epochs", "batch_size", "lr", "image_size", "pretrained", "optimizer", "schedule", "augment",
    "seed",
)  # fmt: skip
# What belongs to the command and not to the run: its heading, what the value is called, the help.
_OWN_FLAGS: dict[str, tuple[str, str | None, str]] = {
    "out": ("main", "DIR", "the run folder (default: runs/NAME, and a hash if flags are given)"),
    "config": ("run folder", "FILE", "settings from a TOML file; flags win over it"),
    "fresh": ("run folder", None, "start again; an existing run is renamed, not deleted"),
    "dry_run": (
        "run folder",
        None,
        "train for a few steps, say what they cost and how long the run would take, and leave nothing",
    ),
    "find_lr": (
        "run folder",
        "FILE.svg",
        "train for up to 100 steps with a rising learning rate, draw their losses, say which one is best, "
        "and leave nothing else",
    ),
    "trust": (
        "run folder",
        None,
        "run code that the folder of the run or of its teacher names (FILE.py:FUNCTION) and this command "
        "does not, also where nothing shows that you made that folder here; read that code first",
    ),
    "replay_step": (
        "run folder",
        "FILE",
        "run the step again that stopped a run; nothing is written",
    ),
    "json_lines": (
        "run folder",
        None,
        "print what happens as one JSON object per line, and nothing else, on standard output",
    ),
    "procs": (
        "processes",
        "N|auto",
        "train on N processes of this machine; auto starts one for each GPU (default: 1)",
    ),
}


def add_flags(parser: argparse.ArgumentParser, *, chinese: bool) -> None:
    """One flag per setting below its heading, the important ones first, and those of the command.

    Args:
        parser: of `flambeau train`.
        chinese: the help is in Chinese.
    """
    texts: Texts = _chinese if chinese else _english
    parser.usage = f"{parser.prog} [DATA] [--out DIR] [--SETTING VALUE ...]"
    parser.add_argument("--zh", action="help", help="this help in Chinese")
    if chinese:
        _translate(parser)
    titles = dict.fromkeys(["main", *(field.metadata["group"] for field in FIELDS.values())])
    groups = {
        title: parser.add_argument_group(
            HEADINGS[title] if chinese else _HEADINGS.get(title, title)
        )
        for title in titles
    }
    _add_setting(groups["main"], "data", texts)
    _add_own_flag(groups["main"], "out", texts)
    for name in _IMPORTANT:
        _add_setting(groups["main"], name, texts)
    for name, field in FIELDS.items():
        if name not in ("data", *_IMPORTANT):
            _add_setting(groups[field.metadata["group"]], name, texts)
    for name, (title, _, _) in _OWN_FLAGS.items():
        if name != "out":
            _add_own_flag(groups[title], name, texts)
    # What launchers before torchrun pass to each process, in the two spellings that they had.
    parser.add_argument(
        "--local-rank", "--local_rank", type=int, default=None, help=argparse.SUPPRESS
    )


def _add_own_flag(group: argparse._ArgumentGroup, name: str, texts: Texts) -> None:
    _, metavar, _ = _OWN_FLAGS[name]
    text = texts(name)
    if metavar is None:
        group.add_argument(flag_of(name), action="store_true", help=text)
    else:
        group.add_argument(flag_of(name), metavar=metavar, help=text)


def _add_setting(group: argparse._ArgumentGroup, name: str, texts: Texts) -> None:
    """The flag of a setting; it appears in the namespace only if it is given."""
    field = FIELDS[name]
    text, choices = texts(name), field.metadata["choices"]
    kinds = allowed_types(field)
    if name == "data":
        group.add_argument("data", nargs="?", default=argparse.SUPPRESS, metavar="DATA", help=text)
    elif kinds == (bool,):
        group.add_argument(
            flag_of(name),
            action=argparse.BooleanOptionalAction,
            default=argparse.SUPPRESS,
            help=text,
        )
    else:
        metavar = "{" + ",".join(choices) + "}" if choices else _metavar(name, kinds)
        bare = field.metadata["bare"]
        group.add_argument(
            flag_of(name),
            type=functools.partial(_read, name, kinds),
            nargs=None if bare is None else "?",
            const=bare,
            default=argparse.SUPPRESS,
            metavar=metavar,
            help=text,
        )


def _read(name: str, kinds: tuple[type, ...], text: str) -> Any:
    """The value of a flag: a number, or words instead of one."""
    kind = kinds[0]
    try:
        return kind(text)
    except ValueError:
        if str in kinds:
            try:
                parse_batch_size(text)  # the only one that takes both
            except InputError as error:
                raise argparse.ArgumentTypeError(f"{error}".removeprefix("batch_size ")) from None
            return text
        what = {int: "a whole number", float: "a number"}[kind]
        hint = "; part of one is --duration, such as 1.5ep" if name == "epochs" else ""
        raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}{hint}") from None


def _english(name: str) -> str:
    if name in _OWN_FLAGS:
        return _OWN_FLAGS[name][2]
    field = FIELDS[name]
    default = _default(name, field.metadata["auto"], yes="yes")
    return str(field.metadata["help"]) + (f" (default: {default})" if default else "")


def _chinese(name: str) -> str:
    if name in _OWN_FLAGS:
        return _wrapped(chinese_help.FLAGS[name])
    meaning, auto = chinese_help.SETTINGS[name]
    default = _default(name, auto, yes=chinese_help.YES)
    return _wrapped(meaning + (f"（{chinese_help.DEFAULT}{default}）" if default else ""))


def _default(name: str, auto: str, *, yes: str) -> str:
    """What is taken where nothing is given, in words; '' where that is nothing."""
    default = FIELDS[name].default
    if auto:
        return auto
    if default is True:
        return yes
    return "" if default is None or default is False else str(default).replace("%", "%%")


def _translate(parser: argparse.ArgumentParser) -> None:
    """What argparse itself writes.

    Raises:
        InputError: standard output has no Chinese letters.
    """
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        chinese_help.DESCRIPTION.encode(encoding)
    except UnicodeEncodeError as error:
        raise InputError(
            f"standard output is in {encoding}, which has no Chinese letters: set PYTHONUTF8=1, or leave "
            "--zh out"
        ) from error
    parser.description = chinese_help.DESCRIPTION
    parser.formatter_class = argparse.RawTextHelpFormatter  # it would break lines at spaces alone
    parser._optionals.title = chinese_help.OPTIONS
    for action, text in zip(
        parser._actions, (chinese_help.HELP, chinese_help.IN_CHINESE), strict=True
    ):
        action.help = text


def _wrapped(text: str) -> str:
    """In lines that fit beside the flags of a help; a Chinese letter takes two columns."""
    room, lines, used = max(20, shutil.get_terminal_size().columns - 27), [""], 0
    # Words of other languages stay whole, and no line begins with a comma.
    for part in re.findall(r"（?(?:[!-~]+|.)[，。；：、）]*", text.replace("%%", "%")):
        width = sum(2 if unicodedata.east_asian_width(c) in "WF" else 1 for c in part)
        if used + width > room:
            lines.append("")
            used = 0
        lines[-1] += part
        used += width
    return "\n".join(line.strip() for line in lines).replace("%", "%%")


def flag_of(name: str) -> str:
    """As it is written on the command line."""
    return "DATA" if name == "data" else "--" + name.replace("_", "-")


def _metavar(name: str, kinds: tuple[type, ...]) -> str:
    if name in ("duration", "warmup", "checkpoint_every"):
        return "LENGTH"
    if name == "batch_size":
        return "N|auto[:N]"
    return {int: "N", float: "X", str: "NAME"}[kinds[0]]
