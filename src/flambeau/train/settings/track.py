"""The names of the trackers, and what `track` may be: names, or functions of one line."""

from collections.abc import Callable, Sequence

from flambeau.errors import InputError, nearest

HISTOGRAMS = "tensorboard:histograms"
TRACKERS = ("tensorboard", HISTOGRAMS, "wandb", "mlflow", "csv")
LineFunction = Callable[[int, dict[str, float]], object]
"""Takes the step and the figures of a line of metrics.jsonl."""
Track = str | LineFunction | Sequence[str | LineFunction]


def tracker_list(track: Track | None) -> tuple[str | LineFunction, ...]:
    """The trackers one by one; 'a,b' are two, and 'none' is none.

    Raises:
        InputError: an unknown name, one twice, or something that is neither a name nor a function.

    Example:
        >>> tracker_list("tensorboard,csv")
        ('tensorboard', 'csv')
    """
    if track is None:
        return ()
    told = [track] if isinstance(track, str) or callable(track) else track
    found: list[str | LineFunction] = []
    for item in told:
        if isinstance(item, str):
            found += [] if item == "none" else [name.strip() for name in item.split(",")]
        elif callable(item):
            found.append(item)
        else:
            raise InputError(
                f"track must hold names of trackers ({', '.join(TRACKERS)}) or functions of a step and its "
                f"figures, got {item!r:.100}"
            )
    names = [name for name in found if isinstance(name, str)]
    for name in names:
        if name == "none":
            raise InputError(
                f"track = {','.join(names)!r}: none turns all of them off; name it alone"
            )
        if name not in TRACKERS:
            known = ", ".join(TRACKERS)
            raise InputError(
                f"track must be none, or of {known}; got {name!r}{nearest(name, TRACKERS)}"
            )
    first = [name.partition(":")[0] for name in names]
    twice = [name for name in first if first.count(name) > 1]
    if twice:
        raise InputError(f"track names {twice[0]} twice: {','.join(names)}; name it once")
    return tuple(found)
