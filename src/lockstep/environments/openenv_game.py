"""A game on an OpenEnv server: the extra `openenv`.

    class Echo(OpenEnvGame):
        url = "http://127.0.0.1:8000"
        action = "message"               # the field of an action that takes the policy's text
        observation = "echoed_message"   # the field of an observation that the policy reads

Each sample has a session of its own, so a server needs as many as `environment.max_live`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lockstep.common_errors import missing_package
from lockstep.errors import ConfigError

_missing: ImportError | None = None
try:  # here, and not at first use, so that the processes of all samples share what it loads
    from openenv.core import GenericEnvClient
except ImportError as error:
    _missing = error


class OpenEnvGame:
    """A client of a server, in gym form. Rewards of steps are added up; a step without one gives 0.

    Raises:
        ConfigError: there is no URL; the package `openenv` is missing.
    """

    url: str = ""
    """Of the server."""
    action: str = ""
    """Field of an action that takes the policy's text; empty: the text is an action as JSON."""
    observation: str = ""
    """Field of an observation that the policy reads; empty: it reads the whole as JSON."""
    columns: Sequence[str] = ("seed",)
    """Columns that the server's `reset` gets from rows that have them. Equal for all samples of a row, which
    begin alike only if the server's episodes depend on nothing else."""
    seconds: float = 600.0
    """Deadline of an answer, if `environment.tool_seconds` is longer."""

    def __init__(self) -> None:
        name = type(self).__name__
        if _missing is not None:
            raise missing_package(name, "openenv", extra="openenv", cause=_missing)
        if not self.url:
            raise ConfigError(f"missing-setting: {name} has no `url`; set it to that of an OpenEnv server")
        self._client = GenericEnvClient(base_url=self.url, message_timeout_s=self.seconds)

    async def reset(self, **row: Any) -> Any:
        """Begin an episode."""
        given = {name: row[name] for name in self.columns if name in row}
        return self._read((await self._client.reset(**given)).observation)

    async def step(self, action: str) -> tuple[Any, float, bool]:
        """Take a step with what the policy wrote."""
        wanted = self._written(action)
        if isinstance(wanted, str):
            return wanted, 0.0, False
        result = await self._client.step(wanted)
        return self._read(result.observation), result.reward or 0.0, result.done

    async def close(self) -> None:
        """End the session."""
        await self._client.close()

    def _written(self, text: str) -> dict[str, Any] | str:
        """The action that the policy wrote, or what is wrong with it."""
        if self.action:
            return {self.action: text}
        try:
            action = json.loads(text)
        except (ValueError, RecursionError) as error:
            return f"error: an action is a JSON object, and this is no JSON ({error})"
        return action if isinstance(action, dict) else "error: an action is a JSON object"

    def _read(self, observation: Mapping[str, Any]) -> Any:
        """What the policy reads."""
        return observation[self.observation] if self.observation else dict(observation)
