"""API keys: authentication, and the tenant name that separates cached blocks."""

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
    """The accepted API keys. Without any, every request is accepted.

    Only hashes are stored. Every hash is compared in constant time, so the response time reveals nothing about a key.

    >>> keys = Keys(["secret", "other"])
    >>> keys.authenticate(b"Bearer secret") is not None, keys.authenticate(b"Bearer secre"), keys.authenticate(b"")
    (True, None, None)
    >>> Keys([]).authenticate(b""), Keys(["secret"]).authenticate(b"Bearer secret")
    ('', '')
    """

    def __init__(self, keys: Iterable[str]) -> None:
        self._digests = [_digest(key.encode()) for key in keys]

    def __len__(self) -> int:
        return len(self._digests)

    def authenticate(self, authorization: bytes) -> str | None:
        """Return the tenant of a request, a name that does not reveal the key; None for an unknown key.

        A single key has the tenant "", as without keys: there is nobody to separate its blocks from.
        """
        if not self._digests:
            return ""
        scheme, _, key = authorization.partition(b" ")
        given = _digest(key.strip() if scheme.lower() == b"bearer" else b"")
        known = False
        for digest in self._digests:
            known |= hmac.compare_digest(digest, given)
        if not known:
            return None
        return _tenant(given) if len(self) > 1 else ""

    @property
    def owner(self) -> str:
        """The owner of blocks that outlive the server: requests of a single key have no tenant.

        >>> [bool(Keys(keys).owner) for keys in ([], ["a"], ["a", "b"])], Keys(["a"]).owner == Keys(["b"]).owner
        ([False, True, True], False)
        """
        return "several keys" if len(self) > 1 else "".join(map(_tenant, self._digests))


def read_keys(file: Path | None) -> list[str]:
    """Read keys from a file, one per line, with `#` comments. Without a file, read INLAY_API_KEYS, comma-separated."""
    if file is None:
        return [key.strip() for key in os.environ.get(VARIABLE, "").split(",") if key.strip()]
    try:
        lines = [COMMENT.sub("", line).strip() for line in file.read_text("utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        problem = f"The API keys in {file} cannot be read: {one_line(error)}."
        raise UsageError(problem, "Use a UTF-8 text file with one key per line.") from error
    keys = [line for line in lines if line]
    if not keys:
        raise UsageError(f"There are no API keys in {file}.", "Write one key per line, or omit --api-key-file.")
    return keys


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _tenant(digest: bytes) -> str:
    return hashlib.sha256(digest).hexdigest()[:16]
