"""A packed copy of the images of a training, made for trials and removed with them."""

import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

_SHARE_OF_DISK = 0.25  # of what is free; chosen


class PackedCopies:
    """Copies of one folder of images, each made when a trial first asks for it.

    Args:
        data: the folder.
        place: where a hidden folder for them is made, and removed by `close`.
        limit_s: what packing may take.
    """

    def __init__(self, data: Path, place: Path, *, limit_s: float) -> None:
        self._data, self._place, self._limit_s = data, place, limit_s
        self._folder: Path | None = None
        self._made: dict[tuple[str, ...], Path | str] = {}

    def copy(self, flags: Sequence[str]) -> Path | str:
        """What `flambeau train` takes as DATA in place of the folder, or why there is none.

        Args:
            flags: of `flambeau pack`.
        """
        key = tuple(flags)
        if key not in self._made:
            self._made[key] = self._pack(key)
        return self._made[key]

    def close(self) -> None:
        """Remove them."""
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)

    def _pack(self, flags: tuple[str, ...]) -> Path | str:
        if not self._fits():
            return f"a copy might take more than {_SHARE_OF_DISK:.0%} of the free disk"
        if self._folder is None:
            self._folder = Path(tempfile.mkdtemp(prefix=".flambeau-tune-", dir=self._place))
        # This format keeps the names of images, so that the same ones are held out.
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
        most = shutil.disk_usage(self._place).free * _SHARE_OF_DISK
        total = 0
        for file in self._data.rglob("*"):
            total += file.stat().st_size if file.is_file() else 0
            if total > most:
                return False
        return True
