"""A real browser without a window: headless Chromium, driven through a pipe with the DevTools protocol."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium")
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-extensions", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--no-default-browser-check", "--metrics-recording-only", "--mute-audio", "--remote-debugging-pipe",
)  # fmt: skip
TIMEOUT_S = 60.0


class Browser:
    """One page. ``errors`` are console messages and exceptions since ``open``; ``requests`` are its requests."""

    def __init__(self, to_fd: int, from_fd: int) -> None:
        self._to, self._from = to_fd, from_fd
        self._rest = b""
        self._number = 0
        self._session: str | None = None
        self.errors: list[str] = []
        self.requests: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command to the browser and return its answer."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method, "params": params}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                return answer["result"]

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False, script: bool = True) -> None:
        """Show a file, and wait until it is there."""
        self.errors, self.requests = [], []
        self.call("Emulation.setScriptExecutionDisabled", value=not script)
        self.look(width=width, height=height, dark=dark)
        self.call("Page.navigate", url=path.as_uri())
        while self._read().get("method") != "Page.loadEventFired":
            pass

    def look(self, *, width: int, height: int = 900, dark: bool = False) -> None:
        """Another screen, or another time of day."""
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 500)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def ask(self, expression: str) -> Any:
        """The value of an expression in the page."""
        answer = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(
                str(answer["exceptionDetails"].get("exception", {}).get("description", answer["exceptionDetails"]))
            )
        return answer["result"].get("value")

    def press(self, key: str) -> None:
        """A key, where the focus is."""
        code = {"Tab": 9, "ArrowLeft": 37, "ArrowRight": 39, "Home": 36, "End": 35, " ": 32, "Enter": 13}[key]
        for kind in ("rawKeyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent", type=kind, key=key, code="Space" if key == " " else key, windowsVirtualKeyCode=code
            )

    def picture(self, path: Path, *, whole: bool = True) -> None:
        """Write the visible part of the page, or all of it, as a PNG."""
        shown = self.call("Page.captureScreenshot", captureBeyondViewport=whole, optimizeForSpeed=True)
        path.write_bytes(base64.b64decode(shown["data"]))

    def _read(self) -> dict[str, Any]:
        until = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._rest:
            if not select.select([self._from], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError(f"the browser said nothing for {TIMEOUT_S} s")
            piece = os.read(self._from, 1 << 20)
            if not piece:
                raise RuntimeError("the browser is gone")
            self._rest += piece
        text, _, self._rest = self._rest.partition(b"\0")
        message: dict[str, Any] = json.loads(text)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, told: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            self.errors.append(
                str(told["exceptionDetails"].get("exception", {}).get("description", told["exceptionDetails"]["text"]))
            )
        elif method == "Runtime.consoleAPICalled":
            self.errors.append(" ".join(str(argument.get("value", "")) for argument in told["args"]))
        elif method == "Log.entryAdded":
            self.errors.append(told["entry"]["text"])
        elif method == "Network.requestWillBeSent" and told["type"] != "Document":
            self.requests.append(told["request"]["url"][:200])


@contextmanager
def browser(folder: Path, *options: str) -> Iterator[Browser]:
    """A browser that keeps its files below ``folder``, which is empty, and is gone afterwards; ``options`` are its own."""
    assert PROGRAM is not None
    # It reads commands at descriptor 3 and answers at 4.
    its_in, our_out = os.pipe()
    our_in, its_out = os.pipe()
    high = [
        os.dup(descriptor) for descriptor in (its_in, its_out)
    ]  # of two that may be 3 and 4 themselves, none is overwritten too early
    command = f'exec "$@" 3<&{high[0]} 4>&{high[1]}'
    process = subprocess.Popen(
        ["/bin/bash", "-c", command, "browser", PROGRAM, *QUIET, *options, f"--user-data-dir={folder / 'profile'}"],
        pass_fds=high, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        env={**os.environ, "HOME": str(folder), "XDG_CONFIG_HOME": str(folder), "XDG_CACHE_HOME": str(folder)},
        start_new_session=True,
    )  # fmt: skip
    for descriptor in (its_in, its_out, *high):
        os.close(descriptor)
    try:
        yield Browser(our_out, our_in)
    finally:
        os.close(our_out)  # at which it ends by itself
        try:
            process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            process.wait()
        os.close(our_in)
