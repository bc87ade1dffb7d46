"""The pages as a site: it builds without a warning, names what is wrong, and works without a network."""

import json
import os
import posixpath
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from types import ModuleType
from urllib.parse import quote, unquote

import pytest

from flambeau.cli.recipe_search import Index
from load_script import load_script

ROOT = Path(__file__).resolve().parents[1]
TOOL = ROOT / "tools" / "build_site.py"
SCORE = ROOT / "tools" / "docs_score.py"
LANGUAGES = ("en", "zh")
# What a reader types, and the first answer.
QUERIES = [
    ("en", "torch.cuda.amp", "errors_and_old_names"),
    ("zh", "torch.cuda.amp", "errors_and_old_names"),
    ("zh", "双线性池化", "training_tricks"),
    ("en", "does not require grad and does not have a grad_fn", "errors_and_old_names"),
    ("zh", "does not require grad and does not have a grad_fn", "errors_and_old_names"),
]


@pytest.fixture(scope="module")
def tool() -> ModuleType:
    return load_script(TOOL)


def build(out: Path, *options: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(TOOL), "--out", str(out), *options]
    return subprocess.run(command, capture_output=True, text=True, encoding="utf-8", check=False)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("site") / "out"
    done = build(out)
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    return out


# ---------------------------------------------------------------- quick: for programs that read


@pytest.mark.parametrize("language", LANGUAGES)
def test_programs_find_all_pages(tool: ModuleType, language: str) -> None:
    pages = ROOT / "docs" / language
    made = tool.for_programs(pages)
    names = {page.relative_to(pages).with_suffix("").as_posix() for page in pages.rglob("*.md")}
    links = re.findall(r"\]\(([\w/]+)\.html[)#]", made["llms.txt"])
    assert len(links) > 40
    assert set(links) <= names
    assert ".md)" not in made["llms.txt"]
    assert made["llms.txt"].startswith("# flambeau\n\n> ")
    for page in pages.rglob("*.md"):
        assert page.read_text(encoding="utf-8").strip() in made["llms-full.txt"], page


# ---------------------------------------------------------------- quick: what is wrong is named

INDEX = """# Home

[A recipe](recipes/) and [a page](page.md#a-part).

## Pages

- [Page](page.md)
- [Other](other.md)
- [Recipes](recipes/)
- [Contributing](../../{contributing})
"""


@pytest.fixture
def docs(tmp_path: Path) -> Path:
    """A small folder of pages without a mistake."""
    docs = tmp_path / "docs"
    for language, contributing in (("en", "CONTRIBUTING.md"), ("zh", "CONTRIBUTING.zh-CN.md")):
        folder = docs / language
        folder.mkdir(parents=True)
        index = INDEX.format(contributing=contributing)
        (folder / "index.md").write_text(index, encoding="utf-8")
        (folder / "page.md").write_text("# Page\n\n## A part\n\n[zh](../zh/other.md)\n")
        (folder / "other.md").write_text("# Other\n\n[code](../../tools/build_site.py)\n")
        (folder / "design.md").write_text(
            "# 设计\n\n[页](page.md)。\n二。\nA line.\nAnother.\n", "utf-8"
        )
        with (folder / "index.md").open("a") as file:
            file.write("- [Design](design.md)\n")
    return docs


def test_small_site_builds(docs: Path, tmp_path: Path) -> None:
    done = build(tmp_path / "out", "--docs", str(docs))
    assert (done.returncode, done.stderr) == (0, "")
    page = (tmp_path / "out" / "en" / "page.html").read_text(encoding="utf-8")
    assert 'href="../zh/other.html"' in page
    chinese = (tmp_path / "out" / "zh" / "design.html").read_text(encoding="utf-8")
    assert "</a>。二。A line.\nAnother.</p>" in chinese
    assert list(broken_links(tmp_path / "out")) == []
    assert not list((tmp_path / "out").rglob("searchtools.js"))  # ours takes its place


def test_each_mistake_fails_the_build_and_is_named(docs: Path, tmp_path: Path) -> None:
    (docs / "en" / "other.md").write_text("# Other\n\n[a](missing.md) [b](../zh/missing.md)\n")
    (docs / "zh" / "other.md").write_text("# Other\n\n[a](page.md#no-part)\n[c](nowhere/)\n")
    for language in LANGUAGES:
        (docs / language / "unlisted.md").write_text("# Unlisted\n")
    done = build(tmp_path / "out", "--docs", str(docs))
    assert done.returncode == 1
    for said in (
        r"docs/en/other\.md:3: WARNING: .*missing\.md",
        r"docs/en/other\.md:3: WARNING: .*zh/missing\.md",
        r"docs/zh/other\.md:3: WARNING: .*no-part",
        r"docs/zh/other\.md:3: WARNING: .*nowhere/",
        r"docs/en/unlisted\.md: WARNING: document isn't included in any toctree",
    ):
        assert re.search(said, done.stderr), f"{said} is not in\n{done.stderr}"


