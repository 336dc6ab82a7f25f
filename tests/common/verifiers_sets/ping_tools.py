"""The tool of ping_tasks."""

import verifiers.v1 as vf


class PingTools(vf.Toolset[vf.ToolsetConfig]):
    TOOL_PREFIX = "ping"

    @vf.tool
    def ping(self, n: int) -> str:
        """Ping."""
        return f"pong {n}"


if __name__ == "__main__":
    PingTools.run()
