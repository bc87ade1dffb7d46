"""The exceptions of flambeau that a user can act on, and suggestions for misspelled words."""

import contextlib
import difflib
import errno
import json
import lzma
import os
import re
import shutil
import zipfile
import zlib
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

ZIP_ERRORS = (
    zipfile.BadZipFile,
    zlib.error,
    lzma.LZMAError,
    EOFError,
    ValueError,
    RuntimeError,  # a password; NotImplementedError for a compression that is not known
)
"""What reading a damaged or unusual zip file, as .npz and .pth are, raises."""


class InputError(ValueError):
    """Wrong input, in one or two lines that name it and what to do about it.

    Commands print the message without a traceback and exit with 2.
    """


class DamagedData(InputError):
    """Data whose bytes are damaged; other InputErrors may be about undamaged data that are not supported."""


class NothingFound(Exception):
    """A search without a result, in a message like that of an InputError; commands exit with 1."""


class WorkerLost(RuntimeError):
    """A data worker died or hangs; the message names it and its sample.

    Commands print the message without a traceback and exit with 1: the same command may continue.
    """


class DecodeError(ValueError):
    """Bytes that cannot be decoded as an image; the message is the reason, without a path."""


class UnsupportedImage(DecodeError):
    """Undamaged bytes that are no supported image."""


@contextlib.contextmanager
def refusing(what: str) -> Iterator[None]:
    """Turn a ValueError raised inside, as by a recipe, into an InputError that begins with `what`."""
    try:
        yield
    except ValueError as error:
        raise InputError(f"{what}: {error}") from error


@contextlib.contextmanager
def in_words_of_python(names: Collection[str], words: Collection[str] = ()) -> Iterator[None]:
    """InputErrors raised inside name a function's arguments, `names`, instead of flags.

    Args:
        words: values that may stand behind a flag.
    """
    value = "|".join(map(re.escape, words)) or "(?!)"
    pattern = rf"(?<![\w-])--([a-z]+(?:-[a-z]+)*)(?: ({value})(?![\w-]))?"

    def as_argument(flag: re.Match[str]) -> str:
        name = flag[1].replace("-", "_")
        if name not in names:
            return flag[0]
        return f"{name}=" if flag[2] is None else f'{name}="{flag[2]}"'

    try:
        yield
    except InputError as error:
        text = re.sub(pattern, as_argument, str(error))
        raise type(error)(text) from error


def _numbers(names: str) -> frozenset[int]:
    return frozenset(getattr(errno, name) for name in names.split() if hasattr(errno, name))


DAMAGE_ERRNOS = _numbers("EIO EBADMSG EUCLEAN EILSEQ ENODATA")
"""What a disk says of data that it has lost; each system has some of these names."""

_NETWORK_ERRNOS = _numbers(
    "ESTALE ETIMEDOUT ENOLCK EREMOTEIO ENOLINK ECOMM EPROTO EREMCHG ENONET EHOSTDOWN EHOSTUNREACH ENETDOWN "
    "ENETUNREACH ENETRESET ECONNRESET ECONNREFUSED ECONNABORTED ENOTCONN ESHUTDOWN ENOKEY EKEYEXPIRED "
    "EKEYREVOKED EKEYREJECTED"
)
_LIMIT_ERRNOS = _numbers("EMFILE ENFILE")

SHARED_MEMORY = "/dev/shm"
_SHARED_FULL = "no space left in shared memory, through which processes hand over batches"
_SHARED_REMEDY = (
    f"remove what lies in {SHARED_MEMORY}, give a container more of it (docker run --shm-size=1g), "
    "or use no workers"
)
_LITTLE = 1 << 20  # bytes; a semaphore takes a page, a batch much more

DISK_ERRNOS = (
    DAMAGE_ERRNOS
    | _NETWORK_ERRNOS
    | _LIMIT_ERRNOS
    | _numbers(
        "ENOSPC EDQUOT EFBIG EACCES EPERM EROFS ENOTDIR ENOENT EISDIR ENAMETOOLONG ENODEV ENXIO ENOMEDIUM "
        "EMEDIUMTYPE EBUSY EAGAIN EDEADLK ETXTBSY ELOOP EMLINK EXDEV EEXIST ENOTEMPTY ENOMEM EOVERFLOW "
        "EOPNOTSUPP ENOTSUP ENOSYS ECANCELED EINTR"
    )
)
"""What a disk, a network disk or a limit of the system may answer, and no mistake in a program."""


def disk_errno(error: BaseException) -> int | None:
    """The number of a disk's error, also in a library's words; else None.

    Example:
        >>> disk_errno(OSError("[Errno 116] cannot open: Stale file handle")) == errno.ESTALE
        True
    """
    if isinstance(error, OSError) and error.errno is not None:
        return error.errno if error.errno in DISK_ERRNOS else None
    text = str(error)
    if of_rust := re.search(r"\(os error (\d+)\)", text):
        return int(of_rust[1]) if int(of_rust[1]) in DISK_ERRNOS else None
    if not isinstance(error, OSError):
        return None
    return next((number for number in sorted(DISK_ERRNOS) if os.strerror(number) in text), None)


def disk_failure(error: BaseException, number: int) -> str:
    """A sentence about an error of the disk: which file, what, and what to do.

    Example:
        >>> disk_failure(OSError(errno.EBUSY, "Device or resource busy", "a.rec"), errno.EBUSY)
        'a.rec: Device or resource busy; fix that and run the command again'
    """
    what = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror:
        if number == errno.ENOSPC and _is_of_shared_memory(error.filename):
            where = error.filename or SHARED_MEMORY
            return f"{where}: {_SHARED_FULL}; {_SHARED_REMEDY}, and run the command again"
        where = "a file" if number in _LIMIT_ERRNOS else "the disk"
        what = f"{_as_named(error.filename) or where}: {error.strerror}"
    return f"{what}; {disk_remedy(number) or 'fix that'} and run the command again"


