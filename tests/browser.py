"""A headless Chromium, driven over its DevTools pipe (https://chromedevtools.github.io/devtools-protocol/): no driver, no
package, no port. One process serves many pages."""

import base64
import itertools
import json
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome", "chrome"))), None)
FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--disable-extensions", "--disable-dev-shm-usage", "--hide-scrollbars",
    "--remote-debugging-pipe",
)  # fmt: skip


class Browser:
    """A tab. `told` is what the page said on its console and what it asked the network for, beside itself."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()

        def descriptors() -> None:  # the protocol's: it reads 3 and writes 4
            kept = os.dup(theirs_out)  # theirs_out may be 3
            os.dup2(theirs_in, 3)
            os.dup2(kept, 4)

        self._process = subprocess.Popen(
            [CHROMIUM, *FLAGS, f"--user-data-dir={self._folder.name}", "about:blank"], pass_fds=(3, 4),
            preexec_fn=descriptors,  # noqa: PLW1509  (dup2 takes no lock)
            stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(theirs_in)
        os.close(theirs_out)
        self._ids, self._rest, self._session = itertools.count(1), b"", None
        self.told: list[str] = []
        target = self.do("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.do(f"{domain}.enable")

    def do(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command and its answer; events on the way are looked at."""
        number = next(self._ids)
        order = {"id": number, "method": method, "params": parameters}
        os.write(self._out, json.dumps(order | ({"sessionId": self._session} if self._session else {})).encode() + b"\0")
        while (answer := self._next()).get("id") != number:
            self._hear(answer)
        assert "error" not in answer, (method, answer)
        return answer["result"]

    def open(self, page: Path, width: int, height: int = 900, dark: bool = False) -> None:
        """Load a file in a window of this size (CSS pixels) and this preference of colours."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.do("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600)
        self.do("Emulation.setEmulatedMedia", features=scheme)
        self.told.clear()
        assert "errorText" not in self.do("Page.navigate", url=page.resolve().as_uri()), page
        while (event := self._next()).get("method") != "Page.loadEventFired":
            self._hear(event)

    def ask(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        answer = self.do("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def screenshot(self) -> bytes:
        """The whole page as PNG."""
        return base64.b64decode(self.do("Page.captureScreenshot", captureBeyondViewport=True)["data"])

    def pdf(self) -> bytes:
        return base64.b64decode(self.do("Page.printToPDF")["data"])

    def close(self) -> None:
        self._session = None
        self.do("Browser.close")
        self._process.wait(timeout=30)
        os.close(self._in)
        os.close(self._out)
        self._folder.cleanup()

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            got = os.read(self._in, 1 << 20)
            assert got, "the browser has ended"
            self._rest += got
        message, self._rest = self._rest.split(b"\0", 1)
        return json.loads(message)

    def _hear(self, event: dict[str, Any]) -> None:
        about = event.get("params", {})
        match event.get("method"):
            case "Runtime.consoleAPICalled" | "Runtime.exceptionThrown" | "Log.entryAdded":
                self.told.append(json.dumps(about))
            case "Network.requestWillBeSent" if about["type"] != "Document":
                self.told.append(about["request"]["url"])
