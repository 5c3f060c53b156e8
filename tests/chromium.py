"""A headless Chromium, told what to do through two pipes: no driver and no library between."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from pathlib import Path

NAMES = ("chromium", "chromium-browser", "google-chrome")
_QUIET = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--hide-scrollbars", "--remote-debugging-pipe"),
)
_LIMIT = 60.0


def installed() -> str | None:
    return next((found for name in NAMES if (found := shutil.which(name))), None)


@dataclass
class Browser:
    """One browser with one page. What it said and asked for is kept."""

    profile: Path
    events: list[dict[str, Any]] = field(default_factory=list)
    _number: int = 0
    _session: str = ""
    _rest: bytes = b""

    def __enter__(self) -> Browser:
        there, out = os.pipe()
        into, here = os.pipe()
        command = [str(installed()), *_QUIET, f"--user-data-dir={self.profile}", "about:blank"]
        # Chromium reads from 3 and writes to 4; both numbers may be taken, so the ends go up before they come down.
        script = f'exec 13<&{there} 14>&{here}; exec 3<&13 4>&14 13<&- 14>&-; exec "$@"'
        self._process = subprocess.Popen(
            ["bash", "-c", script, "bash", *command],
            pass_fds=(there, here),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(there)
        os.close(here)
        self._to, self._from = out, into
        targets = self("Target.getTargets")["targetInfos"]
        target = next(each["targetId"] for each in targets if each["type"] == "page")
        self._session = self("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self(f"{domain}.enable")
        return self

    def __exit__(self, *_: object) -> None:
        self._session = ""
        with suppress(AssertionError, OSError):
            self("Browser.close")
        try:
            self._process.wait(timeout=10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._to)
        os.close(self._from)

    def __call__(self, method: str, **params: Any) -> Any:
        """Call a method of the DevTools protocol and wait for its answer."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next(method)
            if answer.get("id") == self._number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _next(self, doing: str) -> Any:
        end = time.monotonic() + _LIMIT
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._from], [], [], max(0.0, end - time.monotonic()))
            assert ready, f"Chromium did not answer {doing} within {_LIMIT:.0f} s"
            data = os.read(self._from, 1 << 16)
            assert data, f"Chromium ended while it was to do {doing}"
            self._rest += data
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, file: Path, *, width: int = 1280, dark: bool = False, fragment: str = "") -> None:
        """Open a page from disk, as wide as this, and wait until it has drawn itself."""
        self.events.clear()
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self("Emulation.setEmulatedMedia", features=scheme)
        self("Emulation.setDeviceMetricsOverride", width=width, height=860, deviceScaleFactor=1, mobile=width < 500)
        self("Page.navigate", url="about:blank")
        self("Page.navigate", url=file.as_uri() + fragment)
        end = time.monotonic() + _LIMIT
        while not self.ask("document.documentElement?.dataset.ready || ''"):
            assert time.monotonic() < end, f"{file.name} never became ready: {self.complaints}"
            time.sleep(0.02)

    def ask(self, expression: str) -> Any:
        """What an expression is in the page."""
        answer = self("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def press(self, key: str, code: int = 0) -> None:
        """Press a key; characters type themselves."""
        text = {"text": key} if len(key) == 1 else {}
        self("Input.dispatchKeyEvent", type="keyDown", key=key, windowsVirtualKeyCode=code, **text)
        self("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def picture(self, file: Path) -> Path:
        """What is to be seen now."""
        file.write_bytes(base64.b64decode(self("Page.captureScreenshot", format="png")["data"]))
        return file

    @property
    def complaints(self) -> list[str]:
        """What the page wrote to the console, and errors that nobody caught."""
        said = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(each["params"])[:400] for each in self.events if each.get("method") in said]

    @property
    def requests(self) -> list[str]:
        """Every address that was asked for."""
        asked = [each for each in self.events if each.get("method") == "Network.requestWillBeSent"]
        return [each["params"]["request"]["url"] for each in asked]
