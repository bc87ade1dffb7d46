"""Every page is true: its blocks run, its links resolve, and both languages show the same code.

The blocks of a page run in order in a temporary folder, with every warning an error: Python in one namespace,
and of ```bash each line by itself. A line ends with 0 unless its comment begins with `exit code N`.
A Python block cannot be skipped, one for the shell can, by ```bash not-run: REASON, which no reader sees;
the commands in it are parsed all the same.
"""

import ast
import functools
import itertools
import linecache
import os
import random
import re
import shlex
import signal
import subprocess
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, redirect_stdout
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest
import torch

from flambeau.cli.command import check
from flambeau.cli.command import main as flambeau
from flambeau.errors import InputError

ROOT = Path(__file__).resolve().parents[1]
ENGLISH_PAGES = sorted((ROOT / "docs" / "en").rglob("*.md"))
CHINESE_PAGES = sorted((ROOT / "docs" / "zh").rglob("*.md"))
DOCS = [*ENGLISH_PAGES, *CHINESE_PAGES]
# What readers stumble over, and what to write in its place.
BANNED = {
    r"\b(old|the) notes\b|\bthe note('s)?\b|笔记(?!本)": "what snippets do, or what changed in torch",
    r"英文部分|中文部分": "what is shown; every page can be read alone",
    r"\b(to|not|cannot|could not) be had\b": "'available'",
    r"\bmend(s|ed|ing)?\b": "'fix'",
    r"\b(gone|go|goes|going) on with\b": "'continue'",
    r"\bfor nothing\b(?! can| in)": "'free', or 'never'",
    r"\b(of the|our) house\b": "'ours', or 'flambeau's'",
    r"\bstands? still\b": "'hangs', or 'does not change'",
    r"\bwithout a word\b|\bin silence\b": "'silently'",
    r"\bas ever\b": "'as usual'",
    r"\bby hand\b": "'manually', or how it is done",
    r"\b(colour|favour|behaviour|centre)s?\b": "it as torch does: 'color', 'center'",
    r"\b(one|once) an? (batch|channel|epoch|file|GPU|image|line|machine|process|rank|sample|step)\b": "'per'",
}
_THEMES = "AG|AMP|CKP|DAT|DBG|DEV|DIST|ENV|FT|IMG|INF|INS|MEM|MOD|PRO|REP|SBN|SCH|TEN|TRK|VIZ"
ROW_IDS = {rf"\b({_THEMES})-\d\d\b": "no row ids"}
GLOSSARY = {  # docs/zh/glossary.md: one word for one thing
    "您": "'你'",
    r"(?<!试验)工作进程": "'数据加载进程'",
    r"批次大小|批量大小": "'批大小'",
    r"叶子(张量|节点)?": "'叶张量'",
    r"设备内存|(GPU|显卡) ?(的|上的)?内存": "'显存'",
    "缺省|数据增广": "'默认', '数据增强'",
    r"(?<!数据)加载进程": "'数据加载进程'",
    "核函数|处理器时间": "'内核', 'CPU 时间'",
}
PLAIN_FOLDERS = [
    "recipes", "cli", "data/sources", "data/pack", "data/loading", "data/datasets",
    "run/folder", "trainer/parts", "weights",
]  # fmt: skip
READMES = [ROOT / "README.md", ROOT / "README.zh-CN.md"]
CONTRIBUTING = [ROOT / "CONTRIBUTING.md", ROOT / "CONTRIBUTING.zh-CN.md"]
PAGES = [*READMES, *CONTRIBUTING, *DOCS]
RECIPE_PAGES = [page for page in ENGLISH_PAGES if page.parent.name == "recipes"]

