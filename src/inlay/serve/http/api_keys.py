"""API keys: who may ask, and whose cache is whose."""

from __future__ import annotations

import hashlib
import hmac
import os
import re
from typing import TYPE_CHECKING

from inlay.errors import UsageError, one_line

if TYPE_CHECKING:
    from collections.abc import Iterable
    from pathlib import Path

VARIABLE = "INLAY_API_KEYS"
COMMENT = re.compile(r"(^|\s)#.*")


class Keys:
    """The keys a server knows; without any, everybody may ask.

    Only hashes are kept. All of them are compared, each in constant time, so how long a refusal takes says nothing
    about any key.

    >>> keys = Keys(["secret", "other"])
    >>> keys.authenticate(b"Bearer secret") is not None, keys.authenticate(b"Bearer secre"), keys.authenticate(b"")
    (True, None, None)
    >>> Keys([]).authenticate(b"")
    ''
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __len__(self) -> int:
        return len(self._digests)

    def authenticate(self, authorization: bytes) -> str | None:
        """Whose request this is: a name that does not tell the key, or None for a stranger."""
        if not self._digests:
            return ""
        scheme, _, key = authorization.partition(b" ")
        given = _digest(key.strip() if scheme.lower() == b"bearer" else b"")
        known = False
        for digest in self._digests:
            known |= hmac.compare_digest(digest, given)
        return hashlib.sha256(given).hexdigest()[:16] if known else None


def read_keys(file: Path | None) -> list[str]:
    """Keys from a file, one a line, `#` begins a comment; or, without a file, from INLAY_API_KEYS, between commas."""
    if file is None:
        return [key.strip() for key in os.environ.get(VARIABLE, "").split(",") if key.strip()]
    try:
        lines = [COMMENT.sub("", line).strip() for line in file.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        problem = f"The API keys in {file} cannot be read: {one_line(error)}."
        raise UsageError(problem, "Give a text file, one key a line.") from error
    keys = [line for line in lines if line]
    if not keys:
        raise UsageError(f"There are no API keys in {file}.", "Write one a line, or leave --api-key-file out.")
    return keys


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
