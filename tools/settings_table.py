"""Print the table of all settings of `flambeau train`, as docs/en/train.md shows it.

    python tools/settings_table.py
    python tools/settings_table.py --zh     # that of docs/zh/train.md

Run it after a change of src/flambeau/train/settings/settings.py and put the outputs in the pages;
tests/test_settings_table.py compares the two. The settings are read without torch.
"""

import dataclasses
import math
import sys
from typing import Any

from flambeau.train.settings.chinese_help import SETTINGS
from flambeau.train.settings.field_checks import Range
from flambeau.train.settings.settings import FIELDS

_HEAD = "| setting | default | range | meaning | on a resume |\n|---|---|---|---|---|"
_CHINESE_HEAD = "| 设置 | 默认值 | 范围 | 含义 | 恢复时 |\n|---|---|---|---|---|"


def settings_table(*, chinese: bool = False) -> str:
    """A Markdown table, one row a setting in the order of `Settings`, without a newline at its end."""
    row = _chinese_row if chinese else _row
    head = _CHINESE_HEAD if chinese else _HEAD
    return "\n".join([head, *(_line(row(name, field)) for name, field in FIELDS.items())])


def _line(cells: tuple[str, ...]) -> str:
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


def _row(name: str, field: dataclasses.Field[Any]) -> tuple[str, ...]:
    meaning = _plain(field.metadata["help"])
    if field.metadata["choices"]:
        meaning = f"{', '.join(field.metadata['choices'])}: {meaning}"
    allowed = str(field.metadata["range"] or "")
    resume = "may change" if field.metadata["neutral"] else "stays"
    default = _default(field, field.metadata["auto"], words=("no", "yes", "none"))
    return _flag(name, field), default, allowed, meaning, resume


def _chinese_row(name: str, field: dataclasses.Field[Any]) -> tuple[str, ...]:
    text, auto = SETTINGS[name]
    meaning = _plain(text)
    if field.metadata["choices"]:
        meaning = f"{'、'.join(field.metadata['choices'])}：{meaning}"
    resume = "可以改变" if field.metadata["neutral"] else "不变"
    default = _default(field, auto, words=("否", "是", "无"))
    return _flag(name, field), default, _chinese_range(field.metadata["range"]), meaning, resume


def _chinese_range(allowed: Range | None) -> str:
    if allowed is None:
        return ""
    low, high = str(Range(allowed.low)).split()[-1], str(Range(allowed.high)).split()[-1]
    zero = "0，或" if allowed.or_zero else ""
    if allowed.high == math.inf:
        return f"{zero}{'大于' if allowed.above_low else '至少'} {low}"
    if not allowed.above_low and not allowed.below_high:
        return f"{zero}从 {low} 到 {high}"
    above, below = "大于" if allowed.above_low else "至少", "小于" if allowed.below_high else "至多"
    return f"{zero}{above} {low}，{below} {high}"


def _flag(name: str, field: dataclasses.Field[Any]) -> str:
    if name == "data":
        return "`DATA`"
    flag = "--" + name.replace("_", "-")
    return f"`{flag}`, `--no-{flag[2:]}`" if field.default is True else f"`{flag}`"


def _default(field: dataclasses.Field[Any], auto: str, *, words: tuple[str, str, str]) -> str:
    """In words where there are some, which are those for no, yes and nothing."""
    if auto:
        return _plain(auto)
    if isinstance(field.default, bool):
        return words[field.default]
    return words[2] if field.default is None else f"`{field.default}`"


def _plain(text: str) -> str:
    """Help texts double their percent signs for argparse; a table cell cannot hold a bar."""
    assert "|" not in text, text
    return str(text.replace("%%", "%"))


if __name__ == "__main__":
    print(settings_table(chinese="--zh" in sys.argv[1:]))
