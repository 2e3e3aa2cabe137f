"""A browser for tests: pages are opened, looked at, and worked with keys; over the DevTools pipe.

Chromium reads commands from its third file and answers on its fourth, JSON with a zero byte at
the end of each. Every wait has an end. `requests` and `problems` are what the page asked for,
and what went wrong in it.
"""

from __future__ import annotations

import json
import os
import select
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
QUIET = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
         "--disable-background-networking", "--disable-component-update", "--disable-sync",
         "--remote-debugging-pipe")  # fmt: skip
PATIENCE = 30.0  # seconds for one answer
# Becomes the browser, with the two ends of pipes where it looks for them.
PIPED = """
import os, sys
read, write = (os.dup(int(one)) for one in sys.argv[1:3])
while min(read, write) < 5:
    read, write = os.dup(read), os.dup(write)
os.dup2(read, 3), os.dup2(write, 4)
os.execv(sys.argv[3], sys.argv[3:])
"""
CODES = {"ArrowLeft": 37, "ArrowUp": 38, "ArrowRight": 39, "ArrowDown": 40, "PageUp": 33,
         "PageDown": 34, "End": 35, "Home": 36, "Enter": 13, "Tab": 9, "Escape": 27}  # fmt: skip


class Browser:
    """One window; use as `with`."""

    def __init__(self, profile: Path, width: int = 1400, height: int = 900) -> None:
        to_read, self._write = os.pipe()
        self._read, to_write = os.pipe()
        command = [CHROMIUM, *QUIET, f"--user-data-dir={profile}"]
        self._process = subprocess.Popen(
            [sys.executable, "-c", PIPED, str(to_read), str(to_write), *command],
            pass_fds=(to_read, to_write), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        self._held, self._number, self._session = b"", 0, None
        self.requests: list[str] = []
        self.problems: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.call(f"{domain}.enable")
        self.resize(width, height)

    def __enter__(self) -> Browser:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.wait(PATIENCE)
        os.close(self._write)
        os.close(self._read)

    def resize(self, width: int, height: int) -> None:
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height,
                  deviceScaleFactor=1, mobile=False)  # fmt: skip

    def open(self, address: str) -> None:
        self.call("Page.navigate", url=address)

    def ask(self, expression: str) -> Any:
        """Returns the value of an expression of JavaScript, awaited."""
        told = self.call(
            "Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True
        )
        if "exceptionDetails" in told:
            raise AssertionError(f"{expression}: {told['exceptionDetails']}")
        return told["result"].get("value")

    def wait(self, expression: str) -> None:
        """Returns as soon as an expression is true."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            if self.ask(f"!!({expression})"):
                return
            time.sleep(0.02)
        raise AssertionError(f"{expression} did not become true; problems: {self.problems}")

    def press(self, *keys: str) -> None:
        for key in keys:
            code = CODES.get(key, ord(key.upper()) if len(key) == 1 else 0)
            typed = {"text": "\r"} if key == "Enter" else {"text": key} if len(key) == 1 else {}
            named = {"key": key, "windowsVirtualKeyCode": code}
            self.call("Input.dispatchKeyEvent", type="keyDown", **named, **typed)
            self.call("Input.dispatchKeyEvent", type="keyUp", **named)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Sends one command; returns its result."""
        self._number += 1
        said = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            said["sessionId"] = self._session
        os.write(self._write, json.dumps(said).encode() + b"\0")
        while True:
            told = self._message()
            if told.get("id") == self._number:
                if "error" in told:
                    raise AssertionError(f"{method}: {told['error']}")
                return told["result"]
            self._notice(told)

    def _notice(self, told: dict[str, Any]) -> None:
        about = told.get("params", {})
        if told.get("method") == "Network.requestWillBeSent":
            self.requests.append(about["request"]["url"])
        elif told.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(about["exceptionDetails"]))
        elif told.get("method") == "Log.entryAdded" and about["entry"]["level"] == "error":
            self.problems.append(about["entry"]["text"])

    def _message(self) -> dict[str, Any]:
        end = time.monotonic() + PATIENCE
        while b"\0" not in self._held:
            ready, _, _ = select.select([self._read], [], [], max(0.0, end - time.monotonic()))
            block = os.read(self._read, 1 << 16) if ready else b""
            if not block:
                raise AssertionError("chromium does not answer")
            self._held += block
        message, _, self._held = self._held.partition(b"\0")
        return json.loads(message)
