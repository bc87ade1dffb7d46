"""Where flambeau keeps data that it fetches or makes."""

import os
from pathlib import Path


def data_home() -> Path:
    """$FLAMBEAU_DATA, else ~/.cache/flambeau/data; it need not be there."""
    return Path(os.environ.get("FLAMBEAU_DATA") or "~/.cache/flambeau/data").expanduser()
