"""A training run: its settings, parts, loop and folder. May import recipes, data and parallel.

The folder is callable: `flambeau.train("photos/", epochs=5)` is `flambeau.train.api.train`, because the door
and the folder have one name.
"""

import sys
from types import ModuleType
from typing import Any


class _Door(ModuleType):
    def __call__(self, *arguments: Any, **settings: Any) -> Any:
        from flambeau.train.api import train

        return train(*arguments, **settings)


sys.modules[__name__].__class__ = _Door
