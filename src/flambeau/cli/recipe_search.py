"""Searches recipes, pages, flags and lint rules: by name, word, old API or error message, in two languages.

Source: Robertson and Zaragoza, "The Probabilistic Relevance Framework: BM25 and Beyond", 2009; the text of
links to a page counts for that page, as in Brin and Page, "The Anatomy of a Large-Scale Hypertextual Web
Search Engine", 1998; questions that an entry answers are added to its text, in the words in which people ask,
as in Nogueira et al., "Document Expansion by Query Prediction", 2019 (arXiv:1904.08375).

There is no stored index: docstrings and pages are read at each search, which takes half a second.
"""

import ast
import difflib
import functools
import itertools
import math
import posixpath
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

from flambeau.cli.homophones import COMMON, FIRSTS, Homophones

if TYPE_CHECKING:
    from flambeau_lint.rule import Rule

RECIPES = Path(__file__).resolve().parents[1] / "recipes"
SYNONYMS = Path(__file__).with_name("synonyms.txt")
ASKED = {language: Path(__file__).with_name(f"asked_{language}.tsv") for language in ("en", "zh")}
"""Of each language: the name of an entry, a tab, and questions that it answers, between '|'."""

# Lists of links: their text counts only for the pages that they link to.
_LISTS = ("index.md", "coverage.md")
_ANSWERS = "errors_and_old_names.md"  # each row of its tables answers one question
# Chosen on the questions of tools/docs_questions.
_WEIGHTS = {"name": 6.0, "title": 4.0, "asked": 5.0, "links": 2.5, "body": 1.0}
_RULE = 0.7  # times, of a rule, whose few words would outweigh a page
_ANSWER = 1.6  # times, of a row that answers one question
_SHORTEST_MESSAGE = 3  # words
_SYNONYM = 0.8  # what a word counts that the query only means
_PHRASE = 2.5  # times, where the exact phrase stands
_QUESTION = 0.7  # more, times the share that the query and one of the questions have in common
# A list of words, not one per line.
_STOP_WORDS = frozenset(
    {
        "a", "am", "an", "and", "any", "are", "as", "at", "be", "been", "between", "by", "can", "could",
        "did", "difference", "do", "does", "for", "from", "had", "has", "have", "how", "i", "if", "in",
        "into", "is", "it", "its", "just", "me", "my", "not", "of", "on", "or", "pytorch", "should", "so",
        "some", "than", "that", "the", "them", "there", "they", "this", "through", "to", "too", "use",
        "using", "very", "want", "was", "way", "what", "when", "where", "which", "why", "will", "with",
        "would", "you",
    }
)  # fmt: skip
_CHINESE_STOP = re.compile(
    "怎么回事|怎么样|怎么办|怎么|正常吗|请问|为啥|怎样|如何|什么是|什么|为什么|为何|是不是|有没有|可以|能不能|哪些|哪个|一个|一下|的|了|吗|呢|我|在|是|把|用|和|与|时"
)
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
_LETTER = "[A-Za-z0-9_.]"  # not of Chinese, which is written beside English words without a blank
_WORD = re.compile(r"[A-Za-z0-9]+|[\u4e00-\u9fff]+")
_DOTTED = re.compile(r"(?<!\w)[A-Za-z]\w*(?:\.\w+)*", re.ASCII)
_HUMP = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_LINK = re.compile(r"\[([^\]]*)\]\(([^)\s]+)\)")
_BAR = re.compile(r"(?<!\\)\|")  # between two cells of a table
_NO_ATTRIBUTE = re.compile(r"module '([\w.]+)' has no attribute '(\w+)'")
_NO_IMPORT = re.compile(r"cannot import name '(\w+)' from '([\w.]+)'")
_FLAG = re.compile(r"\| `(--[\w-]+)` \|")


@dataclass
class Entry:
    """A 'recipe', 'page', 'flag' or 'rule' of the linter, and its text by field, as in _WEIGHTS.

    Attributes:
        title: of a result: the page's headings.
        messages: the words of the error messages that a row answers, if so.
    """

    kind: str
    name: str
    line: str
    texts: dict[str, list[str]] = field(default_factory=dict, repr=False)
    messages: list[list[str]] | None = None
    title: str = ""

    def add(self, where: str, text: str) -> None:
        self.texts.setdefault(where, []).append(text)


def docs_folder() -> Path | None:
    """The folder of the pages, in the installed package or the checkout, if any."""
    package = Path(__file__).resolve().parents[1]
    for folder in (package / "docs", package.parents[1] / "docs"):
        if (folder / "en" / "index.md").is_file():
            return folder
    return None


