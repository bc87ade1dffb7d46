"""Record `flambeau train`, killed in its third epoch and started again, as docs/pictures/session.svg.

    python tools/draw/session.py               # on an idle machine: it shows seconds

The lines are those of the command, without the table of its settings and without the folder of this package.
Run it after a change of what the command prints; tests/test_session_picture.py compares the two.
"""

import io
import re
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

from rich.console import Console
from rich.text import Text

FILE = Path(__file__).resolve().parents[2] / "docs" / "pictures" / "session.svg"
COLUMNS = 112
PROMPT = "$ "
COMMAND = "flambeau train"


def record() -> list[str]:
    """What stands on the terminal in the end."""
    with tempfile.TemporaryDirectory() as folder:
        return [*train(folder, kill_at="epoch 3/4"), "Killed", *train(folder)]


def train(folder: str, *, kill_at: str = "") -> list[str]:
    """The prompt and the lines of one start, which is killed after the line that begins so."""
    lines = [PROMPT + COMMAND]
    with subprocess.Popen(
        [sys.executable, "-m", "flambeau", "train"],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=folder,
    ) as process:
        assert process.stdout is not None
        for line in process.stdout:
            lines.append(line.rstrip())
            if kill_at and line.startswith(kill_at):
                process.send_signal(signal.SIGKILL)
    if process.returncode != (-signal.SIGKILL if kill_at else 0):
        raise SystemExit("\n".join(lines))
    return shorten(lines)


def shorten(lines: list[str]) -> list[str]:
    """Without the table of settings, which is indented, and with no folder of this machine."""
    package = re.compile(r"/\S*/flambeau/(?=data/embedded)")
    kept: list[str] = []
    for line in lines:
        is_setting = re.match(r" {2}[a-z]| {10}", line) is not None
        if line and not is_setting:
            kept.append(package.sub(".../", line))
        elif line and kept[-1] != "  ...":
            kept.append("  ...")
    return kept


def svg(lines: list[str]) -> str:
    """The lines as a drawing of a terminal, with the prompts and the result in bold."""
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    for line in lines:
        is_bold = line.startswith((PROMPT, "Killed", "going on", "finished"))
        console.print(Text(line, style="bold" if is_bold else ""), soft_wrap=True)
    drawn = console.export_svg(title=COMMAND, unique_id="session")
    drawn = re.sub(r"@font-face \{.*?\}", "", drawn, flags=re.DOTALL)  # a font of another host
    return "\n".join(row.rstrip() for row in drawn.splitlines() if row.strip()) + "\n"


if __name__ == "__main__":
    FILE.write_text(svg(record()), encoding="utf-8", newline="\n")
