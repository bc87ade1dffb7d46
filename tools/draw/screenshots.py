"""Photograph the reports that docs/en/report.md shows: real trainings, written and drawn as a user's are.

    python tools/draw/screenshots.py

It trains the small data set that comes with the package, three times, and lets headless Chromium draw the
reports; the pictures go to docs/pictures/report. Needs Chromium (Debian: chromium).
"""

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from PIL import Image

from flambeau.cli.command import main as flambeau

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "pictures" / "report"
COLORS = 128  # of a picture, which is a drawing rather than a photograph
SHOTS = {  # file: page, width and height in pixels, further flags
    "run": ("one", 1200, 2560, []),
    "runs-dark": ("all", 1200, 1150, ["--blink-settings=preferredColorScheme=0"]),
}


def main() -> int:
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        sys.exit("chromium is not installed")
    FOLDER.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary:
        runs = Path(temporary) / "runs"
        for name, flags in {
            "fashion-mnist": [],
            "seed-1": ["--seed", "1"],
            "slower": ["--lr", "0.02"],
        }.items():
            if flambeau(
                ["train", "--epochs", "4", "--log-every", "10", "--out", str(runs / name), *flags]
            ):
                sys.exit("the training failed")
        every = Path(temporary) / "all.html"
        if flambeau(["report", str(runs), "--out", str(every)]):
            sys.exit("the report failed")
        pages = {"one": runs / "fashion-mnist" / "report.html", "all": every}
        for name, (page, width, height, flags) in SHOTS.items():
            shot = Path(temporary) / f"{name}.png"
            command = [
                browser,
                "--headless",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                f"--window-size={width},{height}",
                f"--screenshot={shot}",
                *flags,
                f"file://{pages[page]}",
            ]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            with Image.open(shot) as image:
                small = image.convert("RGB").quantize(COLORS, dither=Image.Dither.NONE)
                small.save(FOLDER / f"{name}.png", optimize=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
