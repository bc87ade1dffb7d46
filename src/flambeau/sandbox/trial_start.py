"""The first process of a command in the sandbox: it makes the view, and becomes the command.

It runs under `python -I -S`, so that it starts in some 20 ms and has no threads.
"""

import json
import os
import sys
from pathlib import Path

from flambeau.sandbox.landlock import write_only_below
from flambeau.sandbox.mount_syscalls import die_with_parent
from flambeau.sandbox.overlay_view import enter_view

REPORT = "started.json"
"""Written beside the plan: the namespace and read-only folders of the view, or why it could not be made."""


def main(plan_file: str, command: list[str]) -> None:
    """Become the command; the plan has `view`, arguments of `enter_view`, or `write_below`, folders."""
    report = Path(plan_file).with_name(REPORT)
    plan = json.loads(Path(plan_file).read_text(encoding="utf-8"))
    # Opened now, because the view may hide it.
    file = os.open(report, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    result: dict[str, object] = {"failure": ""}
    try:
        if "view" in plan:
            result["read_only"] = enter_view(**plan["view"])
            result["namespace"] = str(Path("/proc/self/ns/mnt").readlink())
        elif "write_below" in plan:
            write_only_below(plan["write_below"])
        die_with_parent()
    except OSError as error:
        result["failure"] = f"{error.filename or 'the view'}: {error.strerror or error}"
    os.write(file, json.dumps(result).encode())
    os.close(file)
    if result["failure"]:
        sys.exit(1)
    os.execvp(command[0], command)
