"""A real browser without a package for it: headless Chromium, driven over the pipe of its DevTools protocol."""

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
SECONDS = 40  # that an answer may take on a busy machine
LAUNCH = """
import fcntl, os, sys
ends = [fcntl.fcntl(int(end), fcntl.F_DUPFD, 64) for end in sys.argv[1:3]]
for end, number in zip(ends, (3, 4)):
    os.dup2(end, number)
os.execv(sys.argv[3], sys.argv[3:])
"""  # Chromium reads commands from file descriptor 3 and answers on 4
KEYS = {"Tab": 9, "Enter": 13, "Space": 32}


def find_browser() -> str | None:
    """The one that BESPOKE_BROWSER names, one that is installed, or Playwright's own in the virtual environment."""
    if named := os.environ.get("BESPOKE_BROWSER"):
        return named
    installed = (shutil.which(name) for name in NAMES)
    return next((path for path in (*installed, *_playwrights()) if path), None)


def _playwrights() -> list[str]:
    """The newest first: their folders are numbered."""
    folder = Path(sys.prefix) / "browsers"
    return sorted(str(path) for path in folder.glob("chromium-*/chrome-*/chrome"))[::-1]


class Page:
    """One tab: what it does, and what it has said and asked for."""

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back, self._buffer, self._ids = to, back, b"", itertools.count(1)
        self.session: str | None = None
        self.complaints: list[str] = []  # console errors, warnings, and exceptions
        self.requests: list[str] = []  # addresses

    def send(self, method: str, **params: Any) -> dict[str, Any]:
        number = next(self._ids)
        message = {"id": number, "method": method, "params": params}
        if self.session:
            message["sessionId"] = self.session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._receive()
            if answer.get("id") == number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']['message']}")
                result: dict[str, Any] = answer["result"]
                return result

    def _receive(self) -> dict[str, Any]:
        until = time.monotonic() + SECONDS
        while b"\0" not in self._buffer:
            if not select.select([self._back], [], [], max(0.0, until - time.monotonic()))[0]:
                raise TimeoutError(f"the browser has said nothing for {SECONDS} seconds")
            got = os.read(self._back, 1 << 20)
            if not got:
                raise RuntimeError("the browser has gone")
            self._buffer += got
        first, self._buffer = self._buffer.split(b"\0", 1)
        message: dict[str, Any] = json.loads(first)
        self._note(message.get("method", ""), message.get("params", {}))
        return message

    def _note(self, method: str, params: dict[str, Any]) -> None:
        if method == "Runtime.exceptionThrown":
            details = params["exceptionDetails"]
            self.complaints.append(str(details.get("exception", {}).get("description", details["text"])))
        elif method == "Runtime.consoleAPICalled" and params["type"] in ("error", "warning", "assert"):
            self.complaints.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
        elif method == "Log.entryAdded" and params["entry"]["level"] in ("error", "warning"):
            self.complaints.append(params["entry"]["text"])
        elif method == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])

    def open(self, path: Path, *, width: int = 1280, height: int = 900, dark: bool = False) -> None:
        self.resize(width, height)
        self.prefer(dark=dark)
        self.complaints.clear()
        self.requests.clear()
        self.send("Page.navigate", url=path.resolve().as_uri())
        self.wait("document.readyState === 'complete'")

    def resize(self, width: int, height: int = 900) -> None:
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )

    def prefer(self, *, dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])

    def evaluate(self, expression: str) -> Any:
        """Its value; a promise is waited for."""
        params = {"expression": expression, "awaitPromise": True, "returnByValue": True, "userGesture": True}
        answer = self.send("Runtime.evaluate", **params)
        if "exceptionDetails" in answer:
            raise RuntimeError(answer["exceptionDetails"].get("exception", {}).get("description", expression))
        return answer["result"].get("value")

    def wait(self, expression: str) -> None:
        until = time.monotonic() + SECONDS
        while not self.evaluate(f"Boolean({expression})"):
            if time.monotonic() > until:
                raise TimeoutError(f"not true after {SECONDS} seconds: {expression}")
            time.sleep(0.02)

    def press(self, key: str) -> None:
        code = {"key": " " if key == "Space" else key, "code": key, "windowsVirtualKeyCode": KEYS[key]}
        text = {"Enter": "\r", "Space": " "}.get(key)
        self.send("Input.dispatchKeyEvent", type="keyDown", **code, **({"text": text} if text else {}))
        self.send("Input.dispatchKeyEvent", type="keyUp", **code)

    def move(self, x: float, y: float) -> None:
        self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)

    def screenshot(self, path: Path, *, whole: bool = True) -> None:
        image = self.send("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(image))


@contextmanager
def browser(program: str) -> Iterator[Page]:
    """A tab of a browser with a profile of its own, which is gone afterwards."""
    to_browser, our_end = os.pipe()
    back, their_end = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run"]
        options += ["--disable-background-networking", "--hide-scrollbars", f"--user-data-dir={profile}"]
        command = [sys.executable, "-c", LAUNCH, str(to_browser), str(their_end), program, *options]
        process = subprocess.Popen(
            [*command, "--remote-debugging-pipe", "about:blank"],
            pass_fds=(to_browser, their_end),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        os.close(to_browser)
        os.close(their_end)
        try:
            page = Page(our_end, back)
            target = page.send("Target.createTarget", url="about:blank")["targetId"]
            page.session = page.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                page.send(f"{domain}.enable")
            yield page
        finally:
            process.terminate()
            try:
                process.wait(timeout=10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
            os.close(our_end)
            os.close(back)
