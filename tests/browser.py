"""A headless Chromium that a test looks through: real pages, real clicks, screenshots.

Driven by the DevTools protocol over websocket-client, which the Kubernetes client brings along.
"""

import base64
import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
_PATIENCE = 60.0
"""Seconds that the browser has to start, and every command to be answered."""


class Page:
    """One tab."""

    def __init__(self, address: str) -> None:
        import websocket

        self._socket = websocket.create_connection(address, timeout=_PATIENCE, suppress_origin=True)
        self._number = 0
        self.requests: list[str] = []
        """URLs that were asked for, the page's own among them."""
        self.problems: list[str] = []
        """What the console says of errors and warnings, and exceptions that nobody caught."""
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")
        self.call("Performance.enable", timeDomain="threadTicks")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """Send a command and return its answer; events that come before it are noted."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": params}))
        while True:
            message = json.loads(self._socket.recv())
            if message.get("id") == self._number:
                assert "error" not in message, (method, message["error"])
                return dict(message["result"])
            self._note(message)

    def look(self, *, width: int, height: int, scheme: str = "light") -> None:
        """Be a window of that size whose user prefers `scheme`; below 600 pixels a phone's."""
        is_phone = width < 600
        scale = 2 if is_phone else 1
        self.call(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=is_phone
        )
        self.call("Emulation.setTouchEmulationEnabled", enabled=is_phone)
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def open(self, url: str) -> None:
        """Go to a page."""
        self.call("Page.navigate", url=url)

    def run(self, script: str) -> Any:
        """Return the value of an expression, a promise's once it is kept."""
        done = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in done, done["exceptionDetails"]
        return done["result"].get("value")

    def wait(self, script: str) -> float:
        """Wait until an expression is true; return the seconds that it took."""
        started = time.monotonic()
        while not self.run(script):
            assert time.monotonic() < started + _PATIENCE, f"never true: {script}"
            time.sleep(0.02)
        return time.monotonic() - started

    def busy_seconds(self) -> float:
        """Return the processor time of the main thread since the page was gone to; the clock's depends on others."""
        metrics = self.call("Performance.getMetrics")["metrics"]
        return float(next(one["value"] for one in metrics if one["name"] == "TaskDuration"))

    def screenshot(self, path: Path, *, whole: bool = False) -> None:
        """Save what is seen, or the `whole` page, as PNG."""
        image = self.call("Page.captureScreenshot", captureBeyondViewport=whole)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(image["data"]))

    def close(self) -> None:
        """Let go of the tab."""
        self._socket.close()

    def _note(self, message: dict[str, Any]) -> None:
        params = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning", "assert"):
                self.problems.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] in ("error", "warning"):
                self.problems.append(params["entry"]["text"])


@contextmanager
def open_page() -> Iterator[Page]:
    """Start Chromium with one empty tab; it ends with the block."""
    import requests

    assert CHROMIUM is not None
    # As root, and in a container, Chromium has no sandbox and little shared memory.
    flags = ["--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--disable-gpu", "--no-first-run"]
    flags += ["--remote-debugging-port=0", "--remote-allow-origins=*", "--disable-background-networking"]
    # A desk has a mouse: without one, pages show at once what appears when it points there.
    flags += ["--blink-settings=primaryHoverType=2,availableHoverTypes=2,primaryPointerType=4,availablePointerTypes=4"]
    with TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        command = [CHROMIUM, *flags, f"--user-data-dir={folder}", "about:blank"]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            port = _port(Path(folder) / "DevToolsActivePort", process)
            tabs = requests.get(f"http://127.0.0.1:{port}/json/list", timeout=_PATIENCE).json()
            address = next(tab["webSocketDebuggerUrl"] for tab in tabs if tab["type"] == "page")
            page = Page(address)
            try:
                yield page
            finally:
                page.close()
        finally:
            process.terminate()
            process.wait(_PATIENCE)


def _port(file: Path, process: "subprocess.Popen[bytes]") -> int:
    deadline = time.monotonic() + _PATIENCE
    while time.monotonic() < deadline:
        assert process.poll() is None, f"Chromium ended with code {process.returncode}"
        if file.exists() and (lines := file.read_text().splitlines()):
            return int(lines[0])
        time.sleep(0.05)
    raise AssertionError("Chromium did not say where it listens")
