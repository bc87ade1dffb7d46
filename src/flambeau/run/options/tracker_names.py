"""The values of the option `track`: names of trackers, or functions of one line."""

from collections.abc import Callable, Sequence

from flambeau.errors import InputError, nearest

_OPTIONS = {"tensorboard": ("histograms", "graph")}
TRACKERS = ("tensorboard", "tensorboard:histograms", "tensorboard:graph", "wandb", "mlflow", "csv")
"""The names; several options can follow one name: tensorboard:histograms:graph."""
LineFunction = Callable[[int, dict[str, float]], object]
"""Takes the step and the figures of a line of metrics.jsonl."""
Track = str | LineFunction | Sequence[str | LineFunction]


def tracker_list(track: Track | None) -> tuple[str | LineFunction, ...]:
    """The trackers one by one: 'a,b' is two, and 'none' is none.

    InputError: an unknown name, a name twice, or neither a name nor a function.
    """
    if track is None:
        return ()
    items = [track] if isinstance(track, str) or callable(track) else track
    trackers: list[str | LineFunction] = []
    for item in items:
        if isinstance(item, str):
            trackers += [] if item == "none" else [name.strip() for name in item.split(",")]
        elif callable(item):
            trackers.append(item)
        else:
            raise InputError(
                f"track must hold names of trackers ({', '.join(TRACKERS)}) or functions of a step and its "
                f"figures, got {item!r:.100}"
            )
    names = [name for name in trackers if isinstance(name, str)]
    for name in names:
        if name == "none":
            raise InputError(
                f"track = {','.join(names)!r}: none turns all of them off; name it alone"
            )
        if not _is_known(name):
            known = ", ".join(TRACKERS)
            raise InputError(
                f"track must be none, or of {known}; got {name!r}{nearest(name, TRACKERS)}"
            )
    first = [name.partition(":")[0] for name in names]
    twice = [name for name in first if first.count(name) > 1]
    if twice:
        raise InputError(f"track names {twice[0]} twice: {','.join(names)}; name it once")
    return tuple(trackers)


def tracker_options(tracker: str | LineFunction) -> tuple[str, ...]:
    """The options that follow the name of a tracker: `tensorboard:histograms:graph` has two."""
    return tuple(tracker.split(":")[1:]) if isinstance(tracker, str) else ()


def _is_known(name: str) -> bool:
    options = tracker_options(name)
    known = _OPTIONS.get(name.partition(":")[0], ())
    is_once = len(set(options)) == len(options)
    return name in TRACKERS or (len(options) > 1 and is_once and set(options) <= set(known))