def test_a_failed_build_and_other_folders_leave_everything_as_it_was(
    docs: Path, tmp_path: Path
) -> None:
    out = tmp_path / "new" / "out"
    assert build(out, "--docs", str(docs)).returncode == 0
    page, index = out / "en" / "page.html", docs / "en" / "index.md"
    before = page.read_bytes()
    text = index.read_text(encoding="utf-8")
    index.write_text(text + "\n[a](missing.md)\n", encoding="utf-8")
    assert build(out, "--docs", str(docs)).returncode == 1
    assert page.read_bytes() == before
    index.write_text(text, encoding="utf-8")
    (out / "en" / "old.html").touch()
    assert build(out, "--docs", str(docs)).returncode == 0
    assert not (out / "en" / "old.html").exists()
    for wrong in (docs, TOOL):
        done = build(wrong, "--docs", str(docs))
        assert done.returncode == 2
        assert f"{wrong} holds something else: --out takes a new folder" in done.stderr
    done = build(out, "--docs", str(tmp_path))
    assert done.returncode == 2
    assert f"there is no {tmp_path / 'en' / 'index.md'}" in done.stderr


def test_page_of_one_language_is_named(docs: Path, tmp_path: Path) -> None:
    (docs / "zh" / "other.md").unlink()
    done = build(tmp_path / "out", "--docs", str(docs))
    assert done.returncode == 1
    assert done.stderr == "docs/en/other.md has no docs/zh/other.md\n"


def test_navigation_is_what_the_index_says(tool: ModuleType) -> None:
    """Each page in one section alone, and the same pages in the same order in both languages."""
    lists = {}
    for language in LANGUAGES:
        index = (ROOT / "docs" / language / "index.md").read_text(encoding="utf-8")
        index = index.replace(f"../../{tool.CONTRIBUTING[language]}", "contributing.md")
        lists[language] = [section.splitlines()[5:-1] for section in tool.navigation(index)]
    assert lists["en"] == lists["zh"]
    pages = [page for section in lists["en"] for page in section]
    assert len(pages) == len(set(pages))
    assert "recipes/index.md" in pages
    assert "contributing.md" in pages


# ---------------------------------------------------------------- slow: the real site

LINKED = {
    "a": "href",
    "link": "href",
    "script": "src",
    "img": "src",
    "iframe": "src",
    "source": "src",
}


class Targets(HTMLParser):
    """Where the elements of a page lead, and which ids it has."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[tuple[str, str]] = []
        self.ids: set[str] = set()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        values = dict(attrs)
        self.ids.add(values.get("id") or "")
        if target := values.get(LINKED.get(tag, "")):
            self.found.append((tag, target))


def targets(path: Path) -> Targets:
    parser = Targets()
    parser.feed(path.read_text(encoding="utf-8"))
    return parser


def broken_links(site: Path) -> Iterator[str]:
    pages = {path: targets(path) for path in site.rglob("*.html")}
    for path, page in pages.items():
        for _, target in page.found:
            file, _, anchor = unquote(target).partition("#")
            if re.match(r"[a-z]+:", target):
                continue
            goal = (path.parent / file.partition("?")[0]).resolve() if file else path
            if not goal.is_file():
                yield f"{path.relative_to(site)}: {target}"
            elif anchor and goal in pages and anchor not in pages[goal].ids:
                yield f"{path.relative_to(site)}: {target} has no such part"


@pytest.mark.slow
def test_links_of_the_site_lead_somewhere(site: Path) -> None:
    assert list(broken_links(site)) == []
    page = targets(site / "en" / "design.html")
    assert any(target.endswith("/check_house.py") for _, target in page.found)


@pytest.mark.slow
def test_nothing_is_loaded_from_a_network(site: Path) -> None:
    for path in site.rglob("*.html"):
        loaded = [target for tag, target in targets(path).found if tag != "a"]
        assert [target for target in loaded if re.match(r"([a-z]+:)?//", target)] == []
    for path in site.rglob("*.css"):
        text = re.sub(r"/\*.*?\*/", "", path.read_text(encoding="utf-8"), flags=re.DOTALL)
        used = re.findall(r"url\(\s*[\"']?([^)\"']+)|@import\s+[\"']?([^\"';]+)", text)
        assert [url for pair in used for url in pair if re.match(r"(https?:)?//", url)] == []
    for path in site.rglob("*.js"):
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"(fetch|import|open|importScripts)\(\s*[\"'`](https?:)?//", text)
        assert not re.search(r"\.(src|href)\s*=\s*[\"'`](https?:)?//", text)


@pytest.mark.slow
def test_every_page_switches_to_itself_in_the_other_language(site: Path) -> None:
    for language, other in (LANGUAGES, LANGUAGES[::-1]):
        pages = sorted((site / language).rglob("*.html"))
        sources = sorted((ROOT / "docs" / language).rglob("*.md"))
        assert len(pages) == len(sources) + 3  # recipes, contributing, search
        for path in pages:
            goals = [(path.parent / t).resolve() for tag, t in targets(path).found if tag == "a"]
            assert goals.count(site / other / path.relative_to(site / language)) >= 2, path
            text = path.read_text(encoding="utf-8")
            assert f'<html class="no-js" lang="{"en" if language == "en" else "zh-CN"}"' in text


SEARCH = """
const fs = require("fs"), vm = require("vm");
const [folder, language] = process.argv.slice(1);
globalThis.window = {};
const {Index} = require(`${folder}/_static/search.js`);
vm.runInThisContext(fs.readFileSync(`${folder}/_static/search_index.js`, "utf-8"));
const index = new Index(window.flambeauIndex[language]);
const found = JSON.parse(fs.readFileSync(0, "utf-8")).map((query) => index.search(query, 5)
    .map(({entry, title, line}) => [entry.kind, entry.name, title, line]));
