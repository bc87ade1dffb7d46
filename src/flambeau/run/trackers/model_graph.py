"""The graph of a model as TensorBoard draws it, traced on a copy, so that the run keeps its bits."""

import contextlib
import copy
import io
import warnings
from typing import Any

import torch
from torch import Tensor, nn

from flambeau.recipes.setup.seeding import rng_state, set_rng_state


def model_graph(model: nn.Module, batch: Any) -> Any:
    """What `FileWriter.add_graph` of torch's writer takes, of one sample of a batch.

    Args:
        model: that takes the first tensor of a batch; images of 8 bits as numbers from 0 to 1.
        batch: a tensor (N, ...), or a sequence that begins with one; on any device.

    Raises:
        Exception: whatever the model raises in a trace, or its copy.
    """
    from torch.utils.tensorboard._pytorch_graph import graph

    first = batch[0] if isinstance(batch, (tuple, list)) and batch else batch
    if not isinstance(first, Tensor) or not first.ndim:
        raise TypeError("a batch does not begin with a tensor")
    sample = first[:1].detach().to("cpu", copy=True)
    generators = rng_state()
    try:
        twin = copy.deepcopy(model).cpu().eval()
        if sample.dtype == torch.uint8:
            sample = sample / 255
        if sample.is_floating_point():
            numbers = (p.dtype for p in twin.parameters() if p.is_floating_point())
            sample = sample.to(next(numbers, torch.float32))
        # The tracer of TorchScript warns of what it is, and torch prints its errors before it raises them.
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()), torch.no_grad():
            warnings.simplefilter("ignore")
            return graph(twin, sample)
    finally:
        set_rng_state(generators)
