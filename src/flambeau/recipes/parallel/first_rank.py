"""Do something on rank 0 alone, and give its result, or its error, to every rank.

只在 rank 0 上做一件事，并把结果（或错误）交给每个 rank。

Source: own.

Usual code is `if rank == 0: work()` and a barrier: an error on rank 0 then leaves the others waiting until
the timeout, and so does work that takes longer than the timeout.

Not for large results, nor for work that each machine must do (a download to a local disk).
"""

import pickle
from collections.abc import Callable
from datetime import timedelta
from typing import Any, TypeVar

import torch.distributed as dist

_T = TypeVar("_T")


def on_first_rank(work: Callable[[], _T], *, timeout_s: float = 1800.0) -> _T:
    """Call `work` on rank 0; return what it returns, or raise what it raises, on every rank.

    All ranks must call it. Without a process group it is `work()`.

    Args:
        work: its result can be pickled and is not on a device: a path, a number, tensors on the CPU.
        timeout_s: how long the other ranks wait for it, whatever the timeout of the process group is.

    Returns:
        The result; on the other ranks a copy of it.

    Raises:
        BaseException: of the same type and text on every rank, what `work` has raised; a RuntimeError with
            its text where it cannot be pickled; pickle's own error for a result that cannot.
        ValueError: `timeout_s` is not above 0.

    Example:
        >>> on_first_rank(lambda: "runs/2026-11-21")
        'runs/2026-11-21'
    """
    if timeout_s <= 0:
        raise ValueError(f"timeout_s must be above 0, got {timeout_s}")
    if not dist.is_initialized():
        return work()
    # A group of its own: with this timeout, and of gloo, so that nothing goes through a GPU.
    group: Any = dist.new_group(backend="gloo", timeout=timedelta(seconds=timeout_s))
    try:
        return _result(work, group)
    finally:
        dist.destroy_process_group(group)


def _result(work: Callable[[], _T], group: dist.ProcessGroup) -> _T:
    if dist.get_rank() != 0:
        result, error = pickle.loads(_broadcast(None, group))
        if error is not None:
            error.add_note("on rank 0, which did this for all ranks")
            raise error
        answer: _T = result
        return answer
    try:
        result = work()
        payload = _pickled((result, None))
    except BaseException as failure:
        error = _portable(failure)
        _broadcast(pickle.dumps((None, error)), group)
        if error is failure:
            raise
        raise error from failure
    _broadcast(payload, group)
    return result


def _portable(error: BaseException) -> BaseException:
    """The error, if it can be pickled; else a RuntimeError with its text."""
    try:
        _pickled(error)
    except Exception as cause:  # whatever an error's own code does; all ranks then raise this one
        text = RuntimeError(f"rank 0 failed with {type(error).__name__}: {error}")
        text.add_note(f"not raised as such, because it cannot be pickled: {cause}")
        return text
    return error


def _pickled(value: object) -> bytes:
    """The pickle of a value, which can be read again."""
    payload = pickle.dumps(value)
    pickle.loads(payload)
    return payload


def _broadcast(payload: bytes | None, group: dist.ProcessGroup) -> bytes:
    """The bytes of rank 0, on every rank."""
    box = [payload]
    dist.broadcast_object_list(box, src=0, group=group)
    assert box[0] is not None
    return box[0]