FENCE = re.compile(r"(?P<indent> *)(?P<marks>`{3,}|~{3,}) *(?P<word>[^`]*)")
NOT_RUN = re.compile(r"bash not-run: \S.*")
NO_RUN_HINT = "write ```bash not-run: REASON"
HARMLESS = ("mkdir",)
"""What a page may run besides flambeau and python: an installer would change the machine of whoever tests."""
COMMENT = re.compile(r"(?:^| +)# ?(.*)")
EXIT_CODE = re.compile(r"(?:exit code|退出码) (\d+)")
INLINE_CODE = re.compile(r"(`+)(?!`).+?(?<!`)\1(?!`)")
LINK = re.compile(r"\]\((?P<inline>[^)\s]+)[^)]*\)|^\[[^\]]+\]: *(?P<below>\S+)")
CJK = re.compile(r"[\u4e00-\u9fff]")
ENGLISH = re.compile(r"[a-z]{3,} [a-z]{2,}")
# A word that ends in three small letters, a full stop, a capital: 'et al. The' and 'e.g. A' pass.
TWO_SENTENCES = re.compile(r"[a-z]{3}[)\"']?[.?!] [A-Z]|[。？！][^\s”’」』）)*_]")


class Block(NamedTuple):
    word: str  # what follows the opening fence: 'python', 'bash', ''
    line: int  # of the first line inside, from 1
    source: str


class Page(NamedTuple):
    blocks: list[Block]
    prose: list[tuple[int, str]]  # (line number, text) outside the blocks, `code` emptied


def parse(text: str) -> Page:
    """Split a page into its fenced blocks and the lines around them."""
    page = Page([], [])
    fence: re.Match[str] | None = None
    inside: list[str] = []
    number = 0
    for number, line in enumerate(text.splitlines(), start=1):
        if fence is None:
            fence = FENCE.fullmatch(line)
            inside = []
            if fence is None:
                page.prose.append((number, INLINE_CODE.sub("``", line)))
        elif re.fullmatch(rf" *{fence['marks']}{fence['marks'][0]}* *", line):
            source = "".join(f"{row.removeprefix(fence['indent'])}\n" for row in inside)
            page.blocks.append(Block(fence["word"].strip(), number - len(inside), source))
            fence = None
        else:
            inside.append(line)
    if fence is not None:
        raise ValueError(f"line {number - len(inside)}: this block is never closed")
    return page


def read(path: Path) -> Page:
    return parse(path.read_text(encoding="utf-8"))


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


# ---------------------------------------------------------------- the blocks run


def python_blocks(page: Page, name: str) -> list[Block]:
    return [block for block in blocks_to_run(page, name) if block.word == "python"]


def blocks_to_run(page: Page, name: str) -> list[Block]:
    for block in page.blocks:
        if block.word.startswith("py") and block.word != "python":
            pytest.fail(f"{name}:{block.line - 1}: write ```python, not ```{block.word}")
        is_shell = re.match(r"(bash|sh|shell|console|zsh)\b", block.word)
        if is_shell and block.word != "bash" and not NOT_RUN.fullmatch(block.word):
            better = "```bash, or ```bash not-run: REASON"
            pytest.fail(f"{name}:{block.line - 1}: write {better}, not ```{block.word}")
    return [block for block in page.blocks if block.word in ("python", "bash")]


def run_page(page: Page, name: str) -> None:
    """Run the blocks of a page; a failure names the page and the line."""
    main = types.ModuleType("__main__")
    with kept_process_state():
        sys.modules["__main__"] = main  # its classes can be pickled for worker processes
        warnings.simplefilter("error")
        for block in blocks_to_run(page, name):
            if block.word == "bash":
                for line, text in shell_lines(block):
                    run_line(text, f"{name}:{line}")
                continue
            padded = "\n" * (block.line - 1) + block.source
            # Tracebacks and inspect.getsource find the block at its place on the page.
            lines = padded.splitlines(keepends=True)
            linecache.cache[name] = (len(padded), None, lines, name)
            try:
                exec(compile(padded, name, "exec", dont_inherit=True), main.__dict__)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                line = line_of(error, name)
                pytest.fail(f"{name}:{line}: {type(error).__name__}: {error}")


