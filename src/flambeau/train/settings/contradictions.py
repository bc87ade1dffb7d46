"""Settings that do not go together."""

from typing import Any

from flambeau.errors import InputError
from flambeau.train.settings.field_checks import parse_batch_size


def check_contradictions(settings: Any) -> None:
    """Refuse two settings of which one rules the other out.

    Args:
        settings: a `Settings`, which calls this.

    Raises:
        InputError: there are such two.
    """
    if settings.shard != "none" and settings.compression != "none":
        raise InputError(
            f"compression = {settings.compression!r} has no effect with shard = {settings.shard!r}: leave "
            "one of them out"
        )
    if settings.shard != "none" and settings.compile != "none":
        raise InputError(
            f"shard = {settings.shard!r} and compile = {settings.compile!r} do not go together: leave one out"
        )
    if settings.shard != "none" and settings.qat:
        raise InputError(f"shard = {settings.shard!r} and qat do not go together: leave one out")
    if settings.shard != "none" and settings.optimizer == "muon":
        raise InputError(
            f"shard = {settings.shard!r} leaves each process a piece of a matrix, and optimizer = 'muon' "
            "needs whole ones: leave one of them out"
        )
    if settings.parts is not None:
        _check_parts(settings)


def _check_parts(settings: Any) -> None:
    """What `Run` cannot see of it, or only later."""
    parts = f"parts = {settings.parts}"
    if parse_batch_size(settings.batch_size).finds:
        raise InputError(
            f"{parts} cut a step of known size, and batch_size = {settings.batch_size!r} finds one: give a "
            "number"
        )
    if settings.sync_bn and settings.compile != "none":
        raise InputError(
            f"{parts} and compile = {settings.compile!r}: with sync_bn the model is cut at each of its "
            "layers, and which pieces torch compiles depends on the process; leave one of them out"
        )
    if settings.shard != "none":
        raise InputError(
            f"{parts}: with shard = {settings.shard!r} gradients are added in the order of the processes; "
            "leave one of them out"
        )
