"""`flambeau env --wheel`, `--pip`, `--mirror`, `--check` and `--disk`: answers, and what is refused."""

import http.server
import json
import os
import re
import sys
import threading
import time
import tomllib
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.tags import sys_tags

from flambeau.cli.machine import disk_speed as disk
from flambeau.cli.machine import install_lines as lines
from flambeau.cli.machine import package_index, wheel_tags
from flambeau.cli.machine.install_lines import BUILDS, TORCH, Machine, install_lines
from flambeau.cli.machine.package_index import newest_fitting, requirements
from flambeau.errors import InputError
from refused import refused

ROOT = Path(__file__).resolve().parents[2]
HERE = f"cp{sys.version_info.major}{sys.version_info.minor}"
TAG = next(str(tag) for tag in sys_tags() if not tag.platform.startswith("linux_"))


# ---------------------------------------------------------------- wheels


@pytest.mark.parametrize(
    "name",
    [
        "timm-1.0.20-py3-none-any.whl",
        f"torch-2.15.0-{TAG}.whl",
        f"https://host/whl/torch-2.15.0-{TAG}.whl#sha256=0",
        f"downloads/x-1-{HERE}-abi3-{TAG.rpartition('-')[2]}.whl",
    ],
)
def test_wheels_that_fit(name: str, flambeau: Any) -> None:
    assert flambeau("env --wheel", name) == (0, f"{name} fits here\n", "")


@pytest.mark.parametrize(
    ("name", "reasons"),
    [
        ("torch-2.1.0-cp36-cp36m-win_amd64.whl", ["interpreter cp36-cp36m", "platform win_amd64"]),
        ("x-1-cp36-cp36m-any.whl", ["it is for the interpreter cp36-cp36m, and here is Python"]),
        (f"x-1-{HERE}-{HERE}-macosx_11_0_arm64.whl", ["it is for the platform macosx_11_0_arm64"]),
    ],
)
def test_wheels_that_do_not(name: str, reasons: list[str], flambeau: Any) -> None:
    code, said, err = flambeau("env --wheel", name)
    first, *others = said.splitlines()
    assert (code, first, err) == (1, f"{name} does not fit here", "")
    assert len(others) == len(reasons)
    for reason, line in zip(reasons, others, strict=True):
        assert reason in line


@pytest.mark.skipif("manylinux" not in TAG, reason="needs glibc")
def test_an_older_c_library(flambeau: Any) -> None:
    name = f"x-1-{HERE}-{HERE}-manylinux_2_999_{os.uname().machine}.whl"
    assert (
        "  it needs glibc 2.999 or later, and here is glibc 2." in flambeau("env --wheel", name).out
    )


