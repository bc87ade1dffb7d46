"""A function in a user's file, given on the command line as FILE.py:FUNCTION."""

import contextlib
import inspect
import sys
import traceback
import types
from collections.abc import Callable, Collection, Generator
from pathlib import Path
from typing import Any

from flambeau.errors import InputError, unreadable


def is_function(text: object) -> bool:
    """Whether a word of the command line is a function in a file."""
    return ".py:" in str(text)


def read_source(name: str, *, what: str) -> bytes:
    """The present content of FILE.py in FILE.py:FUNCTION, which is given as `what`, such as DATA."""
    path = Path(name.rpartition(":")[0])
    if not path.is_file():
        raise InputError(f"{what}: {path} is not a file")
    try:
        return path.read_bytes()
    except OSError as error:
        raise unreadable(path, error) from error


def load_function(name: str, *, what: str, source: bytes | None = None) -> Callable[..., Any]:
    """Run a file, or its earlier `source`, as a new module, and return its function."""
    path_text, _, function_name = name.rpartition(":")
    source = read_source(name, what=what) if source is None else source
    module = _load_module(Path(path_text), source, prefix=what.strip("-").lower())
    function = getattr(module, function_name, None)
    if not callable(function):
        raise InputError(f"{path_text} has no function '{function_name}'; {what} FILE.py:FUNCTION")
    checked: Callable[..., Any] = function
    return checked


def call_function(name: str, *, what: str, source: bytes | None = None) -> Any:
    """The result of a function without arguments."""
    function = load_function(name, what=what, source=source)
    with running_user_code(Path(name.rpartition(":")[0])):
        missing = missing_arguments(function)
        if missing:
            raise InputError(f"{name} asks for {missing[0]!r}; it is called without arguments")
        return function()


def missing_arguments(function: Callable[..., Any], given: Collection[str] = ()) -> list[str]:
    """Names of the arguments without default that are not in `given`."""
    return [
        p.name
        for p in inspect.signature(function).parameters.values()
        if p.default is p.empty
        and p.name not in given
        and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


@contextlib.contextmanager
def running_user_code(path: Path) -> Generator[None, None, None]:
    """Turn errors of a user's file into an InputError that names the line.

    Its prints go to standard error; a change of the working folder is undone.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr), contextlib.chdir(Path.cwd()):
            yield
    except InputError:
        raise
    except (Exception, SystemExit) as error:
        raise failed(path, error) from error


def failed(path: Path, error: BaseException) -> InputError:
    """The error for an exception in the user's file, with its line."""
    number = line_of(path, error)
    line = f", line {number}" if number else ""
    hint = ""
    if isinstance(error, ModuleNotFoundError) and error.name:
        beside = path.parent / error.name.partition(".")[0]
        if beside.is_dir() or beside.with_suffix(".py").is_file():
            hint = f"\nIt lies beside the file: run the command with PYTHONPATH={path.parent}"
    return InputError(f"{path}{line}: {type(error).__name__}: {first_line(error)}{hint}")


def line_of(path: Path, error: BaseException) -> int | None:
    """The last line of a file in the traceback of an error."""
    file = path.absolute()
    frames = traceback.extract_tb(error.__traceback__)
    return next((f.lineno for f in reversed(frames) if Path(f.filename) == file), None)


def first_line(error: BaseException) -> str:
    """The first line of an error's message, at most 200 characters."""
    text = str(error).strip().splitlines()
    return text[0][:200] if text else type(error).__name__


def _load_module(path: Path, source: bytes, *, prefix: str) -> types.ModuleType:
    module = types.ModuleType(f"flambeau_{prefix}_{path.stem}")
    module.__file__ = str(path.absolute())
    sys.modules[module.__name__] = module  # dataclasses and pickle look for it there
    with running_user_code(path):
        exec(compile(source, module.__file__, "exec", dont_inherit=True), module.__dict__)
    return module
