"""The loss of `flambeau train`: normalize, erase, mix, call the network and its teacher."""

import functools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from flambeau.data.sources.source import same_unit
from flambeau.errors import InputError
from flambeau.recipes.data.random_erasing import random_erasing
from flambeau.recipes.training.amp_step import autocast
from flambeau.recipes.training.cutmix import cutmix
from flambeau.recipes.training.distillation import Teacher
from flambeau.recipes.training.mixup import mixup
from flambeau.recipes.training.progressive_resizing import image_side, resize_images
from flambeau.trainer.parts.data import DataFacts, teacher_sha256
from flambeau.trainer.prediction.trained_model import Trained, load_trained
from flambeau.trainer.settings.resolved_settings import ResolvedSettings
from flambeau.trainer.settings.settings import teacher_runs
from flambeau.trainer.tasks.task import Task

_SHOWN = 16  # images of a batch that are kept for the report


class TrainingLoss:
    """From uint8 images (N, C, S, S) and targets (N,) to the loss, 0-d; `teacher` None: by labels alone."""

    def __init__(
        self,
        model: nn.Module,
        settings: ResolvedSettings,
        facts: DataFacts,
        *,
        device: torch.device,
        normalize: Callable[[Tensor], Tensor],
        teacher: "AdaptedTeacher | SeveralTeachers | None",
    ) -> None:
        self._model, self._settings = model, settings
        self._device = device
        self._precision = settings.autocast
        self._task = facts.task
        weights = facts.class_weights
        self._class_weights = None if weights is None else torch.tensor(weights, device=device)
        self._normalize, self._teacher = normalize, teacher
        self.inputs: Tensor | None = None
        """Some images of a batch as the model gets them, once `keeps_inputs` is set."""
        self.keeps_inputs = False
        self.side_of_step: Callable[[int], int] | None = None
        """Of the images that the model gets, pixels; None: always that of the data set."""

    def plan_sizes(self, total_steps: int) -> list[str]:
        """With `start_size`, give the model smaller images first, in a training of so many steps.

        Returns lines for the user.
        """
        start, end = self._settings.start_size, self._settings.image_size
        if start is None:
            return []
        self.side_of_step = functools.partial(
            image_side, total_steps=total_steps, start=start, end=end
        )
        return [
            f"trained on images of {start} px in the first 30 % of the steps, and of {end} px in the last "
            "30 %: an evaluation before that tells little of the one at the end"
        ]

    def __call__(self, images: Tensor, targets: Tensor, *, step: int) -> Tensor:
        """The loss of a batch of a step; its random draws come from torch's default generator."""
        return self.with_logits(images, targets, step=step)[0]

    def with_logits(
        self, images: Tensor, targets: Tensor, *, step: int
    ) -> tuple[Tensor, Tensor | None]:
        """The loss and the logits, (N, classes); None for mixed images, which have no single class."""
        settings = self._settings
        draw = torch.default_generator
        x = self._normalize(images)
        if self.side_of_step is not None:
            x = resize_images(x, self.side_of_step(step))
        if settings.random_erasing:
            x = random_erasing(x, generator=draw, probability=settings.random_erasing)
        odd = step % 2
        mix = cutmix if settings.cutmix and (odd or not settings.mixup) else mixup
        if alpha := settings.cutmix if mix is cutmix else settings.mixup:
            x, targets = mix(
                x, targets, alpha=alpha, num_classes=self._task.num_outputs, generator=draw
            )
        if self.keeps_inputs:
            self.inputs = x[:_SHOWN].clone()
            self.keeps_inputs = False
        with autocast(self._device, self._precision):
            logits = self._model(x)
            if self._teacher is not None:
                teacher_logits = self._teacher(x)
        loss = self._task.loss(
            logits, targets, smoothing=settings.label_smoothing, weight=self._class_weights
        )
        plain_logits = None if alpha else logits.detach()
        if self._teacher is None:
            return loss, plain_logits
        distilled = self._task.distillation_loss(
            logits, teacher_logits, temperature=self._teacher.temperature
        )
        return torch.lerp(loss, distilled, self._teacher.weight), plain_logits


