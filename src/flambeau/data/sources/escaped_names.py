"""Class names that cannot be folder names: how `flambeau pack` writes them, and how they are read back.

Bytes are escaped as in a URL (RFC 3986, section 2.1).
'T-shirt/top' becomes the folder 'T-shirt%2Ftop', and a hidden file beside it gives the class name.
Without that file a folder's name is the class: a user's folder 'a%2Fb' stays 'a%2Fb'.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from flambeau.errors import InputError, json_object, unreadable, why_no_json

CLASS_NAMES = ".class_names.json"
_FORBIDDEN = re.compile(r'[\x00-\x1f\x7f-\x9f/\\:*?"<>|\u2028\u2029\ud800-\udfff]')
_WINDOWS = re.compile(r"(con|prn|aux|nul|com\d|lpt\d)(\..*)?", re.IGNORECASE | re.DOTALL)
_LONGEST = 200  # bytes; file systems end at 255, and endings are added
_MAX_FILE = 1 << 26  # bytes of the hidden file: some hundred thousand classes
_PARTS = {
    name: is_val
    for is_val, names in enumerate(
        (("train", "training"), ("val", "valid", "validation", "test", "testing"))
    )
    for name in names
}


def folder_names(classes: Sequence[str]) -> list[str]:
    """A folder name for each class, distinct in any case; '%' is escaped if any name must be.

    T-shirt/top and 50% become T-shirt%2Ftop and 50%25; 50% alone stays 50%.
    """
    # These would be taken for the two parts of a data set.
    as_parts = {_PARTS[name.lower()] for name in classes if name.lower() in _PARTS} == {0, 1}
    plain = [name for name in classes if not (as_parts and name.lower() in _PARTS)]
    if len(plain) == len(classes) == len({_same(name) for name in plain if _fits(name)}):
        return list(classes)
    taken: set[str] = set()
    made = []
    for name in classes:
        escaped = _escaped(name, first=as_parts and name.lower() in _PARTS)
        unique = escaped
        number = 2
        while _same(unique) in taken:
            unique, number = f"{escaped}%~{number}", number + 1
        taken.add(_same(unique))
        made.append(unique)
    return made


def class_names_file(classes: Sequence[str]) -> str | None:
    """The hidden file's content, for folders whose name is not the class, if any."""
    folders = folder_names(classes)
    escaped = {
        folder: name for folder, name in zip(folders, classes, strict=True) if folder != name
    }
    return json.dumps(escaped, indent=1, ensure_ascii=False) + "\n" if escaped else None


def named_class(folder: Path) -> Callable[[str], str]:
    """A function from the name of a sub-folder of `folder` to its class."""
    names = _read(folder / CLASS_NAMES)
    return lambda name: names.get(unicodedata.normalize("NFC", name), name)


def _read(path: Path) -> Mapping[str, str]:
    try:
        with path.open("rb") as file:
            content = file.read(_MAX_FILE + 1)
        if len(content) > _MAX_FILE:
            raise ValueError(f"it has more than {_MAX_FILE} bytes")
        names = json.loads(content.decode(), object_pairs_hook=json_object)
        if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()):
            raise ValueError("it gives no name for each folder")
        for name in names.values():
            name.encode()  # a lone surrogate is not text
    except (FileNotFoundError, NotADirectoryError):
        return {}
    except OSError as error:
        raise unreadable(path, error) from error
    except (ValueError, RecursionError) as error:
        raise InputError(
            f"{path} is damaged: {why_no_json(error)}\n"
            "It gives the names of classes that cannot name a folder: pack the images again, or remove it"
        ) from error
    return {unicodedata.normalize("NFC", folder): name for folder, name in names.items()}


def require_different(classes: Iterable[str], folder: Path) -> None:
    """Raise InputError for two folders of one class, as an edited hidden file may name them."""
    seen: set[str] = set()
    for name in classes:
        if name in seen:
            raise InputError(
                f"{folder} has two folders of class {name!r}: look at {folder / CLASS_NAMES}"
            )
        seen.add(name)


def _fits(name: str) -> bool:
    """Whether a class name can be a folder name on every system, and is not hidden there."""
    odd = _FORBIDDEN.search(name) or _WINDOWS.fullmatch(name) or name != name.strip(" ")
    odd = odd or name.startswith(".") or name.endswith(".") or name == "__MACOSX"
    return bool(name) and not odd and len(name.encode()) <= _LONGEST


def _same(name: str) -> str:
    """Equal for names that some file system does not distinguish."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())


def _escaped(name: str, *, first: bool) -> str:
    text = _FORBIDDEN.sub(_code, name.replace("%", "%25"))
    if first or _WINDOWS.fullmatch(text) or text == "__MACOSX" or text[:1] in (".", " "):
        text = _code(text[0]) + text[1:]
    if text[-1:] in (".", " "):
        text = text[:-1] + _code(text[-1])
    if len(text.encode()) > _LONGEST:
        text = text.encode()[:_LONGEST].decode(errors="ignore").rstrip(" .") + "%~"
    return text or "%"


def _code(match: "re.Match[str] | str") -> str:
    text = match if isinstance(match, str) else match[0]
    return "".join(f"%{byte:02X}" for byte in text.encode(errors="surrogatepass"))