def _as_named(path: object) -> object:
    """A path through a folder that is held open, as the user knows it."""
    through = re.match(r"/proc/self/fd/\d+(?=/|$)", f"{path}")
    if through is None:
        return path
    with contextlib.suppress(OSError):
        return f"{Path(through[0]).readlink()}{str(path)[through.end() :]}"
    return path


_SHORTAGES = (
    ("shared memory.*No space left", _SHARED_FULL, _SHARED_REMEDY),
    (
        r"Too many open files|received 0 items of ancdata",
        "too many open files",
        "raise the limit (`ulimit -n`) or use fewer workers",
    ),
    (
        r"can't start new thread|Resource temporarily unavailable|pthread_create",
        "no further process or thread may be started",
        "raise the limit on processes (`ulimit -u`, or that of the container) or on memory (`ulimit -v`), "
        "or use fewer workers",
    ),
    (
        r"[Cc]an(no|')t allocate memory|failed to map segment|bad_alloc|Unable to allocate|^out of memory$",
        "memory has run out",
        "raise the limit (`ulimit -v`, `ulimit -d`, or that of the container) or use fewer workers",
    ),
)
"""What Python and libraries say of a limit of the system, what it is, and what to do."""


def shortage(error: BaseException) -> str | None:
    """A sentence about a limit of the system that an error tells of in other words than a disk's; else None.

    Example:
        >>> shortage(RuntimeError("can't start new thread")).partition(";")[0]
        'no further process or thread may be started'
    """
    if isinstance(error, OSError) and (error.filename is not None or error.errno is None):
        return None  # of a file, which `disk_failure` names; libraries name it in their text
    if getattr(error, "errno", None) == errno.ENOSPC and _is_of_shared_memory(None):
        return f"{_SHARED_FULL}; {_SHARED_REMEDY}, and run the command again"  # of a semaphore
    text = "out of memory" if isinstance(error, MemoryError) else f"{error}"
    for said, what, remedy in _SHORTAGES:
        if re.search(said, text):
            return f"{what}; {remedy}, and run the command again"
    return None


def _is_of_shared_memory(file: object) -> bool:
    """Whether it is shared memory that is full: semaphores and the like have no file name to say so."""
    if file is not None:
        return str(file).startswith(f"{SHARED_MEMORY}/")
    try:
        return shutil.disk_usage(SHARED_MEMORY).free < _LITTLE
    except OSError:
        return False


@contextlib.contextmanager
def naming(path: Path) -> Iterator[None]:
    """An OSError of a call on a descriptor, which knows no name, names the file."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise


def disk_remedy(number: int | None) -> str | None:
    """What to do about an error of the disk; None if its name says it."""
    if number in _LIMIT_ERRNOS:
        return "raise the limit (`ulimit -n`) or use fewer workers"
    if number == errno.EFBIG:
        return "raise the limit (`ulimit -f`) or use a disk that takes larger files"
    if number in _NETWORK_ERRNOS:
        return "see that the server of that disk answers"
    return None


def unreadable(path: object, error: OSError) -> InputError:
    """The error for a file or folder that cannot be read.

    Example:
        >>> unreadable("a.rec", FileNotFoundError(2, "No such file or directory"))
        InputError('a.rec cannot be read: no such file or directory')
    """
    return InputError(f"{path} cannot be read: {(error.strerror or str(error)).lower()}")


def require_folder(path: Path) -> None:
    """InputError for a file in a folder that does not exist."""
    if not path.parent.is_dir():
        raise InputError(f"{path} cannot be made: there is no folder {path.parent}\nMake it first")


def why_no_json(error: Exception) -> str:
    """An exception of json.loads in words; other exceptions as they are.

    Example:
        >>> why_no_json(RecursionError("maximum recursion depth exceeded"))
        'it is nested too deeply'
    """
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    if isinstance(error, UnicodeDecodeError):
        return f"it is no JSON (byte {error.start} is no UTF-8)"
    if isinstance(error, json.JSONDecodeError):
        return f"it is no JSON ({error})"
    is_of_int = isinstance(error, ValueError) and "set_int_max_str_digits" in str(error)
    return "it has a number of thousands of digits" if is_of_int else str(error)


def json_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """For `object_pairs_hook` of json.loads, which silently takes a name's last value.

    Example:
        >>> json.loads('{"cat": 1, "dog": 2}', object_pairs_hook=json_object)
        {'cat': 1, 'dog': 2}
    """
    values: dict[str, Any] = {}
    for name, value in pairs:
        if name in values:
            raise ValueError(f"it gives {name[:80]!r} twice")
        values[name] = value
    return values


def nearest(word: str, known: Iterable[str]) -> str:
    """'; did you mean X?' for the known word that begins with it or is most similar, or ''.

    Dashes of flags are ignored. At a similarity of 0.6 (two letters in five) the first letters must be equal.
    """
    by_bare = {name.lower().lstrip("-"): name for name in known}
    word = word.lower().lstrip("-")
    longer = [name for name in by_bare if name.startswith(word)] if len(word) > 2 else []
    close = [min(longer, key=lambda name: (len(name), name))] if longer else []
    close = close or difflib.get_close_matches(word, by_bare, n=1, cutoff=0.7)
    begin_alike = [name for name in by_bare if name[:1] == word[:1]]
    close = close or difflib.get_close_matches(word, begin_alike, n=1, cutoff=0.6)
    return f"; did you mean '{by_bare[close[0]]}'?" if close else ""
