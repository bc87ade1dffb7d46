"""What was found, as text for people and as lines for GitHub; and the page of a rule."""

import json
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import PurePath
from typing import Any

from flambeau_lint.checked_file import Checked, Place
from flambeau_lint.rule import Rule
from flambeau_lint.rules.catalog import BY_CODE

LEVELS = {
    "removed": "error",
    "wrong": "error",
    "deprecated": "warning",
    "changed": "warning",
    "unsafe": "warning",
    "slow": "note",
}
"""How much a kind matters, in the words of SARIF."""

_APEX = ("parallel/from_apex_and_old_launchers.md",)
_WORKERS = ("data_cookbook.md#workers-pinning-prefetch",)
PAGES: Mapping[str, tuple[str, ...]] = {
    "FLB177": _APEX,
    "FLB178": _APEX,
    "FLB179": _APEX,
    "FLB180": _APEX,
    "FLB181": _APEX,
    "FLB182": _APEX,
    "FLB325": _WORKERS,
    "FLB403": ("checkpoints.md#prefixes", "recipes/state_dict_prefixes.md"),
    "FLB404": ("models.md#logits-and-their-loss",),
    "FLB405": ("precision.md#autocast-and-the-scaler", "recipes/amp_step.md"),
    "FLB406": ("parallel/samplers.md#distributedsampler",),
    "FLB408": ("models.md#what-counts-as-a-part",),
    "FLB419": ("training_tricks.md#gradient-accumulation",),
    "FLB420": ("schedules.md#order-of-the-calls",),
    "FLB438": ("recipes/state_dict_prefixes.md",),
    "FLB459": ("parallel/processes.md#without-the-recipe",),
    "FLB460": ("models.md#take-a-model-apart",),
    "FLB461": ("tensors.md#shapes",),
    "FLB462": _WORKERS,
    "FLB502": ("checkpoints.md#whole-model-pickles", "recipes/safe_pickle.md"),
    "FLB601": ("reproducibility.md#deterministic-algorithms", "recipes/determinism.md"),
}
"""Of some rules, the pages of flambeau and of its recipes that say more; they name the rule in turn."""


def printable(text: str) -> str:
    """Names of files cannot move the cursor, nor make a line of their own."""
    return "".join(one if one.isprintable() else repr(one)[1:-1] for one in text)


def in_chinese(found: Sequence[Checked]) -> list[Checked]:
    """The same with Chinese messages."""
    return [
        replace(
            file, places=tuple(replace(one, message=BY_CODE[one.code].zh) for one in file.places)
        )
        for file in found
    ]


def text_lines(found: Sequence[Checked]) -> Iterator[str]:
    """`path:line:column: CODE message`; [*] has a fix, [?] has one that is not safe."""
    for file in found:
        for place in file.places:
            mark = {"safe": " [*]", "unsafe": " [?]"}.get(place.fix, "")
            yield f"{where(file.path, place)}: {place.code}{mark} {place.message}"


def where(path: str, place: Place) -> str:
    cell = f"cell {place.cell}:" if place.cell else ""
    return f"{printable(path)}:{cell}{place.line}:{place.column}"


def summary(found: Sequence[Checked], *, chinese: bool) -> str:
    """The last line."""
    places = [place for file in found for place in file.places]
    files = sum(bool(file.places) for file in found)
    safe = sum(place.fix == "safe" for place in places)
    unsafe = sum(place.fix == "unsafe" for place in places)
    if not places:
        count = len(found)
        in_files = f"nothing found in {count} {'file' if count == 1 else 'files'}"
        return f"{count} 个文件中没有发现问题" if chinese else in_files
    if chinese:
        fixes = f"--fix 可修正 {safe} 处，--unsafe-fixes 另有 {unsafe} 处"
        return f"{len(found)} 个文件中，{files} 个有 {len(places)} 处；{fixes}"
    return (
        f"{len(places)} found in {files} of {len(found)} files; --fix can change {safe} of them,"
        f" --unsafe-fixes {unsafe} more"
    )


