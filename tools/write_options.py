#!/usr/bin/env python
"""Write what is derived from the declared options into the files that show it.

    python tools/write_options.py            # after a change of an option
    python tools/write_options.py --check    # print what is out of date, and end with 1 if anything is

An option is declared once, in run/options/ or trainer/settings/settings.py.
From there this writes the keywords of `Run` and `flambeau.train` with their lines of help, which editors and
type checkers read from the source, and the tables of docs/en/ and docs/zh/.
The flags of `flambeau train` are made when it starts.
tests/test_write_options.py runs the check.
"""

import ast
import dataclasses
import math
import re
import sys
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flambeau.run.options.option import Range, options_of, plain_text
from flambeau.run.options.run_options import RunOptions
from flambeau.trainer.settings.settings import FIELDS

ROOT = Path(__file__).resolve().parents[1]
SRC = ROOT / "src" / "flambeau"
DECLARED_IN = (
    SRC / "run/options/shared_options.py",
    SRC / "run/options/run_options.py",
    SRC / "trainer/settings/settings.py",
)
Fields = Mapping[str, dataclasses.Field[Any]]


@dataclass(frozen=True)
class Words:
    """The words of a table in one language, and how its cells are made."""

    chinese: bool
    no_yes: tuple[str, str]
    nothing: str
    may_change: str
    stays: str
    comma: str
    colon: str

    def text(self, field: dataclasses.Field[Any]) -> str:
        return str(field.metadata["chinese" if self.chinese else "text"])

    def default(self, field: dataclasses.Field[Any]) -> str:
        auto = str(field.metadata["auto"][self.chinese])
        if auto:
            return auto
        if isinstance(field.default, bool):
            return self.no_yes[field.default]
        return self.nothing if field.default is None else f"`{field.default}`"


ENGLISH = Words(False, ("no", "yes"), "none", "may change", "stays", ", ", ": ")
CHINESE = Words(True, ("否", "是"), "无", "可以改变", "不变", "、", "：")


# ---------------------------------------------------------------- tables of the pages


def settings_table(words: Words, fields: Fields) -> str:
    """The settings of `flambeau train`, one row each: flag, default, range, meaning, on a resume."""
    rows = []
    for name, field in fields.items():
        meaning = words.text(field)
        if field.metadata["choices"]:
            meaning = words.comma.join(field.metadata["choices"]) + words.colon + meaning
        allowed = field.metadata["range"]
        shown = chinese_range(allowed) if words.chinese else str(allowed or "")
        resume = words.may_change if field.metadata["may_change"] else words.stays
        rows.append(row(flag(name, field), words.default(field), shown, meaning, resume))
    return "\n".join(rows)


def run_table(words: Words) -> str:
    """The options of `Run`, one row each: name, default, meaning, on a resume."""
    rows = []
    for name, field in options_of(RunOptions).items():
        default = words.default(field)
        if field.default is dataclasses.MISSING or default == words.nothing:
            default = ""
        resume = words.may_change if field.metadata["may_change"] else words.stays
        rows.append(row(f"`{name}`", default, words.text(field), resume))
    return "\n".join(rows)


def row(*cells: str) -> str:
    assert not any("|" in cell for cell in cells), cells
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


def flag(name: str, field: dataclasses.Field[Any]) -> str:
    if name == "data":
        return "`DATA`"
    spelled = name.replace("_", "-")
    return f"`--{spelled}`, `--no-{spelled}`" if field.default is True else f"`--{spelled}`"


def chinese_range(allowed: Range | None) -> str:
    if allowed is None:
        return ""
    low = str(Range(allowed.low)).split()[-1]
    high = str(Range(allowed.high)).split()[-1]
    zero = "0，或" if allowed.or_zero else ""
    if allowed.high == math.inf:
        return f"{zero}{'大于' if allowed.above_low else '至少'} {low}"
    if not allowed.above_low and not allowed.below_high:
        return f"{zero}从 {low} 到 {high}"
    above = "大于" if allowed.above_low else "至少"
    below = "小于" if allowed.below_high else "至多"
    return f"{zero}{above} {low}，{below} {high}"


def with_table(page: str, header: str, rows: str, *, keep: Iterable[str] = ()) -> str:
    """The page with other rows below a header; rows whose first cell is one of `keep` stay."""
    head, _, rest = page.partition(header)
    assert rest, f"no table {header!r}"
    old, blank, after = rest.partition("\n\n")
    line, *old_rows = old.strip("\n").splitlines()
    kept = [text for text in old_rows if text.split("|")[1].strip() in keep]
    return head + header + "\n" + "\n".join([line, *kept, rows]) + blank + after


# ---------------------------------------------------------------- keywords of functions


