"""Settings that belong to one optimizer, one schedule or a teacher, and would do nothing without."""

from typing import TYPE_CHECKING

from flambeau.data.errors import InputError

if TYPE_CHECKING:
    from flambeau.train.config import Settings

MOMENTUM = {"sgd": 0.9, "rmsprop": 0.9, "muon": 0.95}
"""The momentum of the optimizers that take one, where it is left open."""


def check_takes_effect(s: "Settings") -> None:
    """Refuse settings of something that is not chosen.

    Raises:
        InputError: there is one.
    """
    for name in ("patience", "plateau_factor"):
        if getattr(s, name) is not None and s.schedule != "plateau":
            raise InputError(f"{name} has no effect with schedule = {s.schedule!r}: leave it out")
    if s.momentum is not None and s.optimizer not in MOMENTUM:
        raise InputError(f"momentum has no effect with optimizer = {s.optimizer!r}: leave it out")
    for name in ("teacher_weight", "temperature"):
        if getattr(s, name) is not None and s.teacher is None:
            raise InputError(f"{name} has no effect without a teacher: leave it out")
    if s.shard != "none" and s.optimizer == "muon":
        raise InputError(
            f"shard = {s.shard!r} leaves each process a piece of a matrix, and optimizer = 'muon' needs "
            "whole ones: leave one of them out"
        )
