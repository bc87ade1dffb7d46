"""`flambeau how`: what the pages answer to a question: where, a sentence, code, and what to type next."""

import argparse
import re
from pathlib import PurePosixPath

from flambeau.cli.reading_flags import check_at_least
from flambeau.cli.recipe_search import Entry, Index, docs_folder, is_chinese, section
from flambeau.cli.table import print_json
from flambeau.errors import NothingFound
from flambeau.terminal import print_text, say

HELP = "answer a question, or an error message that you paste, from the pages"

_LONGEST_CODE = 40  # lines
_BLOCK = re.compile(r"^```(?:python|bash)[^\n]*\n(.*?)^```", re.MULTILINE | re.DOTALL)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "query",
        metavar="WORD",
        nargs="+",
        help="a question in a few words, or a message in quotes; in English or Chinese",
    )
    parser.add_argument("--top", type=int, default=3, metavar="N", help="answers (default: 3)")
    parser.add_argument(
        "--json", action="store_true", help="a JSON object per answer, for programs"
    )
    parser.add_argument("--zh", action="store_true", help="in Chinese")


def run(arguments: argparse.Namespace) -> int:
    """Print the answers, the best first; returns the exit code."""
    check_at_least(arguments, top=1)
    words = " ".join(arguments.query)
    language = "zh" if arguments.zh or is_chinese(words) else "en"
    entries = Index(chinese=language == "zh").search(words, top=arguments.top)
    if not entries:
        raise NothingFound(f"no page knows any of {words!r}\nName it in other words")
    answers = [_answer(entry, language) for entry in entries]
    if arguments.json:
        print_json(answers)
        return 0
    for number, answer in enumerate(answers):
        print_text("  ".join(dict.fromkeys((answer["name"], answer["title"]))))
        print_text(f"  {answer['line']}")
        # The code of the best answer alone: of all of them it would fill the screen.
        if number == 0 and answer["code"]:
            lines = answer["code"].splitlines()
            shown = lines[:_LONGEST_CODE] + ["..."] * (len(lines) > _LONGEST_CODE)
            print_text("".join(f"    {line}".rstrip() + "\n" for line in ["", *shown, ""]), end="")
    say(f"next: {answers[0]['next']}")
    return 0


def _answer(entry: Entry, language: str) -> dict[str, str]:
    page_of = f"flambeau recipes {'--zh ' if language == 'zh' else ''}page"
    if entry.kind == "rule":
        from flambeau_lint.rules.catalog import RULES

        rule = next(rule for rule in RULES if rule.code == entry.name)
        code = f"# old\n{rule.bad.strip()}\n\n# today\n{rule.good.strip()}"
        following = f"flambeau lint rule {rule.code}"
    elif entry.kind == "flag":
        code = f"{entry.name.replace('flambeau train', 'flambeau train DATA')} VALUE"
        following = f"{page_of} train.md"
    else:
        is_recipe = entry.kind == "recipe"
        where = f"recipes/{PurePosixPath(entry.name).name}.md" if is_recipe else entry.name
        # A row of a table says what to do; the code below the table is of other rows.
        code = "" if entry.messages is not None else _code(where, language)
        following = f"{page_of} {where}"
    return {
        "kind": entry.kind,
        "name": entry.name,
        "title": entry.title,
        "line": entry.line,
        "code": code,
        "next": following,
    }


def _code(where: str, language: str) -> str:
    """The first block of a page, or of its section below an anchor; empty if it has none."""
    page, _, mark = where.partition("#")
    folder = docs_folder()
    if folder is None:
        return ""
    text = (folder / language / page).read_text(encoding="utf-8")
    found = _BLOCK.search(section(text, mark) or "" if mark else text)
    return found[1].rstrip() if found else ""
