"""A contestant as a process: a JSON request a line comes in, a JSON answer a line goes out.

`python -P protocol.py SCRIPT ARGUMENTS` runs the script's `open_contestant(arguments)` and says `ready` when that has
made its first token. Requests are calls of the contestant's methods:
`{"do": "decode", "tokens": 64, "context_tokens": 64}` is answered with the seconds each token took, or with a sentence
that says why not. Only the standard library is imported: scripts run in environments of their own. What libraries
print goes to standard error.
"""

from __future__ import annotations

import json
import os
import runpy
import sys
from typing import Any


def main(script: str, arguments: dict[str, Any]) -> None:
    """Open the contestant, then answer until there are no more requests."""
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
        return answer(absent=f"{error.name or error} is not installed there.")
    answer(ready=contestant.version)
    for line in sys.stdin:
        request = json.loads(line)
        do = request.pop("do")
        if do == "quit":
            break
        if not hasattr(contestant, do):
            answer(cannot=f"There is no {do} here.")
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