def shell_lines(block: Block) -> Iterator[tuple[int, str]]:
    """(line of the page, text) of each command; one that goes on behind a backslash is one."""
    start = 0
    parts: list[str] = []
    for number, row in enumerate(block.source.splitlines(), start=block.line):
        start = start if parts else number
        parts.append(row.removesuffix("\\"))
        if not row.endswith("\\"):
            if not re.fullmatch(r"\s*(#.*)?", "".join(parts)):
                yield start, "".join(parts)
            parts = []


def run_line(text: str, where: str) -> None:
    """`flambeau ...`, maybe with NAME=VALUE before it or > FILE behind it, in this process."""
    comment = COMMENT.search(text)
    code = EXIT_CODE.match(comment[1]) if comment else None
    expected = int(code[1]) if code else 0
    words = shlex.split(text, comments=True)
    variables = list(itertools.takewhile(re.compile(r"\w+=").match, words))
    words = words[len(variables) :]
    if words[0] == "flambeau":
        environment = [one.replace("$PWD", str(Path.cwd())).split("=", 1) for one in variables]
        found = run_flambeau(words[1:], dict(environment), where)
    elif words[0] == "python":
        found = subprocess.run([sys.executable, *words[1:]], check=False).returncode
    elif words[0] in HARMLESS:
        found = subprocess.run(words, check=False).returncode
    else:
        pytest.fail(
            f"{where}: {words[0]} is not run here, since it may change this machine: {NO_RUN_HINT}"
        )
    if found != expected:
        pytest.fail(f"{where}: exit code {found} where {expected} was expected: {text}")


def run_flambeau(words: list[str], variables: dict[str, str], where: str) -> int:
    with ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        for name, value in variables.items():
            patch.setenv(name, value)
        if ">" in words[-2:-1]:
            file = stack.enter_context(Path(words[-1]).open("w", encoding="utf-8"))
            stack.enter_context(redirect_stdout(file))
            words = words[:-2]
        try:
            return flambeau(words)
        except Exception as error:
            pytest.fail(f"{where}: {type(error).__name__}: {error}")


def line_of(error: BaseException, name: str) -> int | None:
    if isinstance(error, SyntaxError) and error.filename == name:
        return error.lineno
    frames = traceback.extract_tb(error.__traceback__)
    return [frame.lineno for frame in frames if frame.filename == name][-1]


def attribute(owner: object, name: str) -> tuple[Callable[[], Any], Callable[[Any], Any]]:
    return functools.partial(getattr, owner, name), functools.partial(setattr, owner, name)


