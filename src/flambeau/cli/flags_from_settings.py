"""The flags of `flambeau train`: one per setting, below headings, with their help in two languages."""

import argparse
import functools
import re
import shutil
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from flambeau.data.stores.address import is_address
from flambeau.errors import InputError
from flambeau.provenance import is_run
from flambeau.run.options.option import GROUPS, allowed_types, plain_text, typed
from flambeau.terminal import text_width
from flambeau.trainer.settings.settings import FIELDS, parse_batch_size

Texts = Callable[[str], str]
"""Takes the name of a flag; gives its help."""

_HEADINGS = {"main": "what matters first"}
_IMPORTANT = (
    "model",
    "epochs",
    "batch_size",
    "lr",
    "image_size",
    "pretrained",
    "optimizer",
    "schedule",
    "augment",
    "seed",
)
TARGETS = ("task", "target", "label_separator", "group", "split", "ignore_index")
"""The settings that say which targets of the data are meant, and which images belong together."""
# Flags that are no settings of a run: heading, metavar, help in English and in Chinese.
COMMAND_FLAGS: dict[str, tuple[str, str | None, str, str]] = {
    "out": (
        "main",
        "DIR",
        "run folder, or an address such as s3://bucket/runs/a (default: runs/NAME, plus a hash if flags "
        "are given)",
        "运行目录，或 s3://bucket/runs/a 这样的地址（默认：runs/NAME，给出设置时后面再加一个哈希）",
    ),
    "config": (
        "run folder",
        "FILE",
        "read settings from a TOML file; flags take precedence",
        "从 TOML 文件读取设置；命令行优先",
    ),
    "fresh": (
        "run folder",
        None,
        "start again; an existing run is renamed, not deleted",
        "重新开始；原有的运行改名，不会删除",
    ),
    "dry_run": (
        "run folder",
        None,
        "train for a few steps, report their cost and the estimated duration of the run, and leave "
        "nothing behind",
        "训练几步，报告其开销和整个运行的预计时间，不留下任何东西",
    ),
    "find_lr": (
        "run folder",
        "FILE.svg",
        "learning-rate range test: train for up to 100 steps with a rising learning rate, draw the loss, "
        "suggest a learning rate, and leave nothing else behind",
        "学习率范围测试：用逐步升高的学习率训练至多 100 步，画出损失曲线并建议学习率，此外不留下任何东西",
    ),
    "trust": (
        "run folder",
        None,
        "also run code that the run folder or the folder of its teacher names (FILE.py:FUNCTION) and "
        "this command does not, when nothing shows that you created that folder on this machine; read "
        "that code first",
        "运行目录（或教师模型的目录）中指名、而本命令没有指名的代码（FILE.py:FUNCTION）也执行，"
        "即使没有记录表明该目录是你在本机创建的；请先读一遍那些代码",
    ),
    "replay_step": (
        "run folder",
        "FILE",
        "repeat the step that stopped a run because it was not finite, and write nothing",
        "重新执行因出现非有限值而使运行停止的那一步，不写入任何文件",
    ),
    "json_lines": (
        "run folder",
        None,
        "print every event as one JSON object per line on standard output, and nothing else there",
        "在标准输出上逐行打印事件（JSON 对象），除此之外什么都不打印",
    ),
    "procs": (
        "processes",
        "N|auto",
        "train on N processes of this machine; auto starts one per GPU (default: 1)",
        "在本机的 N 个进程上训练；auto 表示每个 GPU 一个（默认：1）",
    ),
}
_DESCRIPTION = "训练图像分类模型；再次执行同一命令会继续它的运行"
_ARGPARSE_TEXTS = ("选项", "显示帮助", "显示这份中文帮助")
"""The heading and the two lines that argparse itself writes, in Chinese."""


def add_flags(parser: argparse.ArgumentParser, *, chinese: bool) -> None:
    """A flag per setting below its heading, important ones first, and the command's."""
    texts: Texts = _chinese if chinese else _english
    parser.usage = f"{parser.prog} [DATA] [--out DIR] [--SETTING VALUE ...]"
    parser.add_argument("--zh", action="help", help="this help in Chinese")
    if chinese:
        _translate(parser)
    groups = {
        title: parser.add_argument_group(in_chinese if chinese else _HEADINGS.get(title, title))
        for title, in_chinese in GROUPS.items()
    }
    _add_setting(groups["main"], "data", texts)
    _add_command_flag(groups["main"], "out", texts)
    for name in _IMPORTANT:
        _add_setting(groups["main"], name, texts)
    for name, field in FIELDS.items():
        if name not in ("data", *_IMPORTANT):
            _add_setting(groups[field.metadata["group"]], name, texts)
    for name, (title, *_) in COMMAND_FLAGS.items():
        if name != "out":
            _add_command_flag(groups[title], name, texts)
    # Launchers before torchrun pass this to each process, in two spellings.
    parser.add_argument(
        "--local-rank", "--local_rank", type=int, default=None, help=argparse.SUPPRESS
    )


def add_target_flags(group: argparse._ArgumentGroup, names: Sequence[str] = TARGETS) -> None:
    """Settings of DATA's targets, for a command that reads what `train` reads."""
    for name in names:
        _add_setting(group, name, _english)


def given_targets(arguments: argparse.Namespace) -> dict[str, Any]:
    """Those that are given."""
    return {name: getattr(arguments, name) for name in TARGETS if hasattr(arguments, name)}