@pytest.mark.parametrize(
    ("served", "remark"),
    [
        (None, "it is built for CUDA 12.8, and there is no NVIDIA driver here"),
        ((11, 8), "it is built for CUDA 12.8, and the driver here serves CUDA 11.8 at most"),
        ((12, 2), None),
        ((13, 0), None),
    ],
)
def test_a_build_for_cuda(
    served: Any, remark: str | None, flambeau: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(wheel_tags, "cuda_of_driver", lambda: served)
    name = f"torch-2.9.0%2Bcu128-{TAG}.whl"
    said = [f"{name} fits here", *([] if remark is None else [f"  {remark}"])]
    assert flambeau("env --wheel", name) == (0, "\n".join(said) + "\n", "")


@pytest.mark.parametrize(
    "name", ["torch", "torch-1.1.0.whl", "torch-1.1.0-cp36-win.whl", "x.tar.gz"]
)
def test_no_name_of_a_wheel(name: str, flambeau: Any) -> None:
    refused(flambeau("env --wheel", name), f"{name!r} is no name of a wheel", "NAME-VERSION-PYTHON")


# ---------------------------------------------------------------- lines to install by


@pytest.mark.parametrize(
    ("machine", "torch", "index"),
    [
        (Machine("linux", None, [], False), TORCH, "cpu"),
        (Machine("linux", (13, 2), [(9, 0)], False), ">=2.14,<2.16", None),
        (Machine("linux", (14, 0), [(9, 0)], False), ">=2.14,<2.16", None),
        (Machine("win32", (13, 2), [(9, 0)], False), ">=2.12,<2.16", "cu132"),
        (Machine("linux", (13, 0), [], False), TORCH, "cu130"),
        (Machine("linux", (12, 2), [(8, 0)], False), ">=2.11,<2.15", "cu126"),
        (Machine("linux", (13, 2), [(7, 0)], False), ">=2.11,<2.15", "cu126"),
        (Machine("linux", (12, 8), [(12, 0)], False), ">=2.11,<2.12", "cu128"),
        (Machine("linux", (12, 2), [(7, 0), (12, 0)], False), TORCH, "cpu"),
        (Machine("linux", (11, 8), [(8, 0)], False), TORCH, "cpu"),
        (Machine("linux", None, [], True), ">=2.12,<2.14", "rocm7.2"),
        (Machine("darwin", None, [], False), TORCH, None),
        (Machine("win32", None, [], True), TORCH, None),
    ],
)
def test_lines_of_a_machine(machine: Machine, torch: str, index: str | None) -> None:
    command = f"pip install 'torch{torch}' torchvision"
    for mirror, by_pip, by_uv in (
        (None, "", ""),
        ("https://m/simple", " --index-url https://m/simple", " --default-index https://m/simple"),
    ):
        reason, *first, note, rest = install_lines(machine, mirror)
        if index is None:
            assert first == [command + by_pip]
        else:
            uv = f"uv {command}{by_uv} --torch-backend {index}"
            assert first == [f"pip install uv{by_pip}", uv]
        assert rest == f"pip install -e .{by_pip}"
        assert reason.startswith("# ") and note.startswith("# ")


def test_too_old_a_driver_is_said() -> None:
    reason = install_lines(Machine("linux", (11, 8), [(8, 0)], False), None)[0]
    assert "no build of torch" in reason and "update the driver" in reason


def test_the_versions_are_those_of_the_package() -> None:
    """The table needs a new line, or a new bound, when flambeau takes another torch."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    torch = next(r for r in map(Requirement, project["dependencies"]) if r.name == "torch")
    assert SpecifierSet(TORCH) == torch.specifier
    for versions in (*(build.torch for build in BUILDS), lines._ON_PYPI[1], lines._ROCM[1]):
        low, high = re.fullmatch(r">=(2\.\d+),<2\.(\d+)", versions).groups()  # type: ignore[union-attr]
        assert low in torch.specifier and f"2.{int(high) - 1}" in torch.specifier


def test_lines_of_this_machine(flambeau: Any) -> None:
    code, said, err = flambeau("env --pip --mirror https://m/simple/")
    assert (code, err) == (0, "")
    assert said.splitlines()[-1] == "pip install -e . --index-url https://m/simple"


@pytest.mark.parametrize(
    ("words", "parts"),
    [
        ("--pip --mirror http://m/simple", ("plain http is refused", "--trusted-host", "https://")),
        ("--check --mirror HTTP://m/simple", ("plain http is refused",)),
        ("--pip --mirror m/simple", ("--mirror m/simple is no address", "https://HOST/simple")),
        ("--pip --mirror file:///x", ("is no address",)),
        ("--pip --mirror https://", ("is no address",)),
        ("--mirror https://m/simple", ("--mirror has no effect without --pip or --check",)),
        ("--check", ("give --mirror URL",)),
        ("--pip --check --mirror https://m", ("--pip and --check are two questions",)),
        ("--pip --wheel a.whl", ("--wheel and --pip are two questions",)),
        ("--pip --json", ("--json has no effect with --pip",)),
        ("--wheel a.whl --disk", ("--disk has no effect with --wheel",)),
        ("--wheel", ("--wheel needs a value",)),
    ],
)
def test_what_does_not_go_together(words: str, parts: tuple[str, ...], flambeau: Any) -> None:
    refused(flambeau("env", words), *parts)


# ---------------------------------------------------------------- an index


class Index(http.server.BaseHTTPRequestHandler):
    """A small index: what each path answers is in `pages`."""

    pages: dict[str, tuple[int, str, bytes]]

    def do_GET(self) -> None:
        """Answer."""
        code, kind, body = self.pages.get(self.path, (404, "text/html", b"not there"))
        self.send_response(code)
        self.send_header("Content-Type", kind)
        if code == 302:
            self.send_header("Location", body.decode())
        self.end_headers()
        if code == 200 and body == b"slow":
            for _ in range(100):
                self.wfile.write(b" " * 70_000)
                time.sleep(0.05)
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        """Nothing."""


@pytest.fixture
def index(
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[tuple[str, dict[str, tuple[int, str, bytes]]]]:
    """The address of an index, and its pages by path."""
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.delenv(name, raising=False)
    pages: dict[str, tuple[int, str, bytes]] = {}
    handler = type("Here", (Index,), {"pages": pages})
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/simple", pages
        server.shutdown()
        thread.join()


JSON = "application/vnd.pypi.simple.v1+json"
FILES: list[dict[str, Any]] = [
    {"filename": f"torch-2.11.0-{TAG}.whl", "yanked": False},
    {"filename": f"torch-2.14.0-{TAG}.whl", "requires-python": ">=3.10"},
    {"filename": f"torch-2.15.0-{TAG}.whl", "yanked": "broken"},
    {"filename": f"torch-2.15.0rc1-{TAG}.whl"},
    {"filename": f"torch-2.15.1-{TAG}.whl", "requires-python": ">=99"},
    {"filename": f"torch-2.99.0-{TAG}.whl"},
    {"filename": "torch-2.15.0-cp36-cp36m-win_amd64.whl"},
    {"filename": "torch-2.15.0.tar.gz"},
    {"filename": "nonsense"},
]


def page_of(files: list[dict[str, Any]]) -> bytes:
    """As PEP 503 has it."""
    links = []
    for file in files:
        python = file.get("requires-python")
        more = f' data-requires-python="{python.replace(">", "&gt;")}"' if python else ""
        more += ' data-yanked="broken"' if file.get("yanked") else ""
        links.append(f'<a href="x#sha256=0"{more}>{file["filename"]}</a><br/>')
    return f"<!DOCTYPE html><html><body><h1>Links</h1>{''.join(links)}</body></html>".encode()


@pytest.mark.parametrize(
    ("kind", "body"),
    [(JSON, json.dumps({"files": FILES}).encode()), ("text/html", page_of(FILES))],
)
def test_the_newest_that_fits(kind: str, body: bytes, index: Any) -> None:
    address, pages = index
    pages["/simple/torch/"] = (200, kind, body)
    assert str(newest_fitting(address, Requirement("Torch>=2.11,<2.16"))) == "2.14.0"
    assert newest_fitting(address, Requirement("torch<2")) is None
    assert newest_fitting(address, Requirement("timm")) is None  # 404


def test_the_table_of_an_index(flambeau: Any, index: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    address, pages = index
    monkeypatch.setattr(lines, "require_https", lambda _: address)
    needs = [Requirement(text) for text in ("torch>=2.11,<2.16", "timm")]
    monkeypatch.setattr(package_index, "requirements", lambda: needs)
    pages["/simple/torch/"] = (200, JSON, json.dumps({"files": FILES}).encode())
    code, said, err = flambeau("env --check --mirror https://m/simple")
    assert (code, err) == (1, "")
    head, torch, timm = (re.split("  +", line) for line in said.splitlines())
    assert head == ["package", "wanted", "newest that fits here"]
    assert (torch[0], torch[2], timm) == ("torch", "2.14.0", ["timm", "any", "-"])
    pages["/simple/timm/"] = (200, JSON, b'{"files": [{"filename": "timm-1.0-py3-none-any.whl"}]}')
    assert flambeau("env --check --mirror https://m/simple").code == 0


def test_what_flambeau_needs_is_asked_for() -> None:
    names = {one.name for one in requirements()}
    assert {"torch", "torchvision", "timm"} <= names
    assert "lmdb" not in names  # of an extra


@pytest.mark.parametrize(
    ("code", "kind", "body", "said"),
    [
        (500, "text/html", b"", "answers with 500"),
        (200, JSON, b"{", "it is no JSON"),
        (200, JSON, b"[]", "is no list of files"),
        (200, JSON, b'{"files": 1}', "is no list of files"),
        (200, JSON, b"[" * 100_000, "is no list of files"),
    ],
)
def test_an_index_that_answers_nonsense(
    code: int, kind: str, body: bytes, said: str, index: Any
) -> None:
    address, pages = index
    pages["/simple/torch/"] = (code, kind, body)
    with pytest.raises(InputError, match=re.escape(said)):
        newest_fitting(address, Requirement("torch"))


def test_an_index_that_is_not_there_or_slow(index: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    address, pages = index
    with pytest.raises(InputError, match=r"does not answer: .*refused\nCheck the address"):
        newest_fitting("http://127.0.0.1:9/simple", Requirement("torch"))
    pages["/simple/torch/"] = (200, "text/html", b"slow")
    with pytest.raises(InputError, match="does not answer: it takes too long"):
        newest_fitting(address, Requirement("torch"), timeout_s=0.5)
    monkeypatch.setattr(package_index, "_MOST", 1 << 17)
    with pytest.raises(InputError, match="is longer than 0 MiB"):
        newest_fitting(address, Requirement("torch"))


def test_no_way_leads_from_https_to_http() -> None:
    handler = package_index._NoPlainHttp()
    request = urllib.request.Request("https://m/simple/torch/")
    with pytest.raises(InputError, match="leads to http://m/torch, which checks no certificate"):
        handler.redirect_request(request, None, 302, "Found", {}, "http://m/torch")
    other = handler.redirect_request(request, None, 302, "Found", {}, "https://m/torch")
    assert other is not None and other.full_url == "https://m/torch"


# ---------------------------------------------------------------- a disk


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pieces that are measured at once."""
    monkeypatch.setattr(disk, "_PIECE", 1 << 16)
    monkeypatch.setattr(disk, "_MOST", 1 << 20)


def test_a_disk_is_measured_and_left_as_it_was(small: None, tmp_path: Path) -> None:
    found = disk.disk_speed(tmp_path)
    assert found["folder"] == str(tmp_path)
    for name in ("write_mib_per_s", "read_mib_per_s"):
        speed = found[name]
        assert isinstance(speed, float) and speed > 0
    assert list(tmp_path.iterdir()) == []


def test_it_ends_in_time(small: None, tmp_path: Path) -> None:
    """Each look at the clock is two seconds later: two pieces of each kind, and not all."""
    ticks = iter(range(0, 1000, 2))
    found = disk.disk_speed(tmp_path, clock=lambda: float(next(ticks)))
    assert found["write_mib_per_s"] == pytest.approx(2 / 16 / 6, abs=0.1)


def test_an_interruption_leaves_no_file(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(_: int) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(os, "fsync", interrupted)
    with pytest.raises(KeyboardInterrupt):
        disk.disk_speed(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_disks_that_cannot_be_measured(
    flambeau: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    refused(flambeau("env --disk", tmp_path / "gone"), "gone: there is no such folder")

    def full(*_: Any, **__: Any) -> Any:
        raise PermissionError(13, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(disk.tempfile, "TemporaryFile", full)
        refused(flambeau("env --disk", tmp_path), "permission denied; name a folder")
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1 << 20}))
    refused(flambeau("env --disk", tmp_path), "1 MiB are left there")


def test_the_disk_is_in_the_report(
    small: None, flambeau: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    report = json.loads(flambeau("env --json --disk").out)
    assert report["disk"]["folder"] == "."
    assert re.search(r"^  write mib per s +\d", flambeau("env --disk", tmp_path).out, re.MULTILINE)
