"""One JSON line a request, on standard error. What was said is never in it."""

from __future__ import annotations

import json
import logging
import queue
import sys
import threading
from dataclasses import dataclass, field
from datetime import UTC, datetime
from time import monotonic, time
from typing import Any, TextIO

MOST_WAITING = 10_000


@dataclass
class RequestRecord:
    """What is known about a request; filled in as it goes along."""

    id: str
    route: str
    client: str
    start_time: float = field(default_factory=monotonic)
    status: int | None = None
    """None: not answered yet."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    tokens: int | None = None
    first_token_s: float | None = None
    finish_reason: str | None = None
    error: str | None = None

    def mark_first_token(self) -> None:
        """Now there is something to send."""
        if self.first_token_s is None:
            self.first_token_s = monotonic() - self.start_time

    def fields(self) -> dict[str, Any]:
        """What a log line says of it: nothing that is not known."""
        known = {name: value for name, value in vars(self).items() if value is not None and name != "start_time"}
        return {**known, "seconds": monotonic() - self.start_time}


class LogWriter:
    """JSON lines, written by a thread of their own: who reads them slowly delays no request.

    When too many wait, lines are lost, and the next one says how many.
    """

    def __init__(self, stream: TextIO | None = None, most: int = MOST_WAITING) -> None:
        self._stream = stream or sys.stderr
        self._waiting: queue.Queue[str | None] = queue.Queue(most)
        self._lost = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def write(self, fields: dict[str, Any]) -> None:
        """One line more. Never waits."""
        line = {"time": datetime.fromtimestamp(time(), UTC).isoformat(timespec="milliseconds"), **fields}
        if self._lost:
            line["lost_lines"] = self._lost
        rounded = {name: round(value, 6) if isinstance(value, float) else value for name, value in line.items()}
        try:
            self._waiting.put_nowait(json.dumps(rounded))
            self._lost = 0
        except queue.Full:
            self._lost += 1

    def close(self, seconds: float = 1.0) -> None:
        """Write what waits, if somebody reads it."""
        try:
            self._waiting.put(None, timeout=seconds)
        except queue.Full:
            return
        self._thread.join(seconds)

    def _write(self) -> None:
        while (line := self._waiting.get()) is not None:
            try:
                self._stream.write(line + "\n")
                if self._waiting.empty():
                    self._stream.flush()
            except (OSError, ValueError):  # nobody reads them any more: answers go on
                return


class LogHandler(logging.Handler):
    """What libraries log, as lines among the others."""

    def __init__(self, lines: LogWriter) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        """One line, with the traceback where there is one."""
        if record.getMessage() == "Invalid HTTP request received.":
            return  # connections write lines of their own about it
        fields: dict[str, Any] = {"level": record.levelname.lower(), "message": record.getMessage().strip()}
        if record.exc_info:
            fields["traceback"] = logging.Formatter().formatException(record.exc_info)
        self._lines.write(fields)
