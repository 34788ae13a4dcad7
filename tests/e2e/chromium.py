"""A headless Chromium, whichever this machine has, spoken to in DevTools' own protocol.

Found in this order: a Chromium or Chrome on the path, or the one inside QtWebEngine.
"""

import base64
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import httpx
from websockets.sync.client import ClientConnection, connect

NAMES = ("chromium", "chromium-browser", "chromium-headless-shell", "google-chrome")
START_TIMEOUT_S = 60
ANSWER_TIMEOUT_S = 30

QT_WINDOW = """
from PyQt6.QtCore import QUrl
from PyQt6.QtWebEngineWidgets import QWebEngineView
from PyQt6.QtWidgets import QApplication
application = QApplication(["chromium"])
view = QWebEngineView()
view.resize({width}, {height})
view.load(QUrl("about:blank"))
view.show()
application.exec()
"""


def command(port: int, profile: Path, width: int, height: int) -> list[str] | None:
    """What starts a browser that listens on ``port``; None if there is none here."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    if found:
        return [
            found,
            "--headless=new",
            "--no-sandbox",  # it sees our own page only, often as root
            "--disable-gpu",
            f"--remote-debugging-port={port}",
            f"--user-data-dir={profile}",
            f"--window-size={width},{height}",
            "about:blank",
        ]
    probe = "import PyQt6.QtWebEngineWidgets"
    if subprocess.run([sys.executable, "-c", probe], capture_output=True).returncode:
        return None
    return [sys.executable, "-c", QT_WINDOW.format(width=width, height=height)]


class Page:
    """One tab."""

    def __init__(self, socket: ClientConnection) -> None:
        self._socket, self._asked = socket, 0
        self.complaints = list[str]()
        """What the console had to say as a warning or an error, and what was thrown."""
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Ask the browser, and note what it says meanwhile."""
        self._asked += 1
        self._socket.send(json.dumps({"id": self._asked, "method": method, "params": parameters}))
        while True:
            heard = json.loads(self._socket.recv(timeout=ANSWER_TIMEOUT_S))
            if heard.get("id") == self._asked:
                assert "error" not in heard, f"{method}: {heard['error']}"
                return heard["result"]
            self._note(heard)

    def _note(self, event: dict[str, Any]) -> None:
        match event:
            case {"method": "Runtime.exceptionThrown", "params": params}:
                self.complaints.append(json.dumps(params["exceptionDetails"])[:500])
            case {"method": "Runtime.consoleAPICalled", "params": {"type": kind, "args": args}}:
                if kind in ("error", "warning", "assert"):
                    self.complaints.append(f"{kind}: {args}")
            case {"method": "Log.entryAdded", "params": {"entry": entry}}:
                if entry["level"] in ("error", "warning"):
                    self.complaints.append(f"{entry['level']}: {entry['text']}")
            case _:
                pass

    def go(self, url: str) -> None:
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """The value of an expression, which may be a promise."""
        answer = self.call(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True
        )
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, script: str, timeout_s: float = 30) -> Any:
        """The value of an expression, once it is true."""
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline:
            if value := self.run(script):
                return value
            time.sleep(0.1)
        raise AssertionError(f"did not become true within {timeout_s} s: {script}")

    def dark(self, is_dark: bool) -> None:
        scheme = {"name": "prefers-color-scheme", "value": "dark" if is_dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])

    def screenshot(self, path: Path) -> None:
        data = self.call("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))


def is_here(port: int = 0) -> bool:
    """Whether a browser can be started."""
    return command(port, Path(), 0, 0) is not None


@contextmanager
def browse(port: int, directory: Path, width: int = 1360, height: int = 1180) -> Iterator[Page]:
    """A browser with one empty page, on a free port of this machine."""
    begin = command(port, directory / "profile", width, height)
    assert begin is not None, "no Chromium here"
    flags = {
        "QT_QPA_PLATFORM": "offscreen",
        "QTWEBENGINE_REMOTE_DEBUGGING": f"127.0.0.1:{port}",
        "QTWEBENGINE_CHROMIUM_FLAGS": "--no-sandbox --disable-gpu",
        "QTWEBENGINE_DISABLE_SANDBOX": "1",
        "XDG_RUNTIME_DIR": str(directory),
    }
    log = directory / "browser.log"
    with log.open("w") as output:
        process = subprocess.Popen(
            begin, stdout=output, stderr=subprocess.STDOUT, env=os.environ | flags
        )
    try:
        with connect(_socket(port, process, log), max_size=None, compression=None) as socket:
            yield Page(socket)
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(timeout=10)
        process.kill()
        process.wait()


def _socket(port: int, process: "subprocess.Popen[bytes]", log: Path) -> str:
    """Where the first page listens, once it does."""
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        with suppress(httpx.HTTPError, StopIteration):
            tabs = httpx.get(f"http://127.0.0.1:{port}/json", timeout=5).json()
            return next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
        time.sleep(0.1)
    raise AssertionError(f"the browser did not start:\n{log.read_text()[-2000:]}")
