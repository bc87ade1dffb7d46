"""The device of a training: which one it is, its float32 precision and threads."""

import contextlib
import os
from collections.abc import Iterator

import torch

from flambeau.errors import InputError
from flambeau.parallel.ranks import local_world
from flambeau.recipes.setup.environment import default_device, usable_cpus
from flambeau.recipes.setup.float32_precision import set_float32_precision


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
            # Of a GPU that is missing torch says why in its first sentence, of others in its own terms.
            is_gpu = name == "cuda" or name.startswith("cuda:")
            why = f" ({str(error).splitlines()[0].split('. ')[0]})" if is_gpu else ""
            raise InputError(
                f"device = {name!r} is not available here: there is {', '.join(_names())}{why}"
            ) from error
    if device.type == "cuda":
        gpus = 1 if device.index is not None else torch.cuda.device_count()
        if local_world() > gpus:
            raise InputError(
                f"{local_world()} processes on this machine, and {gpus} GPU{'s' * (gpus != 1)} for them: "
                "each needs one of its own; start fewer, or use --device cpu"
            )
    return device


def _names() -> list[str]:
    """Of the devices that this machine has, as --device takes them."""
    found = torch.accelerator.current_accelerator(check_available=True)
    if found is None:
        return ["cpu"]
    numbers = range(torch.accelerator.device_count())
    return ["cpu", *(f"{found.type}:{number}" for number in numbers)]


def use_float32(precision: str, device: torch.device) -> None:
    """Let products of float32 on a GPU be what the setting says, which torch's defaults are not.

    Args:
        precision: 'tf32' for TF32; any other word for full float32.

    Raises:
        InputError: TF32 on another device than an NVIDIA GPU.
    """
    if device.type == "cuda":
        set_float32_precision("tf32" if precision == "tf32" else "ieee")
    elif precision == "tf32":
        raise InputError(
            f"precision = 'tf32' is for NVIDIA GPUs, and the device is {device}: use fp32"
        )


@contextlib.contextmanager
def num_threads(number: int) -> Iterator[None]:
    """Until the end of this, torch computes with so many threads."""
    usual = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(usual)


def use_threads() -> None:
    """Let torch compute on this process's share of the CPUs it may use, or as OMP_NUM_THREADS says.

    One thread more than there are CPUs can cost a factor of ten: each waits for the other by spinning.
    """
    said = os.environ.get("OMP_NUM_THREADS", "")
    share = max(1, usable_cpus() // local_world())
    torch.set_num_threads(int(said) if said.isdigit() and int(said) else share)
