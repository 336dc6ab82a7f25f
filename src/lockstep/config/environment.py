"""The `environment` section: a class of the user's whose methods are the policy's tools, or a game."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from lockstep.config.base import Config, Name, PositiveInt, Seconds, check
from lockstep.config.rules import refuse
from lockstep.config.train import Auto


class EnvironmentConfig(Config):
    """Turns with tools. `environment = "my_module:Calculator"` is short for the section with that `name`."""

    name: Name | None = None
    """`module:Class`, found from the working directory as well; its public typed methods are tools, or it is
    a game with `reset` and `step` (docs/how-to/environments.md). It runs in processes of its own, with the
    rights of the user."""
    classes: dict[str, Name] = Field(default_factory=dict)
    """In place of `name`: several classes, each under a name by which rows choose it in `column`. Rows can
    choose no others."""
    column: Name = "environment"
    """The column with a name of `classes`."""
    weight: float = 1.0
    """Weight of the rewards that the class gives, beside those of `rewards`."""
    tool_seconds: Seconds | Auto = "auto"
    """Seconds that each call may take. auto: 30, and 5 for `lockstep.environments.python_tool:PythonTool`."""
    max_live: PositiveInt | Auto = "auto"
    """Most instances that live at the same time on a rank; other samples wait. auto: what half of the free
    memory holds, at most 512."""
    isolation: Literal["auto", "process", "shared"] = "auto"
    """process: each instance has a process of its own. shared: all instances share one, for classes whose
    methods are async; a method that blocks, or ends the process, then costs every instance in it. auto:
    process, and a sandbox for `lockstep.environments.python_tool:PythonTool`."""
    max_calls: PositiveInt = 16
    """Calls of a turn that are run; those after them are answered by an error."""
    on_error: Literal["message", "drop"] = "message"
    """What a tool that raises, hangs, floods or exits leads to. message: the policy reads an error. drop: the
    sample is dropped. A constructor, `reset` or reward that fails drops its sample in any case; the run ends
    if that happens to all samples of a step."""
    result_characters: PositiveInt = 16_384
    """A longer result of a tool is cut there, and marked."""

    @property
    def targets(self) -> dict[str, str]:
        """`module:Class` by name; the only one has the name ""."""
        return dict(self.classes) if self.name is None else {"": self.name}

    @property
    def shown_targets(self) -> str:
        """The targets as the user wrote them."""
        return f"classes = {self.classes}" if self.name is None else f"name = {self.name!r}"

    @check
    def _check(self) -> EnvironmentConfig:
        refuse(self, "environment")
        return self
