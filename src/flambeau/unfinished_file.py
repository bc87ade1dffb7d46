"""Names of files and folders that are being written, and what killed writes have left of them; without torch.

The recipe atomic_checkpoint has the same names.
"""

import contextlib
import re
import secrets
import shutil
import time
from pathlib import Path

_ABANDONED_S = 86_400  # no write takes a day; chosen


def unfinished(path: Path) -> Path:
    """An unused hidden name beside `path`; what killed writes of `path` have left is removed."""
    name = re.compile(rf"\.{re.escape(path.name)}\.[0-9a-f]{{16}}\.tmp")
    with contextlib.suppress(OSError):
        for other in path.parent.iterdir():
            if name.fullmatch(other.name) and _is_abandoned(other):
                remove(other)
    return path.with_name(f".{path.name}.{secrets.token_hex(8)}.tmp")


def _is_abandoned(path: Path) -> bool:
    """Whether nothing was written there for a day."""
    return time.time() - path.lstat().st_mtime > _ABANDONED_S


def remove(path: Path) -> None:
    """Remove a file or folder, as far as the disk allows; it need not be there."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with contextlib.suppress(OSError):
            path.unlink()
