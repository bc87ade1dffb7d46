"""Distillation: train a small network on the probabilities of a large one.

知识蒸馏：让小网络学习大网络给出的概率。

Source: Hinton et al., "Distilling the knowledge in a neural network", 2015, section 2
(arXiv:1503.02531); Zhao et al., "Decoupled knowledge distillation", CVPR 2022 (arXiv:2203.08679).

Not for a teacher trained with label smoothing, which teaches worse (Müller et al. 2019, arXiv:1906.02629),
nor for a teacher that sees other pixels than the student: give both the same augmented, mixed images (Beyer
et al. 2022, arXiv:2106.05237).
"""

import math
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Reduction = Literal["mean", "sum", "none"]
_NO_LABEL = -100  # the ignore_index of torch.nn.functional.cross_entropy


def distillation_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    targets: Tensor | None = None,
    *,
    temperature: float,
    alpha: float = 1.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """alpha * T^2 * KL(teacher || student), both softened by T, + (1 - alpha) * cross-entropy of the labels.

    T^2 keeps the size of the KL term's gradient for all T (section 2.1 of Hinton et al.).

    Args:
        student_logits: (N, C) floating-point, unnormalised.
        teacher_logits: (N, C), classes in the same order; they get no gradient.
        targets: (N,) int64 classes or (N, C) probabilities (mixup, cutmix); None if alpha is 1. -100 is no
            label, as in torch's cross_entropy: only the teacher counts there, and 'mean' divides the
            cross-entropy by the number of labels.
        temperature: T above 0; usually 1 to 10, 4 on CIFAR-100 in Zhao et al.
        alpha: in [0, 1], the weight of the teacher.
        reduction: 'mean' over N, 'sum', or 'none'.

    Returns:
        0-d, or (N,) for 'none'; float64 for float64 logits, else float32.

    Raises:
        ValueError: shapes that do not fit, T or alpha out of range, targets missing or without effect.
        TypeError: logits not floating-point, targets neither that nor int64.

    Example:
        >>> student, teacher = torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([[1.0, 1.0, 0.0]])
        >>> distillation_loss(student, teacher, temperature=2.0)
        tensor(0.3737)
        >>> distillation_loss(student, teacher, torch.tensor([0]), temperature=2.0, alpha=0.5)
        tensor(0.3066)
    """
    student, teacher = _checked(student_logits, teacher_logits, temperature)
    if not 0 <= alpha <= 1:
        raise ValueError(f"alpha must be in [0, 1], got {alpha}")
    if (alpha < 1) != (targets is not None):
        raise ValueError(f"targets belong to alpha below 1, and only there; got alpha={alpha}")
    loss = _kl(student / temperature, teacher / temperature) * (alpha * temperature**2)
    if targets is not None:
        loss = loss + (1 - alpha) * _cross_entropy(student, targets, reduction)
    return _reduced(loss, reduction)


def decoupled_loss(
    student_logits: Tensor,
    teacher_logits: Tensor,
    targets: Tensor,
    *,
    temperature: float,
    alpha: float = 1.0,
    beta: float = 8.0,
    reduction: Reduction = "mean",
) -> Tensor:
    """DKD: T^2 * (alpha * KL of right against wrong + beta * KL among the wrong classes).

    The KL of Hinton et al. is this with alpha = 1 and beta = 1 - p, p being the teacher's probability of the
    right class: a certain teacher teaches little about the others. Add the cross-entropy of the labels.

    Args:
        student_logits: (N, C) floating-point, C at least 2.
        teacher_logits: (N, C); they get no gradient.
        targets: (N,) int64 classes in [0, C); mixed labels have no right class.
        temperature: T above 0; 4 on CIFAR-100 and 1 on ImageNet in the paper.
        alpha: at least 0; 1 in the paper.
        beta: at least 0; 8 in the paper's ablation on CIFAR-100, 0.5 on ImageNet.
        reduction: 'mean' over N, 'sum', or 'none'.

    Returns:
        As `distillation_loss`.

    Raises:
        ValueError: shapes that do not fit, a number out of range.
        TypeError: logits not floating-point, targets not int64.

    Example:
        >>> student, teacher = torch.tensor([[2.0, 0.0, 0.0]]), torch.tensor([[1.0, 1.0, 0.0]])
        >>> decoupled_loss(student, teacher, torch.tensor([0]), temperature=2.0)
        tensor(1.2686)
    """
    student, teacher = _checked(student_logits, teacher_logits, temperature)
    if targets.dtype != torch.int64:
        raise TypeError(f"targets must be int64 classes, got {targets.dtype}")
    if targets.shape != student.shape[:1] or student.shape[1] < 2:
        raise ValueError(
            f"targets must be (N,) for logits (N, C) with C at least 2, got {tuple(targets.shape)} "
            f"and {tuple(student.shape)}"
        )
    if not (alpha >= 0 and beta >= 0):
        raise ValueError(f"alpha and beta must be at least 0, got {alpha} and {beta}")
    student, teacher = student / temperature, teacher / temperature
    right = targets.unsqueeze(1)
    # The columns of all other classes; a mask instead would wait for the device.
    columns = torch.arange(student.shape[1] - 1, device=student.device).expand(len(student), -1)
    columns = columns + (columns >= right)
    wrong_s = student.gather(1, columns)
    wrong_t = teacher.gather(1, columns)
    # A softmax over these two logits gives the probabilities of right and wrong.
    binary_s = torch.cat([student.gather(1, right), wrong_s.logsumexp(1, keepdim=True)], 1)
    binary_t = torch.cat([teacher.gather(1, right), wrong_t.logsumexp(1, keepdim=True)], 1)
    loss = alpha * _kl(binary_s, binary_t)
    if student.shape[1] > 2:  # one wrong class alone has nothing to teach
        # Nor have wrong classes that are all impossible for the teacher.
        none = (wrong_t == -math.inf).all(1, keepdim=True)
        loss = loss + beta * _kl(wrong_s.masked_fill(none, 0.0), wrong_t.masked_fill(none, 0.0))
    return _reduced(loss * temperature**2, reduction)


