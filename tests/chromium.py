"""A real headless Chromium, driven over its DevTools protocol: what a page does, requests and prints."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import shutil
import subprocess
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp

EXECUTABLE = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
_FLAGS = (
    "--headless", "--no-sandbox", "--disable-gpu", "--enable-unsafe-swiftshader", "--disable-dev-shm-usage",
    "--disable-quic", "--no-first-run", "--disable-background-networking", "--disable-component-update",
    "--disable-sync", "--remote-debugging-port=0",
)  # fmt: skip


class Page:
    """One tab. errors: console errors and uncaught exceptions. requested: every address the page asked for."""

    def __init__(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        self._socket = socket
        self._ids = itertools.count(1)
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._reader = asyncio.create_task(self._read())
        self.errors: list[str] = []
        self.requested: list[str] = []

    async def send(self, method: str, **params: Any) -> Any:
        """One command of the protocol and its result."""
        number = next(self._ids)
        future = self._answers[number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": number, "method": method, "params": params})
        answer = await asyncio.wait_for(future, 60)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return answer["result"]

    async def _read(self) -> None:
        async for message in self._socket:
            event = json.loads(message.data)
            if "id" in event:
                self._answers.pop(event["id"]).set_result(event)
                continue
            params = event.get("params", {})
            if event["method"] == "Network.requestWillBeSent":
                self.requested.append(params["request"]["url"])
            elif event["method"] == "Runtime.exceptionThrown":
                details = params["exceptionDetails"]
                self.errors.append(details.get("exception", {}).get("description") or details["text"])
            elif event["method"] == "Runtime.consoleAPICalled" and params["type"] in ("error", "assert"):
                self.errors.append(" ".join(str(a.get("value", a.get("description"))) for a in params["args"]))
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                self.errors.append(params["entry"]["text"])

    async def open(self, path: Path) -> None:
        """Load a file and wait until the report says it is ready."""
        await self.send("Page.navigate", url=path.resolve().as_uri())
        await self.until("window.sweepReport !== undefined && document.readyState === 'complete'")

    async def run(self, script: str) -> Any:
        """The value of a JavaScript expression; a promise is awaited."""
        result = await self.send(
            "Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True, userGesture=True
        )
        if "exceptionDetails" in result:
            raise RuntimeError(result["exceptionDetails"]["exception"]["description"])
        return result["result"].get("value")

    async def until(self, script: str, timeout_s: float = 90.0) -> None:
        """Wait for an expression to become true."""
        deadline = time.monotonic() + timeout_s
        while not await self.run(f"Boolean({script})"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"never true: {script}; errors: {self.errors}")
            await asyncio.sleep(0.05)

    async def resize(self, width: int, height: int) -> None:
        """The window, in CSS pixels."""
        await self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 640
        )

    async def click(self, x: float, y: float) -> None:
        """A real mouse click at a place of the window."""
        await self.send("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
        await asyncio.sleep(0.3)  # the drawing library finds the nearest point when the mouse rests
        for kind in ("mousePressed", "mouseReleased"):
            await self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    async def press(self, key: str, code: int) -> None:
        """A key on whatever has the focus, for instance ("ArrowLeft", 37)."""
        for kind in ("keyDown", "keyUp"):
            await self.send("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code)

    async def screenshot(self, path: Path, clip: dict[str, float] | None = None) -> None:
        """PNG of the window, or of a rectangle of the page (x, y, width, height)."""
        options = {} if clip is None else {"clip": {**clip, "scale": 1}, "captureBeyondViewport": True}
        shot = await self.send("Page.captureScreenshot", format="png", **options)
        path.write_bytes(base64.b64decode(shot["data"]))


@asynccontextmanager
async def browser(width: int = 1280, height: int = 900, flags: Sequence[str] = ()) -> AsyncIterator[Page]:
    """A fresh Chromium with one empty page; both are gone afterwards."""
    assert EXECUTABLE is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        process = subprocess.Popen(
            [EXECUTABLE, *_FLAGS, *flags, f"--user-data-dir={profile}", "about:blank"],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        try:
            port = await _port(Path(profile) / "DevToolsActivePort", process)
            async with aiohttp.ClientSession() as session:
                async with session.get(f"http://127.0.0.1:{port}/json/list") as response:
                    targets = await response.json()
                address = next(t["webSocketDebuggerUrl"] for t in targets if t["type"] == "page")
                async with session.ws_connect(address, max_msg_size=0) as socket:
                    page = Page(socket)
                    for domain in ("Page", "Runtime", "Network", "Log"):
                        await page.send(f"{domain}.enable")
                    await page.resize(width, height)
                    yield page
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


async def _port(file: Path, process: subprocess.Popen[bytes]) -> int:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        assert process.poll() is None, "Chromium ended at once"
        if file.exists() and (lines := file.read_text().split()):
            return int(lines[0])
        await asyncio.sleep(0.05)
    raise TimeoutError("Chromium opened no debugging port")
