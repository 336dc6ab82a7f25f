"""Environments of the tools of notes_server.py."""

import sys
from pathlib import Path

from lockstep.environments.mcp_tools import McpTools

SERVER = Path(__file__).parent / "notes_server.py"


class Notes(McpTools):
    command = (sys.executable, str(SERVER))
    variables = {"COLOUR": "blue"}  # noqa: RUF012

    async def reset(self, first: str) -> str:
        return "Notes: " + await self._call_tool("add", {"text": first})

    def twice(self, number: int) -> int:
        """Double a number.

        Args:
            number: It.
        """
        return 2 * number

    async def get_reward(self) -> float:
        return (await self._call_tool("count", {})).count("1")


class Clashing(Notes):
    def add(self) -> str:
        """Has the name of a tool of the server."""
        return ""


class Absent(Notes):
    command = "no-such-program --flag"


class Silent(Notes):
    command = (sys.executable, "-c", "")


class Unnamed(McpTools):
    pass
