"""What a task must provide; the trainer, the export and the report call these methods and nothing else.

N: images of a batch. A target is an int64 label, or a row of float32.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from flambeau.data.sources.source import Source
from flambeau.run.loop.sample_results import SampleResultsMetric
from flambeau.trainer.evaluation.answers import Answer
from flambeau.trainer.evaluation.evaluation_result import Evaluation
from flambeau.trainer.evaluation.label_evaluation import LabelEvaluation
from flambeau.trainer.evaluation.number_evaluation import NumberEvaluation
from flambeau.trainer.evaluation.sample_history import SampleHistory

AnyEvaluation = Evaluation | LabelEvaluation | NumberEvaluation
"""Each has `as_dict`, `save_predictions`, `predictions` and `num_images`."""


class Counters(Protocol):
    """What `flambeau evaluate` counts, batch after batch."""

    @property
    def indices(self) -> Sequence[int]:
        """Positions in the data of the images so far."""

    def update(self, outputs: Tensor, targets: Tensor, indices: Sequence[int]) -> None:
        """Count a batch.

        Args:
            outputs: of the model.
            targets: of its images.
            indices: positions of the images in the data.
        """

    def evaluation(self, *, describe: Callable[[int], str], **facts: Any) -> AnyEvaluation:
        """All figures.

        Args:
            describe: gives what the image at a position is called.
            facts: further fields of the evaluation.
        """


class Task(Protocol):
    """One kind of training. A second kind is a second class with these methods, and no `if` elsewhere."""

    @property
    def losses(self) -> Sequence[str]:
        """The values of the setting `loss`, the default first."""

    @property
    def best_figures(self) -> Sequence[str]:
        """The figures of an evaluation that can choose the best weights, the default first."""

    @property
    def main_figure(self) -> str:
        """The figure, a mean over images, by which an exported model is compared with its run."""

    @property
    def default_smoothing(self) -> float:
        """The setting `label_smoothing`, if none is given."""

    @property
    def lr_share(self) -> float:
        """The default learning rate of sgd and rmsprop in that of classes."""

    @property
    def refuses(self) -> Mapping[str, str]:
        """The settings that must keep their default value, and why."""

    @property
    def num_outputs(self) -> int:
        """The width of the model's last layer."""

    def loss(
        self, outputs: Tensor, targets: Tensor, *, smoothing: float, weight: Tensor | None
    ) -> Tensor:
        """The loss of a batch, 0-d float32.

        Args:
            outputs: of the model.
            targets: of its images, perhaps mixed.
            smoothing: of the targets.
            weight: of each class; None weighs them alike.
        """

    def distillation_loss(self, outputs: Tensor, teacher: Tensor, *, temperature: float) -> Tensor:
        """How far the outputs are from those of a teacher, 0-d float32."""

    def shared(self, outputs: Tensor) -> Tensor:
        """Outputs in what another model of the same targets understands; see `of_shared`."""

    def of_shared(self, outputs: Tensor) -> Tensor:
        """What `shared` of another model gives, as outputs of this one."""

    def training_figures(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        """What a line of metrics.jsonl says of training batches, besides the loss: (N,) each, by name."""

    def evaluation_figures(self, outputs: Tensor, targets: Tensor) -> Mapping[str, Tensor]:
        """What the line of an evaluation says: (N,) each, by name; `main_figure` is one of them."""

    def history(self, num_samples: int, *, fingerprint: str, device: torch.device) -> SampleHistory:
        """What the run notes of each training sample."""

    def sample_results(self, best: str) -> SampleResultsMetric[Any]:
        """Keeps the prediction of each evaluated image for the report: `metrics["val"]` of `Run`.

        Args:
            best: the figure that chooses the best weights; given by this metric if `evaluation_figures` lacks
                it.
        """

    def report_facts(
        self, results: Any, *, step: int, describe: Callable[[int], str]
    ) -> dict[str, Any]:
        """The content of evaluation.json; `mistakes` and `unsure` are lists of images with their 'index'.

        Args:
            results: of an evaluation, as its `sample_results` keep them.
            step: of the weights.
            describe: the name of the image at a position.
        """

    def suspects(self, run: Path, train: Source) -> list[dict[str, Any]]:
        """Training images whose targets look wrong, as evaluation.json has them.

        Args:
            run: the run folder with the record of `history`.
            train: what was trained on.
        """

    def mean_of_views(self, outputs: Tensor, mirrored: Tensor) -> Tensor:
        """One output for an image and its mirror image."""

    def counters(self, device: torch.device) -> Counters:
        """What an evaluation counts.

        Args:
            device: of the model.
        """

    @property
    def outputs_are(self) -> str:
        """What the outputs stand for, in the plural."""

    @property
    def cpp_name(self) -> str:
        """The task in classify.cpp of an export."""

    @property
    def decoded(self) -> str:
        """What `decode` returns, as an output of an exported graph is called: 'probabilities'."""

    @property
    def decoded_how(self) -> str:
        """How `decode` makes it of the outputs, for the model card."""

    @property
    def of_logits(self) -> str:
        """The expression of `decode` in example.py, with `logits` (K,) of one image."""

    @property
    def example_lines(self) -> str:
        """What example.py of an export does with `decoded` (K,) of one image; it has `preprocessing`."""

    def decode(self, outputs: Tensor) -> Tensor:
        """What an exported graph returns beside the outputs, such as probabilities; traceable."""

    def shown_figure(self, value: float) -> str:
        """The main figure as text."""

    def agrees(self, outputs: Tensor, reference: Tensor) -> Tensor:
        """(N,) bool: whether both outputs predict the same, by which a step of an export is judged."""

    def export_facts(self, outputs: Tensor, targets: Tensor | None) -> Mapping[str, Any]:
        """What export.json says of the outputs, beside the shape of the images.

        Args:
            outputs: of the exported model.
            targets: of the same images, if they are known.
        """

    def predictions(self, outputs: Tensor) -> Any:
        """What `flambeau.load(run)(images)` returns of outputs on the CPU."""

    def answers(self, outputs: Tensor, *, top: int) -> Sequence[Answer]:
        """What `flambeau predict` says of each image.

        Args:
            outputs: of the model.
            top: how many classes to name, where there is one per image.
        """

    def answer_columns(self, *, top: int) -> list[str]:
        """The names of the cells of an answer."""
