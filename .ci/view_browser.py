"""A headless Chromium, driven through its DevTools protocol."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import aiohttp

SECONDS = 30.0
"""Deadline of every wait."""
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--remote-debugging-port=0",
)


class Browser:
    """One page of a Chromium with a new profile. `problems`: console errors, exceptions, and requests that
    failed, were blocked, or went elsewhere than `origin`."""

    def __init__(self) -> None:
        self.problems: list[str] = []
        self.requests: list[str] = []
        self.origin = ""
        self._answers: dict[int, asyncio.Future[Any]] = {}
        self._number = 0
        self._loaded: set[str] = set()
        self._reader: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Browser:
        self._profile = tempfile.mkdtemp(prefix="chromium-")
        command = ["chromium", *FLAGS, f"--user-data-dir={self._profile}", "about:blank"]
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        # Its temporary files are in the profile too; its processes are a group of their own.
        environment = os.environ | {"TMPDIR": self._profile}
        self._process = subprocess.Popen(command, env=environment, start_new_session=True, **quiet)
        self._session = aiohttp.ClientSession()
        try:
            await self._attach()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def _attach(self) -> None:
        port = (await _until(self._port_file, "chromium has not started")).split()[0]
        async with self._session.get(f"http://127.0.0.1:{port}/json/list") as answer:
            pages = [each for each in await answer.json() if each["type"] == "page"]
        self._socket = await self._session.ws_connect(pages[0]["webSocketDebuggerUrl"], max_msg_size=2**28)
        self._reader = asyncio.create_task(self._read())
        for domain in ("Page", "Runtime", "Network", "Log"):
            await self.call(f"{domain}.enable")
        await self.call("Page.setLifecycleEventsEnabled", enabled=True)

    async def __aexit__(self, *_: object) -> None:
        if self._reader is not None:
            self._reader.cancel()
        await self._session.close()
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        # Processes that outlive the first one still write to the profile.
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        await _until(self._removed, "the profile of chromium is still written")

    def _removed(self) -> bool | None:
        """Remove the profile; None if it has to be tried again."""
        shutil.rmtree(self._profile, ignore_errors=True)
        return None if os.path.exists(self._profile) else True

    def _port_file(self) -> str | None:
        path = Path(self._profile, "DevToolsActivePort")
        return (path.read_text() or None) if path.exists() else None

    async def call(self, method: str, **parameters: Any) -> Any:
        """Call a method of the protocol."""
        self._number += 1
        answer = self._answers[self._number] = asyncio.get_running_loop().create_future()
        await self._socket.send_json({"id": self._number, "method": method, "params": parameters})
        return await asyncio.wait_for(answer, SECONDS)

    async def _read(self) -> None:
        async for message in self._socket:
            told = json.loads(message.data)
            if "id" in told:
                answer = self._answers.pop(told["id"])
                if "error" in told:
                    answer.set_exception(RuntimeError(str(told["error"])))
                else:
                    answer.set_result(told["result"])
            else:
                self._event(told["method"], told["params"])

    def _event(self, method: str, told: Any) -> None:
        if method == "Page.lifecycleEvent" and told["name"] == "load":
            self._loaded.add(told["loaderId"])
        elif method == "Page.javascriptDialogOpening":
            self.problems.append(f"dialog: {told['message']}")
        elif method == "Runtime.exceptionThrown":
            self.problems.append(f"exception: {told['exceptionDetails']}")
        elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning"):
            self.problems.append(f"console: {told['args']}")
        elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.problems.append(f"log: {told['entry']['text']} {told['entry'].get('url', '')}")
        elif method == "Network.loadingFailed" and not told.get("canceled"):
            self.problems.append(f"request failed: {told['errorText']} {told.get('blockedReason', '')}")
        elif method == "Network.requestWillBeSent":
            url = told["request"]["url"] + told["request"].get("urlFragment", "")
            self.requests.append(url)
            if not url.startswith((self.origin, "data:", "about:")):
                self.problems.append(f"request to elsewhere: {url}")

    async def open(self, url: str) -> None:
        """Load a page."""
        told = await self.call("Page.navigate", url=url)
        # Not any load event will do: an earlier page may still be loading. A fragment alone loads nothing.
        until = time.monotonic() + SECONDS
        while "loaderId" in told and told["loaderId"] not in self._loaded:
            if time.monotonic() > until:
                raise TimeoutError(f"not loaded after {SECONDS:g} s: {url}")
            await asyncio.sleep(0.02)

    async def look(self, expression: str) -> Any:
        """The value of an expression of JavaScript."""
        told = await self.call(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in told:
            raise RuntimeError(f"{expression}: {told['exceptionDetails']['exception']['description']}")
        return told["result"].get("value")

    async def _look(self, expression: str) -> Any:
        """As `look`; None while one document takes the place of another."""
        try:
            return await self.look(expression)
        except RuntimeError as error:
            if "context" in str(error) or "navigated" in str(error):
                return None
            raise

    async def wait(self, expression: str) -> Any:
        """Wait until an expression is true; its value."""
        until = time.monotonic() + SECONDS
        while not (value := await self._look(expression)):
            if time.monotonic() > until:
                raise TimeoutError(f"still false after {SECONDS:g} s: {expression}")
            await asyncio.sleep(0.05)
        return value

    async def mouse(self, kind: str, x: float, y: float, *, pressed: bool = False) -> None:
        """kind: mouseMoved, mousePressed or mouseReleased."""
        button = "none" if kind == "mouseMoved" and not pressed else "left"
        await self.call(
            "Input.dispatchMouseEvent", type=kind, x=x, y=y, button=button, buttons=int(pressed), clickCount=1
        )

    async def press(self, key: str) -> None:
        """Press a key."""
        text = {"text": key} if len(key) == 1 else {}
        await self.call("Input.dispatchKeyEvent", type="keyDown", key=key, **text)
        await self.call("Input.dispatchKeyEvent", type="keyUp", key=key)

    async def resize(self, width: int, *, dark: bool = False) -> None:
        """Set the width of the window, and the colours that the system prefers."""
        size = {"width": width, "height": 844, "deviceScaleFactor": 1, "mobile": width < 600}
        await self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        await self.call("Emulation.setEmulatedMedia", features=[scheme])

    async def shoot(self, file: Path, *, height: int | None = None) -> None:
        """Write a picture of the window, or of the first `height` pixels of the page."""
        clip = {}
        if height is not None:
            width = await self.look("innerWidth")
            clip = {"clip": {"x": 0, "y": 0, "width": width, "height": height, "scale": 1}}
        told = await self.call(
            "Page.captureScreenshot", format="png", captureBeyondViewport=bool(clip), **clip
        )
        file.write_bytes(base64.b64decode(told["data"]))


async def _until(look: Any, complaint: str) -> Any:
    until = time.monotonic() + SECONDS
    while (value := look()) is None:
        if time.monotonic() > until:
            raise TimeoutError(f"{complaint} after {SECONDS:g} s")
        await asyncio.sleep(0.05)
    return value
