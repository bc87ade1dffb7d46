"""The tasks by name."""

from flambeau.data.sources.target_names import TaskName
from flambeau.trainer.tasks.classification import Classification
from flambeau.trainer.tasks.multilabel import Multilabel
from flambeau.trainer.tasks.regression import Regression
from flambeau.trainer.tasks.segmentation import Segmentation

TASK_TYPES: dict[TaskName, type[Classification | Multilabel | Regression | Segmentation]] = {
    "classification": Classification,
    "multilabel": Multilabel,
    "regression": Regression,
    "segmentation": Segmentation,
}
