"""Report what a run depends on: versions, devices, and how many CPUs this process may really use.

运行环境报告：版本、设备，以及本进程真正可用的 CPU 数量。

Source: original; cgroup files after the Linux kernel's documents cgroup-v2.rst (cpu.max, memory.max),
sched-bwc.rst (cpu.cfs_quota_us) and cgroup-v1/memory.rst.

Not for live figures such as load or used memory.
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
# CPU features by which torch, oneDNN and flambeau choose kernels, as Linux names them.
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
    """Report software and hardware, ready for `json.dumps`.

    Naming the GPUs initializes CUDA: call `make_deterministic` and fork before, not after.

    Returns:
        Plain data, with None for what this machine does not have. `cuda_build` is torch's CUDA version,
        `driver` that of the NVIDIA driver.

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
    """The accelerator of this machine, or the CPU.

    Returns:
        Without an index. (`torch.accelerator.current_accelerator()` alone is `cuda` on a machine without a
        GPU, if torch was built for it.)

    Example:
        >>> torch.ones(2, device=default_device()).sum().tolist()
        2.0
    """
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def native_bf16(device: torch.device, *, cpuinfo: Path = _CPUINFO) -> bool:
    """Whether a device computes bfloat16 natively, without emulation.

    Emulated bfloat16 is slower than float32: up to 11 times on a CPU without AVX-512.
    `torch.cuda.is_bf16_supported()` is True for emulation too.

    Args:
        device: False for types other than CPU and CUDA.
        cpuinfo: Linux's list of CPU features; False if it is missing.

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
    """How many threads this process can run at once, by CPU affinity and container quota.

    More threads were up to 17 times slower in bfloat16 (measured, torch 2.15, two threads on one core).

    Args:
        cgroup_root: where cgroups of version 1 or 2 are mounted, if any.

    Returns:
        At least 1; a quota of 1.5 CPUs counts as 2.

    Example:
        >>> 1 <= usable_cpus() <= os.cpu_count()
        True
    """
    count = os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):  # Linux; includes cpusets and taskset
        count = min(count, len(os.sched_getaffinity(0)))
    limits = _cgroup_limits("cpu", _CPU_FILES, cgroup_root, _read(cgroup_of_process))
    return min([count, *(math.ceil(int(quota) / int(period)) for quota, period in limits)])


def usable_memory(
    *,
    cgroup_root: Path = Path("/sys/fs/cgroup"),
    cgroup_of_process: Path = Path("/proc/self/cgroup"),
) -> int | None:
    """Bytes of memory that this process may use: the machine's, or a lower limit of its container.

    Above that limit the kernel kills a process, usually a data worker.

    Args:
        cgroup_root: where cgroups of version 1 or 2 are mounted, if any.

    Returns:
        None where the system does not report it (Windows).

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
    """The limits of the process's cgroups and of all their parents.

    `files` names the file of version 2, then those of version 1; `memberships` is the kernel's list.
    """
    for line in memberships.splitlines():
        _, controllers, name = line.split(":", 2)
        inner = PurePosixPath(name.lstrip("/"))
        # '..' is a cgroup outside this container's view; then only the root can be read.
        parts = () if ".." in inner.parts else inner.parts
        folders = [PurePosixPath(*parts[:depth]) for depth in range(len(parts) + 1)]
        if not controllers:  # version 2
            fields = [_read(root / folder / files[0]).split() for folder in folders]
        elif controller in controllers.split(","):
            # Version 1: the folder is 'cpu,cpuacct', often with a link 'cpu'.
            mounts = [root / mount / f for mount in {controllers, controller} for f in folders]
            fields = [[_read(mount / file).strip() for file in files[1:]] for mount in mounts]
        else:
            continue
        # Without a limit the value is 'max' in version 2 and -1 in version 1; without a file ''.
        yield from (field for field in fields if field and field[0].isdecimal())


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:  # the file does not exist on this system or is not readable
        return ""


def _cpuinfo_line(name: str, cpuinfo: Path) -> str | None:
    match = re.search(rf"^(?:{name})[ \t]*:[ \t]*(.*)$", _read(cpuinfo), re.MULTILINE)
    return match[1] if match else None


def _cpu_model() -> str:
    return _cpuinfo_line("model name", _CPUINFO) or platform.processor() or platform.machine()


def _cpu_features(cpuinfo: Path = _CPUINFO) -> list[str]:
    known = (_cpuinfo_line("flags|Features", cpuinfo) or "").split()
    return [name for name in _FEATURES if name in known]


def _driver(path: Path = Path("/proc/driver/nvidia/version")) -> str | None:
    match = re.search(r"Kernel Module.*?\s(\d+\.[\d.]+)", _read(path))
    return match[1] if match else None


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
