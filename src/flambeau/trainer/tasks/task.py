"""What a task must provide; the trainer, the export and the report call these methods and nothing else.

N: images of a batch, K: outputs. A target is an int64 label, a row of float32, or a mask (S, S) uint8; the
outputs are (N, K), or (N, K, S, S) for masks.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from flambeau.data.sources.source import Source
from flambeau.data.transforms.crops import EvalResize
from flambeau.run.loop.sample_results import SampleResultsMetric
from flambeau.trainer.evaluation.answers import Answer, Size
from flambeau.trainer.evaluation.evaluation_result import Evaluation
from flambeau.trainer.evaluation.label_evaluation import LabelEvaluation
from flambeau.trainer.evaluation.mask_evaluation import MaskEvaluation
from flambeau.trainer.evaluation.number_evaluation import NumberEvaluation
from flambeau.trainer.evaluation.sample_history import SampleHistory
from flambeau.trainer.tasks.export_words import ExportWords

AnyEvaluation = Evaluation | LabelEvaluation | NumberEvaluation | MaskEvaluation
"""Each has `as_dict`, `save_predictions`, `predictions` and `num_images`."""


class Counters(Protocol):
    """What `flambeau evaluate` counts, batch after batch."""

    @property
    def indices(self) -> Sequence[int]:
        """Positions in the data of the images so far."""

    def update(self, outputs: Tensor, targets: Tensor, indices: Sequence[int]) -> None:
        """Count a batch: outputs of the model, targets, and positions of the images in the data."""

    def evaluation(self, *, describe: Callable[[int], str], **facts: Any) -> AnyEvaluation:
        """All figures; `describe` names the image at a position, `facts` are further fields."""


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
    def default_optimizer(self) -> str:
        """The setting `optimizer`, if none is given."""

    @property
    def lr_share(self) -> float:
        """The default learning rate of sgd and rmsprop in that of classes."""

    @property
    def adam_lr_share(self) -> float | None:
        """That of adam and adamw, which then grows with the root of the batch; None: as for classes."""

    @property
    def crop_scale(self) -> float:
        """The smallest share of an image in a training crop, by default; 1: not shifted either."""

    @property
    def mirrors(self) -> bool:
        """Whether half of the training images are mirrored, unless otherwise asked for."""

    @property
    def refuses(self) -> Mapping[str, str]:
        """The settings that must keep their default value, and why."""

    @property
    def default_model(self) -> str | None:
        """The setting `model`, if none is given; None: by the size of the images."""

    @property
    def num_outputs(self) -> int:
        """The width of the model's last layer."""

    @property
    def per_pixel(self) -> bool:
        """Whether the model has outputs for each pixel."""

    @property
    def eval_resize(self) -> EvalResize:
        """How an evaluation resizes images."""

    def loss(
        self, outputs: Tensor, targets: Tensor, *, smoothing: float, weight: Tensor | None
    ) -> Tensor:
        """The loss of a batch, 0-d float32, of perhaps mixed targets; `weight`: of each class."""

    def loss_towards(self, outputs: Tensor, reference: Tensor) -> Tensor:
        """The loss with the predictions of other outputs in place of targets, 0-d float32."""

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
        """Keeps each evaluated image's prediction for the report: `metrics["val"]` of `Run`.

        It gives the figure `best`, if `evaluation_figures` lacks it.
        """

    def report_facts(
        self, results: Any, *, step: int, describe: Callable[[int], str]
    ) -> dict[str, Any]:
        """The content of evaluation.json; `mistakes` and `unsure` list images with their 'index'."""

    def picture(self, image: Tensor, target: Tensor, sample: dict[str, Any]) -> Tensor:
        """What the report shows of an image (C, S, S): a picture (C, H, W), both uint8 or from 0 to 1.

        `sample` is of `report_facts` or `suspects`; what is only for this picture is removed.
        """

    def suspects(self, run: Path, train: Source) -> list[dict[str, Any]]:
        """Training images whose targets look wrong, for evaluation.json, by the run's record of `history`."""

    def mean_of_views(self, outputs: Tensor, mirrored: Tensor) -> Tensor:
        """One output for an image and its mirror image."""

    def mean_of_models(self, outputs: Sequence[Tensor]) -> Tensor:
        """One output for those of several models, as `shared` gives them; traceable."""

    def counters(self, device: torch.device, source: Source) -> Counters:
        """What an evaluation of the images of `source` counts."""

    @property
    def export_words(self) -> ExportWords:
        """What an export calls its outputs."""

    def decode(self, outputs: Tensor) -> Tensor:
        """The outputs as what people compare, such as probabilities."""

    def graph_answer(self, outputs: Tensor, pixels: Tensor) -> Tensor:
        """What an exported graph of pixels (N, H, W, C) returns beside the outputs; traceable."""

    def shown_figure(self, value: float) -> str:
        """The main figure as text."""

    def agrees(self, outputs: Tensor, reference: Tensor) -> Tensor:
        """(N,) bool: whether both predict the same, which judges a step of an export."""

    def export_facts(self, outputs: Tensor, targets: Tensor | None) -> Mapping[str, Any]:
        """What export.json says of the outputs, beside the images' shape; targets if known."""

    def predictions(self, batches: Iterable[tuple[Tensor, Sequence[Size]]]) -> Any:
        """What `flambeau.load(run)(images)` returns, of outputs on the CPU and the sizes of the images."""

    def answers(self, outputs: Tensor, sizes: Sequence[Size], *, top: int) -> Sequence[Answer]:
        """What `flambeau predict` says of each image, naming `top` classes where there is one per image.

        `sizes` may be empty without outputs for each pixel.
        """

    def answer_columns(self, *, top: int) -> list[str]:
        """The names of the cells of an answer."""


def joined(batches: Iterable[tuple[Tensor, Sequence[Size]]], num_outputs: int) -> Tensor:
    """The outputs (N, K) of all batches, of a model without outputs for each pixel."""
    parts = [outputs for outputs, _ in batches]
    return torch.cat(parts) if parts else torch.empty(0, num_outputs)
