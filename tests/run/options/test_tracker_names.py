"""What `track` may be."""

from typing import Any

import pytest

from flambeau.errors import InputError
from flambeau.run.options.tracker_names import tracker_list, tracker_options
from flambeau.trainer.settings.settings import Settings
from flambeau.trainer.settings.stored_settings import canonical


def test_names_and_functions() -> None:
    assert tracker_list(None) == tracker_list("none") == tracker_list([]) == ()
    assert tracker_list("csv, wandb") == tracker_list(["csv", "wandb"]) == ("csv", "wandb")
    assert tracker_list(print) == (print,)
    assert tracker_list(["none", print, "csv,mlflow", max]) == (print, "csv", "mlflow", max)


@pytest.mark.parametrize(
    ("track", "message"),
    [
        ("none,csv", r"^track = 'none,csv': none turns all of them off; name it alone$"),
        ("tensorbord", r"^track must be none, or of tensorboard, .*; got 'tensorbord'; did you mean 'tensor"),
        ("csv,", r"got ''$"),
        ("csv,none", r"none turns all of them off; name it alone$"),
        ("tensorboard,tensorboard:histograms", "^track names tensorboard twice: .*; name it once$"),
        ("tensorboard:graph:graph", r"got 'tensorboard:graph:graph'"),
        ("tensorboard:histograms:x", r"got 'tensorboard:histograms:x'"),
        ("csv:graph", r"got 'csv:graph'"),
        ("tensorboard:", r"got 'tensorboard:'"),
        (["csv", "csv"], "^track names csv twice"),
        ([3], r"^track must hold names of trackers \(tensorboard, .*\) or functions .*, got 3$"),
    ],
)  # fmt: skip
def test_what_is_refused(track: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        tracker_list(track)
    if isinstance(track, str):
        with pytest.raises(InputError, match=message):
            Settings(track=track)


def test_one_spelling() -> None:
    assert canonical(Settings(track=" csv,wandb ")).track == "csv,wandb"
    assert canonical(Settings()).track == "none"


@pytest.mark.parametrize(
    "options", [(), ("graph",), ("histograms", "graph"), ("graph", "histograms")]
)
def test_options_stand_behind_the_name(options: tuple[str, ...]) -> None:
    (name,) = tracker_list(":".join(("tensorboard", *options)))
    assert tracker_options(name) == options