class AdaptedTeacher:
    """A trained network that gets the student's inputs and returns logits of the student's classes.

    `weight`: its share in the loss; `temperature` softens the probabilities of both. InputError: other
    classes, another number of channels, or pixels of another unit.
    """

    def __init__(
        self,
        trained: Trained,
        facts: DataFacts,
        *,
        device: torch.device,
        weight: float,
        temperature: float,
    ) -> None:
        self.weight, self.temperature = weight, temperature
        theirs = trained.facts
        ours = facts
        if theirs.task_name != ours.task_name:
            raise InputError(
                f"the teacher is of a {theirs.task_name} task, and this is {ours.task_name}: choose one of "
                "the same task"
            )
        if set(theirs.classes) != set(ours.classes):
            odd = min(set(theirs.classes) ^ set(ours.classes))
            raise InputError(
                f"the teacher knows {len(theirs.classes)} classes and these data have "
                f"{len(ours.classes)}; only one of them has {odd!r}: train the teacher on these classes"
            )
        if theirs.channels != ours.channels:
            raise InputError(
                f"the teacher takes {theirs.channels} channels and this model {ours.channels}: choose models "
                "that agree"
            )
        if not same_unit(theirs.pixels, ours.pixels):
            raise InputError(
                f"the teacher was trained on pixels of kind {theirs.pixels!r} and these are {ours.pixels!r}, "
                "in another unit: train it on these images"
            )
        order = [theirs.classes.index(name) for name in ours.classes]
        self._order = None if theirs.classes == ours.classes else torch.tensor(order, device=device)
        self._size = trained.image_size
        # From the student's normalization to the teacher's.
        std = torch.tensor(theirs.std, device=device).view(1, -1, 1, 1)
        mean = torch.tensor(theirs.mean, device=device).view(1, -1, 1, 1)
        self._scale = torch.tensor(ours.std, device=device).view(1, -1, 1, 1) / std
        self._shift = (torch.tensor(ours.mean, device=device).view(1, -1, 1, 1) - mean) / std
        self._is_same = (theirs.mean, theirs.std) == (ours.mean, ours.std)
        self._network = Teacher(trained.model.to(device))
        self._task = ours.task
        self._their_task = theirs.task

    def __call__(self, x: Tensor) -> Tensor:
        """Logits (N, classes) for images (N, C, S, S) as the student gets them."""
        if not self._is_same:
            x = torch.addcmul(self._shift, x, self._scale)
        logits: Tensor = self._their_task.shared(self._network(resize_images(x, self._size)))
        if self._order is not None:
            logits = logits.index_select(1, self._order)
        return self._task.of_shared(logits)


class SeveralTeachers:
    """Teachers of one weight and temperature as one: the mean of softened probabilities, or numbers."""

    def __init__(self, teachers: Sequence[AdaptedTeacher], task: Task) -> None:
        self._teachers, self._task = teachers, task
        self.weight = teachers[0].weight
        self.temperature = teachers[0].temperature

    def __call__(self, x: Tensor) -> Tensor:
        """Outputs (N, classes) which, divided by the temperature, have the mean of the probabilities."""
        softened = [teacher(x).float() / self.temperature for teacher in self._teachers]
        return self._task.mean_of_models(softened) * self.temperature


def make_teacher(
    settings: ResolvedSettings, facts: DataFacts, device: torch.device
) -> AdaptedTeacher | SeveralTeachers | None:
    """The teacher of a run, if any, or several as one, on the device.

    InputError: no finished run, of other data, or changed since this run began.
    """
    if settings.distillation is None:
        return None
    teacher, weight, temperature = settings.distillation
    if teacher_sha256(teacher) != facts.teacher_sha256:
        raise InputError(
            f"the weights in {teacher} have changed since the run was started; restore them, or "
            "start again with --fresh or another --out"
        )
    # `check_teacher_code` has asked whether its code may run.
    teachers = [
        AdaptedTeacher(
            load_trained(run, trust=True, say=lambda text: None),
            facts,
            device=device,
            weight=weight,
            temperature=temperature,
        )
        for run in teacher_runs(teacher)
    ]
    return teachers[0] if len(teachers) == 1 else SeveralTeachers(teachers, facts.task)
