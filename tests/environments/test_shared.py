"""Async environments in one process, and async ones in a process each."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosting import hosted, processes, run

from lockstep.environments.host import ToolHost
from lockstep.environments.results import ToolResult

TOOLS = '''
import asyncio, os, time

class Async:
    """Its methods meet in an event loop."""
    met = asyncio.Event()

    async def reset(self, **row):
        self.row, self.ticks = row, 0
        self.ticking = asyncio.create_task(self._tick())
        return "Go."

    async def _tick(self):
        while True:
            await asyncio.sleep(0.01)
            self.ticks += 1

    async def ticked(self) -> int:
        """Return how often the task in the background ran."""
        return self.ticks

    async def meet(self) -> str:
        """Wait for the other instance."""
        if Async.met.is_set():
            return "second"
        Async.met.set()
        await asyncio.sleep(0.3)
        return "first"

    async def wait(self) -> str:
        """Wait for ever."""
        await asyncio.sleep(3600)

    async def block(self) -> str:
        """Block the loop."""
        time.sleep(3600)

    async def leave(self) -> str:
        """End the process."""
        os._exit(4)

    async def where(self) -> int:
        """Return the process."""
        return os.getpid()

    async def get_reward(self) -> float:
        return 0.5
'''


@pytest.fixture(scope="module")
def host(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ToolHost]:
    folder = tmp_path_factory.mktemp("tools")
    (folder / "async_tools.py").write_text(TOOLS)
    with hosted("async_tools:Async", folder, isolation="shared", tool_seconds=3.0, max_live=8) as host:
        yield host


async def pair(host: ToolHost, *names: str) -> list[ToolResult]:
    """Both instances call at the same time, then both say where they are."""
    instances = [await host.open({"a": 1}, seed=0) for _ in names]
    assert [await instance.reset() for instance in instances] == ["Go."] * len(names)
    results = await asyncio.gather(
        *(instance.call(name, {}, turn=0, call=0) for instance, name in zip(instances, names, strict=True))
    )
    results += [await instance.call("where", {}, turn=1, call=0) for instance in instances]
    for instance in instances:
        await instance.close()
    return results


def texts(results: list[ToolResult]) -> list[str]:
    return [result.error or result.text for result in results]


def test_they_share_a_process_and_a_loop(host: ToolHost) -> None:
    *met, one, other = texts(run(pair(host, "meet", "meet")))
    assert sorted(met) == ["first", "second"]
    assert one == other and len(processes(host)) == 1

    async def rewarded() -> Any:
        instance = await host.open({}, seed=0)
        reward = await instance.reward({})
        await instance.close()
        return reward

    assert run(rewarded()) == 0.5


def test_one_that_awaits_too_long_costs_itself(host: ToolHost) -> None:
    late, fine, ended, where = texts(run(pair(host, "wait", "where")))
    assert (late, ended) == ("timeout", "ended")
    assert fine == where


@pytest.mark.parametrize("name, kind", [("block", "timeout"), ("leave", "died")])
def test_one_that_blocks_or_ends_the_process_costs_all(host: ToolHost, name: str, kind: str) -> None:
    (before,) = texts(run(pair(host)) or run(pair(host, "where")))[:1]
    first, _, ended, also = texts(run(pair(host, name, "wait")))
    assert first == kind and ended == "ended" and also == "ended"
    (after, _) = texts(run(pair(host, "where")))
    assert after != before and after.isdigit()
    assert len(processes(host)) == 1 and host._room._free == host.max_live


def test_tasks_in_the_background_run_between_calls(tmp_path: Path) -> None:
    (tmp_path / "async_tools_ticking.py").write_text(TOOLS)

    async def waited(host: ToolHost) -> list[int]:
        instance = await host.open({}, seed=0)
        await instance.reset()
        counts = [0]
        # Alone, a call lets the task run once or not at all.
        while len(counts) < 20 and counts[-1] - counts[-2:][0] < 5:
            await asyncio.sleep(1.0)
            counts.append(int((await instance.call("ticked", {}, turn=0, call=0)).text))
        await instance.close()
        return counts

    with hosted("async_tools_ticking:Async", tmp_path, max_live=1) as host:
        assert max(b - a for a, b in itertools.pairwise(run(waited(host)))) >= 5


def test_async_ones_in_a_process_each(tmp_path: Path) -> None:
    (tmp_path / "async_tools_alone.py").write_text(TOOLS)
    with hosted("async_tools_alone:Async", tmp_path, tool_seconds=3.0, max_live=8) as host:
        first, second, one, other = texts(run(pair(host, "meet", "meet")))
        assert (first, second) == ("first", "first") and one != other
        assert processes(host) == []
