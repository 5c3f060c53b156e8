"""Runs a contestant in a process: one JSON request per input line, one JSON answer per output line.

`python -P protocol.py SCRIPT ARGUMENTS` runs the script's `open_contestant(arguments)` and answers `ready` after the
first token. Requests are calls of the contestant's methods. The answer to
`{"do": "decode", "tokens": 64, "context_tokens": 64}` is the seconds of each token, or the reason why it is not
supported. Only the standard library is imported, because scripts run in separate environments. Output of libraries
goes to standard error.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from typing import Any


def main(script: str, arguments: dict[str, Any]) -> None:
    """Open the contestant and answer requests until there are no more."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def answer(**fields: Any) -> None:
        answers.write(json.dumps(fields) + "\n")
        answers.flush()

    try:
        contestant = runpy.run_path(script)["open_contestant"](arguments)
    except SystemExit as sentence:
        return answer(absent=str(sentence))
    except ImportError as error:
        return answer(absent=f"{error.name or error} is not installed in its environment.")
    answer(ready=contestant.version)
    for line in sys.stdin:
        request = json.loads(line)
        do = request.pop("do")
        if do == "quit":
            break
        if not hasattr(contestant, do):
            answer(cannot=f"Task {do} is not supported.")
            continue
        try:
            said = getattr(contestant, do)(**request)
            answer(**({"cannot": said} if isinstance(said, str) else {"seconds": said}))
        except Exception as error:
            first = (str(error).splitlines() or [""])[0]
            answer(failed=f"{type(error).__name__}: {first}")
    return None


if __name__ == "__main__":
    main(sys.argv[1], json.loads(sys.argv[2]))
