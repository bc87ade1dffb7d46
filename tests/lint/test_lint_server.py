"""`flambeau-lint --server`, spoken to over standard input and output as an editor does."""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from flambeau_lint.command import main

ROOT = Path(__file__).resolve().parents[2]
OLD = "import torch\ny = torch.ger(a, b)\n"
NEW = "import torch\ny = torch.outer(a, b)\n"


class Editor:
    """The least of an editor: messages with a header, texts, and the edits that are made to them."""

    def __init__(
        self, folder: Path, *flags: str, capabilities: dict[str, Any] | None = None
    ) -> None:
        self.folder = folder
        self.texts: dict[str, str] = {}
        self.shown: list[str] = []
        self.number = 0
        paths = [str(ROOT / "src"), os.environ.get("PYTHONPATH", "")]
        environment = {
            **os.environ,
            "PYTHONPATH": os.pathsep.join(filter(None, paths)),
            "XDG_CACHE_HOME": str(folder / ".cache"),
        }
        self.process = subprocess.Popen(
            [sys.executable, "-m", "flambeau_lint", "--server", *flags],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            cwd=folder,
            env=environment,
        )
        asked = {"processId": None, "rootUri": folder.as_uri(), "capabilities": capabilities or {}}
        self.capabilities = self.ask("initialize", asked)["capabilities"]
        self.tell("initialized", {})

    def uri(self, name: str) -> str:
        return (self.folder / name).as_uri()

    def send(self, message: dict[str, Any]) -> None:
        body = json.dumps({"jsonrpc": "2.0", **message}).encode()
        assert self.process.stdin is not None
        self.process.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
        self.process.stdin.flush()

    def receive(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        length = 0
        while line := self.process.stdout.readline().strip():
            name, _, value = line.partition(b":")
            length = int(value) if name.lower() == b"content-length" else length
        assert length, (self.process.stderr.read() if self.process.stderr else b"").decode()
        message: dict[str, Any] = json.loads(self.process.stdout.read(length))
        if message.get("method") == "window/showMessage":
            self.shown.append(message["params"]["message"])
        return message

    def tell(self, method: str, params: Any) -> None:
        self.send({"method": method, "params": params})

    def ask(self, method: str, params: Any) -> Any:
        self.number += 1
        self.send({"id": self.number, "method": method, "params": params})
        while True:
            message = self.receive()
            if message.get("id") == self.number:
                assert "error" not in message, message["error"]
                return message["result"]

    def diagnostics(self, name: str) -> list[dict[str, Any]]:
        """The next ones of a file."""
        while True:
            message = self.receive()
            is_about_it = message.get("params", {}).get("uri") == self.uri(name)
            if message.get("method") == "textDocument/publishDiagnostics" and is_about_it:
                found: list[dict[str, Any]] = message["params"]["diagnostics"]
                return found

    def open(self, name: str, text: str, language: str = "python") -> list[dict[str, Any]]:
        self.texts[name] = text
        document = {"uri": self.uri(name), "languageId": language, "version": 1, "text": text}
        self.tell("textDocument/didOpen", {"textDocument": document})
        return self.diagnostics(name)

    def type(self, name: str, text: str, version: int) -> None:
        self.texts[name] = text
        document = {"uri": self.uri(name), "version": version}
        changes = [{"text": text}]
        self.tell("textDocument/didChange", {"textDocument": document, "contentChanges": changes})

    def actions(self, name: str, where: dict[str, Any], *only: str) -> list[dict[str, Any]]:
        context: dict[str, Any] = {"diagnostics": []}
        if only:
            context["only"] = list(only)
        document = {"uri": self.uri(name)}
        params = {"textDocument": document, "range": where, "context": context}
        found: list[dict[str, Any]] = self.ask("textDocument/codeAction", params)
        return found

    def after(self, name: str, action: dict[str, Any], *, ends: str = "\r\n|\r|\n") -> str:
        """The text with the edits of an action, whose columns count UTF-16; `ends` is what ends a line."""
        text = self.texts[name]
        spans = []
        for edit in action["edit"]["changes"][self.uri(name)]:
            start, end = (offset(text, edit["range"][side], ends) for side in ("start", "end"))
            spans.append((start, end, edit["newText"]))
        for start, end, new in sorted(spans, reverse=True):
            text = text[:start] + new + text[end:]
        return text


def offset(text: str, position: dict[str, int], ends: str) -> int:
    starts = [0, *(one.end() for one in re.finditer(ends, text))]
    if position["line"] >= len(starts):
        return len(text)  # as editors take what lies behind their last line
    start = starts[position["line"]]
    units = text[start:].encode("utf-16-le")[: 2 * position["character"]]
    return start + len(units.decode("utf-16-le"))


@pytest.fixture
def editor(tmp_path: Path) -> Iterator[Editor]:
    pytest.importorskip("pygls")
    one = Editor(tmp_path, "--target", "2.15")
    yield one
    one.process.kill()
    one.process.communicate()


def test_a_finding_is_shown_with_its_rule(editor: Editor) -> None:
    (found,) = editor.open("a.py", OLD)
    assert found["range"] == {
        "start": {"line": 1, "character": 4},
        "end": {"line": 1, "character": 13},
    }
    assert (found["code"], found["source"], found["severity"]) == ("FLB206", "flambeau-lint", 2)
    assert found["tags"] == [2]
    assert found["data"] == {"kind": "deprecated", "name": "ger"}
    assert "`torch.ger`" in found["message"]
    page = Path(found["codeDescription"]["href"].removeprefix("file://"))
    assert page.read_text(encoding="utf-8").startswith("FLB206 ger\n")


def test_it_follows_what_is_typed(editor: Editor) -> None:
    assert editor.open("a.py", NEW) == []
    editor.type("a.py", OLD + "(", 2)  # does not parse
    editor.type("a.py", OLD, 3)
    assert [one["code"] for one in editor.diagnostics("a.py")] == ["FLB206"]
    editor.tell("textDocument/didClose", {"textDocument": {"uri": editor.uri("a.py")}})
    assert editor.diagnostics("a.py") == []


def test_fixes_and_comments(editor: Editor) -> None:
    (found,) = editor.open("a.py", OLD)
    fix, silence = editor.actions("a.py", found["range"], "quickfix")
    assert (fix["kind"], fix["isPreferred"]) == ("quickfix", True)
    assert fix["diagnostics"][0]["code"] == "FLB206"
    assert editor.after("a.py", fix) == NEW
    silenced = "import torch\ny = torch.ger(a, b)  # noqa: FLB206\n"
    assert editor.after("a.py", silence) == silenced
    assert editor.open("b.py", silenced) == []
    nowhere = {"start": {"line": 0, "character": 0}, "end": {"line": 0, "character": 0}}
    assert editor.actions("a.py", nowhere, "quickfix") == []


def test_all_safe_fixes_at_once(editor: Editor) -> None:
    text = OLD + "z = torch.symeig(y)\nw = torch.ger(y, y)"
    assert len(editor.open("a.py", text)) == 3
    everywhere = {"start": {"line": 0, "character": 0}, "end": {"line": 3, "character": 0}}
    for only in ([], ["source"], ["source.fixAll"], ["source.fixAll.flambeau"]):
        found = editor.actions("a.py", everywhere, *only)
        (whole,) = [one for one in found if one["kind"] == "source.fixAll.flambeau"]
        fixed = NEW + "z = torch.symeig(y)\nw = torch.outer(y, y)"
        assert editor.after("a.py", whole) == fixed
    assert editor.actions("a.py", everywhere, "refactor") == []
    editor.open("b.py", NEW)
    assert editor.actions("b.py", everywhere) == []


def test_a_doubtful_fix_says_so(editor: Editor) -> None:
    text = "import torch\nr = torch.matrix_rank(a)\n"
    (found,) = editor.open("a.py", text)
    fix, _ = editor.actions("a.py", found["range"], "quickfix")
    assert fix["title"].endswith(", which may change what the program does")
    assert not fix["isPreferred"]
    assert "torch.linalg.matrix_rank(a)" in editor.after("a.py", fix)
    assert editor.actions("a.py", found["range"], "source.fixAll") == []


@pytest.mark.parametrize("end", ["\n", "\r\n", "\r"])
def test_columns_count_utf_16(editor: Editor, end: str) -> None:
    """'𝑥' is two units and four bytes; a form feed and U+2028 begin no line."""
    text = f"import torch{end}s = '𝑥\x0c\u2028火'; y = torch.ger(a, b){end}"
    (found,) = editor.open("a.py", text)
    assert editor.capabilities["positionEncoding"] == "utf-16"
    assert found["range"]["start"] == {"line": 1, "character": 17}
    fix, silence = editor.actions("a.py", found["range"], "quickfix")
    assert editor.after("a.py", fix) == text.replace("torch.ger", "torch.outer")
    assert editor.after("a.py", silence) == text.removesuffix(end) + f"  # noqa: FLB206{end}"


@pytest.mark.parametrize("ends", ["\r\n|\r|\n", "\r\n|\n"])
@pytest.mark.parametrize(
    "text",
    [
        "import torch\ry = torch.ger(a, b)\r",
        "import torch\ry = torch.ger(a, b)",
        "# 火\rimport torch\r\ny = torch.ger(a, b)\nz = 1\n",
    ],
)
def test_a_cr_alone_ends_no_line_in_some_editors(editor: Editor, text: str, ends: str) -> None:
    (found,) = editor.open("a.py", text)
    fix, silence, every = editor.actions("a.py", found["range"])
    expected = text.replace("torch.ger", "torch.outer")
    assert editor.after("a.py", fix, ends=ends) == expected
    assert editor.after("a.py", every, ends=ends) == expected
    silenced = text.replace("(a, b)", "(a, b)  # noqa: FLB206")
    assert editor.after("a.py", silence, ends=ends) == silenced


def test_an_editor_that_counts_bytes(tmp_path: Path) -> None:
    pytest.importorskip("pygls")
    general = {"general": {"positionEncodings": ["utf-8", "utf-16"]}}
    editor = Editor(tmp_path, "--target", "2.15", capabilities=general)
    (found,) = editor.open("a.py", "import torch\ns = '𝑥'; y = torch.ger(a, b)\n")
    assert editor.capabilities["positionEncoding"] == "utf-8"
    assert found["range"]["start"]["character"] == 16
    editor.process.kill()
    editor.process.communicate()


def test_the_settings_of_the_project_hold(editor: Editor) -> None:
    settings = editor.folder / "pyproject.toml"
    settings.write_text('[tool.flambeau.lint]\nignore = ["FLB206"]\nexclude = ["old/*"]\n')
    assert editor.open("a.py", OLD) == []
    assert editor.open("old/a.py", "import torch\ntorch.qr(a)\n") == []
    settings.write_text('[tool.flambeau.lint]\nignroe = ["FLB206"]\n')
    editor.tell("textDocument/didSave", {"textDocument": {"uri": editor.uri("a.py")}})
    assert editor.diagnostics("a.py") == []
    assert "did you mean ignore?" in editor.shown[0]
    settings.write_text("")
    editor.tell("textDocument/didSave", {"textDocument": {"uri": editor.uri("a.py")}})
    assert [one["code"] for one in editor.diagnostics("a.py")] == ["FLB206"]
    assert len(editor.shown) == 1


def test_other_files_are_left_alone(editor: Editor) -> None:
    assert editor.open("a.md", f"```python\n{OLD}```\n", "markdown") == []
    legacy = f"# -*- coding: gbk -*-\n# 火\n{OLD}"  # the editor has read it as text
    assert [one["range"]["start"]["line"] for one in editor.open("b.py", legacy)] == [3]


def test_it_ends_when_the_editor_does(editor: Editor) -> None:
    assert editor.ask("shutdown", None) is None
    editor.tell("exit", None)
    assert editor.process.wait(timeout=20) == 0


@pytest.mark.parametrize(
    "words", [["--fix"], ["a.py"], ["--output-format", "json"], ["--jobs", "2"]]
)
def test_what_means_nothing_to_it_is_refused(
    words: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["--server", *words]) == 2
    assert "and --server exclude each other" in capsys.readouterr().err


def test_what_to_install_is_said(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "flambeau_lint.server", raising=False)
    for name in ("lsprotocol", "pygls"):
        monkeypatch.setitem(sys.modules, name, None)
    assert main(["--server"]) == 2
    assert "pip install 'pygls" in capsys.readouterr().err
