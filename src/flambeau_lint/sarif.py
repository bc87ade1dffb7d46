"""What was found as SARIF 2.1.0, which code scanning reads.

Source: the OASIS standard "Static Analysis Results Interchange Format (SARIF) Version 2.1.0".
"""

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path, PurePath
from typing import Any
from urllib.parse import quote

from flambeau_lint.checked_file import Checked, Place
from flambeau_lint.reports import LEVELS, in_cell, rule_page
from flambeau_lint.rule import Rule
from flambeau_lint.rules.catalog import BY_CODE

_SCHEMA = (
    "https://docs.oasis-open.org/sarif/sarif/v2.1.0/errata01/os/schemas/sarif-schema-2.1.0.json"
)


def as_sarif(found: Sequence[Checked], version: str) -> str:
    """One run; columns count code points, and paths are relative to where the command was started."""
    codes = sorted({place.code for file in found for place in file.places})
    index = {code: number for number, code in enumerate(codes)}
    seen: dict[str, int] = {}
    results = [
        _result(file.path, place, index[place.code], seen)
        for file in found
        for place in file.places
    ]
    driver = {
        "name": "flambeau-lint",
        "version": version,
        "rules": [_rule(BY_CODE[code]) for code in codes],
    }
    run = {
        "tool": {"driver": driver},
        "columnKind": "unicodeCodePoints",
        "results": results,
        "invocations": [
            {"executionSuccessful": True, "toolExecutionNotifications": _problems(found)}
        ],
    }
    return json.dumps({"$schema": _SCHEMA, "version": "2.1.0", "runs": [run]}, indent=1)


def _rule(rule: Rule) -> dict[str, Any]:
    return {
        "id": rule.code,
        "name": rule.name,
        "shortDescription": {"text": rule.en},
        "fullDescription": {"text": rule.why or rule.en},
        "help": {"text": rule_page(rule)},
        "defaultConfiguration": {"level": LEVELS[rule.kind]},
        "properties": {
            "tags": [rule.kind, rule.library],
            "precision": "very-high" if rule.sure == "certain" else "high",
        },
    }


def _uri(path: str) -> str:
    place = PurePath(path)
    if place.is_absolute():
        try:
            place = PurePath(Path(path).relative_to(Path.cwd()))
        except ValueError:
            return Path(path).as_uri()
    return quote(os.fsencode(place.as_posix()))


def _result(path: str, place: Place, number: int, seen: dict[str, int]) -> dict[str, Any]:
    uri = _uri(path)
    location: dict[str, Any] = {"artifactLocation": {"uri": uri}}
    if not place.cell:  # whose lines are none of the file
        location["region"] = {
            "startLine": place.line,
            "startColumn": place.column,
            "endLine": place.end_line,
            "endColumn": place.end_column,
        }
    # Lines that move keep their name: it is made of what stands there, and of how often it did before.
    word = hashlib.sha256(f"{place.code}\0{uri}\0{place.text.strip()}".encode()).hexdigest()[:16]
    seen[word] = seen.get(word, 0) + 1
    result: dict[str, Any] = {
        "ruleId": place.code,
        "ruleIndex": number,
        "level": LEVELS[BY_CODE[place.code].kind],
        "message": {"text": in_cell(place) + place.message},
        "locations": [{"physicalLocation": location}],
        "partialFingerprints": {"primaryLocationLineHash": f"{word}:{seen[word]}"},
    }
    if place.edits:
        result["fixes"] = [_fix(uri, place)]
    return result


def _fix(uri: str, place: Place) -> dict[str, Any]:
    replacements = [
        {
            "deletedRegion": {
                "startLine": one.start[0],
                "startColumn": one.start[1],
                "endLine": one.end[0],
                "endColumn": one.end[1],
            },
            "insertedContent": {"text": one.text},
        }
        for one in place.edits
    ]
    return {
        "description": {"text": f"{place.fix} fix"},
        "artifactChanges": [{"artifactLocation": {"uri": uri}, "replacements": replacements}],
    }


def _problems(found: Sequence[Checked]) -> list[dict[str, Any]]:
    return [
        {"level": "warning", "message": {"text": f"{file.path}: {file.problem}"}}
        for file in found
        if file.problem
    ]
