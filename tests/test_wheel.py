"""The wheel of tools/build_wheel brings the C kernel to a machine without a compiler."""

import json
import os
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[1]
CROSS = "aarch64-linux-gnu-gcc"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(sys.platform != "linux", reason="manylinux is for Linux"),
]

# Run where the wheel is installed, and in the checkout: the same pixels, by the kernel and without it.
PROGRAM = """
import hashlib, json, shutil
import numpy as np, simplejpeg
import flambeau
from flambeau.images.decode import Picture
from flambeau.images.jpeg.scan_segments import is_segmented, segment
from flambeau.images.native import kernel

y, x = np.mgrid[:120, :170]
image = np.stack([x % 256, y * 2 % 256, (x + y) % 256], -1).astype(np.uint8)
plain = simplejpeg.encode_jpeg(image, colorsubsampling="420")
packed = segment(plain)
part = Picture(packed).pixels((30, 40, 50, 60), channels=3)
kernel_is, kernel.kernel = kernel.kernel_status(), lambda: None
assert is_segmented(packed) and (Picture(plain).pixels((30, 40, 50, 60), channels=3) == part).all()
print(json.dumps({
    "file": flambeau.__file__, "kernel": kernel_is, "pixels": hashlib.sha256(part.tobytes()).hexdigest(),
    "compilers": [name for name in ("cc", "gcc", "clang") if shutil.which(name)],
}))
"""


def build(out: Path, **environment: str) -> Path:
    script = [sys.executable, str(ROOT / "tools" / "build_wheel"), "--out", str(out)]
    subprocess.run(script, check=True, env=os.environ | environment)
    (wheel,) = out.glob("*.whl")
    return wheel


def answer(**environment: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM], check=True, capture_output=True, text=True, env=environment
    )
    return json.loads(done.stdout)


def test_kernel_of_the_wheel_is_used_where_there_is_no_compiler(tmp_path: Path) -> None:
    if not any(map(shutil.which, ("cc", "gcc", "clang"))):
        pytest.skip("no C compiler to build the wheel with")
    wheel = build(tmp_path / "dist")
    assert "manylinux" in wheel.name
    (tmp_path / "empty").mkdir()
    bare = {"PATH": str(tmp_path / "empty"), "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    installed = tmp_path / "installed"
    names = zipfile.ZipFile(wheel).namelist()
    assert {"flambeau/docs/en/index.md", "flambeau/docs/zh/recipes/ema.md"} <= set(names)
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-index", "--target"]
    subprocess.run([*pip, str(installed), str(wheel)], check=True, env=bare)
    there = answer(**bare, PYTHONPATH=str(installed))
    assert there["file"].startswith(str(installed))
    assert there["compilers"] == []
    assert there["kernel"].startswith("built: ")
    here = answer(**os.environ | {"PYTHONPATH": str(ROOT / "src")})
    assert here["pixels"] == there["pixels"]


def test_wheel_for_another_processor(tmp_path: Path) -> None:
    if shutil.which(CROSS) is None:
        pytest.skip(f"no {CROSS} on this machine")
    name = build(tmp_path, CC=CROSS).name
    assert "manylinux" in name and name.endswith("_aarch64.whl")