def _add_command_flag(group: argparse._ArgumentGroup, name: str, texts: Texts) -> None:
    metavar = COMMAND_FLAGS[name][1]
    text = texts(name)
    if metavar is None:
        group.add_argument(flag_of(name), action="store_true", help=text)
    else:
        group.add_argument(flag_of(name), metavar=metavar, help=text)


def _add_setting(group: argparse._ArgumentGroup, name: str, texts: Texts) -> None:
    """The flag of a setting; the namespace has it only if it is given."""
    field = FIELDS[name]
    text = texts(name)
    choices = field.metadata["choices"]
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
    elif name == "teacher":
        group.add_argument(
            "--teacher",
            nargs="+",
            action=_Teachers,
            default=argparse.SUPPRESS,
            metavar="RUN",
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


class _Teachers(argparse.Action):
    """Takes one run or several; a last word that is no run is DATA."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: str | None = None,
    ) -> None:
        *first, last = values
        if (
            first
            and not (is_address(last) or is_run(Path(last)))
            and not hasattr(namespace, "data")
        ):
            namespace.data = last
            values = first
        namespace.teacher = ",".join(values)


def _read(name: str, kinds: tuple[type, ...], text: str) -> Any:
    """The value of a flag: a number, or words instead of one."""
    kind = kinds[0]
    try:
        return typed(FIELDS[name], text) if text.endswith("%") else kind(text)
    except ValueError:
        if str in kinds:
            try:
                parse_batch_size(text)  # the only one that takes both
            except InputError as error:
                raise argparse.ArgumentTypeError(f"{error}".removeprefix("batch_size ")) from None
            return text
        what = {int: "a whole number", float: "a number"}[kind]
        hint = "; part of one is --duration, such as 1.5ep" if name == "epochs" else ""
        if "," in text:
            hint = f"; flambeau sweep --set {name}={text} tries several values"
        raise argparse.ArgumentTypeError(f"must be {what}, got {text!r}{hint}") from None


def _english(name: str) -> str:
    if name in COMMAND_FLAGS:
        return COMMAND_FLAGS[name][2]
    default = _default(name, FIELDS[name].metadata["auto"][0], yes="yes")
    text = plain_text(FIELDS[name].metadata["text"])
    text += f" (default: {default})" if default else ""
    return text.replace("%", "%%")  # argparse formats percent signs


def _chinese(name: str) -> str:
    if name in COMMAND_FLAGS:
        return _wrapped(COMMAND_FLAGS[name][3])
    default = _default(name, FIELDS[name].metadata["auto"][1], yes="是")
    text = plain_text(FIELDS[name].metadata["chinese"])
    text += f"（默认：{default}）" if default else ""
    return _wrapped(text).replace("%", "%%")


def _default(name: str, auto: str, *, yes: str) -> str:
    """The default in words; '' if there is none."""
    default = FIELDS[name].default
    if auto:
        return auto
    if default is True:
        return yes
    return "" if default is None or default is False else str(default)


def _translate(parser: argparse.ArgumentParser) -> None:
    """Translate the lines that argparse itself writes; InputError: standard output cannot encode Chinese."""
    encoding = getattr(sys.stdout, "encoding", None) or "utf-8"
    try:
        _DESCRIPTION.encode(encoding)
    except UnicodeEncodeError as error:
        raise InputError(
            f"standard output is in {encoding}, which has no Chinese letters: set PYTHONUTF8=1, or leave "
            "--zh out"
        ) from error
    parser.description = _DESCRIPTION
    parser.formatter_class = argparse.RawTextHelpFormatter  # others break lines only at spaces
    parser._optionals.title, *texts = _ARGPARSE_TEXTS
    for action, text in zip(parser._actions, texts, strict=True):
        action.help = text


def _wrapped(text: str) -> str:
    """In lines that fit beside the flags of the help; a Chinese character takes two columns."""
    room = max(20, shutil.get_terminal_size().columns - 27)
    lines = [""]
    used = 0
    # Words of other languages stay whole, and no line begins with a comma.
    for part in re.findall(r"（?(?:[!-~]+|.)[，。；：、）]*", text):
        width = text_width(part)
        if used + width > room:
            lines.append("")
            used = 0
        lines[-1] += part
        used += width
    return "\n".join(line.strip() for line in lines)


def flag_of(name: str) -> str:
    return "DATA" if name == "data" else "--" + name.replace("_", "-")


# What stands for the value of a flag in the help, where its type does not say it: a setting, its word.
METAVARS = {
    "batch_size": "N|auto[:N]", "duration": "LENGTH", "warmup": "LENGTH", "checkpoint_every": "LENGTH",
    "extend": "LENGTH", "milestones": "LENGTHS", "stop_within": "TIME", "verify_steps": "1/N",
    "weights": "FILE|RUN", "class_weights": "auto|FILE", "cache": "DIR", "cache_size": "SIZE",
    "mirror": "ADDRESS", "target": "COLUMNS", "fold": "K/N", "test": "SHARE|DATA",
    "label_separator": "TEXT", "recompute": "PATTERNS", "freeze": "PATTERNS", "betas": "B1,B2",
    "device": "DEVICE", "track": "NAMES",
}  # fmt: skip


def _metavar(name: str, kinds: tuple[type, ...]) -> str:
    return METAVARS.get(name) or {int: "N", float: "X", str: "NAME"}[kinds[0]]