def is_chinese(text: str) -> bool:
    return re.search(r"[\u4e00-\u9fff]", text) is not None


@dataclass(frozen=True)
class _Concept:
    """What a part of a query asks for: any of some texts, as their words' stems; the query's own comes first.

    Attributes:
        weight: how much it tells: the rarer in the entries, the more.
    """

    alternatives: tuple[tuple[str, ...], ...]
    weight: float = 0.0


class Index:
    """All entries with their words counted; perhaps of the Chinese pages.

    Args:
        docs: the folder of the pages (None: the package's).
    """

    def __init__(self, *, chinese: bool, docs: Path | None = None) -> None:
        self._entries = _entries(docs or docs_folder(), chinese=chinese)
        self._counts = [
            {where: Counter(_tokens(" ".join(texts))) for where, texts in entry.texts.items()}
            for entry in self._entries
        ]
        lengths = [counts.get("body", Counter()).total() for counts in self._counts]
        self._plain = [_plain_text(entry) for entry in self._entries]
        average = sum(lengths) / len(lengths) or 1.0
        self._lengths = [length / average for length in lengths]
        held = Counter(
            word for counts in self._counts for word in {*itertools.chain(*counts.values())}
        )
        self._weight_of = {
            word: math.log(1 + len(self._entries) / (num + 0.5)) for word, num in held.items()
        }
        terms = {word for text, _ in _synonyms() for word in _tokens(text)}
        self._homophones = Homophones(
            # A term is no accident of two words, however few entries hold it.
            {word: max(n, COMMON * (word in terms)) for word, n in held.items() if is_chinese(word)}
        )
        self._questions = [
            [self._telling_words(question) for question in _questions(entry)]
            for entry in self._entries
        ]

    @property
    def entries(self) -> tuple[Entry, ...]:
        """All that is searched: recipes, sections of pages, rows that answer a message, flags, rules."""
        return tuple(self._entries)

    def search(self, words: str, *, min_share: float = 0.0, top: int | None = None) -> list[Entry]:
        """The matching entries, the best first; before all, those whose error message stands in the words.

        A misspelt word counts as the nearest known one, of the same sound in Chinese; an unknown one as
        nothing.

        Args:
            top: at most so many.
            min_share: of the query's known part, by weight, in each result.
        """
        query = _message_words(words)
        words = self._homophones.corrected(_missing_name(words) or words)
        concepts = self._concepts(words)
        total = sum(concept.weight for concept in concepts)
        phrase = " ".join(words.lower().split())
        asked = {word for concept in concepts for part in concept.alternatives for word in part}
        weights = {word: self._weight_of[word] for word in asked}
        telling = self._telling_words(words)
        scored = []
        for number, entry in enumerate(self._entries):
            counts = self._counts[number]
            length = self._lengths[number]
            points = [self._points(concept, counts, length) for concept in concepts]
            held = sum(c.weight for c, one in zip(concepts, points, strict=True) if one)
            if not held or held < min_share * total:
                continue
            score = sum(points) * (held / total) ** 2
            score *= 1 + _QUESTION * _likeness(telling, self._questions[number])
            matched = 0
            if entry.messages is not None:
                score *= _ANSWER
                matched = _longest_message(entry.messages, query)
            if entry.kind == "rule":
                score *= _RULE
            if len(concepts) > 1 and phrase in self._plain[number]:
                score *= _PHRASE
            scored.append((matched, score, entry))
        scored.sort(key=lambda row: (-row[0], -row[1], row[2].name))
        return [
            replace(
                entry,
                title=entry.line if entry.kind == "page" else entry.name,
                line=_best_line(entry, weights) if entry.kind == "page" else entry.line,
            )
            for *_, entry in scored[:top]
        ]

    def _telling_words(self, text: str) -> dict[str, float]:
        """The words of a question that an entry has, in their order, and their weights."""
        words = _tokens(_CHINESE_STOP.sub(" ", text))
        return {word: self._weight_of[word] for word in words if word in self._weight_of}

    def _concepts(self, words: str) -> list[_Concept]:
        groups, rest = _synonyms_in(words)
        tokens = list(dict.fromkeys(_tokens(_CHINESE_STOP.sub(" ", rest))))
        tokens = [
            word for word in tokens if word not in _stop_stems() and not word.isdecimal()
        ] or ([] if groups else list(dict.fromkeys(_tokens(words))))
        concepts = [*groups, *(_Concept(((word,),)) for word in tokens)]
        return [known for one in concepts if (known := self._known(one)) is not None]

    def _known(self, concept: _Concept) -> _Concept | None:
        """A concept without the texts that no entry has; None if none is left."""
        kept = [part for part in concept.alternatives if all(w in self._weight_of for w in part)]
        if not kept and len(concept.alternatives) == 1:
            near = nearest_of(concept.alternatives[0][-1], self._weight_of)
            kept = [(near,)] if near is not None else []
        if not kept:
            return None
        weights = [self._weight_of[word] for word in kept[0]]
        return _Concept(tuple(kept), sum(weights) / math.sqrt(len(weights)))

    def _points(self, concept: _Concept, counts: dict[str, Counter[str]], length: float) -> float:
        best = 0.0
        for number, part in enumerate(concept.alternatives):
            points = [_points(word, counts, length) for word in part]
            if all(points):
                mean = sum(points) / len(points)
                best = max(best, mean * (_SYNONYM if number else 1.0))
        return concept.weight * best


