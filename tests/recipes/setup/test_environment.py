import json
import os
from importlib import metadata
from pathlib import Path

import pytest
import torch

from flambeau.recipes.setup import environment as module
from flambeau.recipes.setup.environment import (
    default_device,
    environment,
    native_bf16,
    usable_cpus,
    usable_memory,
)

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.fixture
def eight_cpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 8)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(8)), raising=False)


def cpus(tmp_path: Path, memberships: str, files: dict[str, str]) -> int:
    """`usable_cpus` in a made-up cgroup tree."""
    root = tmp_path / "cgroup"
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    (tmp_path / "self").write_text(memberships)
    return usable_cpus(cgroup_root=root, cgroup_of_process=tmp_path / "self")


# ---------------------------------------------------------------- the report


def test_report_is_json_and_names_what_runs_here() -> None:
    report = environment()
    assert json.loads(json.dumps(report)) == report
    assert report["torch"] == torch.__version__
    assert report["cuda_build"] == torch.version.cuda
    assert report["packages"]["numpy"] == metadata.version("numpy")
    assert report["usable_cpus"] == usable_cpus()
    assert report["torch_threads"] == torch.get_num_threads()
    assert len(report["gpus"]) == torch.cuda.device_count()
    assert report["cpu"]


def test_packages_are_looked_up_not_imported() -> None:
    found = environment(packages=["pip", "no-such-distribution"])["packages"]
    assert found == {"pip": metadata.version("pip"), "no-such-distribution": None}


def test_report_without_proc_files(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """As on macOS and Windows."""
    monkeypatch.setattr(module, "_read", lambda path: "")
    report = environment()
    assert report["driver"] is None
    assert report["cpu"]  # the platform module's word


@pytest.mark.parametrize(
    ("text", "version"),
    [  # first lines of /proc/driver/nvidia/version of the closed and of the open kernel module
        (
            "NVRM version: NVIDIA UNIX x86_64 Kernel Module  535.104.05  Sat Aug 19 2023",
            "535.104.05",
        ),
        (
            "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15  Release Build",
            "570.86.15",
        ),
        ("", None),
    ],
)
def test_driver_version(tmp_path: Path, text: str, version: str | None) -> None:
    (tmp_path / "version").write_text(text)
    assert module._driver(tmp_path / "version") == version


def test_driver_absent(tmp_path: Path) -> None:
    assert module._driver(tmp_path / "version") is None


@pytest.mark.gpu
@needs_cuda
def test_report_names_the_gpu() -> None:
    assert environment()["gpus"][0] == torch.cuda.get_device_name(0)
    assert environment()["default_device"] == "cuda"


# ---------------------------------------------------------------- devices


def test_default_device_exists() -> None:
    torch.ones(1, device=default_device())
    expected = (
        "cuda"
        if torch.cuda.is_available()
        else "mps"
        if torch.backends.mps.is_available()
        else "cpu"
    )
    assert default_device().type == expected


def test_default_device_without_an_accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """A build for CUDA says 'cuda' where no GPU is, unless it is asked to look."""
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: False)
    assert default_device() == torch.device("cpu")


@pytest.mark.parametrize(
    ("cpuinfo", "native"),
    [
        ("processor\t: 0\nflags\t\t: fpu avx512f avx512_bf16 avx512vbmi\n", True),
        ("flags\t\t: fpu avx512f amx_bf16 amx_tile\n", True),
        ("flags\t\t: fpu avx512f avx512vbmi\nbugs\t\t: amx_bf16\n", False),
        ("flags\t\t: fpu avx2\nvmx flags\t: avx512_bf16\n", False),
        ("Features\t: fp asimd bf16 i8mm\nCPU implementer : 0x41\n", True),
        ("Features\t: fp asimd svebf16x\n", False),
        ("flags\t\t:\nbf16\n", False),
    ],
)
def test_native_bf16_of_a_cpu(tmp_path: Path, cpuinfo: str, native: bool) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert native_bf16(torch.device("cpu"), cpuinfo=tmp_path / "cpuinfo") is native


def test_native_bf16_agrees_with_torch_here() -> None:
    supported = getattr(torch.cpu, "_is_avx512_bf16_supported", None)
    if supported is None or not Path("/proc/cpuinfo").exists():
        pytest.skip("torch.cpu has no such question, or there is no /proc/cpuinfo")
    if supported():
        assert native_bf16(torch.device("cpu"))


def test_native_bf16_is_false_where_nothing_is_known(tmp_path: Path) -> None:
    assert native_bf16(torch.device("cpu"), cpuinfo=tmp_path / "none") is False
    assert native_bf16(torch.device("mps")) is False


@pytest.mark.parametrize(
    ("capability", "native"), [((7, 5), False), ((8, 0), True), ((9, 0), True)]
)
def test_native_bf16_of_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], native: bool
) -> None:
    asked = []
    monkeypatch.setattr(
        torch.cuda, "get_device_capability", lambda device: asked.append(device) or capability
    )
    assert native_bf16(torch.device("cuda:1")) is native
    assert asked == [torch.device("cuda:1")]


# ---------------------------------------------------------------- CPUs


def test_usable_cpus_without_cgroups(eight_cpus: None, tmp_path: Path) -> None:
    nothing = tmp_path / "none"
    assert usable_cpus(cgroup_root=nothing, cgroup_of_process=nothing) == 8


