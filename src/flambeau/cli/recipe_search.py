"""Searches the recipes, the pages and the flags: by name, word, old API or error message, in two languages.

Source: Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond", 2009; the text of
links to a page counts for that page, as in Brin and Page, "The Anatomy of a Large-Scale Hypertextual Web
Search Engine", 1998.

There is no stored index: docstrings and pages are read at each search, which takes a third of a second.
"""

import ast
import functools
import math
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath

RECIPES = Path(__file__).resolve().parents[1] / "recipes"

# Lists of links: their text counts only for the pages that they link to.
_LISTS = ("index.md", "coverage.md")
_ANSWERS = "errors_and_old_names.md"  # each row of its tables answers one question
# Both chosen on the questions of the tests.
_WEIGHTS = {"name": 6.0, "title": 4.0, "links": 2.5, "body": 1.0}
_MIN_SHARE = 0.5  # share of the query's words, by weight, that a result has at least
# A list of words, not one per line.
_STOP_WORDS = frozenset(
    {
        "a", "an", "and", "are", "as", "at", "be", "by", "can", "do", "does", "for", "from", "how", "i", "if",
        "in", "into", "is", "it", "its", "me", "my", "not", "of", "on", "or", "that", "the", "this",
        "through", "to", "use", "using", "was", "what", "when", "where", "which", "why", "with", "you",
    }
)  # fmt: skip
# Tried in this order: a suffix before its own endings.
_SUFFIXES = (
    "ations",
    "ation",
    "ating",
    "ated",
    "ates",
    "ate",
    "ings",
    "ing",
    "ions",
    "ion",
    "ies",
    "ed",
    "es",
    "s",
    "e",
    "y",
)
_WORD = re.compile(r"[A-Za-z0-9]+|[\u4e00-\u9fff]+")
_HUMP = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_FLAG = re.compile(r"\| `(--[\w-]+)` \|")


@dataclass
class Entry:
    """A search result: a 'recipe', 'page' or 'flag', with its text by field (name, title, links, body)."""

    kind: str
    name: str
    line: str
    texts: dict[str, list[str]] = field(default_factory=dict, repr=False)

    def add(self, where: str, text: str) -> None:
        self.texts.setdefault(where, []).append(text)


