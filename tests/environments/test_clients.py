"""What clients of servers share, without their packages and servers."""

import asyncio
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from lockstep.environments.held import Held
from lockstep.environments.mcp_tools import McpToolError, McpTools
from lockstep.environments.openenv_game import OpenEnvGame


def test_what_could_not_be_entered_is_left_without_another_error():
    @asynccontextmanager
    async def lost():
        async with asyncio.TaskGroup():
            raise ConnectionError("connection closed")
        yield

    async def used():
        held = Held(lost)
        try:
            await held.get()
        finally:
            await held.close()

    with pytest.raises(ConnectionError, match="connection closed"):
        asyncio.run(used())


@pytest.mark.parametrize(
    ("told", "text"),
    [({"content": []}, '{"code": 3}'), ({"content": [{"type": "text", "text": "no"}]}, "no")],
)
def test_an_mcp_server_may_answer_errors_as_data(told, text):
    message = {**told, "structuredContent": {"code": 3}, "isError": True}

    class Session:
        async def call_tool(self, name, arguments):
            return SimpleNamespace(model_dump=lambda **how: message)

    @asynccontextmanager
    async def session():
        yield Session()

    async def called():
        tools = McpTools.__new__(McpTools)
        tools._session = Held(session)
        try:
            return await tools._call_tool("fail", {})
        finally:
            await tools.close()

    with pytest.raises(McpToolError) as raised:
        asyncio.run(called())
    assert str(raised.value) == text
    message.pop("isError")
    assert asyncio.run(called()) == ({"code": 3} if not told["content"] else text)


def test_an_action_that_is_nested_too_deeply_is_the_policys_mistake():
    assert "is no JSON" in OpenEnvGame.__new__(OpenEnvGame)._written("[" * 100_000)
