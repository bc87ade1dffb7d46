"""`flambeau completion`: what bash, zsh and fish make of the scripts, as a user types."""

import os
import pty
import re
import select
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest

from flambeau.cli.command import VERBS

TYPED = [
    ("tr", {"train"}),
    ("ru", {"runs"}),
    ("train --opt", {"--optimizer"}),
    ("train --optimizer adam", {"adam", "adamw", "adamax"}),
    ("runs --state f", {"finished", "failed", "foreign"}),
    ("runs --sort w", {"when"}),
    ("recipes c", {"copy"}),
    ("recipes show em", {"ema"}),
    ("train pho", {"photos"}),
    ("train --weights pho", {"photos", "photos.rec"}),
    ("train --out pho", {"photos"}),
    ("predict pho", {"photos"}),
    ("completion z", {"zsh"}),
]  # fmt: skip
BASH = """
source flambeau.bash
COMP_WORDS=(flambeau {words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1))
function=$(complete -p flambeau | sed 's/.*-F \\([^ ]*\\).*/\\1/')
$function flambeau "${{COMP_WORDS[COMP_CWORD]}}" "${{COMP_WORDS[COMP_CWORD - 1]}}"
printf '%s\\n' "${{COMPREPLY[@]}}"
"""


@pytest.fixture(autouse=True)
def _photos(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flambeau: Any) -> None:
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    Path("photos.rec").touch()
    for shell in ("bash", "zsh", "fish"):
        code, out, err = flambeau(f"completion {shell}")
        assert (code, err) == (0, "")
        Path(f"flambeau.{shell}").write_text(out)


def shell_says(shell: str, *words: str) -> str:
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed")
    done = subprocess.run([shell, *words], capture_output=True, text=True, timeout=300, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    return done.stdout


@pytest.mark.parametrize(("words", "expected"), TYPED)
def test_bash(words: str, expected: set[str]) -> None:
    out = shell_says("bash", "--norc", "-c", BASH.format(words=words))
    found = {line.rstrip("/ ") for line in out.splitlines()}
    assert expected <= found
    if "pho" not in words:
        assert found == expected
    if "--out" in words or "predict" in words:
        assert "photos.rec" not in found


@pytest.mark.parametrize(("words", "expected"), TYPED)
def test_fish(words: str, expected: set[str]) -> None:
    out = shell_says("fish", "-N", "-c", f"source flambeau.fish; complete -C 'flambeau {words}'")
    assert expected <= {line.split("\t")[0].rstrip("/ ") for line in out.splitlines()}


@pytest.mark.parametrize(
    ("typed", "completed"),
    [
        ("tr", "train"),
        ("train --optimizer rm", "--optimizer rmsprop"),
        ("recipes show em", "recipes show ema"),
        ("train --out pho", "--out photos/"),
        ("train pho", "train photos"),
    ],
)
def test_zsh(typed: str, completed: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Typed on a terminal, with the tab key: zsh completes nowhere else."""
    if shutil.which("zsh") is None:
        pytest.skip("zsh is not installed")
    monkeypatch.setenv("TERM", "dumb")
    Path("zfunc").mkdir()
    Path("flambeau.zsh").rename("zfunc/_flambeau")
    process, terminal = pty.fork()
    if process == 0:
        os.execvp("zsh", ["zsh", "-f", "-i"])
    try:
        set_up = "PS1='%%'; fpath=($PWD/zfunc $fpath); autoload -U compinit; compinit -u -D"
        os.write(terminal, f"{set_up}; echo rea''dy\n".encode())
        read_until(terminal, "ready\r")
        os.write(terminal, f"flambeau {typed}\t".encode())
        assert completed in read_until(terminal, completed)
    finally:
        os.kill(process, 9)
        os.waitpid(process, 0)
        os.close(terminal)


def read_until(terminal: int, text: str) -> str:
    seen, end = "", time.monotonic() + 20
    while text not in seen and time.monotonic() < end:
        if select.select([terminal], [], [], 0.2)[0]:
            seen += re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", os.read(terminal, 4096).decode())
    return seen


def test_every_command_is_in_every_script() -> None:
    for shell in ("bash", "zsh", "fish"):
        script = Path(f"flambeau.{shell}").read_text()
        assert all(re.search(rf"\b{verb}\b", script) for verb in VERBS)


@pytest.mark.parametrize(
    ("words", "message"),
    [("completion", "SHELL"), ("completion tcsh", "'tcsh'"), ("completion bash zsh", "'zsh'")],
)
def test_mistakes_end_with_2(words: str, message: str, flambeau: Any) -> None:
    code, out, err = flambeau(words)
    assert (code, out) == (2, "")
    assert message in err
    assert len(err.splitlines()) == 1
