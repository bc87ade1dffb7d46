"""How the command refuses what a user has to fix."""

import json
from typing import Any


def refused(answer: Any, *parts: str, printed: bool = False) -> str:
    """The message, which holds these parts: one or two lines, no traceback, exit code 2.

    Args:
        answer: of the fixture `flambeau`.
        parts: of the message.
        printed: something was printed before it.
    """
    assert answer.code == 2, answer
    assert printed or answer.out == "", answer
    assert "Traceback" not in answer.err
    if '{"error": ' in answer.err:  # of --json
        found = json.loads(answer.err.splitlines()[-1])
        message = f"{found['error']}\n{found['hint']}"
    else:
        message = answer.err[answer.err.index("flambeau: ") :]
    assert len(message.splitlines()) <= 2, message
    for part in parts:
        assert part in message, message
    return message
