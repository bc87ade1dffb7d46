"""`flambeau lint` as a user types it: files, settings, comments, formats, exit codes, what it writes."""

import io
import json
import os
import re
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator

import flambeau_lint
from flambeau.cli.command import main as flambeau
from flambeau_lint import many_files
from flambeau_lint.command import main
from flambeau_lint.rules.catalog import BY_CODE, RULES

OLD = "import torch\ny = torch.ger(a, b)\n"
NEW = "import torch\ny = torch.outer(a, b)\n"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / ".cache"))
    return tmp_path


def lint(*words: str) -> int:
    return main([*words, "--target", "2.15"])


def git(*words: str) -> None:
    settings = ["-c", "user.name=a", "-c", "user.email=a@b.c", "-c", "init.defaultBranch=main"]
    subprocess.run(["git", *settings, *words], check=True, capture_output=True)


def committed(name: str, text: str) -> Path:
    path = Path(name)
    path.write_text(text)
    if not Path(".git").exists():
        git("init")
    git("add", name)
    git("commit", "-m", name)
    return path


def test_exit_codes(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.py").write_text(OLD)
    Path("b.py").write_text(NEW)
    assert lint("a.py") == 1
    assert "a.py:2:5: FLB206 [*] `torch.ger`" in capsys.readouterr().out
    assert lint("b.py") == 0
    assert lint("--exit-zero", "a.py") == 0
    assert lint(".") == 1
    assert "1 found in 1 of 2 files" in capsys.readouterr().out
    assert flambeau(["lint", "a.py"]) == 1
    assert flambeau(["lint", "b.py"]) == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["nothere.py"], "'nothere.py' does not exist"),
        (["--select", "FLB999", "a.py"], "there is no rule 'FLB999'"),
        (["--ignore", "torch-qrr", "a.py"], "did you mean torch-qr?"),
        (["--from", "old", "a.py"], "--from old: must be a version of torch"),
        (["--what", "a.py"], "--what"),
        (["empty"], "no Python files, notebooks or pages in empty"),
        (["rule", "FLB999"], "there is no rule 'FLB999'"),
        (["rule"], "name a code"),
        (["rule", "torch-qrr"], "did you mean torch-qr?"),
        (["--unsafe-fixes", "a.py"], "--unsafe-fixes has no effect without --fix or --diff"),
        (["--allow-dirty", "--diff", "a.py"], "no effect without --fix or --add-noqa"),
        (["--diff", "--fix", "a.py"], "--diff and --fix exclude each other"),
        (["--diff", "--add-noqa", "a.py"], "--diff and --add-noqa exclude each other"),
        (["--add-noqa", "--fix", "a.py"], "--add-noqa and --fix exclude each other"),
        (["--statistics", "--output-format", "json", "a.py"], "exclude each other"),
        (["--zh", "--diff", "a.py"], "--zh and --diff exclude each other"),
        (["rule", "FLB187", "--fix"], "--fix has no effect on 'rule'"),
        (["rule", "FLB187", "--jobs", "2"], "--jobs has no effect on 'rule'"),
        (["rule", "FLB187", "--select", "FLB1"], "--select has no effect on 'rule'"),
        (["rule", "FLB187", "--from", "1.8"], "--from has no effect on 'rule'"),
        (["rule", "FLB187", "--output-format", "sarif"], "--output-format sarif has no effect"),
        (["--jobs", "-1", "a.py"], "--jobs -1: must be a number of processes"),
        (["--from", "2.15", "--target", "1.8", "a.py"], "--from 2.15 is newer than --target 1.8"),
    ],
)
def test_wrong_usage_is_said(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.py").write_text(OLD)
    Path("empty").mkdir()
    assert main(words) == 2
    assert message in capsys.readouterr().err
    assert flambeau(["lint", *words]) == 2


def test_pages_of_rules(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["rule", "FLB187"]) == 0
    assert "torch.linalg.qr" in capsys.readouterr().out
    assert main(["rule", "all"]) == 0
    page = capsys.readouterr().out
    assert all(f"{rule.code} {rule.name}\n" in page for rule in RULES)


def test_rules_as_json(capsys: pytest.CaptureFixture[str]) -> None:
    schema = Path(__file__).parents[2] / "docs" / "schemas" / "lint_rule.json"
    assert main(["rule", "all", "--output-format", "json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    Draft202012Validator(json.loads(schema.read_text("utf-8"))).validate(rows)
    assert [row["code"] for row in rows] == list(BY_CODE)
    assert main(["rule", "FLB405", "--output-format", "json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row == {**row, "name": "clip-of-scaled-gradients", "removed": None, "fix": None}
    assert row["pages"] == ["precision.md#autocast-and-the-scaler", "recipes/amp_step.md"]


@pytest.mark.parametrize("kind", ["json", "sarif", "github"])
def test_messages_for_programs_in_chinese(capsys: pytest.CaptureFixture[str], kind: str) -> None:
    Path("a.py").write_text(OLD)
    assert lint("--zh", "--output-format", kind, "a.py") == 1
    written = capsys.readouterr().out
    assert "已弃用" in (
        written if kind == "github" else json.dumps(json.loads(written), ensure_ascii=False)
    )


def test_versions_choose_rules() -> None:
    Path("a.py").write_text("import torch\ntorch.load(f)\n")
    assert main(["--target", "2.15", "a.py"]) == 0
    assert main(["--target", "2.5", "a.py"]) == 1
    assert main(["--target", "2.15", "--from", "1.8", "a.py"]) == 1
    assert main(["--target", "2.15", "--from", "2.7", "a.py"]) == 0


def test_preview_rules_are_off_until_named() -> None:
    Path("a.py").write_text("import os, torch\nos.environ['PYTHONHASHSEED'] = '0'\n")
    assert lint("a.py") == 0
    assert lint("--preview", "a.py") == 1
    assert lint("--select", "FLB421", "a.py") == 1
    assert lint("--select", "FLB4", "a.py") == 0


def test_fixes_are_written_where_git_keeps_the_old(capsys: pytest.CaptureFixture[str]) -> None:
    path = committed("a.py", OLD)
    path.chmod(0o751)
    git("commit", "-am", "mode")
    assert lint("--fix", "a.py") == 0
    assert path.read_text() == NEW
    assert stat.S_IMODE(path.stat().st_mode) == 0o751
    assert "1 fixed in 1 file\n" in capsys.readouterr().err


@pytest.mark.parametrize("state", ["changed", "staged", "untracked", "ignored", "outside"])
def test_files_that_git_could_not_bring_back_are_refused(
    state: str, capsys: pytest.CaptureFixture[str]
) -> None:
    if state != "outside":
        committed("first.py", NEW)
    if state == "ignored":
        committed(".gitignore", "a.py\n")
    if state in ("changed", "staged"):
        committed("a.py", "import torch\n")
    path = Path("a.py")
    path.write_text(OLD)
    if state == "staged":
        git("add", "a.py")
    assert lint("--fix", "a.py") == 2
    assert path.read_text() == OLD
    assert "--allow-dirty" in capsys.readouterr().err
    assert lint("--fix", "--allow-dirty", "a.py") == 0
    assert path.read_text() == NEW


@pytest.mark.parametrize(
    "settings",
    [
        {"core.fsmonitor": "touch {ran}; false"},
        {"filter.any.clean": "touch {ran}; cat"},
        {"filter.any.process": "touch {ran}; false", "filter.any.required": "true"},
        {"filter.a.b=c.clean": "touch {ran}; cat"},
        {"include.path": "more"},
    ],
    ids=["monitor", "clean", "process", "odd name", "included"],
)
def test_git_runs_no_program_of_the_repository(settings: dict[str, str], tmp_path: Path) -> None:
    ran = tmp_path / "ran"
    name = "a.b=c" if "filter.a.b=c.clean" in settings else "any"
    committed(".gitattributes", f"*.py filter={name}\n")
    committed("a.py", OLD)
    Path(".git", "more").write_text(f'[filter "any"]\n\tclean = touch {ran}; cat\n')
    for key, value in settings.items():
        git("config", key, value.format(ran=ran))
    os.utime("a.py", (1, 1))  # so that git reads it again
    assert lint("--fix", "a.py") == 0
    assert not ran.exists()
    assert Path("a.py").read_text() == NEW


def test_diff_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.py").write_text(OLD)
    assert lint("--diff", "a.py") == 1
    assert Path("a.py").read_text() == OLD
    assert "-y = torch.ger(a, b)\n+y = torch.outer(a, b)\n" in capsys.readouterr().out
    Path("b.py").write_text(NEW)
    assert lint("--diff", "b.py") == 0


def test_unsafe_fixes_are_asked_for() -> None:
    text = "import torch\nx = k.replace('module.', '')\n"
    path = committed("a.py", text)
    assert lint("--fix", "a.py") == 1
    assert path.read_text() == text
    assert lint("--fix", "--unsafe-fixes", "a.py") == 0
    assert "removeprefix('module.')" in path.read_text()


def test_a_link_stays_a_link() -> None:
    path = committed("a.py", OLD)
    Path("link.py").symlink_to(path)
    assert lint("--fix", "--allow-dirty", "link.py") == 0
    assert Path("link.py").is_symlink()
    assert path.read_text() == NEW


@pytest.mark.parametrize(
    "comment",
    ["# noqa", "# noqa: FLB206", "# NOQA:E501,FLB206", "# flambeau: ignore[FLB206]", "#noqa"],
)
def test_comments_silence(comment: str) -> None:
    text = OLD.replace(")\n", f")  {comment}\n")
    Path("a.py").write_text(text)
    assert lint("a.py") == 0
    assert lint("--fix", "--allow-dirty", "a.py") == 0
    assert Path("a.py").read_text() == text


@pytest.mark.parametrize(
    "comment", ["# noqa: E501", "# flambeau: ignore[FLB207]", "# not a noqa", "# noqa:FLB20"]
)
def test_other_comments_do_not(comment: str) -> None:
    Path("a.py").write_text(OLD.replace(")\n", f")  {comment}\n"))
    assert lint("a.py") == 1


def test_a_string_is_no_comment() -> None:
    Path("a.py").write_text("import torch\nx = '# noqa'; torch.ger(a, b)\n")
    assert lint("a.py") == 1


def test_unknown_codes_in_comments_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.py").write_text("import torch  # noqa: FLB999\n")
    assert lint("a.py") == 0
    assert "a.py:1: a comment names FLB999" in capsys.readouterr().err
    Path("a.py").write_text(_SAVED.format("", "").replace("(", "(  # noqa: FLB999"))
    assert lint("a.py") == 1
    assert capsys.readouterr().err.count("a comment names") == 1


@pytest.mark.parametrize(
    ("comment", "problem"),
    [
        ("# flambeau: ignore", "names no code: write 'flambeau: ignore[FLB101]'"),
        ("# flambeau: ignore[]", "names no code, and there is no such rule"),
        ("# flambeau: ignore[ger]", "names ger, and there is no such rule"),
        ("# flambeau: ignore[FLB206, FLB20]", "names FLB20, and there is no such rule"),
        ("# noqa: E501, FLB20", "names FLB20, and there is no such rule"),
        ("# noqa: flb20", "names FLB20, and there is no such rule"),
        ("# flambeau: ignore[FLB206]", ""),
        ("# noqa: flb206", ""),
        ("# noqa: E501, B101", ""),
        ("# flambeau: ignored by most", ""),
    ],
)
def test_comments_that_silence_nothing_are_named(
    comment: str, problem: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.py").write_text(OLD.replace(")\n", f")  {comment}\n"))
    lint("a.py")
    said = f"a.py:2: a comment {problem}\n" if problem else ""
    assert capsys.readouterr().err == said


def test_comments_of_a_file_that_names_another_encoding(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """GBK: its bytes as UTF-8 are no GBK, which raised."""
    text = f"# -*- coding: gbk -*-\n# 训练，火炬\n{OLD}z = torch.ger(a, b)  # noqa: FLB206 火\n"
    path = Path("a.py")
    path.write_text(text, encoding="gbk")
    assert lint("a.py") == 1
    assert "1 found" in capsys.readouterr().out
    assert lint("--add-noqa", "--allow-dirty", "a.py") == 0
    assert lint("a.py") == 0
    silenced = path.read_text(encoding="gbk")
    assert silenced == text.replace("ger(a, b)\n", "ger(a, b)  # noqa: FLB206\n", 1)


_SAVED = "from torch.cuda.amp import (\n    autocast,{}\n    GradScaler,{}\n)\n"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "import torch\nx = torch.ger(a, b) + \\\n    1 + \\\n    2\ny = '\\\n'\n",
            "import torch\nx = torch.ger(a, b) + \\\n    1 + \\\n    2  # noqa: FLB206\ny = '\\\n'\n",
        ),
        (
            "import torch\nx = '# noqa: E501', torch.ger(a, b)  # noqa: E501 é # noqa: E501\n",
            "import torch\nx = '# noqa: E501', torch.ger(a, b)  # noqa: E501, FLB206 é # noqa: E501\n",
        ),
        (_SAVED.format("", ""), _SAVED.format("  # noqa: FLB2120", "  # noqa: FLB2121")),
    ],
)
def test_add_noqa_where_a_comment_fits(text: str, expected: str) -> None:
    Path("a.py").write_text(text)
    assert lint("a.py") == 1
    assert lint("--add-noqa", "--allow-dirty", "a.py") == 0
    assert Path("a.py").read_text() == expected
    assert lint("a.py") == 0


def test_the_first_line_of_an_import_speaks_for_its_names() -> None:
    Path("a.py").write_text(_SAVED.format("", "").replace("(", "(  # noqa: FLB2120, FLB2121"))
    assert lint("a.py") == 0
    Path("a.py").write_text(_SAVED.format("", "").replace("(", "(  # noqa: FLB2120"))
    assert lint("a.py") == 1
    Path("a.py").write_text("import torch\nx = f(  # noqa: FLB206\n    torch.ger(a, b)\n)\n")
    assert lint("a.py") == 1


def test_add_noqa_says_what_it_leaves(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.py").write_text(OLD)
    Path("a.md").write_text(f"```python\n{OLD}```\n")
    assert lint("--add-noqa", "--allow-dirty", ".") == 0
    said = capsys.readouterr().err
    assert "1 file written; 1 notebooks and pages left as they are" in said


def close(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Files that nobody may read, and folders in which nobody may write: also for root, who may all."""
    read = Path.read_bytes
    make = tempfile.mkstemp

    def read_bytes(path: Path) -> bytes:
        if path.name in names:
            raise PermissionError(13, "Permission denied", str(path))
        return read(path)

    def mkstemp(suffix: str = "", prefix: str = "", *, dir: Path) -> tuple[int, str]:
        if dir.name in names:
            raise PermissionError(13, "Permission denied", str(dir))
        return make(suffix, prefix, dir)

    monkeypatch.setattr(Path, "read_bytes", read_bytes)
    monkeypatch.setattr(tempfile, "mkstemp", mkstemp)


@pytest.mark.parametrize(
    "words", [[], ["--exit-zero"], ["--diff"], ["--add-noqa", "--allow-dirty"]]
)
def test_files_that_cannot_be_read(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Said, and none the less the others are looked at; what was not looked at is not clean."""
    Path("a.py").write_text(OLD)
    Path("b.py").write_text(OLD)
    Path("c.py").write_text("import torch\nprint 1\n")
    close(monkeypatch, "a.py")
    assert lint(*words, "--no-cache", ".") == 2
    said = capsys.readouterr()
    assert "a.py: not linted: Permission denied\n" in said.err
    assert "c.py: not linted: line 2 is Python 2" in said.err
    assert "b.py" in said.out or "# noqa" in Path("b.py").read_text()


def test_what_a_killed_fix_has_left_is_removed_a_day_later() -> None:
    Path("a.py").write_text(OLD)
    ours = "flambeau-lint-"
    old, young = Path(f".a.py.{ours}ab_12345.tmp"), Path(f".a.py.{ours}zzzzzzzz.tmp")
    others = [Path(".a.py.backup01.tmp"), Path(f".b.py.{ours}ab_12345.tmp")]
    for path in (old, young, *others):
        path.write_text("x = 1\n")
    for path in (old, *others):
        os.utime(path, (0, 0))
    assert lint("--fix", "--allow-dirty", "a.py") == 0
    assert [path.exists() for path in (old, young, *others)] == [False, True, True, True]


@pytest.mark.parametrize("verb", ["--fix", "--add-noqa"])
def test_a_file_that_cannot_be_written(
    verb: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The others are."""
    for folder in ("a", "b"):
        Path(folder).mkdir()
        Path(folder, "x.py").write_text(OLD)
    close(monkeypatch, "a")
    assert lint(verb, "--allow-dirty", ".") == 2
    assert "a/x.py is not written: Permission denied\n" in capsys.readouterr().err
    assert [Path(one, "x.py").read_text() == OLD for one in "ab"] == [True, False]


def test_a_folder_that_cannot_be_read(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("closed").mkdir()
    Path("a.py").write_text(OLD)
    scan = os.scandir

    def scandir(folder: Any) -> Any:
        if f"{folder}".endswith("closed"):
            raise PermissionError(13, "Permission denied", f"{folder}")
        return scan(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    assert lint(".") == 2
    assert "closed: Permission denied; --exclude leaves it out\n" in capsys.readouterr().err
    assert lint("--exclude", "closed", ".") == 1


def test_add_noqa_silences_all() -> None:
    text = (
        "import torch\ny = torch.ger(\n    a, b)  # why\nz = torch.ger(a, b)  # noqa: E501\n"
        "s = torch.ger('''\n''', b)\n"
    )
    path = committed("a.py", text)
    assert lint("--add-noqa", "a.py") == 0
    assert lint("a.py") == 0
    assert "# noqa: E501, FLB206" in path.read_text()
    once = path.read_text()
    assert lint("--add-noqa", "--allow-dirty", "a.py") == 0
    assert path.read_text() == once


def test_settings_of_pyproject(capsys: pytest.CaptureFixture[str]) -> None:
    Path("pyproject.toml").write_text(
        "[tool.flambeau.lint]\nignore = ['FLB206']\ntarget = '2.15'\nexclude = ['old/*']\n"
        "[tool.flambeau.lint.per-file-ignores]\n'tests/*' = ['removed']\n"
    )
    Path("a.py").write_text(OLD)
    Path("tests").mkdir()
    Path("old").mkdir()
    removed = "import torch\ntorch.gels\n"
    Path("tests/b.py").write_text(removed)
    Path("old/c.py").write_text(removed)
    assert main(["."]) == 0
    assert main(["--select", "FLB206", "--ignore", "FLB101", "."]) == 1
    assert main(["old/c.py"]) == 1
    assert main(["--force-exclude", "old/c.py", "a.py"]) == 0
    capsys.readouterr()
    Path("pyproject.toml").write_text("[tool.flambeau.lint]\nselekt = ['FLB1']\n")
    assert main(["."]) == 2
    assert "selekt: there is no such key; did you mean select?" in capsys.readouterr().err
    Path("pyproject.toml").write_text("[tool.flambeau.lint]\nselect = 'FLB1'\n")
    assert main(["."]) == 2
    assert "must be a list of strings" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"tool = 3 # flambeau", "tool = 3: must be a table"),
        (b"[tool]\nflambeau = 'x'", "flambeau = 'x': must be a table"),
        (b"[tool.flambeau]\nlint = ['FLB1']", "lint = ['FLB1']: must be a table"),
        (b"[tool.flambeau.lint]\n# \xff", "can't decode byte 0xff"),
        (b"[tool.flambeau.lint", "pyproject.toml: "),
        (b"[tool]\nflambeau.lint.selekt = []", "did you mean select?"),
        (b'[tool."flambeau".lint]\nselekt = []', "did you mean select?"),
    ],
)
def test_settings_that_cannot_be(
    text: bytes, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("a.py").write_text(OLD)
    Path("pyproject.toml").write_bytes(text)
    assert main(["a.py"]) == 2
    assert message in capsys.readouterr().err


def test_the_next_table_holds_even_if_it_is_empty() -> None:
    Path("pyproject.toml").write_text("[tool.flambeau.lint]\nignore = ['ALL']\n")
    Path("a").mkdir()
    Path("a/a.py").write_text(OLD)
    assert lint("a/a.py") == 0
    Path("a/pyproject.toml").write_text("[project]\ndependencies = ['flambeau']\n")
    assert lint("a/a.py") == 0
    Path("a/pyproject.toml").write_text("[tool.flambeau.lint]\n")
    assert lint("a/a.py") == 1


def test_each_path_has_the_settings_of_its_project(capsys: pytest.CaptureFixture[str]) -> None:
    for name, ignored in (("a", "FLB206"), ("b", "FLB187")):
        Path(name).mkdir()
        Path(name, "pyproject.toml").write_text(f"[tool.flambeau.lint]\nignore = ['{ignored}']\n")
        Path(name, "a.py").write_text("import torch\ntorch.ger(a, b)\ntorch.qr(a)\n")
    for paths in (["a", "b"], ["b/a.py", "a/a.py"], ["a/a.py", "b", "a"]):
        assert lint(*paths) == 1
        shown = capsys.readouterr().out
        assert "a/a.py:3:1: FLB187" in shown
        assert "b/a.py:2:1: FLB206" in shown
        assert "2 found in 2 of 2 files" in shown


def test_below_a_folder_each_file_has_the_settings_of_its_project(
    capsys: pytest.CaptureFixture[str],
) -> None:
    Path("pyproject.toml").write_text("[tool.flambeau.lint]\nignore = ['FLB206', 'FLB187']\n")
    Path("a/deep").mkdir(parents=True)
    Path("a/made").mkdir()
    Path("b").mkdir()
    Path("a/pyproject.toml").write_text(
        "[tool.flambeau.lint]\nignore = ['FLB206']\nexclude = ['made/*']\n"
    )
    Path("b/pyproject.toml").write_text("[project]\nname = 'b'  # flambeau\n")
    text = "import torch\ntorch.ger(a, b)\ntorch.qr(a)\n"
    for name in ("a.py", "a/deep/a.py", "a/made/a.py", "b/a.py"):
        Path(name).write_text(text)
    for paths in (["."], [".", "a"], ["a", "."]):
        assert lint(*paths) == 1
        shown = capsys.readouterr().out
        assert "a/deep/a.py:3:1: FLB187" in shown
        assert "1 found in 1 of 3 files" in shown
    assert lint("--diff", ".") == 1
    assert capsys.readouterr().out.count("+++") == 1
    Path("a/pyproject.toml").write_text("[tool.flambeau.lint]\nselekt = ['FLB1']\n")
    assert lint(".") == 2
    assert "a/pyproject.toml: [tool.flambeau.lint] selekt" in capsys.readouterr().err


def test_a_commit_of_excluded_files_alone_passes(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.py").write_text(OLD)
    assert lint("--exclude", "a.py", "--force-exclude", "a.py") == 0
    assert capsys.readouterr().out == "nothing found in 0 files\n"


def output(capsys: pytest.CaptureFixture[str], kind: str, *paths: str) -> str:
    assert lint("--output-format", kind, *paths) == 1
    return capsys.readouterr().out


def test_json(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.py").write_text(OLD)
    (row,) = json.loads(output(capsys, "json", "a.py"))
    assert (row["file"], row["line"], row["column"], row["code"]) == ("a.py", 2, 5, "FLB206")
    assert row["edits"] == [{"start": [2, 5], "end": [2, 14], "text": "torch.outer"}]


def test_json_is_as_its_schema_says(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.py").write_text(OLD)
    Path("b.ipynb").write_text(notebook(*CELLS))
    Path("c.py").write_text("import torch\nprint 'Python 2'\n")
    schema = Path(__file__).parents[2] / "docs" / "schemas" / "lint.json"
    rows = json.loads(output(capsys, "json", "."))
    Draft202012Validator(json.loads(schema.read_text("utf-8"))).validate(rows)
    assert {row["file"] for row in rows} == {"a.py", "b.ipynb", "c.py"}
    assert {row.get("cell") for row in rows} > {None}
    assert [row["file"] for row in rows if "problem" in row] == ["c.py"]


def test_sarif(capsys: pytest.CaptureFixture[str]) -> None:
    Path("ä b.py").write_text("import torch\nx = '𝄞'; torch.ger(a, b)\nx = '𝄞'; torch.ger(a, b)\n")
    whole: dict[str, Any] = json.loads(output(capsys, "sarif", "ä b.py"))
    (run,) = whole["runs"]
    assert whole["version"] == "2.1.0"
    assert run["columnKind"] == "unicodeCodePoints"
    first, second = run["results"]
    assert run["tool"]["driver"]["rules"][first["ruleIndex"]]["id"] == first["ruleId"] == "FLB206"
    place = first["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "%C3%A4%20b.py"
    assert place["region"]["startColumn"] == 10
    assert first["partialFingerprints"] != second["partialFingerprints"]
    (replacement,) = first["fixes"][0]["artifactChanges"][0]["replacements"]
    assert replacement["insertedContent"]["text"] == "torch.outer"
    # The same line elsewhere keeps its name.
    Path("ä b.py").write_text("import torch\n\n\nx = '𝄞'; torch.ger(a, b)\n")
    later = json.loads(output(capsys, "sarif", "ä b.py"))["runs"][0]["results"][0]
    assert later["partialFingerprints"] == first["partialFingerprints"]


def test_github_lines(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a,b.py").write_text(OLD)
    (line,) = output(capsys, "github", "a,b.py").splitlines()
    assert line.startswith(
        "::warning file=a%2Cb.py,line=2,endLine=2,col=5,title=FLB206 ger::`torch.ger`"
    )


def test_places_in_a_notebook_for_readers_of_lines(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.ipynb").write_text(notebook(*CELLS[:2], "\n\n", CELLS[4]))
    (line,) = output(capsys, "github", "a.ipynb").splitlines()
    assert line.startswith("::warning file=a.ipynb,title=FLB206 ger::cell 4, line 1: `torch.ger`")
    (result,) = json.loads(output(capsys, "sarif", "a.ipynb"))["runs"][0]["results"]
    assert result["message"]["text"].startswith("cell 4, line 1: `torch.ger`")
    assert result["locations"] == [{"physicalLocation": {"artifactLocation": {"uri": "a.ipynb"}}}]


def test_names_that_are_no_text(capsys: pytest.CaptureFixture[str]) -> None:
    name = os.fsdecode(b"\xff.py")
    Path(name).write_text(OLD)
    assert "\\udcff.py:2:5: FLB206" in output(capsys, "text", ".")
    assert json.loads(output(capsys, "json", "."))[0]["file"] == name
    result = json.loads(output(capsys, "sarif", "."))["runs"][0]["results"][0]
    location = result["locations"][0]["physicalLocation"]
    assert location["artifactLocation"]["uri"] == "%FF.py"
    assert output(capsys, "github", ".").startswith("::warning file=\\udcff.py,line=2,")


def test_a_terminal_without_chinese(monkeypatch: pytest.MonkeyPatch) -> None:
    Path("a.py").write_text(OLD)
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    assert lint("--zh", "a.py") == 1
    assert b"a.py:2:5: FLB206 [*] `torch.ger` \\u81ea torch 1.8" in written.getvalue()


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_said() -> None:
    Path("a.py").write_text(OLD)
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "flambeau_lint", "a.py"],
            env={**os.environ, "PYTHONPATH": str(Path(flambeau_lint.__file__).parents[1])},
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            check=False,
        )
    assert (done.returncode, done.stderr) == (2, "flambeau-lint: No space left on device\n")


def test_statistics_and_chinese(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.py").write_text(OLD + OLD)
    assert lint("--statistics", "a.py") == 1
    assert capsys.readouterr().out == "2\tFLB206\t[*] ger\n"
    Path("b.py").write_text("import torch\ny = torch.matrix_rank(a)\ntorch.eig(a)\n")
    assert lint("--statistics", "b.py") == 1
    assert capsys.readouterr().out == "1\tFLB101\t[ ] eig\n1\tFLB105\t[?] matrix-rank\n"
    assert lint("--zh", "a.py") == 1
    assert "已弃用" in capsys.readouterr().out


def notebook(*cells: str, indent: int = 1) -> str:
    rows = [
        {
            "cell_type": "code",
            "execution_count": 3,
            "metadata": {},
            "outputs": [{"name": "stdout", "output_type": "stream", "text": ["é\n"]}],
            "source": cell.splitlines(keepends=True),
        }
        for cell in cells
    ]
    whole = {
        "cells": rows,
        "metadata": {"language_info": {"name": "python"}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(whole, indent=indent, ensure_ascii=False) + "\n"


CELLS = (
    "%matplotlib inline\n!pip install torch\nimport torch",
    "%%bash\ntorch.ger(a, b)",
    "x = !ls\nif True:\n    %time torch.ger\n    y = torch.ger(a, b)",
    "this is no Python",
    "torch.ger(a, b)\n",
)


def test_a_notebook_is_one_program(capsys: pytest.CaptureFixture[str]) -> None:
    text = notebook(*CELLS)
    Path("a.ipynb").write_text(text)
    assert lint("a.ipynb") == 1
    shown = capsys.readouterr().out
    assert "a.ipynb:cell 3:4:9: FLB206" in shown
    assert "a.ipynb:cell 5:1:1: FLB206" in shown
    assert "2 found" in shown
    assert lint("--fix", "--allow-dirty", "a.ipynb") == 0
    fixed = [cell.replace("y = torch.ger", "y = torch.outer") for cell in CELLS]
    fixed[4] = "torch.outer(a, b)\n"
    assert Path("a.ipynb").read_text() == notebook(*fixed)


LAYOUTS = {
    "spaces before colons": lambda text: text.replace('": ', '" : '),
    "line ends of Windows": lambda text: text.replace("\n", "\r\n"),
    "a tab for each level": lambda text: re.sub(
        "^ +", lambda m: "\t" * len(m[0]), text, flags=re.M
    ),
    "a number of JavaScript": lambda text: text.replace('"execution_count": 3', '"width": 1e3'),
    "escaped text beside other": lambda text: text.replace("# é", "# \\u00e9"),
    "one line": lambda text: json.dumps(json.loads(text), separators=(",", ":")),
    "sources as strings": lambda text: json.dumps(
        {
            "cells": [
                {**cell, "source": "".join(cell["source"])} for cell in json.loads(text)["cells"]
            ]
        }
    ),
    "space at the end": lambda text: text + "\n  ",
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_notebook_is_fixed_whatever_its_layout_and_each_other_byte_stays(layout: str) -> None:
    """2.7 % of 482 public notebooks are not laid out as json.dumps lays them out."""
    text = LAYOUTS[layout](notebook("import torch\n", "# é\ntorch.ger(a, b)\n", "torch.ger(a, b)"))
    Path("a.ipynb").write_bytes(text.encode())
    assert lint("--fix", "--allow-dirty", "a.ipynb") == 0
    assert Path("a.ipynb").read_bytes() == text.replace("ger(a", "outer(a").encode()


def test_a_cell_with_half_a_character_is_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    text = notebook("import torch", "# half\ntorch.ger(a, b)", "torch.ger(a, b)")
    Path("a.ipynb").write_text(text.replace("half", "\\ud83d"))
    assert lint("a.ipynb") == 1
    assert "a.ipynb:cell 3:1:1" in capsys.readouterr().out
    assert lint("--fix", "--allow-dirty", "a.ipynb") == 0
    cells = json.loads(Path("a.ipynb").read_text())["cells"]
    sources = ["".join(cell["source"]) for cell in cells]
    assert sources == ["import torch", "# \ud83d\ntorch.ger(a, b)", "torch.outer(a, b)"]


def test_what_is_no_notebook_is_left_alone() -> None:
    Path("b.ipynb").write_text("{}")
    assert lint("b.ipynb") == 0


PAGE = """# Title

```python
import torch
```

- item

  ```py
  torch.ger(a, b)

  x = 1
  ```

```bash
torch.ger(a, b)
```

```python
not Python at all
```
"""
REST = """Title

.. code-block:: python
   :linenos:

   import torch

   torch.ger(a, b)

Text torch.ger(a, b)
"""


@pytest.mark.parametrize(("name", "text", "line"), [("a.md", PAGE, 10), ("a.rst", REST, 8)])
def test_pages(name: str, text: str, line: int, capsys: pytest.CaptureFixture[str]) -> None:
    Path(name).write_text(text)
    assert lint(name) == 1
    shown = capsys.readouterr().out
    assert f"{name}:{line}:" in shown
    assert "1 found" in shown
    assert lint("--fix", "--allow-dirty", name) == 0
    assert Path(name).read_text() == text.replace("torch.ger(a, b)", "torch.outer(a, b)", 1)


def test_the_cache_is_of_the_content(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = Path("a.py")
    path.write_text(OLD)
    assert lint("a.py") == 1
    first = capsys.readouterr().out
    kept = [one for one in (folder / ".cache").rglob("*") if one.is_file()]
    assert len(kept) == 1
    assert lint("a.py") == 1
    assert capsys.readouterr().out == first
    kept[0].write_text("broken")
    assert lint("a.py") == 1
    assert capsys.readouterr().out == first
    path.write_text(NEW)
    assert lint("a.py") == 0
    assert lint("--select", "FLB1", "a.py") == 0
    path.write_text(OLD)
    os.environ["XDG_CACHE_HOME"] = "/proc/nothing"
    assert lint("a.py") == 1


def test_the_cache_has_a_bound(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(many_files, "_ENTRIES", 2)
    cache = folder / ".cache" / "flambeau-lint"
    for age, name in enumerate("abcde"):
        (cache / name).mkdir(parents=True)
        os.utime(cache / name, (age, age))
    for number in range(600):
        Path(f"{number}.py").write_text(f"{OLD}x = {number}\n")
    assert lint(".", "--jobs", "1") == 1
    assert {path.name for path in cache.iterdir()} == {"d", "e", many_files.cache_folder().name}
    kept = [len(list(one.iterdir())) for one in many_files.cache_folder().iterdir()]
    assert sum(kept) > 200  # of 600, of which each of 256 folders got some
    assert max(kept) <= 2


def test_a_library_keeps_what_it_has_deprecated() -> None:
    for name in ("apex/apex/__init__.py", "apex/setup.py", "mine/setup.py"):
        Path(name).parent.mkdir(parents=True, exist_ok=True)
        Path(name).write_text("")
    text = "from apex.optimizers import FusedSGD\n"
    for name in ("apex/tests/test_a.py", "apex/apex/b.py", "mine/a.py"):
        Path(name).parent.mkdir(exist_ok=True)
        Path(name).write_text(text)
    assert lint("apex/tests") == 0
    assert lint("apex/apex") == 0
    assert lint("mine") == 1
    Path("apex/tests/test_a.py").write_text("from apex import amp\n")  # which is gone
    assert lint("apex/tests") == 1


def test_several_processes_say_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    for number in range(60):
        Path(f"a{number:02}.py").write_text(OLD)
    assert lint("--jobs", "1", "--no-cache", ".") == 1
    alone = capsys.readouterr().out
    assert alone.count("FLB206") == 60
    assert lint("--jobs", "3", "--no-cache", ".") == 1
    assert capsys.readouterr().out == alone


def test_folders_of_others_are_left_out() -> None:
    for name in ("venv", "a/node_modules", ".hidden", "env"):
        Path(name).mkdir(parents=True)
        Path(name, "a.py").write_text(OLD)
    Path("env/pyvenv.cfg").touch()
    Path("b.py").write_text(NEW)
    assert lint(".") == 0
    assert lint("venv") == 1


def test_python_2_is_named_and_no_failure(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a.py").write_text("import torch\nprint 'x'\n")
    assert lint("a.py") == 0
    assert "a.py: not linted: line 2 is Python 2" in capsys.readouterr().err


def test_names_cannot_move_the_cursor(capsys: pytest.CaptureFixture[str]) -> None:
    Path("a\x1b[2J.py").write_text(OLD)
    assert lint(".") == 1
    assert "\x1b" not in capsys.readouterr().out
