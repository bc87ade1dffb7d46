"""What the operations of a few steps are, by torch's own profiler: small ones, memory-bound ones, kernels."""

import gzip
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

_STEPS = 3
_SMALL_US = 20.0  # an operation that takes less is mostly Python and dispatch; chosen
# Operations whose time is that of moving their bytes: element by element, or a sum over them.
_MEMORY_BOUND = (
    "batch_norm", "layer_norm", "group_norm", "aten::add", "aten::mul", "aten::div", "aten::sub", "relu",
    "gelu", "silu", "sigmoid", "tanh", "threshold", "dropout", "softmax", "max_pool", "avg_pool",
    "aten::copy_", "aten::fill_", "aten::sum", "aten::mean", "aten::cat",
)  # fmt: skip


class Operations:
    """Some steps under the profiler; nothing if the script has one of its own running."""

    def __init__(self) -> None:
        self._profile: profile | None = None
        self._left = _STEPS

    def start(self) -> None:
        """From here on."""
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available() and torch.cuda.is_initialized():
            activities.append(ProfilerActivity.CUDA)
        one = profile(activities=activities, acc_events=True)
        try:
            one.start()
        except RuntimeError:  # another one is running
            return
        self._profile = one

    def goes_on(self) -> bool:
        """After a step: whether one more is to be made."""
        self._left -= 1
        return self._profile is not None and self._left > 0

    def found(self, trace: str | None) -> dict[str, Any]:
        """Figures per step; operations of the CPU, and on a GPU the share of the time that it computes.

        Args:
            trace: file for a time line, as ui.perfetto.dev opens it; None for none.
        """
        if self._profile is None:
            return {"has_other_profiler": True}
        seen = self._profile
        seen.stop()
        rows = [
            row
            for row in seen.key_averages()
            if row.device_type.name == "CPU" and row.key.startswith("aten::")
        ]
        count = sum(row.count for row in rows)
        total_us = sum(row.self_cpu_time_total for row in rows)
        bound_us = sum(
            row.self_cpu_time_total
            for row in rows
            if any(name in row.key for name in _MEMORY_BOUND)
        )
        small_us = sum(
            row.self_cpu_time_total
            for row in rows
            if row.self_cpu_time_total < _SMALL_US * row.count
        )
        zeroed = {row.key: row.count for row in rows if row.key.endswith("zero_")}
        device_us = sum(row.self_device_time_total for row in rows)
        if trace is not None:
            _write_trace(seen, Path(trace))
        return {
            "count": count / _STEPS, "seconds": total_us / 1e6 / _STEPS, "small_s": small_us / 1e6 / _STEPS,
            "memory_bound_s": bound_us / 1e6 / _STEPS, "device_s": device_us / 1e6 / _STEPS,
            "zeroed": {name: times / _STEPS for name, times in zeroed.items()},
        }  # fmt: skip


def _write_trace(seen: profile, file: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "trace.json"
        seen.export_chrome_trace(str(plain))
        content = plain.read_bytes()
    file.write_bytes(gzip.compress(content, 6) if file.suffix == ".gz" else content)
