"""The device of a run: which it is, and the generators that a forward pass on it draws from."""

import os

import torch

from flambeau.data.errors import InputError
from flambeau.recipes.setup.environment import default_device, usable_cpus


def pick_device(name: str) -> torch.device:
    """The device of a setting.

    Args:
        name: 'auto' for the accelerator, if there is one, else the CPU; or such as 'cpu', 'cuda:1'.

    Raises:
        InputError: there is no such device on this machine.
    """
    if name == "auto":
        return default_device()
    try:
        device = torch.device(name)
        torch.zeros(1, device=device).item()  # which 'meta' has not
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0]
        raise InputError(f"device = {name!r} is not to be had here: {reason}") from error
    return device


def generators_of(device: torch.device) -> list[torch.Generator]:
    """The default generators of the CPU and, where it is another one, of the device."""
    if device.type == "cuda":
        return [torch.default_generator, torch.cuda.default_generators[device.index or 0]]
    return [torch.default_generator]


def use_threads() -> None:
    """Let torch compute on as many threads as this process may use CPUs, or as OMP_NUM_THREADS says.

    One thread more than there are CPUs can cost a factor of ten: each waits for the other by spinning.
    """
    said = os.environ.get("OMP_NUM_THREADS", "")
    torch.set_num_threads(int(said) if said.isdigit() and int(said) else usable_cpus())
