"""The hosts of a run's environments: one for each class that the run file names."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from lockstep.config.environment import EnvironmentConfig
from lockstep.data.row_tools import RowTools
from lockstep.environments.host import ToolHost
from lockstep.environments.journal import Journal
from lockstep.environments.room import Room
from lockstep.schema.rollout import Prompt


class ToolHosts:
    """Starts the processes of all classes; their instances share the room of `max_live`.

    Args:
        journal: keeps what instances answer, for a run that goes on after a kill; None: nothing is kept.

    Raises:
        ConfigError: a class cannot be imported or used.
    """

    def __init__(self, config: EnvironmentConfig, *, journal: Journal | None = None) -> None:
        self.journal = journal
        self._hosts: dict[str, ToolHost] = {}
        self._starting = contextlib.ExitStack()
        with self._starting:
            for name, target in config.targets.items():
                self._hosts[name] = self._starting.enter_context(contextlib.closing(_host(config, target)))
            self._starting.pop_all()
        if len(self._hosts) > 1:
            most = min(host.max_live for host in self)
            room = Room(most)
            for host in self:
                host.share(room, most)
        schemas = {name: host.tools for name, host in self._hosts.items()}
        reads = {name: host.describe()["reads"] for name, host in self._hosts.items()}
        column = config.column if config.classes else None
        self.tools = RowTools(schemas=schemas, reads=reads, column=column)

    def __iter__(self) -> Iterator[ToolHost]:
        return iter(self._hosts.values())

    def of(self, row: Mapping[str, Any], where: str) -> ToolHost:
        """Return the host of a row. Raises DataError: the row names none of them."""
        return self._hosts[self.tools.name(row, where)]

    def begin(self, what: str) -> None:
        """See Environment."""
        if self.journal is not None:
            self.journal.begin(what)
            for host in self:
                host.keeps_states = not host.describe()["repeatable"]

    def require_reward(self) -> None:
        """Check that each class tells rewards. Raises ConfigError: one does not."""
        for host in self:
            host.require_reward()

    async def check(self, prompts: Sequence[Prompt]) -> None:
        """Make and reset an instance for each prompt. Raises ConfigError: it fails for a row."""
        for prompt in prompts:
            await self.of(prompt.row, prompt.where).check([(prompt.where, prompt.row)])

    def close(self) -> None:
        """End all processes. Idempotent."""
        for host in self:
            host.close()
        if self.journal is not None:
            self.journal.close()


def _host(config: EnvironmentConfig, target: str) -> ToolHost:
    return ToolHost(
        target,
        isolation=None if config.isolation == "auto" else config.isolation,
        max_live=None if config.max_live == "auto" else config.max_live,
        tool_seconds=None if config.tool_seconds == "auto" else config.tool_seconds,
        on_error=config.on_error,
        result_characters=config.result_characters,
    )


def tools_of(config: EnvironmentConfig | None) -> RowTools | None:
    """Return the tools that each prompt shows, for those who only make prompts; None without an environment.
    Raises as ToolHosts."""
    if config is None:
        return None
    with contextlib.closing(ToolHosts(config)) as hosts:
        return hosts.tools