def statistics(found: Sequence[Checked]) -> Iterator[str]:
    """How often each rule was found, the most frequent first."""
    counts = Counter(place.code for file in found for place in file.places)
    fixes = {(place.code, place.fix) for file in found for place in file.places}
    for code, count in sorted(counts.items(), key=lambda row: (-row[1], row[0])):
        mark = "[*]" if (code, "safe") in fixes else "[?]" if (code, "unsafe") in fixes else "[ ]"
        yield f"{count}\t{code}\t{mark} {BY_CODE[code].name}"


def as_json(found: Sequence[Checked]) -> str:
    """A list with one object per finding."""
    rows: list[dict[str, Any]] = []
    for file in found:
        for place in file.places:
            rule = BY_CODE[place.code]
            rows.append(
                {
                    "file": file.path,
                    "cell": place.cell or None,
                    "line": place.line,
                    "column": place.column,
                    "end_line": place.end_line,
                    "end_column": place.end_column,
                    "code": place.code,
                    "name": rule.name,
                    "kind": rule.kind,
                    "message": place.message,
                    "fix": place.fix or None,
                    "edits": [
                        {"start": list(one.start), "end": list(one.end), "text": one.text}
                        for one in place.edits
                    ],
                }
            )
        if file.problem:
            rows.append({"file": file.path, "problem": file.problem})
    return json.dumps(rows, indent=1)  # ASCII: names of files may be no text


def github_lines(found: Sequence[Checked]) -> Iterator[str]:
    """Annotations of GitHub Actions."""
    for file in found:
        for place in file.places:
            level = "error" if BY_CODE[place.code].kind in ("removed", "wrong") else "warning"
            fields = f"file={_property(PurePath(file.path).as_posix())}"
            if not place.cell:  # whose lines are none of the file
                fields += f",line={place.line},endLine={place.end_line},col={place.column}"
            title = _property(f"{place.code} {BY_CODE[place.code].name}")
            yield f"::{level} {fields},title={title}::{_data(in_cell(place) + place.message)}"


def in_cell(place: Place) -> str:
    """Where in a notebook, for readers that know only lines of files."""
    return f"cell {place.cell}, line {place.line}: " if place.cell else ""


def _data(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")


def _property(text: str) -> str:
    return _data(text).replace(":", "%3A").replace(",", "%2C")


def rule_page(rule: Rule) -> str:
    """Everything about a rule."""
    facts = [f"{rule.kind} in {rule.library}"]
    facts += [f"deprecated since {rule.deprecated}"] if rule.deprecated else []
    facts += [f"gone since {rule.removed}"] if rule.removed else []
    facts += (
        [f"changed in {rule.changed}, and reported with --from alone"] if rule.is_journey else []
    )
    facts += [f"until {rule.until}"] if rule.until else []
    facts += ["with --preview alone"] if rule.preview else []
    fixes = {
        "none": "no fix",
        "safe": "--fix changes it",
        "unsafe": "--fix --unsafe-fixes changes it",
    }
    parts = [
        f"{rule.code} {rule.name}",
        f"{'; '.join(facts)}; {fixes[rule.fix]}; {rule.sure}",
        rule.en,
        rule.zh,
    ]
    parts += [rule.why] if rule.why else []
    parts += ["Bad:\n\n" + _indented(rule.bad), "Good:\n\n" + _indented(rule.good)]
    if pages := PAGES.get(rule.code):
        parts.append(
            "\n".join(["More:\n", *(f"    flambeau recipes page {page}" for page in pages)])
        )
    return "\n\n".join(parts) + "\n"


def rules_as_json(rules: Sequence[Rule]) -> str:
    """A list with one object per rule: what its page says."""
    rows = [
        {
            "code": rule.code,
            "name": rule.name,
            "kind": rule.kind,
            "library": rule.library,
            "deprecated": rule.deprecated or None,
            "removed": rule.removed or None,
            "changed": rule.changed or None,
            "until": rule.until or None,
            "preview": rule.preview,
            "fix": None if rule.fix == "none" else rule.fix,
            "sure": rule.sure,
            "en": rule.en,
            "zh": rule.zh,
            "why": rule.why or None,
            "bad": rule.bad,
            "good": rule.good,
            "pages": list(PAGES.get(rule.code, ())),
        }
        for rule in rules
    ]
    return json.dumps(rows, indent=1)


def _indented(code: str) -> str:
    return "\n".join(f"    {line}" if line else line for line in code.rstrip("\n").split("\n"))