class Teacher:
    """A trained network for inference only: always in eval mode, never with a graph.

    It is no nn.Module, so as an attribute of a student it is not registered: `student.train()`,
    `state_dict()`, `parameters()` and DDP do not see it, and `student.to()` does not move it.

    Example:
        >>> teacher = Teacher(nn.Linear(4, 3))
        >>> logits = teacher(torch.randn(2, 4))
        >>> logits.requires_grad, teacher.model.training
        (False, False)
    """

    def __init__(self, model: nn.Module) -> None:
        self.model = model.eval()

    def __call__(self, *inputs: Any) -> Any:
        """Call the model, under the surrounding autocast."""
        self.model.eval()  # other code may have put it or a part of it into training mode
        # Not inference_mode: the loss saves these logits for its backward.
        with torch.no_grad():
            return self.model(*inputs)

    def to(self, *args: Any, **kwargs: Any) -> "Teacher":
        """Move or convert the model, as nn.Module.to does; returns itself."""
        self.model.to(*args, **kwargs)
        return self


def _checked(student: Tensor, teacher: Tensor, temperature: float) -> tuple[Tensor, Tensor]:
    if student.ndim != 2 or student.shape != teacher.shape:
        raise ValueError(
            "logits of student and teacher must be (N, C) with the same classes, got "
            f"{tuple(student.shape)} and {tuple(teacher.shape)}"
        )
    if not (student.is_floating_point() and teacher.is_floating_point()):
        raise TypeError(f"logits must be floating, got {student.dtype} and {teacher.dtype}")
    if not 0 < temperature < math.inf:
        raise ValueError(f"temperature must be above 0 and finite, got {temperature}")
    dtype = torch.promote_types(student.dtype, torch.float32)  # 8 or 11 bits are not enough
    return student.to(dtype), teacher.detach().to(dtype)


def _cross_entropy(student: Tensor, targets: Tensor, reduction: str) -> Tensor:
    """(N,): the cross-entropy of each sample; for 'mean' so large that their mean is that of the labels."""
    is_soft = targets.is_floating_point()
    if not is_soft and targets.dtype != torch.int64:
        raise TypeError(f"targets must be int64 classes or probabilities, got {targets.dtype}")
    if targets.shape != (student.shape if is_soft else student.shape[:1]):
        raise ValueError(
            f"targets must be (N,) classes or (N, C) probabilities for logits {tuple(student.shape)}, got "
            f"{targets.dtype} of shape {tuple(targets.shape)}"
        )
    if is_soft:
        return F.cross_entropy(student, targets.to(student.dtype), reduction="none")
    loss = F.cross_entropy(student, targets, reduction="none")
    if reduction != "mean":
        return loss
    return loss * (len(targets) / (targets != _NO_LABEL).sum().clamp(min=1))


def _kl(student: Tensor, teacher: Tensor) -> Tensor:
    """(N,): KL(softmax(teacher) || softmax(student)); a class to which the teacher gives -inf adds 0.

    The terms p * log(p / q) have both signs and cancel where p and q are alike, as with a large T. So each
    similar pair adds p * log(p / q) - p + q, which is above 0 and has the same sum.
    """
    log_p = teacher.log_softmax(1)
    log_q = student.log_softmax(1)
    p = log_p.exp()
    ratio = log_p - log_q
    is_similar = ratio.abs() < 0.5  # not for NaN, of two -inf; chosen
    small = ratio.masked_fill(~is_similar, 0.0)
    terms = F.kl_div(log_q, p, reduction="none") - p + log_q.exp()
    terms = terms.masked_fill(
        ratio.isnan() & (p == 0), 0.0
    )  # 0 * inf if the student gives -inf too
    return torch.where(is_similar, p * (small + torch.expm1(-small)), terms).sum(1)


def _reduced(loss: Tensor, reduction: str) -> Tensor:
    if reduction not in ("mean", "sum", "none"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', got {reduction!r}")
    return loss.mean() if reduction == "mean" else loss.sum() if reduction == "sum" else loss
