"""A packed copy of the images of a training, made for trials and removed after them."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_SHARE_OF_DISK = 0.25  # of the free space; chosen


class PackedCopies:
    """Copies of the folder `data`, in a hidden folder in `parent`, each made when a trial first needs it."""

    def __init__(self, data: Path, parent: Path, *, limit_s: float) -> None:
        self._data, self._parent, self._limit_s = data, parent, limit_s
        self._folder: Path | None = None
        self._made: dict[tuple[str, ...], Path | str] = {}

    def copy(self, flags: Sequence[str]) -> Path | str:
        """What `flambeau train` takes as DATA instead of the folder, or a sentence on why there is none."""
        key = tuple(flags)
        if key not in self._made:
            self._made[key] = self._pack(key)
        return self._made[key]

    def close(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _pack(self, flags: tuple[str, ...]) -> Path | str:
        if not self._fits():
            return f"a copy might take more than {_SHARE_OF_DISK:.0%} of the free disk"
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix=".flambeau-tune-", dir=self._parent))
        # TFRecord keeps the names of images, so that the same ones are held out.
        file = self._folder / f"{len(self._made)}.tfrecord"
        command = [sys.executable, "-m", "flambeau", "pack", f"{self._data}", f"{file}", *flags]
        try:
            done = subprocess.run(command, capture_output=True, timeout=self._limit_s, check=False)
        except subprocess.TimeoutExpired:
            return f"packing takes more than {self._limit_s:.0f} s"
        if done.returncode:
            said = done.stderr.decode(errors="replace").strip()
            return f"packing failed: {said.rpartition('flambeau: ')[2]}"  # what, and what to do
        return next(path for path in (file, file.with_stem(f"{file.stem}_train")) if path.exists())

    def _fits(self) -> bool:
        most = shutil.disk_usage(self._parent).free * _SHARE_OF_DISK
        total = 0
        for file in self._data.rglob("*"):
            total += file.stat().st_size if file.is_file() else 0
            if total > most:
                return False
        return True
