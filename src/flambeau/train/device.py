"""The device of a run: which it is, and the generators that a forward pass on it draws from."""

import os

import torch

from flambeau.data.errors import InputError
from flambeau.parallel.ranks import local_world
from flambeau.recipes.setup.environment import default_device, usable_cpus


def pick_device(name: str) -> torch.device:
    """The device of a setting.

    Args:
        name: 'auto' for the accelerator, if there is one, else the CPU; or such as 'cpu', 'cuda:1'.

    Raises:
        InputError: there is no such device on this machine, or not one for each process on it.
    """
    if name == "auto":
        device = default_device()
    else:
        try:
            device = torch.device(name)
            torch.zeros(1, device=device).item()  # which 'meta' has not
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0]
            raise InputError(f"device = {name!r} is not to be had here: {reason}") from error
    if device.type == "cuda":
        gpus = 1 if device.index is not None else torch.cuda.device_count()
        if local_world() > gpus:
            raise InputError(
                f"{local_world()} processes on this machine, and {gpus} GPU{'s' * (gpus != 1)} for them: "
                "each needs one of its own; start fewer, or use --device cpu"
            )
    return device


def generators_of(device: torch.device) -> list[torch.Generator]:
    """The default generators of the CPU and, where it is another one, of the device."""
    if device.type == "cuda":
        return [torch.default_generator, torch.cuda.default_generators[device.index or 0]]
    return [torch.default_generator]


def use_threads() -> None:
    """Let torch compute on this process's share of the CPUs it may use, or as OMP_NUM_THREADS says.

    One thread more than there are CPUs can cost a factor of ten: each waits for the other by spinning.
    """
    said = os.environ.get("OMP_NUM_THREADS", "")
    share = max(1, usable_cpus() // local_world())
    torch.set_num_threads(int(said) if said.isdigit() and int(said) else share)
