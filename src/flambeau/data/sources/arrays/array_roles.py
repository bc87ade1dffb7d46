"""The roles of the named arrays of a file: images, labels or class names, and their part."""

import re
from collections.abc import Iterable

TRAIN_PARTS = ("train", "training")
VAL_PARTS = ("val", "valid", "validation", "test", "testing")  # the first that exists is used

_WORDS = {
    "images": ("x", "images", "image", "imgs", "data"),
    "labels": ("y", "labels", "label", "targets", "target"),
    "classes": ("classes", "class_names", "names", "label_names", "list_classes"),
    "offsets": ("offsets", "x_offsets", "images_offsets", "image_offsets", "data_offsets"),
}
_ROLE_OF = {word: role for role, words in _WORDS.items() for word in words}


def role_of(name: str) -> tuple[str, str] | None:
    """Part ('' for none) and role that an array's name stands for; None without a known role.

    Roles are 'images', 'labels', 'classes' and 'offsets': `Val/Images` is ('val', 'images').
    """
    part, role = "", ""
    for component in name.lower().split("/"):
        # 'set' has no meaning: train_set_x
        words = [word for word in re.split(r"[_\-. ]+", component) if word not in ("", "set")]
        for end in (0, -1):
            if words and words[end] in (*TRAIN_PARTS, *VAL_PARTS):
                part = words.pop(end)
        role = "_".join(words) or role  # for images/val: 'images'
    return (part, _ROLE_OF[role]) if role in _ROLE_OF else None


def names_by_part(names: Iterable[str]) -> dict[str, dict[str, str]]:
    """The arrays' names by part and role; ValueError if two have the same."""
    parts: dict[str, dict[str, str]] = {}
    # If there are 'classes', then 'names' are something else, such as those of the images.
    for name in sorted(names, key=lambda name: name.lower().endswith("names")):
        known = role_of(name)
        if known is not None:
            part, role = known
            first = parts.setdefault(part, {}).setdefault(role, name)
            if first != name and role != "classes":
                raise ValueError(f"both {first!r} and {name!r} could be the {role}")
    return parts


def is_of_labels(stem: str) -> bool:
    """Whether a file of arrays is of labels by name, and no shard of images."""
    return any(_ROLE_OF.get(word) == "labels" for word in re.split(r"[_\-. ]+", stem.lower()))


def labels_beside(stem: str) -> list[str]:
    """Possible names for the labels of a file of images, the likeliest first, without ending."""
    names = [f"{stem}_labels", f"{stem}.labels"]
    for match in re.finditer(r"[A-Za-z]+", stem):
        if _ROLE_OF.get(match[0].lower()) == "images":
            for word in _WORDS["labels"]:
                for written in (word, word.upper()):
                    names.append(stem[: match.start()] + written + stem[match.end() :])
    return [*names, "labels", "y"]
