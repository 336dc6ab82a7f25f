"""How fast `lockstep view` is with a large run: 10^5 rollouts of 200 tokens, 10^5 steps of metrics.

    python benchmarks/view_large.py write DIR              # DIR/rollouts and DIR/metrics, 0.7 GB
    python benchmarks/view_server.py DIR --json FILE

Asks a server over HTTP; view_large.py measures the readers alone. Every try has a new process, an empty cache
folder, and files that are not in the page cache:
- paint: the first page of rollouts, and a first search, with no index;
- index: until the index that the first page has started holds all rollouts;
- search: of several words and ids and of the three views, once it does; the median of SEARCHED;
- curves: the page of the run, whose metrics are read for the first time, and then the points of eight charts;
- rss: the most memory that the process has had.

With Chromium, also the first contentful paint in a browser and the time to fetch and draw eight curves. Times
are wall seconds and CPU seconds of the server: on a busy machine, the first are mostly waiting.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import importlib.metadata
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from view_large import CHARTS, METRIC_STEPS, ROLLOUTS, TOKENS, metric_names

SEARCHED = 5
"""Requests of which the median counts."""
QUERIES = {
    "a rare word": "text=needle",
    "a frequent word": "text=answer",
    "a phrase": "text=therefore+the+answer",
    "a text that is not there": "text=qqqqqqqq",
    "two characters": "text=th",
    "two token ids": "ids=1004,1005",
    "largest gap": "only=largest+gap",
    "highest reward": "only=highest+reward",
    "truncated": "only=truncated",
}


class Server:
    """A new process of `lockstep view`, and requests to it."""

    def __init__(self, run: Path, cache: Path) -> None:
        command = [sys.executable, "-m", "lockstep", "view", str(run)]
        environment = os.environ | {"LOCKSTEP_CACHE": str(cache)}
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
        said = self.process.stdout.readline() if self.process.stdout else ""
        self.url = said.split()[-1]
        address = urlsplit(self.url)
        self.host, self.port, self.token = address.netloc, address.port, self.url.partition("token=")[2]

    def ask(self, path: str) -> tuple[dict[str, float], str]:
        """Request a page; what it cost, and the page."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        headers = {"Host": self.host, "Cookie": f"lockstep-view-{self.port}={self.token}"}
        wall, cpu = time.perf_counter(), self.cpu()
        with contextlib.closing(connection):
            connection.request("GET", path, headers=headers)
            answer = connection.getresponse()
            body = answer.read().decode()
        assert answer.status == 200, (path, answer.status, body)
        return {"wall_s": time.perf_counter() - wall, "cpu_s": self.cpu() - cpu}, body

    def cpu(self) -> float:
        """CPU seconds of the process."""
        fields = Path(f"/proc/{self.process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def most_memory(self) -> float:
        """The most MiB that the process has had."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.partition("VmHWM:")[2].split()[0]) / 1024

    def end(self) -> None:
        """Press Ctrl-C."""
        self.process.send_signal(signal.SIGINT)
        self.process.communicate(timeout=120)


@contextlib.contextmanager
def serving(run: Path) -> Iterator[Server]:
    """Serve a run with an empty cache folder; its files are not in the page cache."""
    forget(run)
    cache = Path(tempfile.mkdtemp(prefix="view-large-"))
    server = Server(run, cache)
    try:
        yield server
    finally:
        server.end()
        shutil.rmtree(cache)


def forget(run: Path) -> None:
    """Take the files of a run out of the page cache."""
    for path in filter(Path.is_file, run.rglob("*")):
        with path.open("rb") as file:
            os.fdatasync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def measure_rollouts(run: Path) -> dict[str, Any]:
    """Paint, index and searches in one process."""
    page = f"/run/{run.name}/rollouts"
    with serving(run) as server:
        began, cpu = time.perf_counter(), server.cpu()
        result: dict[str, Any] = {"paint": server.ask(page)[0]}
        result["first search, no index"] = server.ask(f"{page}?text=therefore+the+answer")[0]
        while "index is being built" in server.ask(f"{page}?text=needle&limit=1")[1]:
            time.sleep(1)
        result["index"] = {"wall_s": time.perf_counter() - began, "cpu_s": server.cpu() - cpu}
        result["search"] = {name: median_of(server, f"{page}?{query}") for name, query in QUERIES.items()}
        result["rss_mib"] = server.most_memory()
    return result


def median_of(server: Server, path: str) -> dict[str, float]:
    """The cost of a request: the median of SEARCHED, by each kind of seconds."""
    costs = [server.ask(path)[0] for _ in range(SEARCHED)]
    return {kind: statistics.median(cost[kind] for cost in costs) for kind in costs[0]}


def measure_curves(run: Path) -> dict[str, Any]:
    """The first read of metrics.jsonl, and the points of the charts after it."""
    names = ",".join(CHARTS)
    with serving(run) as server:
        result: dict[str, Any] = {"first read": server.ask(f"/run/{run.name}")[0]}
        result["points of eight"] = median_of(
            server, f"/run/{run.name}/curves.json?names={names}&smooth=1000"
        )
        result["rss_mib"] = server.most_memory()
    return result


async def measure_browser(folder: Path) -> dict[str, float]:
    """Seconds until Chromium has painted the first page of rollouts, and for it to draw eight curves."""
    sys.path.insert(0, str(Path(__file__).resolve().parents[1] / ".ci"))
    from view_browser import Browser

    result = {}
    painted = "performance.getEntriesByName('first-contentful-paint')[0]?.startTime"
    async with Browser() as browser:
        with serving(folder / "rollouts") as server:
            await browser.open(server.url.replace("/?", "/static/view.css?"))
            await browser.open(f"http://{server.host}/run/rollouts/rollouts")
            result["paint"] = await browser.wait(painted) / 1000
        with serving(folder / "metrics") as server:
            await browser.open(server.url.replace("/?", "/run/metrics?"))
            await browser.wait("document.querySelector('.chart').chart?.data[0].length > 1000")
            draw = (
                "(async () => { const began = performance.now(); {}; return performance.now() - began; })()"
            )
            for name, call in {
                "fetch and draw": "await lockstep.charts[0].load(true)",
                "draw": "lockstep.charts[0].draw()",
            }.items():
                times = [await browser.look(draw.replace("{}", call)) for _ in range(SEARCHED)]
                result[name] = statistics.median(times) / 1000
    return result


def measure(folder: Path, tries: int) -> dict[str, Any]:
    """All of it, several times."""
    versions = {
        name: importlib.metadata.version(name) for name in ("starlette", "uvicorn", "jinja2", "numpy")
    }
    result: dict[str, Any] = {
        "machine": {"cpus": os.cpu_count(), "cpu": _cpu_name(), "load": list(os.getloadavg())},
        "versions": {"python": platform.python_version(), **versions},
        "rollouts": {"number": ROLLOUTS, "tokens": TOKENS, "bytes": _bytes(folder / "rollouts")},
        "metrics": {"steps": METRIC_STEPS, "names": len(metric_names()), "bytes": _bytes(folder / "metrics")},
        "tries": [],
    }
    for _ in range(tries):
        one = {
            "rollouts": measure_rollouts(folder / "rollouts"),
            "curves": measure_curves(folder / "metrics"),
        }
        if shutil.which("chromium"):
            one["browser"] = asyncio.run(measure_browser(folder))
        one["load"] = os.getloadavg()[0]
        result["tries"].append(_rounded(one))
        print(json.dumps(result["tries"][-1]), flush=True)
    return result


def _bytes(run: Path) -> int:
    return sum(path.stat().st_size for path in run.rglob("*") if path.is_file())


def _cpu_name() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), "")


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    return round(value, 3) if isinstance(value, float) else value


def main() -> None:
    """Measure, and write the figures."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, help="that view_large.py has written")
    parser.add_argument("--json", type=Path, help="file for the figures")
    parser.add_argument("--tries", type=int, default=3)
    options = parser.parse_args()
    result = measure(options.folder, options.tries)
    if options.json is not None:
        options.json.write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
