"""Tools of MCP servers, with real ones: each sample has a server, which ends with it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hosting import hosted, processes, run
from raising import raises

from lockstep.environments.author import EnvironmentClass
from lockstep.environments.host import ToolHost
from lockstep.errors import ConfigError

pytest.importorskip("mcp", reason="the package mcp is not installed: pip install 'lockstep-rl[mcp]'")
import mcp_notes

COMMON = Path(__file__).parents[1] / "common"


@pytest.fixture(scope="module")
def host() -> Iterator[ToolHost]:
    with hosted("mcp_notes:Notes", COMMON, max_live=4, tool_seconds=60.0) as host:
        yield host
        assert processes(host) == []


async def results(host: ToolHost, *calls: tuple[str, dict[str, Any]]) -> list[tuple[str, str | None]]:
    instance = await host.open({"first": "a"}, seed=1)
    await instance.reset()
    found = await instance.calls(calls, turn=0)
    await instance.close()
    return [(result.text, result.error) for result in found]


def test_the_tools_are_those_of_the_class_and_of_the_server(host: ToolHost) -> None:
    tools = {tool["function"]["name"]: tool["function"] for tool in host.tools}
    assert list(tools) == ["twice", "add", "count", "fail", "hang", "leave", "variable"]
    assert tools["add"]["description"] == "Keep a note."
    parameters = tools["add"]["parameters"]
    assert {name: each["type"] for name, each in parameters["properties"].items()} == {
        "text": "string",
        "times": "integer",
    }
    assert parameters["required"] == ["text"]


def test_each_sample_has_a_server_of_its_own(host: ToolHost) -> None:
    async def both() -> list[Any]:
        one, other = [await host.open({"first": first}, seed=1) for first in "ab"]
        said: list[Any] = [await one.reset(), await other.reset()]
        for instance in (one, other):
            said += [r.text for r in await instance.calls([("add", {"text": "x", "times": 2})], turn=0)]
            said.append(await instance.reward({}))
            await instance.close()
        return said

    # `count` answers {"notes": 3}, which has no "1".
    assert run(both()) == ["Notes: a", "Notes: b", "a, x, x", 0.0, "b, x, x", 0.0]


def test_results_and_errors(host: ToolHost) -> None:
    calls: list[tuple[str, dict[str, Any]]] = [
        ("twice", {"number": 4}),
        ("variable", {"name": "COLOUR"}),
        ("variable", {"name": "PYTHONPATH"}),
        ("fail", {}),
        ("add", {"text": "x", "times": "often"}),
        ("nothing", {}),
        ("add", {"text": "y"}),
    ]
    found = run(results(host, *calls))
    assert [kind for _, kind in found] == [None, None, None, "raised", "raised", "unknown-tool", None]
    texts = [text for text, _ in found]
    assert texts[:3] == ["8", "blue", "unset"] and texts[-1] == "a, y"
    assert texts[3].startswith("error: fail raised McpToolError: Error executing tool fail")
    assert "times" in texts[4]


@pytest.mark.slow
def test_a_server_that_hangs_ends_with_its_instance() -> None:
    with hosted("mcp_notes:Notes", COMMON, max_live=1, tool_seconds=20.0) as host:
        hung, after = run(results(host, ("hang", {}), ("add", {"text": "x"})))
        assert processes(host) == []
    assert hung == ("error: hang took longer than 20 s", "timeout")
    assert after[1] == "ended"


def test_a_server_that_exits_is_an_error_of_the_call(host: ToolHost) -> None:
    left, after = run(results(host, ("leave", {}), ("add", {"text": "x"})))
    assert left[1] == after[1] == "raised"
    assert "Connection closed" in left[0]
    assert processes(host) == []


@pytest.mark.parametrize(
    "name, message",
    [
        ("Clashing", "wrong-part: has two tools 'add'"),
        ("Unnamed", "missing-setting: has no `command`"),
    ],
)
def test_a_class_that_cannot_be_used_is_refused(name: str, message: str) -> None:
    found = EnvironmentClass.of(getattr(mcp_notes, name), f"mcp_notes:{name}")
    with raises(ConfigError, message):
        found.schemas()


def test_a_server_that_does_not_start() -> None:
    with pytest.raises(FileNotFoundError, match="no-such-program"):
        run(mcp_notes.Absent()._list_tools())
    with pytest.raises(Exception, match="Connection closed") as raised:
        run(mcp_notes.Silent()._list_tools())
    assert not isinstance(raised.value, ExceptionGroup)
