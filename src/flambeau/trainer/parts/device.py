"""The device of a training, its float32 precision and threads."""

import contextlib
import os
from collections.abc import Iterator

import torch

from flambeau.errors import InputError, nearest
from flambeau.parallel.ranks import local_world
from flambeau.recipes.setup.environment import default_device, usable_cpus
from flambeau.recipes.setup.float32_precision import set_float32_precision


def pick_device(name: str) -> torch.device:
    """The device of a setting: 'auto' is the accelerator if there is one; else a name such as 'cuda:1'.

    InputError: no such device here, or not one per process.
    """
    if name == "auto":
        device = default_device()
    else:
        try:
            device = torch.device(name)
            torch.zeros(1, device=device).item()  # fails on 'meta'
        except (RuntimeError, AssertionError) as error:
            # For a missing GPU the first sentence of torch's error says why.
            is_gpu = name == "cuda" or name.startswith("cuda:")
            kind, _, number = name.lower().partition(":")
            names = _names()
            guess = nearest(name, names)
            if (
                kind in ("gpu", "nvidia") or name.isdecimal()
            ):  # as others call it, or its number alone
                meant = f"cuda:{name if name.isdecimal() else number}".rstrip(":")
                guess = f"; did you mean '{meant}'?"
            why = f" ({str(error).splitlines()[0].split('. ')[0]})" if is_gpu else ""
            raise InputError(
                f"device = {name!r} is not available here: there is {', '.join(names)}{why}{guess}"
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
    """The devices of this machine, as --device takes them."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return ["cpu"]
    numbers = range(torch.accelerator.device_count())
    return ["cpu", *(f"{accelerator.type}:{number}" for number in numbers)]


def use_float32(precision: str, device: torch.device) -> None:
    """Set the precision of float32 products on a GPU: 'tf32', or else full.

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
    before = torch.get_num_threads()
    torch.set_num_threads(number)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def use_threads(number: int | None = None) -> None:
    """Let torch use so many threads; None: OMP_NUM_THREADS, or this process's share of the CPUs.

    One thread too many can cost a factor of ten, because threads wait by spinning.
    """
    if number is not None:
        torch.set_num_threads(number)
        return
    threads = os.environ.get("OMP_NUM_THREADS", "")
    share = max(1, usable_cpus() // local_world())
    torch.set_num_threads(int(threads) if threads.isdigit() and int(threads) else share)


@contextlib.contextmanager
def float32_by_default() -> Iterator[None]:
    """Tensors of no given dtype are float32, as images are, whatever torch.set_default_dtype has chosen."""
    chosen = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(chosen)