console.log(JSON.stringify(found));
"""
# Of each branch of the search that the questions of tools/docs_questions do not take.
MORE = [
    "module 'torch' has no attribute 'symeig'",
    "cannot import name 'container_abcs' from 'torch._six'",
    "tensr convolutoin",
    "how do I",
    "",
    "qqqqq",
    "用gpu训练 AMP",
]


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("node") is None, reason="no Node.js to run the search of the site")
@pytest.mark.parametrize("language", LANGUAGES)
def test_search_answers_as_the_command_does(site: Path, language: str) -> None:
    """Every question of the score: the same entries with the same lines in the same order."""
    asked = [one.text for one in load_script(SCORE).questions(language)] + MORE
    done = subprocess.run(
        ["node", "-e", SEARCH, str(site / language), language],
        input=json.dumps(asked), capture_output=True, check=True, text=True, timeout=300,
    )  # fmt: skip
    index = Index(chinese=language == "zh")
    for query, found in zip(asked, json.loads(done.stdout), strict=True):
        of_command = index.search(query, top=5)
        assert found == [[one.kind, one.name, one.title, one.line] for one in of_command], query


FAILING = """
const [path] = process.argv.slice(1);
const listeners = {};
const status = {}, list = {};
const form = {
  dataset: {root: "", language: "en", nothing: "nothing", failed: "did not load"},
  q: {value: "", addEventListener: (name, run) => { listeners[name] = run; }},
  querySelector: (what) => what === "ol" ? list : status,
  addEventListener() {},
};
globalThis.location = {search: ""};
globalThis.document = {
  createElement: () => ({}),
  head: {append: (script) => setImmediate(script.onerror)},
  querySelector: () => form,
  getElementById: () => null,
  addEventListener: (name, run) => { if (name === "DOMContentLoaded") run(); },
};
require(path);
listeners.focus();
form.q.value = "overfitting";
listeners.input();
setTimeout(() => console.log(JSON.stringify([status.textContent, list.hidden])), 50);
"""


@pytest.mark.skipif(shutil.which("node") is None, reason="no Node.js to run the search of the site")
def test_a_search_whose_index_does_not_load_says_so() -> None:
    done = subprocess.run(
        ["node", "-e", FAILING, str(ROOT / "tools" / "site" / "static" / "search.js")],
        capture_output=True, check=True, text=True, timeout=60,
    )  # fmt: skip
    assert json.loads(done.stdout) == ["did not load", True]


@pytest.mark.slow
@pytest.mark.parametrize("language", LANGUAGES)
def test_search_leads_to_what_it_names(site: Path, language: str) -> None:
    text = (site / language / "_static" / "search_index.js").read_text(encoding="utf-8")
    entries = json.loads(text.partition(" = ")[2].removesuffix(";\n"))["entries"]
    assert len(entries) == len(Index(chinese=language == "zh").entries)
    held: dict[str, str] = {}
    for url in {entry["url"] for entry in entries}:
        page, _, mark = url.partition("#")
        if page not in held:
            held[page] = (site / language / page).read_text(encoding="utf-8")
        assert not mark or f'id="{mark}"' in held[page], url


BROWSER = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
no_browser = pytest.mark.skipif(BROWSER is None, reason="no Chromium to open the site in")


def browse(path: Path, folder: Path, query: str = "") -> tuple[str, list[str]]:
    """A file as the browser shows it where no host exists, and which others the page asked for."""
    log = folder / "net.json"
    options = ["--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000"]
    no_network = ["--host-resolver-rules=MAP * ~NOTFOUND", f"--log-net-log={log}"]
    command = [str(BROWSER), *options, *no_network, f"--user-data-dir={folder / 'user'}"]
    done = subprocess.run(
        [*command, "--dump-dom", path.as_uri() + query],
        capture_output=True, text=True, encoding="utf-8", check=False, timeout=300,
    )  # fmt: skip
    # Its own requests have no page as their origin.
    asked = re.findall(r'"initiator":"null".*"url":"(https?:[^"]*)"', log.read_text("utf-8"))
    return done.stdout, asked


def answers(items: str) -> list[str]:
    return [posixpath.normpath(url) for url in re.findall(r'<li><a href="([^"]*)"', items)]


@pytest.mark.slow
@no_browser
@pytest.mark.parametrize(("language", "query", "first"), QUERIES)
def test_search_page_lists_answers(
    site: Path, tmp_path: Path, language: str, query: str, first: str
) -> None:
    dom, asked = browse(site / language / "search.html", tmp_path, f"?q={quote(query)}")
    found = answers(dom.partition('id="search-results"')[2])
    assert found[0].startswith(first)
    assert len(found) > 3
    assert asked == []


TYPING = """<script>
window.addEventListener("load", async () => {
  const field = document.querySelector("form.site-search").q;
  field.focus();
  for (const letter of QUERY) {
    field.value += letter;
    field.dispatchEvent(new Event("input", {bubbles: true}));
  }
});
</script>"""
AXE = """<script>
setTimeout(() => axe.run(document).then((found) => {
  const told = document.createElement("pre");
  told.id = "axe";
  told.textContent = JSON.stringify([found.passes.length, found.violations.map((one) => one.id)]);
  document.body.append(told);
}), 4000);
</script>"""


def with_scripts(site: Path, folder: Path, page: str, *scripts: str) -> Path:
    """A page of a copy of the site, with scripts at its end."""
    shutil.copytree(site, folder / "site", copy_function=os.link)
    path = folder / "site" / page
    text = path.read_text(encoding="utf-8").replace("</body>", "".join(scripts) + "</body>")
    path.unlink()  # a link to that of the site
    path.write_text(text, encoding="utf-8")
    return path


@pytest.mark.slow
@no_browser
@pytest.mark.parametrize(
    ("page", "query", "first", "language"),
    [
        ("en/recipes/ema.html", "CUDA out of memory. Tried to allocate", "../errors_and", "en"),
        ("en/index.html", "label smothing", "recipes/label_smoothing", "en"),
        ("en/index.html", "过拟合", "../zh/overfitting", "zh-CN"),
        ("zh/index.html", "类别不平衡", "uneven_classes", "zh-CN"),
    ],
)
def test_search_answers_as_one_types(
    site: Path, tmp_path: Path, page: str, query: str, first: str, language: str
) -> None:
    path = with_scripts(site, tmp_path, page, TYPING.replace("QUERY", json.dumps(query)))
    dom, asked = browse(path, tmp_path)
    (opened, items) = re.findall(r"<ol([^>]*)>(.*?)</ol>", dom.partition('role="search"')[2])[0]
    assert f'lang="{language}"' in opened
    assert "hidden" not in opened
    found = answers(items)
    assert any(url.startswith(first) for url in found[:3]), found
    assert len(found) <= 8
    assert asked == []


@pytest.mark.slow
@no_browser
@pytest.mark.parametrize(
    ("page", "query"),
    [("en/index.html", "overfitting"), ("zh/memory.html", "显存"), ("en/search.html", "ema")],
)
def test_axe_finds_nothing(site: Path, tmp_path: Path, page: str, query: str) -> None:
    """Neither on a page nor in the answers of the search, open below its field."""
    package = pytest.importorskip("axe_core_python")
    axe = (Path(package.__file__).parent / "axe.min.js").read_text(encoding="utf-8")
    typing = TYPING.replace("QUERY", json.dumps(query))
    path = with_scripts(site, tmp_path, page, typing, f"<script>{axe}</script>", AXE)
    dom, _ = browse(path, tmp_path)
    (told,) = re.findall(r'<pre id="axe">(.*?)</pre>', dom)
    passes, broken = json.loads(told)
    assert broken == []
    assert passes > 15


@pytest.mark.slow
@no_browser
@pytest.mark.parametrize("page", ["index.html", "zh/index.html", "zh/recipes/ema.html"])
def test_page_needs_no_network(site: Path, tmp_path: Path, page: str) -> None:
    dom, asked = browse(site / page, tmp_path)
    assert "sidebar-tree" in dom
    assert asked == []


@pytest.mark.slow
@no_browser
def test_a_remote_script_would_be_noticed(tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    page.write_text('<script src="https://example.org/x.js"></script>', encoding="utf-8")
    assert browse(page, tmp_path)[1] == ["https://example.org/x.js"]
