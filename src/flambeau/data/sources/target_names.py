"""The tasks by name; without torch, so that `--help` answers at once."""

from typing import Literal, get_args

TaskName = Literal["classification", "multilabel", "regression", "segmentation"]
TASKS: tuple[TaskName, ...] = get_args(TaskName)
