#!/usr/bin/env python
"""Write the table of the linter's rules into docs/en/lint.md and docs/zh/lint.md.

    python tools/write_rules.py            # after a change of a rule
    python tools/write_rules.py --check    # print what is out of date, and end with 1 if anything is

tests/lint/test_lint_page.py runs the check.
"""

import sys
from pathlib import Path

from flambeau_lint.rule import Rule
from flambeau_lint.rules.catalog import RULES

ROOT = Path(__file__).resolve().parents[1]
HEADS = {
    "en": "| code | name | since | fix | what it says |\n|---|---|---|---|---|",
    "zh": "| 代码 | 名称 | 版本 | 修正 | 内容 |\n|---|---|---|---|---|",
}
FIXES = {
    "en": {"none": "", "safe": "safe", "unsafe": "unsafe"},
    "zh": {"none": "", "safe": "安全", "unsafe": "不保证"},
}
PREVIEW = {"en": " (preview)", "zh": "（预览）"}


def versions(rule: Rule) -> str:
    """The first version of each state, with the library where it is not torch."""
    numbers = [one for one in (rule.deprecated, rule.removed or rule.changed) if one]
    library = "" if rule.library == "torch" or not numbers else f"{rule.library} "
    until = f" to {rule.until}" if rule.until else ""
    return (library + ", ".join(numbers) + until).strip()


def row(rule: Rule, language: str) -> str:
    text = rule.zh if language == "zh" else rule.en
    preview = PREVIEW[language] if rule.preview else ""
    cells = [rule.code, f"`{rule.name}`", versions(rule), FIXES[language][rule.fix], text + preview]
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def table(language: str) -> str:
    return "\n".join([HEADS[language], *(row(rule, language) for rule in RULES)]) + "\n"


def written(page: Path, language: str) -> str:
    """The page with today's table behind its last heading."""
    text = page.read_text(encoding="utf-8")
    start = text.index(HEADS[language])
    return text[:start] + table(language)


def main(words: list[str]) -> int:
    stale = 0
    for language in HEADS:
        page = ROOT / "docs" / language / "lint.md"
        new = written(page, language)
        if new == page.read_text(encoding="utf-8"):
            continue
        stale = 1
        print(f"{page.relative_to(ROOT)}: its table of rules is out of date")
        if "--check" not in words:
            page.write_text(new, encoding="utf-8")
    return stale if "--check" in words else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
