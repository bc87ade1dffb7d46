"""What a run depends on: versions, devices, and how many CPUs this process may really use.

运行环境报告：版本、设备，以及本进程真正可用的 CPU 数量。

Source: own; cgroup files after the Linux kernel's documents cgroup-v2.rst (cpu.max, memory.max),
sched-bwc.rst (cpu.cfs_quota_us) and cgroup-v1/memory.rst.

Not for live figures such as load or memory in use.
"""

import math
import os
import platform
import re
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import torch

_PACKAGES = ("torchvision", "timm", "numpy", "pillow", "safetensors")
_CPUINFO = Path("/proc/cpuinfo")
_CPU_FILES = ("cpu.max", "cpu.cfs_quota_us", "cpu.cfs_period_us")
_MEMORY_FILES = ("memory.max", "memory.limit_in_bytes")
# What kernels of torch, oneDNN and ours are chosen by, as the kernel names it.
_FEATURES = (
    "avx2",
    "avx512f",
    "avx512_vnni",
    "avx512_bf16",
    "amx_bf16",
    "amx_int8",
    "asimd",
    "sve",
    "bf16",
)


def environment(*, packages: Sequence[str] = _PACKAGES) -> dict[str, Any]:
    """A report of software and hardware, ready for `json.dumps`.

    Naming GPUs starts CUDA: call `make_deterministic` and fork before, not after.

    Args:
        packages: names of distributions to look up. None of them is imported.

    Returns:
        Strings, numbers, booleans, lists and dicts of them, and None for what this machine does not have.
        `cuda_build` is the CUDA that torch was built with, `driver` the version of the NVIDIA driver.

    Example:
        >>> report = environment()
        >>> report["torch"] == torch.__version__, report["usable_cpus"] >= 1
        (True, True)
    """
    gpus = [f"cuda:{index}" for index in range(torch.cuda.device_count())]
    return {
        "python": platform.python_version(),
        "platform": platform.platform(),
        "torch": torch.__version__,
        "packages": {name: _version(name) for name in packages},
        "cuda_build": torch.version.cuda,
        "rocm_build": torch.version.hip,
        "cudnn": torch.backends.cudnn.version(),
        "driver": _driver(),
        "default_device": str(default_device()),
        "gpus": [torch.cuda.get_device_name(gpu) for gpu in gpus],
        "cpu": _cpu_model(),
        "cpu_features": _cpu_features(),
        "cpu_count": os.cpu_count(),
        "usable_cpus": usable_cpus(),
        "usable_memory_bytes": usable_memory(),
        "torch_threads": torch.get_num_threads(),
        "native_bf16": [name for name in ("cpu", *gpus) if native_bf16(torch.device(name))],
    }


def default_device() -> torch.device:
    """The accelerator that is really there, or the CPU.

    Returns:
        A device without an index. `torch.accelerator.current_accelerator()` alone names the accelerator that
        torch was built for, `cuda` on a machine without a GPU.

    Example:
        >>> torch.ones(2, device=default_device()).sum().tolist()
        2.0
    """
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def native_bf16(device: torch.device, *, cpuinfo: Path = _CPUINFO) -> bool:
    """Whether bfloat16 is computed by the hardware of a device, not emulated.

    Imitated bfloat16 is slower than float32: up to 11 times on a CPU without AVX-512.
    `torch.cuda.is_bf16_supported()` is True for imitation too.

    Args:
        device: of any type; one that is neither a CPU nor CUDA counts as not native.
        cpuinfo: where Linux lists the features of the CPU; a missing file counts as not native.

    Returns:
        True for AVX512-BF16, AMX-BF16 or Arm BF16, and for CUDA from compute capability 8.0.

    Example:
        >>> native_bf16(torch.device("mps"))
        False
    """
    if device.type == "cuda":
        return torch.cuda.get_device_capability(device) >= (8, 0)
    if device.type != "cpu":
        return False
    features = _cpuinfo_line("flags|Features", cpuinfo) or ""
    return not {"avx512_bf16", "amx_bf16", "bf16"}.isdisjoint(features.split())


