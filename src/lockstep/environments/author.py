"""What an author writes: a class of tools, or of a game, as its methods say.

    class Calculator:                                  class Guess:
        def reset(self, **row): ...                        def reset(self, number): ...  -> observation
        def multiply(self, a: int, b: int) -> int:         def step(self, action): ...
            '''Multiply two numbers. Args: ...'''              -> observation, reward, done
        def get_reward(self) -> float: ...

Toolbox form: every public method is a tool, except `reset`, `get_reward` and `close`. Gym form: a class with
`step`. Methods may be async. Loads no torch: this runs in the process that has imported the author's module.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.errors import ConfigError
from lockstep.rollout.reward_functions import text_of

RESERVED = ("reset", "step", "get_reward", "close")
"""Public methods that are no tools."""
_SEE = "see docs/how-to/environments.md"


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentClass:
    """An author's class, and what its methods are for."""

    target: str
    """`module:Class`."""
    made: type
    form: Literal["toolbox", "gym"]
    tools: tuple[str, ...]
    """Names of methods in the order of definition, those of base classes first; none in gym form."""
    reward: Literal["get_reward", "_reward", "step"] | None
    """The method that tells the reward; None: only reward functions of the run can."""
    asynchronous: tuple[str, ...]
    """Names of methods that are coroutine functions."""

    @classmethod
    def of(cls, value: Any, target: str) -> EnvironmentClass:
        """Look at a class.

        Raises:
            ConfigError: it is no class, has no tools, or a tool lacks types or a docstring.
        """
        what = f"environment {target!r}"
        if not inspect.isclass(value):
            raise ConfigError(f"wrong-part: {what} is a {type(value).__name__}, not a class; {_SEE}")
        methods = _methods(value)
        tools = tuple(name for name in methods if name not in RESERVED and not name.startswith("_"))
        gym = "step" in methods
        if gym and tools:
            raise ConfigError(
                f"contradiction: {what} has `step`, so it is a game, and also tools ({', '.join(tools)}); "
                "begin the names of methods that are no tools with an underscore, or rename `step`"
            )
        if gym and "reset" not in methods:
            raise ConfigError(f"wrong-part: {what} has `step` but no `reset`, which returns the first prompt")
        if not gym and not tools:
            raise ConfigError(
                f"wrong-part: {what} has no tools: no public method except {', '.join(RESERVED)}, and no "
                f"`step` either; add a typed method with a docstring, {_SEE}"
            )
        for name in tools:
            _check_tool(f"{what}: tool {name!r}", methods[name])
        reward = next((name for name in ("get_reward", "_reward") if name in methods), None)
        return cls(
            target=target,
            made=value,
            form="gym" if gym else "toolbox",
            tools=tools,
            reward=reward or ("step" if gym else None),
            asynchronous=tuple(n for n in methods if inspect.iscoroutinefunction(methods[n])),
        )

    def schemas(self) -> list[dict[str, Any]]:
        """Return the tools as transformers' `get_json_schema` describes them. Imports transformers, which
        takes a second and some 60 MB.

        Raises:
            ConfigError: a tool's docstring does not describe an argument, or a type has no JSON form.
        """
        from transformers.utils.chat_template_utils import get_json_schema

        methods, schemas = _methods(self.made), []
        for name in self.tools:
            try:
                schemas.append(get_json_schema(methods[name]))
            except Exception as error:  # of several classes, some of them ValueErrors of type hints
                raise ConfigError(
                    f"wrong-part: environment {self.target!r}: tool {name!r}: {text_of(error)}; the "
                    "docstring needs a section `Args:` with a line `name: description` for each argument, "
                    "and types that JSON has (int, float, str, bool, list, dict, Literal, None)"
                ) from error
        return schemas


def _methods(made: type) -> dict[str, Callable[..., Any]]:
    """Methods by name, as an instance would have them; properties are not looked at, as that runs them."""
    names = dict.fromkeys(name for base in reversed(made.__mro__[:-1]) for name in vars(base))
    found = {name: inspect.getattr_static(made, name) for name in names}
    plain = {n: v.__func__ if isinstance(v, staticmethod | classmethod) else v for n, v in found.items()}
    return {name: value for name, value in plain.items() if inspect.isfunction(value)}


def _check_tool(what: str, method: Callable[..., Any]) -> None:
    if not (inspect.getdoc(method) or "").strip():
        raise ConfigError(
            f"wrong-part: {what} has no docstring; say in one what it does, with a line for each argument, "
            "or begin its name with an underscore if it is no tool"
        )
    for name, parameter in list(inspect.signature(method).parameters.items()):
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise ConfigError(
                f"wrong-part: {what} has the argument {str(parameter)!r}, which no JSON object can hold; "
                "name each argument"
            )
        if parameter.annotation is parameter.empty and name not in ("self", "cls"):
            raise ConfigError(f"wrong-part: {what}: argument {name!r} has no type; write `{name}: int`")