def docs_folder() -> Path | None:
    """The folder of the pages, in the installed package or in the checkout; None if there is none."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "docs", package.parents[1] / "docs"):
        if (folder / "en" / "index.md").is_file():
            return folder
    return None


def is_chinese(text: str) -> bool:
    return re.search(r"[\u4e00-\u9fff]", text) is not None


class Index:
    """All entries with their words counted; perhaps of the Chinese pages."""

    def __init__(self, *, chinese: bool) -> None:
        self._entries = _entries(chinese=chinese)
        self._counts = [
            {where: Counter(_tokens(" ".join(texts))) for where, texts in entry.texts.items()}
            for entry in self._entries
        ]
        lengths = [counts.get("body", Counter()).total() for counts in self._counts]
        average = sum(lengths) / len(lengths) or 1.0
        self._lengths = [length / average for length in lengths]

    def search(self, words: str) -> list[Entry]:
        query = list(dict.fromkeys(_tokens(words)))
        weight_of = {}
        for word in [word for word in query if word not in _STOP_WORDS] or query:
            num = sum(any(word in c for c in counts.values()) for counts in self._counts)
            weight_of[word] = math.log(1 + len(self._entries) / (num + 0.5))
        phrase = " ".join(words.lower().split())
        scored = []
        for entry, counts, length in zip(self._entries, self._counts, self._lengths, strict=True):
            points = {word: _points(word, counts, length) for word in weight_of}
            held = sum(weight for word, weight in weight_of.items() if points[word])
            share = held / (sum(weight_of.values()) or 1.0)
            if not held or share < _MIN_SHARE:
                continue
            score = sum(weight * points[word] for word, weight in weight_of.items()) * share**2
            if len(query) > 1 and phrase in _plain_text(entry):
                score *= 2.5  # the exact phrase; chosen like the weights
            line = _best_line(entry, weight_of) if entry.kind == "page" else entry.line
            scored.append((score, replace(entry, line=line)))
        scored.sort(key=lambda pair: (-pair[0], pair[1].name))
        return [entry for _, entry in scored]


def _points(word: str, fields: dict[str, Counter[str]], length: float) -> float:
    points = 0.0
    for where, counts in fields.items():
        if times := counts[word]:
            half = 1.2 * (0.25 + 0.75 * length) if where == "body" else 0.5
            points += _WEIGHTS[where] * times / (times + half)
    return points


def _best_line(entry: Entry, weight_of: Mapping[str, float]) -> str:
    """The line of a page with most of the query; the first one if none has any of it."""
    lines = list(_prose(entry.texts.get("body", [])))
    best = 0.0
    line = lines[0] if lines else entry.line
    for text in lines:
        held = {word for word in _tokens(text) if word in weight_of}
        if (points := sum(weight_of[word] for word in held)) > best:
            best, line = points, text
    return line


def _prose(lines: Iterable[str]) -> Iterator[str]:
    """Lines outside of code blocks; the first two cells of table rows."""
    is_code = False
    for line in lines:
        text = _LINK.sub(r"\1", line).strip().removeprefix("- ")
        if text.startswith("```"):
            is_code = not is_code
        elif not is_code and text and not text.startswith("|--"):
            cells = [cell.strip() for cell in text.strip("|").split("|")]
            yield ": ".join(filter(None, cells[:2])) if text.startswith("|") else text


def _plain_text(entry: Entry) -> str:
    text = "\n".join(line for texts in entry.texts.values() for line in texts)
    return " ".join(text.lower().replace("`", "").split())


def _tokens(text: str) -> Iterator[str]:
    """Stems of words, and pairs of Chinese characters; DataParallel also as two words."""
    for match in _WORD.finditer(text):
        yield from _tokens_of(match[0])


@functools.cache  # only one of twenty words is new
def _tokens_of(run: str) -> tuple[str, ...]:
    if is_chinese(run):
        return tuple(run[i : i + 2] for i in range(max(1, len(run) - 1)))
    parts = _HUMP.findall(run)
    if len(parts) < 2 or run.isupper():
        parts = []
    return (_stem(run.lower()), *(_stem(part.lower()) for part in parts if len(part) > 1))


def _stem(word: str) -> str:
    for suffix in _SUFFIXES:
        if word.endswith(suffix) and len(word) - len(suffix) >= 3:
            return word.removesuffix(suffix)
    return word


# ---------------------------------------------------------------- entries


def _entries(*, chinese: bool) -> list[Entry]:
    by_page: dict[str, Entry] = {}  # 'recipes/ema.md', 'memory.md#del-loss'
    for path in recipe_files():
        by_page[f"recipes/{path.stem}.md"] = _recipe(path, chinese=chinese)
    docs = docs_folder()
    pages = [] if docs is None else sorted((docs / ("zh" if chinese else "en")).rglob("*.md"))
    links: list[tuple[str, str]] = []
    rows: list[Entry] = []
    for path in pages:
        page = path.relative_to(docs / ("zh" if chinese else "en")).as_posix()  # type: ignore[operator]
        text = path.read_text(encoding="utf-8")
        links += _links(text, page)
        sections = [] if page in _LISTS else list(_sections(text, page))
        if page.startswith("recipes/"):
            if page in by_page:
                by_page[page].add("body", text)
        else:
            by_page |= {entry.name: entry for entry in sections}
        if page == "train.md":
            rows += _flags(text)
        if page == _ANSWERS:
            rows += _answers(sections)
    for target, line in links:
        if (entry := by_page.get(target) or by_page.get(target.partition("#")[0])) is not None:
            entry.add("links", line)
    return [*by_page.values(), *rows]


def recipe_files() -> list[Path]:
    return sorted(path for path in RECIPES.rglob("*.py") if path.name != "__init__.py")


def recipe_name(path: Path) -> str:
    """Such as training/ema."""
    return path.relative_to(RECIPES).with_suffix("").as_posix()


def docstring(path: Path) -> str:
    """The docstring of a recipe; its first paragraph is one line in English, the second the same in Chinese.

    The file is parsed, not imported, as that would import torch.
    """
    text = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8")))
    assert text, f"{path} has no docstring; tests/test_architecture.py should have said so"
    return text


def _recipe(path: Path, *, chinese: bool) -> Entry:
    text = docstring(path)
    lines = text.split("\n\n")
    entry = Entry("recipe", recipe_name(path), lines[1 if chinese else 0])
    entry.add("name", entry.name.replace("/", " ").replace("_", " "))
    entry.add("name", path.stem)
    entry.add("title", " ".join(lines[:2]))
    entry.add("body", text)
    source = path.read_text(encoding="utf-8")
    entry.add("title", " ".join(re.findall(r"^(?:def|class) ([A-Za-z]\w*)", source, re.MULTILINE)))
    return entry


def _sections(text: str, page: str) -> Iterator[Entry]:
    """One entry per heading; the part before the second heading is the page itself."""
    entry: Entry | None = None
    title = ""
    slugs = Counter[str]()
    for heading, line in lines_with_headings(text):
        if heading is not None:
            title = title or heading
            slug = anchor(heading)
            name = (
                page if entry is None else f"{page}#{slug}" + f"-{slugs[slug]}" * (slugs[slug] > 0)
            )
            slugs[slug] += 1
            if entry is not None:
                yield entry
            entry = Entry("page", name, heading if heading == title else f"{title}: {heading}")
            entry.add("title", heading)
            entry.add("name", PurePosixPath(page).stem.replace("_", " "))
        elif entry is not None and not _FLAG.match(line):
            entry.add("body", line)
    if entry is not None:
        yield entry


def lines_with_headings(text: str) -> Iterator[tuple[str | None, str]]:
    """Each line of a page with its heading, if it is one; comments in code blocks are none."""
    is_code = False
    for line in text.splitlines():
        if line.lstrip().startswith("```"):
            is_code = not is_code
        match = None if is_code else re.match(r"#+ +(.*)", line)
        yield (match[1].replace("`", "") if match else None), line


def anchor(heading: str) -> str:
    """The anchor that GitHub makes for a heading."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")


