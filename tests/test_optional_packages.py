"""Packages that are missing, or there and broken: one message, with the command that installs them."""

import gc
import subprocess
import sys
from pathlib import Path

import pytest

from flambeau.errors import InputError
from flambeau.optional_packages import extra, large_import


@pytest.mark.parametrize(
    ("module", "package", "group"),
    [
        ("lmdb", "lmdb", "formats"),
        ("pyarrow.parquet", "pyarrow", "hf"),
        ("onnxruntime.quantization", "onnxruntime", "export"),
        ("matplotlib", "matplotlib", "plot"),
        ("pynvml", "nvidia-ml-py", "gpu"),
    ],
)
def test_a_missing_package(
    monkeypatch: pytest.MonkeyPatch, module: str, package: str, group: str
) -> None:
    monkeypatch.delitem(sys.modules, module, raising=False)
    monkeypatch.setitem(sys.modules, module.partition(".")[0], None)
    with pytest.raises(InputError) as refused:
        extra(module, what="this")
    assert str(refused.value) == (
        f"this needs the package {package}\nInstall it: pip install 'flambeau[{group}]'"
    )


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        ("import no_such_module", "No module named 'no_such_module'"),
        ("raise ImportError('libfoo.so.1: cannot open it')", "libfoo.so.1: cannot open it"),
    ],
)
def test_a_package_that_does_not_work(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, source: str, reason: str
) -> None:
    (tmp_path / "broken_package.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match="needs the package broken_package, which is there") as no:
        extra("broken_package", what="this")
    assert reason in str(no.value)


def test_cycles_are_searched_again_after_a_large_import() -> None:
    with pytest.raises(ImportError), large_import():
        assert not gc.isenabled()
        raise ImportError
    assert gc.isenabled()
    gc.disable()
    try:
        with large_import():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_only_a_process_that_has_frozen_its_objects_freezes_more() -> None:
    script = (
        "import gc, importlib\n"
        "from flambeau.optional_packages import large_import\n"
        "def added(name):\n"
        "    before = gc.get_freeze_count()\n"
        "    with large_import():\n"
        "        importlib.import_module(name)\n"
        "    return gc.get_freeze_count() > before\n"
        "print(added('xml.dom.minidom'))\n"
        "gc.freeze()\n"
        "print(added('email.mime.text'))\n"
        "gc.get_freeze_count = lambda: 1 / 0\n"
        "with large_import():\n"  # of what is there already
        "    importlib.import_module('email.mime.text')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == ["False", "True"]
