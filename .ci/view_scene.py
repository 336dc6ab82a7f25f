"""What the checks of `lockstep view` share: runs, a server of them, a browser, and how they are compared."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from view_browser import Browser

ROOT = Path(__file__).resolve().parents[1]
COMMAND = (sys.executable, "-m", "lockstep")
TRAIN = (*COMMAND, "train", "grpo", "--recipe", "tiny", "--log.token_details", "true")
CHART = "[...document.querySelectorAll('.chart[data-metric=\"{}\"]')].find(each => each.checkVisibility())"


@dataclass(kw_only=True)
class Scene:
    """A server of runs, and a browser that has its token."""

    browser: Browser
    url: str
    """With the token."""
    source: Path
    """Folder of the package that serves."""
    runs: Path
    """finished, running, and those of view_runs."""
    training: Training
    """Writes `running`."""

    @property
    def base(self) -> str:
        """The server's address."""
        return self.url.partition("/?")[0]

    @property
    def token(self) -> str:
        """The token of the URL."""
        return self.url.partition("token=")[2]

    async def open(self, run: str, page: str = "") -> None:
        """Load a page of a run."""
        await self.browser.open(f"{self.base}/run/{run}{page}")
        if not await self.browser.look("document.querySelector('main') !== null"):
            raise AssertionError(f"{page or run}: {await self.browser.look('document.body.innerText')}")

    async def curve(self, metric: str, *, until: str = "true", count: int = 2) -> list[list[float]]:
        """The first columns of a chart's data, x first, once there are some and `until` is true of `data`."""
        chart = CHART.format(metric)
        return await self.browser.wait(
            f"(chart => {{ const data = chart?.data; return data && ({until}) && "
            f"[...data].slice(0, {count}).map(column => [...column]); }})({chart}?.chart)"
        )

    async def texts(self, selector: str) -> list[str]:
        """The texts of all elements that a selector finds."""
        found = f"[...document.querySelectorAll({json.dumps(selector)})]"
        return await self.browser.look(f"{found}.map(each => each.textContent.trim())")

    async def unfold(self) -> None:
        """Open the charts of all metrics."""
        await self.browser.look("document.querySelectorAll('details').forEach(each => { each.open = true; })")

    async def main(self) -> str:
        """The text of the page."""
        return await self.browser.look(
            "document.querySelector('main')?.textContent ?? document.body.outerHTML"
        )

    def ask(
        self, path: str, *, method: str = "GET", host: str | None = None, cookie: str | None = None
    ) -> http.client.HTTPResponse:
        """Request a page without the browser; with the right cookie and host unless others are given."""
        address = urlsplit(self.base)
        connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=30)
        sent = f"lockstep-view-{address.port}={self.token}" if cookie is None else cookie
        with contextlib.closing(connection):
            headers = {"Host": host or address.netloc, "Cookie": sent}
            connection.request(method, path, headers=headers)
            answer = connection.getresponse()
            answer.text = answer.read().decode()  # type: ignore[attr-defined]
        return answer


class Training:
    """A process that trains a run without end; it is stopped, except while a check lets it go on."""

    def __init__(self, run: Path, *, begin: bool) -> None:
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        command = [*TRAIN, "--steps", "100000", "--run-dir", str(run)]
        self.run, self._process = run, subprocess.Popen(command, **quiet) if begin else None

    def __enter__(self) -> Training:
        return self

    def __exit__(self, *_: object) -> None:
        if self._process is not None:
            for sent in (signal.SIGCONT, signal.SIGINT):
                self._process.send_signal(sent)
            self._process.wait(120)

    def wait(self) -> None:
        """Wait for three steps, and stop it."""
        assert self._process is not None
        while not (self.run / "metrics.jsonl").exists() or len(steps(self.run)) < 3:
            if self._process.poll() is not None:
                raise RuntimeError(f"the run ended with {self._process.returncode}")
            time.sleep(0.2)
        self._process.send_signal(signal.SIGSTOP)

    @contextlib.contextmanager
    def goes_on(self) -> Iterator[None]:
        """Let it go on."""
        assert self._process is not None
        self._process.send_signal(signal.SIGCONT)
        try:
            yield
        finally:
            self._process.send_signal(signal.SIGSTOP)


def lines(file: Path) -> list[dict[str, Any]]:
    """Rows of JSON Lines; not the last one, if it is being written."""
    return [json.loads(line) for line in file.read_text().splitlines(keepends=True) if line.endswith("\n")]


def steps(run: Path) -> list[dict[str, Any]]:
    """Metrics of the steps."""
    return [row for row in lines(run / "metrics.jsonl") if "evaluation" not in row]


def figures(value: float) -> float:
    """The number that a page shows: four significant digits."""
    return float(f"{value:.4g}")


def number(text: str) -> float:
    """The number that is meant by a text of a page."""
    return float(text.replace(",", "").replace("\N{MINUS SIGN}", "-"))


def same(what: str, found: Any, expected: Any) -> None:
    """Compare; raise AssertionError with both."""
    if found != expected:
        raise AssertionError(f"{what}:\n  the page has {found!r:.2000}\n  expected     {expected!r:.2000}")
    print(f"  {what}", flush=True)


def there(what: str, text: str, *parts: str) -> None:
    """Check that a text has all parts."""
    same(what, [part for part in parts if part not in text], [])


@contextlib.contextmanager
def serving(source: Path, *paths: Path, cache: Path) -> Iterator[str]:
    """Run `lockstep view` as a user does; yield the URL. It must end quietly at a Ctrl-C."""
    process = view(source, paths, cache=cache)
    try:
        yield url_of(process)
    except BaseException:
        print(f"the server wrote: {_end(process)!r}")
        raise
    same("Ctrl-C: exit status and stderr", (_end(process), process.returncode), ("", 0))


def _end(process: subprocess.Popen[str]) -> str:
    """Press Ctrl-C; what the process wrote to stderr."""
    process.send_signal(signal.SIGINT)
    return process.communicate(timeout=60)[1]


def view(source: Path, arguments: Sequence[Any], *, cache: Path) -> subprocess.Popen[str]:
    """Start `lockstep view` from `source`, with an index of its own."""
    environment = {**os.environ, "PYTHONPATH": str(source), "LOCKSTEP_CACHE": str(cache)}
    command = [*COMMAND, "view", *map(str, arguments)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, env=environment, text=True, **pipes)


def url_of(process: subprocess.Popen[str]) -> str:
    """The URL that a server prints."""
    for line in process.stdout or ():
        if found := re.search(r"http://\S+", line):
            return found[0]
    raise RuntimeError(f"the server printed no URL: {process.communicate(timeout=60)[1]}")
