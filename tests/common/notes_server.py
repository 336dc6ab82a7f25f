"""An MCP server on standard input and output, written with the `mcp` package, version 1 or 2: it keeps notes
for as long as it lives."""

import os
import time

try:
    from mcp.server.mcpserver import MCPServer
except ImportError:
    from mcp.server.fastmcp import FastMCP as MCPServer

server = MCPServer("notes")
notes: list[str] = []


@server.tool()
def add(text: str, times: int = 1) -> str:
    """Keep a note."""
    notes.extend([text] * times)
    return ", ".join(notes)


@server.tool()
def count() -> dict[str, int]:
    """Count the notes."""
    return {"notes": len(notes)}


@server.tool()
def fail() -> str:
    """Fail."""
    raise LookupError("by design")


@server.tool()
def hang() -> str:
    """Never answer."""
    time.sleep(600)
    return ""


@server.tool()
def leave() -> str:
    """End the server."""
    os._exit(3)


@server.tool()
def variable(name: str) -> str:
    """Read an environment variable."""
    return os.environ.get(name, "unset")


if __name__ == "__main__":
    server.run()