def test_affinity_counts(eight_cpus: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {1, 5, 7}, raising=False)
    assert cpus(tmp_path, "0::/\n", {"cpu.max": "400000 100000\n"}) == 3


def test_without_affinity_and_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on macOS; and os.cpu_count may not know."""
    monkeypatch.delattr(os, "sched_getaffinity", raising=False)
    monkeypatch.setattr(os, "cpu_count", lambda: None)
    assert cpus(tmp_path, "0::/\n", {}) == 1


@pytest.mark.parametrize(
    ("memberships", "files", "expected"),
    [
        ("0::/\n", {"cpu.max": "max 100000\n"}, 8),
        ("0::/\n", {"cpu.max": "200000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "150000 100000\n"}, 2),
        ("0::/\n", {"cpu.max": "1000 100000\n"}, 1),
        ("0::/\n", {"cpu.max": "1600000 100000\n"}, 8),
        # The tightest cgroup on the way counts, wherever it is.
        ("0::/a/b\n", {"a/b/cpu.max": "max 100000", "a/cpu.max": "300000 100000"}, 3),
        ("0::/a/b\n", {"a/b/cpu.max": "100000 50000", "a/cpu.max": "300000 100000"}, 2),
        ("0::/a/b\n", {"c/cpu.max": "100000 100000"}, 8),
        # A container that sees its host's path but has its own cgroup mounted at the root.
        ("0::/docker/1f2e\n", {"cpu.max": "500000 100000"}, 5),
        ("0::/../other\n", {"cpu.max": "500000 100000", "../other/cpu.max": "100000 100000"}, 5),
        # Version 1.
        (
            "4:cpu,cpuacct:/x\n1:name=systemd:/\n",
            {
                "cpu,cpuacct/x/cpu.cfs_quota_us": "250000\n",
                "cpu,cpuacct/x/cpu.cfs_period_us": "100000\n",
                "cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
                "cpu,cpuacct/cpu.cfs_period_us": "100000\n",
            },
            3,
        ),
        (
            "3:cpuset:/\n2:cpuacct:/\n1:cpu:/\n",
            {
                "cpu/cpu.cfs_quota_us": "400000\n",
                "cpu/cpu.cfs_period_us": "100000\n",
                "cpuset/cpu.cfs_quota_us": "100000\n",
                "cpuset/cpu.cfs_period_us": "100000\n",
            },
            4,
        ),
        ("1:cpu:/\n", {"cpu/cpu.cfs_quota_us": "-1\n", "cpu/cpu.cfs_period_us": "100000\n"}, 8),
        # Both versions at once.
        (
            "1:cpu:/\n0::/\n",
            {"cpu/cpu.cfs_quota_us": "300000", "cpu/cpu.cfs_period_us": "100000"},
            3,
        ),
    ],
)
def test_quota_of_the_cgroup_counts(
    eight_cpus: None, tmp_path: Path, memberships: str, files: dict[str, str], expected: int
) -> None:
    assert cpus(tmp_path, memberships, files) == expected


GIB = 2**30


@pytest.mark.parametrize(
    ("memberships", "files", "expected"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max\n", "a/memory.max": f"{3 * GIB}\n"}, 3 * GIB),
        ("0::/a/b\n", {"a/b/memory.max": f"{GIB}", "a/memory.max": f"{3 * GIB}"}, GIB),
        ("0::/\n", {"memory.max": f"{100 * GIB}\n"}, 16 * GIB),
        ("0::/\n", {}, 16 * GIB),
        ("0::/../other\n", {"memory.max": f"{2 * GIB}"}, 2 * GIB),
        ("9:memory:/x\n", {"memory/x/memory.limit_in_bytes": f"{4 * GIB}\n"}, 4 * GIB),
        ("9:memory:/x\n", {"memory/x/memory.limit_in_bytes": "9223372036854771712\n"}, 16 * GIB),
        ("9:cpu:/x\n", {"cpu/x/memory.limit_in_bytes": f"{GIB}"}, 16 * GIB),
    ],
)
def test_the_limit_of_the_cgroup_counts(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    memberships: str,
    files: dict[str, str],
    expected: int,
) -> None:
    sizes = {"SC_PAGE_SIZE": 4096, "SC_PHYS_PAGES": 16 * GIB // 4096}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    (tmp_path / "self").write_text(memberships)
    found = usable_memory(cgroup_root=tmp_path / "root", cgroup_of_process=tmp_path / "self")
    assert found == expected


def test_memory_of_this_machine() -> None:
    lines = Path("/proc/meminfo").read_text().splitlines()
    total = int(next(line for line in lines if "MemTotal" in line).split()[1])
    assert 0 < (usable_memory() or 0) <= total * 1024 + 2**20


def test_memory_where_the_system_does_not_tell(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(os, "sysconf")
    assert usable_memory() is None


@pytest.mark.parametrize(
    ("cpuinfo", "features"),
    [
        ("flags\t\t: fpu avx avx2 avx512f amx_bf16 amx_tile\n", ["avx2", "avx512f", "amx_bf16"]),
        ("Features\t: fp asimd sve bf16\n", ["asimd", "sve", "bf16"]),
        ("", []),
    ],
)
def test_features_of_the_cpu(tmp_path: Path, cpuinfo: str, features: list[str]) -> None:
    (tmp_path / "cpuinfo").write_text(cpuinfo)
    assert module._cpu_features(tmp_path / "cpuinfo") == features
