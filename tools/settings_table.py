"""Print the table of all settings of `flambeau train`, as docs/en/train.md shows it.

    python tools/settings_table.py

Run it after a change of src/flambeau/train/settings/settings.py and put the output in the page;
tests/test_settings_table.py compares the two. The settings are read without torch.
"""

import dataclasses
from typing import Any

from flambeau.train.settings.settings import FIELDS

_HEAD = "| setting | default | range | meaning | on a resume |\n|---|---|---|---|---|"


def settings_table() -> str:
    """A Markdown table, one row a setting in the order of `--help`, without a newline at its end."""
    return "\n".join([_HEAD, *(_row(name, field) for name, field in FIELDS.items())])


def _row(name: str, field: dataclasses.Field[Any]) -> str:
    meaning = _plain(field.metadata["help"])
    if field.metadata["choices"]:
        meaning = f"{', '.join(field.metadata['choices'])}: {meaning}"
    allowed = field.metadata["range"] or ""
    resume = "may change" if field.metadata["neutral"] else "stays"
    cells = (_flag(name, field), _default(field), allowed, meaning, resume)
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


def _flag(name: str, field: dataclasses.Field[Any]) -> str:
    if name == "data":
        return "`DATA`"
    flag = "--" + name.replace("_", "-")
    return f"`{flag}`, `--no-{flag[2:]}`" if field.default is True else f"`{flag}`"


def _default(field: dataclasses.Field[Any]) -> str:
    if field.metadata["auto"]:
        return _plain(field.metadata["auto"])
    if isinstance(field.default, bool):
        return "yes" if field.default else "no"
    return "none" if field.default is None else f"`{field.default}`"


def _plain(text: str) -> str:
    """Help texts double their percent signs for argparse; a table cell cannot hold a bar."""
    assert "|" not in text, text
    return str(text.replace("%%", "%"))


if __name__ == "__main__":
    print(settings_table())
