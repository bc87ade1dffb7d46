"""Class names that cannot name a folder: how `flambeau pack` writes them, and how they are read back.

Source: own; bytes are escaped as in a URL (RFC 3986, section 2.1).
'T-shirt/top' becomes the folder 'T-shirt%2Ftop', and a hidden file beside it says which class that is.
Without that file a folder is called what it is called: 'a%2Fb' of the user's own stays 'a%2Fb'.
"""

import json
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

from flambeau.errors import InputError, json_object, unreadable, why_no_json

CLASS_NAMES = ".class_names.json"
_NOWHERE = re.compile(r'[\x00-\x1f\x7f-\x9f/\\:*?"<>|\u2028\u2029\ud800-\udfff]')
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
    """A folder for each class, all different also where upper and lower case are one.

    Where all classes can be folders, each has its own name; else '%' is escaped, too.

    Example:
        >>> folder_names(["T-shirt/top", "50%"]), folder_names(["50%", "dog"])
        (['T-shirt%2Ftop', '50%25'], ['50%', 'dog'])
    """
    # As folders, these would be the two parts of a data set.
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
    """What the hidden file says of folders that are called otherwise; None where none is."""
    folders = folder_names(classes)
    escaped = {
        folder: name for folder, name in zip(folders, classes, strict=True) if folder != name
    }
    return json.dumps(escaped, indent=1, ensure_ascii=False) + "\n" if escaped else None


def named_class(folder: Path) -> Callable[[str], str]:
    """A function from the name of a sub-folder to the class that it is of.

    Args:
        folder: that holds the sub-folders of classes.

    Raises:
        InputError: its hidden file cannot be read, or is not as `flambeau pack` writes it.
    """
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
            name.encode()  # half a character of UTF-16 is no text
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
    """Refuse two folders of one class, as an edited file may name them.

    Raises:
        InputError: there are some.
    """
    seen: set[str] = set()
    for name in classes:
        if name in seen:
            raise InputError(
                f"{folder} has two folders of class {name!r}: look at {folder / CLASS_NAMES}"
            )
        seen.add(name)


def _fits(name: str) -> bool:
    """Whether a class can be a folder by its own name, everywhere, and is then seen."""
    odd = _NOWHERE.search(name) or _WINDOWS.fullmatch(name) or name != name.strip(" ")
    odd = odd or name.startswith(".") or name.endswith(".") or name == "__MACOSX"
    return bool(name) and not odd and len(name.encode()) <= _LONGEST


def _same(name: str) -> str:
    """Equal for names that are one on some file system."""
    return unicodedata.normalize("NFC", unicodedata.normalize("NFD", name).casefold())


def _escaped(name: str, *, first: bool) -> str:
    text = _NOWHERE.sub(_code, name.replace("%", "%25"))
    if first or _WINDOWS.fullmatch(text) or text == "__MACOSX" or text[:1] in (".", " "):
        text = _code(text[0]) + text[1:]
    if text[-1:] in (".", " "):
        text = text[:-1] + _code(text[-1])
    if len(text.encode()) > _LONGEST:
        text = text.encode()[:_LONGEST].decode(errors="ignore").rstrip(" .") + "%~"
    return text or "%"


def _code(found: "re.Match[str] | str") -> str:
    text = found if isinstance(found, str) else found[0]
    return "".join(f"%{byte:02X}" for byte in text.encode(errors="surrogatepass"))