def _flags(text: str) -> Iterator[Entry]:
    """Each row of the table of settings in train.md."""
    for line in text.splitlines():
        if (match := _FLAG.match(line)) is not None:
            cells = [cell.strip() for cell in line.strip("| ").split("|")]
            if len(cells) < 5:
                continue  # of another table
            entry = Entry("flag", f"flambeau train {match[1]}", _LINK.sub(r"\1", cells[3]))
            entry.add("name", match[1].replace("-", " "))
            entry.add("title", entry.line)
            yield entry


def _answers(sections: Iterable[Entry]) -> Iterator[Entry]:
    """Each row of a table below a heading, removed from the text there."""
    for part in sections:
        lines = part.texts.get("body", [])
        rows = [line for line in lines if line.startswith("| ") and _LINK.search(line)]
        part.texts["body"] = [line for line in lines if line not in rows]
        for row in rows:
            entry = Entry("page", part.name, part.line)
            entry.add("title", row.split("|")[1])
            entry.add("body", row)
            yield entry


def _links(text: str, page: str) -> Iterator[tuple[str, str]]:
    """(target, line) of each link."""
    for _, line in lines_with_headings(text):
        for match in _LINK.finditer(line):
            target = match[2]
            if ".md" in target and ":" not in target:
                path, _, mark = target.partition("#")
                full = posixpath.normpath(PurePosixPath(page).parent / path)
                yield full + (f"#{mark}" if mark else ""), _LINK.sub(r"\1", line)


def section(text: str, name: str) -> str | None:
    """The part of a page below the heading with this anchor, including its sub-headings."""
    kept: list[str] = []
    depth = 0
    for heading, line in lines_with_headings(text):
        if heading is not None:
            level = len(line) - len(line.lstrip("#"))
            if depth and level <= depth:
                break
            if not depth and anchor(heading) == name:
                depth = level
        if depth:
            kept.append(line)
    return "\n".join(kept).rstrip() + "\n" if kept else None