def annotations() -> dict[Path, dict[str, str]]:
    """The types of all options as their files spell them."""
    found: dict[Path, dict[str, str]] = {}
    for file in DECLARED_IN:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        found[file] = {
            node.target.id: ast.unparse(node.annotation).replace("'", '"')
            for owner in tree.body
            if isinstance(owner, ast.ClassDef)
            for node in owner.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
    return found


def described(field: dataclasses.Field[Any], *, of_command: bool) -> str:
    """An option in the docstring: its text, its choices or range, and what None stands for."""
    text = plain_text(field.metadata["text"])
    if of_command:
        text = re.sub(r"--([a-z-]+[a-z])", lambda match: match[1].replace("-", "_"), text)
    auto = field.metadata["auto"][0]
    notes = [f"None: {auto}"] if auto else []
    if field.metadata["choices"]:
        notes.append(f"one of {', '.join(field.metadata['choices'])}")
    elif field.metadata["range"]:
        notes.append(str(field.metadata["range"]))
    return f"{field.name}: {text}{' (' + '; '.join(notes) + ')' if notes else ''}."


def with_keywords(source: str, function: str, fields: Fields, types: Mapping[str, str]) -> str:
    """The source with the options as keywords of one function, below those that only it has."""
    lines = source.splitlines()
    node = next(
        node
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef) and node.name == function and node.decorator_list
    )
    docstring = node.body[0]
    assert isinstance(docstring, ast.Expr)
    indent = " " * (node.col_offset + 4)
    start = docstring.lineno - 1
    end = docstring.end_lineno
    lines[start:end] = with_args(lines[start:end], fields, indent, of_command=function == "train")
    arguments = [*node.args.args, *node.args.kwonlyargs]
    shown = [f"{indent}{name}: {types[name]}{default_of(field)}," for name, field in fields.items()]
    first = next((arg.lineno for arg in arguments if arg.arg in fields), arguments[-1].lineno + 1)
    last = next(n for n in range(first - 1, start) if lines[n].lstrip().startswith(") ->"))
    lines[first - 1 : last] = shown
    return "\n".join(lines) + "\n"


def default_of(field: dataclasses.Field[Any]) -> str:
    if field.default is dataclasses.MISSING:
        return ""
    if isinstance(field.default, str):
        return f' = "{field.default}"'
    return f" = {field.default!r}"


def with_args(docstring: list[str], fields: Fields, indent: str, *, of_command: bool) -> list[str]:
    """The lines of a docstring with an entry for each option, behind those of other arguments."""
    start = docstring.index(f"{indent}Args:") + 1
    end = next(n for n in range(start, len(docstring)) if not docstring[n].strip())
    entries: list[list[str]] = []
    for line in docstring[start:end]:
        if re.match(rf"{indent}    \S", line):
            entries.append([line])
        else:
            entries[-1].append(line)
    kept = [entry for entry in entries if entry[0].split(":")[0].strip() not in fields]
    new = [
        textwrap.wrap(
            described(field, of_command=of_command),
            110,
            initial_indent=f"{indent}    ",
            subsequent_indent=f"{indent}        ",
            break_long_words=False,
            break_on_hyphens=False,
        )
        for field in fields.values()
    ]
    args = [line for entry in (*kept, *new) for line in entry]
    return docstring[:start] + args + docstring[end:]


# ---------------------------------------------------------------- files


def written() -> dict[Path, str]:
    """Each file that shows options, as it has to be."""
    shared, run, settings = annotations().values()
    run_file = SRC / "run/run.py"
    api_file = SRC / "trainer/api.py"
    of_train = {name: field for name, field in FIELDS.items() if name not in ("data", "track")}
    files = {
        run_file: with_keywords(
            run_file.read_text(encoding="utf-8"),
            "__init__",
            options_of(RunOptions),
            {**shared, **run},
        ),
        api_file: with_keywords(
            api_file.read_text(encoding="utf-8"), "train", of_train, {**shared, **settings}
        ),
    }
    heads = {
        ENGLISH: (
            "en",
            "| setting | default | range | meaning | on a resume |",
            "| argument | default | meaning | on a resume |",
        ),
        CHINESE: (
            "zh",
            "| 设置 | 默认值 | 范围 | 含义 | 恢复时 |",
            "| 参数 | 默认值 | 含义 | 恢复时 |",
        ),
    }
    first_arguments = ("`folder`", "`model`", "`optimizer`", "`data`")
    for words, (language, of_settings, of_run) in heads.items():
        for page, header, rows, keep in (
            ("train.md", of_settings, settings_table(words, FIELDS), ()),
            ("run.md", of_run, run_table(words), first_arguments),
        ):
            path = ROOT / "docs" / language / page
            files[path] = with_table(path.read_text(encoding="utf-8"), header, rows, keep=keep)
    return files


def main() -> int:
    """Write, or check."""
    stale = {
        path: text for path, text in written().items() if text != path.read_text(encoding="utf-8")
    }
    is_check = "--check" in sys.argv[1:]
    for path, text in stale.items():
        if not is_check:
            path.write_text(text, encoding="utf-8")
        print(path.relative_to(ROOT), "is out of date" if is_check else "is written")
    return int(is_check and bool(stale))


if __name__ == "__main__":
    sys.exit(main())
