"""Tools of an MCP server that speaks on its standard input and output: the extra `mcp`.

    class Clock(McpTools):
        command = "uvx mcp-server-time"

        def get_reward(self) -> float: ...

Each sample has a server of its own, which ends with it. Works with versions 1 and 2 of the `mcp` package.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from lockstep.common_errors import missing_package
from lockstep.environments.held import Held
from lockstep.errors import ConfigError

_missing: ImportError | None = None
try:  # here, and not at first use, so that the processes of all samples share what it loads
    from mcp import ClientSession, StdioServerParameters, stdio_client
    from mcp.types import PaginatedRequestParams
except ImportError as error:
    _missing = error


class McpToolError(RuntimeError):
    """The server answered a call with an error."""


class McpTools:
    """A class of tools that a server lists. Subclasses name the command, and may add tools, `reset` and
    rewards, which use the server's tools with `await self._call_tool(name, arguments)`.

    Raises:
        ConfigError: there is no command; the package `mcp` is missing.
    """

    command: str | Sequence[str] = ()
    """What starts the server, without a shell."""
    variables: Mapping[str, str] = {}
    """Environment variables of the server, beside HOME, LOGNAME, PATH, SHELL, TERM and USER."""
    _isolation = "process"  # what ends its process ends the server

    def __init__(self) -> None:
        if _missing is not None:
            raise missing_package(type(self).__name__, "mcp", extra="mcp", cause=_missing)
        if not self.command:
            raise ConfigError(
                f"missing-setting: {type(self).__name__} has no `command`; set it to what starts the server"
            )
        self._session = Held(self._connect)

    async def close(self) -> None:
        """End the server."""
        await self._session.close()

    async def _list_tools(self) -> list[dict[str, Any]]:
        session, tools, cursor = await self._session.get(), list[dict[str, Any]](), None
        while True:
            page = _json(await session.list_tools(params=PaginatedRequestParams(cursor=cursor)))
            tools += page["tools"]
            if not (cursor := page.get("nextCursor")):
                return [_schema(tool) for tool in tools]

    async def _call_tool(self, name: str, arguments: dict[str, Any]) -> Any:
        result = _json(await (await self._session.get()).call_tool(name, arguments))
        text = "\n".join(map(_text, result["content"]))
        only = result.get("structuredContent") if not result["content"] else None
        if result.get("isError"):
            raise McpToolError(text if only is None else json.dumps(only))
        return text if only is None else only

    @asynccontextmanager
    async def _connect(self) -> AsyncIterator[ClientSession]:
        program, *options = shlex.split(self.command) if isinstance(self.command, str) else self.command
        server = StdioServerParameters(command=program, args=options, env=dict(self.variables))
        async with stdio_client(server) as streams, ClientSession(*streams) as session:
            await session.initialize()
            yield session


def _json(message: Any) -> dict[str, Any]:
    """A message as the protocol writes it, whose names are the same in all versions of the package."""
    found: dict[str, Any] = message.model_dump(mode="json", by_alias=True, exclude_none=True)
    return found


def _schema(tool: Mapping[str, Any]) -> dict[str, Any]:
    described = {"name": tool["name"], "description": tool.get("description", "")}
    return {"type": "function", "function": {**described, "parameters": tool["inputSchema"]}}


def _text(block: Mapping[str, Any]) -> str:
    """What the policy reads of a part of a result."""
    text = block.get("text", block.get("resource", {}).get("text"))
    return f"[{block['type']} {block.get('mimeType', '')}: not shown]" if text is None else str(text)
