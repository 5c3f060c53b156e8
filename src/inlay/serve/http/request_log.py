"""The request log: one JSON line per request, on standard error. It contains no prompts and no generated text."""

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
    """The log record of a request, filled in while the request is processed."""

    id: str
    route: str
    client: str
    start_time: float = field(default_factory=monotonic)
    status: int | None = None
    """None until the response starts."""
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    tokens: int | None = None
    first_token_s: float | None = None
    finish_reason: str | None = None
    error: str | None = None

    def mark_first_token(self) -> None:
        """Record the time of the first token."""
        if self.first_token_s is None:
            self.first_token_s = monotonic() - self.start_time

    def fields(self) -> dict[str, Any]:
        """Return the fields of the log line; None values are left out."""
        known = {name: value for name, value in vars(self).items() if value is not None and name != "start_time"}
        return {**known, "seconds": monotonic() - self.start_time}


class LogWriter:
    """Writes JSON lines in a separate thread, so that a slow log reader delays no request.

    When the queue is full, lines are dropped; the next line contains their number.
    """

    def __init__(self, stream: TextIO | None = None, most: int = MOST_WAITING) -> None:
        self._stream = stream or sys.stderr
        self._waiting: queue.Queue[str | None] = queue.Queue(most)
        self._lost = 0
        self._thread = threading.Thread(target=self._write, name="log", daemon=True)
        self._thread.start()

    def write(self, fields: dict[str, Any]) -> None:
        """Queue one line. Never blocks."""
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
        """Write the queued lines, for at most `seconds`."""
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
            except (OSError, ValueError):  # the stream is closed; serving continues without a log
                return


class LogHandler(logging.Handler):
    """Writes log records of libraries as JSON lines."""

    def __init__(self, lines: LogWriter) -> None:
        super().__init__(logging.WARNING)
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        """Write one line, with the traceback if there is one."""
        if record.getMessage() == "Invalid HTTP request received.":
            return  # `Connection` logs it
        fields: dict[str, Any] = {"level": record.levelname.lower(), "message": record.getMessage().strip()}
        if record.exc_info:
            fields["traceback"] = logging.Formatter().formatException(record.exc_info)
        self._lines.write(fields)