@functools.cache
def _stop_stems() -> frozenset[str]:
    """The words of no meaning as a query has them: 'does' is 'doe' there."""
    return frozenset(_stem(word) for word in _STOP_WORDS)


def nearest_of(word: str, known: Iterable[str]) -> str | None:
    """The known word for a misspelt one, if near: the same letters swapped are, of three no other change."""
    if len(word) < 3 or len(word) > 40 or is_chinese(word):
        return None
    same_start = [one for one in known if one[0] == word[0]]
    if swapped := [one for one in same_start if sorted(one) == sorted(word)]:
        return min(swapped)
    if len(word) < 4:
        return None
    near = difflib.get_close_matches(word, same_start, 1, 0.8)
    return near[0] if near else None


def _synonyms_in(words: str) -> tuple[list[_Concept], str]:
    """A concept for each text of a query that synonyms are known of, and the rest of the query."""
    found = []
    rest = f" {' '.join(words.lower().split())} "
    for text, group in _synonyms():
        pattern = (
            re.escape(text)
            if is_chinese(text)
            else rf"(?<!{_LETTER}){re.escape(text)}(?!{_LETTER})"
        )
        shorter = re.sub(pattern, " ", rest)
        if shorter != rest:
            rest = shorter
            own = tuple(_tokens(text))
            others = (tuple(_tokens(other)) for other in group if other != text)
            found.append(_Concept(tuple(dict.fromkeys([own, *others]))))
    return found, rest


@functools.cache
def _synonyms() -> list[tuple[str, tuple[str, ...]]]:
    """Each text of synonyms.txt with its line, the longest text first."""
    lines = SYNONYMS.read_text(encoding="utf-8").splitlines()
    groups = [
        tuple(text.strip().lower() for text in line.split("="))
        for line in lines
        if line and not line.startswith("#")
    ]
    pairs = [(text, group) for group in groups for text in group]
    return sorted(pairs, key=lambda pair: -len(pair[0]))


def _points(word: str, fields: dict[str, Counter[str]], length: float) -> float:
    points = 0.0
    for where, counts in fields.items():
        if times := counts[word]:
            half = 1.2 * (0.25 + 0.75 * length) if where == "body" else 0.5
            points += _WEIGHTS[where] * times / (times + half)
    return points


def _questions(entry: Entry) -> list[str]:
    """What people ask that an entry answers; of a row of error messages these messages."""
    if entry.messages is None:
        return entry.texts.get("asked", [])
    return re.split("[、,]", " ".join(entry.texts["title"]))


def _likeness(query: Mapping[str, float], questions: Iterable[Mapping[str, float]]) -> float:
    """The largest share, by weight, that a query and a question have in common: from 0 to 1."""
    total = sum(query.values())
    best = 0.0
    for question in questions:
        if common := sum(weight for word, weight in question.items() if word in query):
            best = max(best, 2 * common / (total + sum(question.values())))
    return best


def _missing_name(words: str) -> str | None:
    """The name that Python has not found, if the words are its message."""
    if (found := _NO_ATTRIBUTE.search(words)) is not None:
        return f"{found[1]}.{found[2]}"
    found = _NO_IMPORT.search(words)
    return None if found is None else f"{found[2]}.{found[1]}"


def _message_words(text: str) -> list[str]:
    """The words of a message without its numbers and names of files."""
    return re.findall(r"[a-z_]{2,}", text.lower())


def _longest_message(messages: Iterable[list[str]], words: Sequence[str]) -> int:
    """The number of words of the longest message that stands in a text, in its order; 0 for none."""
    longest = 0
    for message in messages:
        rest = iter(words)
        if len(message) >= _SHORTEST_MESSAGE and all(word in rest for word in message):
            longest = max(longest, len(message))
    return longest