PROCESS_STATE: list[tuple[Callable[[], Any], Callable[[Any], Any]]] = [
    (random.getstate, random.setstate),
    (numpy.random.get_state, numpy.random.set_state),
    (torch.get_rng_state, torch.set_rng_state),
    (torch.get_default_dtype, torch.set_default_dtype),
    (torch.get_num_threads, torch.set_num_threads),
    (torch.is_grad_enabled, torch.set_grad_enabled),
    (torch.get_deterministic_debug_mode, torch.set_deterministic_debug_mode),
    (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    attribute(torch.backends.cudnn, "benchmark"),
    attribute(torch.backends.cudnn, "deterministic"),
    attribute(sys, "path"),
    (Path.cwd, os.chdir),
]
RANK_VARIABLES = (
    "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)


@contextmanager
def kept_process_state() -> Iterator[None]:
    """A page may set what it likes for the whole process: the next test does not see it."""
    before = [(read(), write) for read, write in PROCESS_STATE]
    handlers = [(number, signal.getsignal(number)) for number in SIGNALS]
    environment, main, path = dict(os.environ), sys.modules["__main__"], list(sys.path)
    try:
        with warnings.catch_warnings():
            yield
    finally:
        for value, write in before:
            write(value)
        torch.set_default_device(None)
        for number, handler in handlers:
            signal.signal(number, handler)
        sys.modules["__main__"], sys.path[:] = main, path
        for name in os.environ.keys() - environment.keys():
            del os.environ[name]
        os.environ.update(environment)


# tests/test_notebooks.py runs the lessons.
RUN_HERE = [path for path in ENGLISH_PAGES if path.parent.name != "course"]


@pytest.mark.parametrize("path", [READMES[0], CONTRIBUTING[0], *RUN_HERE], ids=name_of)
def test_blocks_run(
    path: Path,
    tmp_path: Path,
    few_embedded: Path,
    monkeypatch: pytest.MonkeyPatch,
    start_ranks: Callable[..., Any],
    run_python: Callable[..., "subprocess.CompletedProcess[str]"],
) -> None:
    """On every tenth of the embedded images; a script that a block starts forks from a Python with torch."""

    def run(words: list[str], **settings: Any) -> "subprocess.CompletedProcess[Any]":
        if words[0] == sys.executable and words[1].endswith(".py") and not settings:
            return run_python(*words[1:])
        return real_run(words, **settings)

    real_run = subprocess.run
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.chdir(tmp_path)
    page = read(path)
    if any("torch.distributed" in block.source for block in page.blocks):
        start_ranks(1, run_alone, page, name_of(path)).results(timeout=300)
    else:
        run_page(page, name_of(path))


def run_alone(page: Page, name: str) -> None:
    """In a process of its own, because a process group may leave threads behind, and no rank of a job."""
    for variable in RANK_VARIABLES:
        del os.environ[variable]
    try:
        run_page(page, name)
    except pytest.fail.Exception as error:
        raise AssertionError(str(error)) from None


def commands_in(block: Block) -> Iterator[tuple[int, list[str]]]:
    """(line of the page, words) of each `flambeau ...` of a block, wherever it stands in a line."""
    for number, text in shell_lines(block):
        lexer = shlex.shlex(text, posix=True, punctuation_chars=True)
        lexer.whitespace_split = True
        for is_mark, words in itertools.groupby(lexer, lambda word: set(word) <= set(";<>|&()")):
            command = list(words)
            while command and (command[0] == "until" or re.match(r"[A-Z_]+=", command[0])):
                command = command[1:]
            if not is_mark and command[:1] == ["flambeau"]:
                yield number, command[1:]


def unknown_commands(page: Page) -> Iterator[str]:
    for block in page.blocks:
        for line, words in commands_in(block) if NOT_RUN.fullmatch(block.word) else ():
            try:
                check(words)
            except InputError as error:
                yield f"line {line}: {error}"


@pytest.mark.parametrize("path", [READMES[0], *ENGLISH_PAGES], ids=name_of)
def test_commands_that_are_not_run_exist(path: Path) -> None:
    """With these flags, and values of these kinds."""
    assert list(unknown_commands(read(path))) == []


@pytest.mark.parametrize("path", RECIPE_PAGES, ids=name_of)
def test_recipe_page_shows_its_recipe_at_work(path: Path) -> None:
    nodes = [
        node
        for block in python_blocks(read(path), name_of(path))
        for node in ast.walk(ast.parse(block.source))
    ]
    modules = [node.module or "" for node in nodes if isinstance(node, ast.ImportFrom)]
    assert any(re.fullmatch(rf"flambeau\.recipes\.\w+\.{path.stem}", name) for name in modules)
    calls = [ast.unparse(node.func) for node in nodes if isinstance(node, ast.Call)]
    asserts = any(isinstance(node, ast.Assert) for node in nodes)
    assert asserts or "torch.testing.assert_close" in calls, "no block asserts anything"


# ---------------------------------------------------------------- words and links


def prose_breaches(page: Page) -> Iterator[str]:
    for number, line in page.prose:
        if not line.startswith(("|", "#")) and (match := TWO_SENTENCES.search(line)):
            yield f"line {number}: two sentences on one line, at {match[0]!r}"


def banned_words(text: str, words: dict[str, str]) -> Iterator[str]:
    any_of_them = re.compile("|".join(f"(?:{pattern})" for pattern in words), re.IGNORECASE)
    for number, line in enumerate(text.splitlines(), start=1):
        if not any_of_them.search(line):
            continue
        for pattern, better in words.items():
            if match := re.search(pattern, line, re.IGNORECASE):
                yield f"line {number}: {match[0]!r}; write {better}"


def links(page: Page) -> Iterator[tuple[int, str]]:
    for number, line in page.prose:
        for match in LINK.finditer(line):
            target = match["inline"] or match["below"]
            if not re.match(r"[a-z]+:", target):
                yield number, target


@functools.cache
def anchors(path: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    text = path.read_text(encoding="utf-8")
    headings = [line.lstrip("# ").replace("`", "") for _, line in parse_headings(text)]
    slugs = [re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings]
    return {
        slug if (before := slugs[:place].count(slug)) == 0 else f"{slug}-{before}"
        for place, slug in enumerate(slugs)
    }


def parse_headings(text: str) -> list[tuple[int, str]]:
    inside = {number for number, _ in parse(text).prose}
    rows = enumerate(text.splitlines(), start=1)
    return [(number, row) for number, row in rows if number in inside and re.match("#+ ", row)]


def link_breaches(page: Page, path: Path) -> Iterator[str]:
    for number, target in links(page):
        file, _, anchor = target.partition("#")
        goal = (path.parent / file).resolve() if file else path
        if not goal.exists():
            yield f"line {number}: {target} leads nowhere"
        elif not goal.is_relative_to(ROOT):
            yield f"line {number}: {target} leaves the project"
        elif anchor and anchor not in anchors(goal):
            yield f"line {number}: {name_of(goal)} has no heading #{anchor}"


def language_breaches(page: Page, language: str) -> Iterator[str]:
    """A page speaks one language; names and quotations of the other may stand in it."""
    lines = [line for _, line in page.prose]
    num_chinese = sum(bool(CJK.search(line)) for line in lines)
    num_english = sum(bool(ENGLISH.search(line)) for line in lines if not CJK.search(line))
    if (num_chinese > num_english) != (language == "zh"):
        yield f"{num_chinese} lines are Chinese and {num_english} English"


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_prose_and_links(path: Path) -> None:
    page = read(path)
    assert [*prose_breaches(page), *link_breaches(page, path)] == []


@pytest.mark.parametrize("path", PAGES, ids=name_of)
def test_plain_words_in_pages(path: Path) -> None:
    words = BANNED | GLOSSARY | ({} if path.name == "coverage.md" else ROW_IDS)
    assert list(banned_words(path.read_text(encoding="utf-8"), words)) == []


@pytest.mark.parametrize("folder", PLAIN_FOLDERS)
def test_plain_words_in_source(folder: str) -> None:
    """In names, comments, docstrings and messages."""
    files = sorted((ROOT / "src" / "flambeau" / folder).rglob("*.py"))
    assert files
    found = [
        f"{name_of(file)}: {breach}"
        for file in files
        for breach in banned_words(file.read_text(encoding="utf-8"), BANNED | GLOSSARY | ROW_IDS)
    ]
    assert found == []


@pytest.mark.parametrize("path", DOCS, ids=name_of)
def test_page_speaks_its_language(path: Path) -> None:
    language = path.relative_to(ROOT / "docs").parts[0]
    assert list(language_breaches(read(path), language)) == []


@pytest.mark.parametrize("folder", ["en", "zh"])
def test_index_lists_every_page(folder: str) -> None:
    """But those of the recipes: their folder is the list, so that a recipe is three files."""
    index = ROOT / "docs" / folder / "index.md"
    linked = {(index.parent / target).resolve() for _, target in links(read(index))}
    assert {index.parent / "recipes"} <= linked
    pages = {page for page in index.parent.rglob("*.md") if page.parent.name != "recipes"}
    assert pages - {index} - linked == set()


def test_both_languages_have_the_same_pages() -> None:
    english = [page.relative_to(ROOT / "docs" / "en") for page in ENGLISH_PAGES]
    assert [page.relative_to(ROOT / "docs" / "zh") for page in CHINESE_PAGES] == english


@pytest.mark.parametrize(
    ("english", "chinese"),
    [READMES, CONTRIBUTING, *zip(ENGLISH_PAGES, CHINESE_PAGES, strict=False)],
    ids=[name_of(path) for path in (READMES[0], CONTRIBUTING[0], *ENGLISH_PAGES)],
)
def test_both_languages_show_the_same_code(english: Path, chinese: Path) -> None:
    """So the Chinese blocks run because the English ones do; comments are translated."""
    assert list(blocks_by_heading(english)) == list(blocks_by_heading(chinese))


def blocks_by_heading(path: Path) -> Iterator[tuple[int, str]]:
    """Which heading each block stands below, counted from 0, and its code."""
    headings = [line for line, _ in parse_headings(path.read_text(encoding="utf-8"))]
    for block in read(path).blocks:
        yield sum(line < block.line for line in headings), code(block)


def code(block: Block) -> str:
    if block.word == "python":
        return ast.unparse(ast.parse(block.source))
    lines = [re.sub(r"(^| +)(#|//).*", "", line).rstrip() for line in block.source.splitlines()]
    word = block.word.partition(" ")[0] if NOT_RUN.fullmatch(block.word) else block.word
    return "\n".join([word, *(line for line in lines if line)])


@pytest.mark.parametrize("path", READMES, ids=name_of)
def test_readme_is_short(path: Path) -> None:
    assert len(path.read_text(encoding="utf-8").splitlines()) <= 120


def test_pages_were_found() -> None:
    assert len(RECIPE_PAGES) >= 10


# ---------------------------------------------------------------- the checks can fail

PAGE = """# Title

```python
x = 1
```

- a list:
  ```python
  y = x + 1
  assert y == 2
  ```

```bash
flambeau recipes page ema > found.txt  # the page of a recipe
NO_COLOR=1 flambeau recipes \\
    page emma                 # exit code 2: there is none
mkdir made

# a comment alone
```

```bash not-run: it fails
exit 1
```
"""


def test_blocks_share_a_namespace_and_a_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert [block.line for block in parse(PAGE).blocks] == [4, 9, 14, 23]
    run_page(parse(PAGE), "page.md")
    assert Path("found.txt").read_text().startswith("# ")
    assert Path("made").is_dir()


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("y == 2", "y == 3", r"page\.md:10: AssertionError"),
        ("x = 1", "x = (", r"page\.md:4: SyntaxError"),
        ("x = 1", "import warnings; warnings.warn('old')", r"page\.md:4: UserWarning: old"),
        ("x = 1", "exit(0)", r"page\.md:4: SystemExit"),
        ("x = 1", "int('a')", r"page\.md:4: ValueError: invalid literal"),
        ("```python\nx", "```python notest\nx", r"page\.md:3: write ```python"),
        ("```python\nx", "```pycon\nx", r"page\.md:3: write ```python"),
        ("```bash\n", "```console\n", r"page\.md:13: write ```bash, or ```bash not-run"),
        ("not-run: it fails", "not-run", r"page\.md:22: write ```bash, or ```bash not-run"),
        ("page ema ", "page emma ", r"page\.md:14: exit code 2 where 0 was expected"),
        ("exit code 2", "exit code 1", r"page\.md:15: exit code 2 where 1 was expected"),
        ("mkdir made", "mkdir made/a/b", r"page\.md:17: exit code 1 where 0 was expected"),
        ("mkdir made", "pip install made", r"page\.md:17: pip is not run here"),
    ],
)
def test_bad_block_fails_at_its_line(
    old: str, new: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pytest.fail.Exception, match=message):
        run_page(parse(PAGE.replace(old, new)), "page.md")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("flambeau train --epochs 3 --ema 0.9 photos/  # a comment", None),
        ("A=1 flambeau runs | jq; until flambeau env --json > env.json; do true; done", None),
        ("cd photos && flambeau runs --sirt best", "--sirt"),
        ("flambeau run", "unknown command 'run'"),
        ("flambeau train --epochs \\\n  three", "--epochs"),
    ],
)
def test_unknown_command_in_a_block_that_is_not_run_is_found(
    line: str, message: str | None
) -> None:
    found = list(unknown_commands(parse(f"```bash not-run: why\n{line}\n```\n")))
    assert len(found) == (message is not None)
    assert all((message or "") in breach and breach.startswith("line 2: ") for breach in found)