def usable_cpus(
    *,
    cgroup_root: Path = Path("/sys/fs/cgroup"),
    cgroup_of_process: Path = Path("/proc/self/cgroup"),
) -> int:
    """The number of threads that this process can run at once: affinity and container quota count.

    More threads than that cost up to 17 times in bfloat16 (measured, torch 2.15, two threads on one core).

    Args:
        cgroup_root: where cgroups of version 1 or 2 are mounted; nothing there means no quota.
        cgroup_of_process: the kernel's list of the cgroups that this process is in.

    Returns:
        At least 1; a quota of 1.5 CPUs counts as 2.

    Example:
        >>> 1 <= usable_cpus() <= os.cpu_count()
        True
    """
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # Linux; cpusets and taskset both show here
        count = min(count, len(os.sched_getaffinity(0)))
    limits = _cgroup_limits("cpu", _CPU_FILES, cgroup_root, _read(cgroup_of_process))
    return min([count, *(math.ceil(int(quota) / int(period)) for quota, period in limits)])


def usable_memory(
    *,
    cgroup_root: Path = Path("/sys/fs/cgroup"),
    cgroup_of_process: Path = Path("/proc/self/cgroup"),
) -> int | None:
    """Bytes that this process may have: the machine's, or the limit of its container if that is lower.

    Above that limit the kernel kills, usually a data worker.

    Args:
        cgroup_root: where cgroups of version 1 or 2 are mounted; nothing there means no limit.
        cgroup_of_process: the kernel's list of the cgroups that this process is in.

    Returns:
        None where the system does not tell (Windows).

    Example:
        >>> usable_memory() is None or usable_memory() > 2**20
        True
    """
    if not hasattr(os, "sysconf"):
        return None
    limits = _cgroup_limits("memory", _MEMORY_FILES, cgroup_root, _read(cgroup_of_process))
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return min([machine, *(int(limit) for (limit,) in limits)])


def _cgroup_limits(
    controller: str, files: tuple[str, ...], root: Path, memberships: str
) -> Iterator[list[str]]:
    """The numbers in the files of the process's cgroups, on the way up to the root of each.

    Args:
        controller: 'cpu' or 'memory'.
        files: the one of version 2, then those of version 1.
        root: where cgroups are mounted.
        memberships: the kernel's list.
    """
    for line in memberships.splitlines():
        _, controllers, name = line.split(":", 2)
        inner = PurePosixPath(name.lstrip("/"))
        # '..' is a cgroup outside this container's view; then its root is all that can be read.
        parts = () if ".." in inner.parts else inner.parts
        folders = [PurePosixPath(*parts[:depth]) for depth in range(len(parts) + 1)]
        if not controllers:  # version 2
            fields = [_read(root / folder / files[0]).split() for folder in folders]
        elif controller in controllers.split(","):
            # Version 1: 'cpu,cpuacct', often a link 'cpu' to it.
            mounts = [root / mount / f for mount in {controllers, controller} for f in folders]
            fields = [[_read(mount / file).strip() for file in files[1:]] for mount in mounts]
        else:
            continue
        # No limit is 'max' in version 2 and -1 in version 1; no file is ''.
        yield from (field for field in fields if field and field[0].isdecimal())


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # no such file on this system, or not for us to read
        return ""


def _cpuinfo_line(name: str, cpuinfo: Path) -> str | None:
    found = re.search(rf"^(?:{name})[ \t]*:[ \t]*(.*)$", _read(cpuinfo), re.MULTILINE)
    return found[1] if found else None


def _cpu_model() -> str:
    return _cpuinfo_line("model name", _CPUINFO) or platform.processor() or platform.machine()


def _cpu_features(cpuinfo: Path = _CPUINFO) -> list[str]:
    known = (_cpuinfo_line("flags|Features", cpuinfo) or "").split()
    return [name for name in _FEATURES if name in known]


def _driver(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    found = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", _read(path))
    return found[1] if found else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