def _best_line(entry: Entry, weight_of: Mapping[str, float]) -> str:
    """The line of a page with most of the query; the first one if none has any of it."""
    lines = list(_prose(entry.texts.get("body", [])))
    best = 0.0
    line = lines[0] if lines else entry.line
    for text in lines:
        held = {word for word in _tokens(text) if word in weight_of}
        # The sum of a set is rounded in no fixed order; of equal lines the first is taken.
        if (points := sum(weight_of[word] for word in held)) > best + 1e-9:
            best, line = points, text
    return line


def _prose(lines: Iterable[str]) -> Iterator[str]:
    """Lines outside of code blocks, without pictures; the first two cells of table rows."""
    is_code = False
    for line in lines:
        text = _LINK.sub(r"\1", line).strip().removeprefix("- ")
        if text.startswith("```"):
            is_code = not is_code
        elif not is_code and text and not text.startswith(("|--", "!")):
            cells = [cell.strip() for cell in _BAR.split(text.strip("|"))]
            row = ": ".join(filter(None, cells[:2])).replace(r"\|", "|")
            yield row if text.startswith("|") else text


def _plain_text(entry: Entry) -> str:
    text = "\n".join(line for texts in entry.texts.values() for line in texts)
    return " ".join(text.lower().replace("`", "").split())


def _tokens(text: str) -> Iterator[str]:
    """Stems of words, and pairs of Chinese characters; DataParallel also as two words.

    Names of code also as they stand: of nn.utils.clip_grad_norm_ the last part and the last two.
    """
    for match in _WORD.finditer(text):
        yield from _tokens_of(match[0])
    for match in _DOTTED.finditer(text):
        parts = match[0].lower().split(".")
        if len(parts) > 1:
            yield ".".join(parts[-2:])
        if "_" in parts[-1]:
            yield parts[-1]


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


def rules_of_search() -> dict[str, Any]:
    """What the site's search, tools/site/static/search.js, takes from here, so that it answers the same."""
    return {
        "synonyms": [list(group) for group in dict.fromkeys(group for _, group in _synonyms())],
        "rules": {
            "weights": _WEIGHTS,
            "rule": _RULE,
            "answer": _ANSWER,
            "shortestMessage": _SHORTEST_MESSAGE,
            "synonym": _SYNONYM,
            "phrase": _PHRASE,
            "question": _QUESTION,
            "stopWords": sorted(_STOP_WORDS),
            "chineseStop": _CHINESE_STOP.pattern,
            "suffixes": _SUFFIXES,
            "firstOfSyllables": FIRSTS,
            "commonPair": COMMON,
        },
    }


# ---------------------------------------------------------------- entries


def _entries(docs: Path | None, *, chinese: bool) -> list[Entry]:
    from flambeau_lint.rules.catalog import RULES

    by_page: dict[str, Entry] = {}  # 'recipes/ema.md', 'memory.md#del-loss'
    for path in recipe_files():
        by_page[f"recipes/{path.stem}.md"] = _recipe(path, chinese=chinese)
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
    named = {entry.name: entry for entry in by_page.values()}
    for name, questions in asked(chinese=chinese):
        if name in named:  # the pages may be others than those of the package
            for question in questions.split("|"):
                named[name].add("asked", question.strip())
    return [*by_page.values(), *rows, *(_rule(rule, chinese=chinese) for rule in RULES)]


def asked(*, chinese: bool) -> Iterator[tuple[str, str]]:
    """The name of an entry, and questions that it answers, with '|' between them."""
    path = ASKED["zh" if chinese else "en"]
    for line in path.read_text(encoding="utf-8").splitlines():
        name, _, questions = line.partition("\t")
        yield name, questions


def _rule(rule: "Rule", *, chinese: bool) -> Entry:
    """A rule of the linter: what became of an old name, or what is wrong."""
    entry = Entry("rule", rule.code, rule.zh if chinese else rule.en)
    entry.add("name", f"{rule.code} {rule.name}")
    entry.add("title", f"{rule.en} {rule.zh}" if chinese else rule.en)
    entry.add("body", rule.why)
    return entry


def recipe_files() -> list[Path]:
    return sorted(path for path in RECIPES.rglob("*.py") if path.name != "__init__.py")


def recipe_name(path: Path) -> str:
    """Such as training/ema."""
    return path.relative_to(RECIPES).with_suffix("").as_posix()


def docstring(path: Path) -> str:
    """The docstring of a recipe, which begins with a line in English and the same in Chinese.

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
    """Each line of a page with its heading, if any; comments in code blocks are none."""
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
            cell = row.split("|")[1]
            messages = [_message_words(text) for text in re.findall(r"`([^`]+)`", cell)]
            entry = Entry("page", part.name, part.line, messages=messages)
            entry.add("title", cell)
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