def test_open_block_is_refused() -> None:
    with pytest.raises(ValueError, match="line 22: this block is never closed"):
        parse(PAGE.removesuffix("```\n"))


def test_process_state_is_kept(tmp_path: Path) -> None:
    source = f"""
import os, random, signal, sys, numpy, torch
random.seed(0)
numpy.random.seed(0)
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)
torch.set_num_threads(torch.get_num_threads() + 1)
torch.set_grad_enabled(False)
torch.use_deterministic_algorithms(True)
torch.set_float32_matmul_precision("medium")
torch.backends.cudnn.benchmark = not torch.backends.cudnn.benchmark
torch.backends.cudnn.deterministic = not torch.backends.cudnn.deterministic
os.chdir({str(tmp_path)!r})
sys.path.append("nowhere")
os.environ["FLAMBEAU_TEST"] = "1"
del os.environ["PATH"]
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
    signal.signal(number, signal.SIG_IGN)
torch.set_default_device("meta")
"""

    def state() -> list[object]:
        values = [read() for read, _ in PROCESS_STATE]
        plain = [value.tolist() if isinstance(value, torch.Tensor) else value for value in values]
        handlers = [signal.getsignal(number) for number in SIGNALS]
        others = torch.get_default_device(), sys.modules["__main__"]
        return [repr(plain), *handlers, dict(os.environ), *others]

    before = state()
    with kept_process_state():
        exec(source)
        assert all(now != then for now, then in zip(state()[:-1], before[:-1], strict=True))
    assert state() == before


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("One thing. Another thing.", 1),
        ("One thing (here). Another.", 1),
        ("一件事。另一件事。", 1),
        ("| One thing. Another thing. |", 0),
        ("See Loshchilov et al. The rest, e.g. A, in Fig. 3 and `a. B`.", 0),
        ("一件事（见上。）", 0),
    ],
)
def test_two_sentences_on_a_line_are_found(line: str, expected: int) -> None:
    assert len(list(prose_breaches(parse(line)))) == expected


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("[a](index.md) and [b](design.md#layout)", []),
        ("![a](https://example.org/missing.png) `[b](missing.md)`", []),
        ("[a](missing.md)", ["line 1: missing.md leads nowhere"]),
        ("[a]: missing.md", ["line 1: missing.md leads nowhere"]),
        ("[a](design.md#nothing)", ["line 1: docs/en/design.md has no heading #nothing"]),
        ("[a](../../..)", ["line 1: ../../.. leaves the project"]),
    ],
)
def test_broken_link_is_found(line: str, expected: list[str]) -> None:
    assert list(link_breaches(parse(line), ROOT / "docs" / "en" / "index.md")) == expected


def test_other_language_is_found() -> None:
    english, chinese = (
        parse("# Title\n\nOnly these words."),
        parse("# 标题\n\n只有中文，还有 two words。"),
    )
    assert list(language_breaches(english, "en")) == list(language_breaches(chinese, "zh")) == []
    assert list(language_breaches(english, "zh")) == ["0 lines are Chinese and 1 English"]
    assert list(language_breaches(chinese, "en")) == ["2 lines are Chinese and 0 English"]


def test_banned_words_are_found() -> None:
    line = "What the notes say (DAT-33) goes on with one a line."
    assert len(list(banned_words(line, BANNED | ROW_IDS))) == 4
    plain = "Fix the config; for nothing can be said of a notebook, 笔记本, once per line."
    assert list(banned_words(plain, BANNED | ROW_IDS)) == []


def test_other_code_is_found() -> None:
    page = parse(PAGE)
    changed = parse(PAGE.replace("exit 1", "exit 2"))
    commented = parse(PAGE.replace("x = 1", "x = 1  # 一").replace("exit 1", "exit 1  # 一"))
    assert list(map(code, page.blocks)) == list(map(code, commented.blocks))
    assert list(map(code, page.blocks)) != list(map(code, changed.blocks))
