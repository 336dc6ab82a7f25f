"""What an author writes: a class of tools, or of a game, as its methods say.

    class Calculator:                                  class Guess:
        def reset(self, **row): ...                        def reset(self, number): ...  -> observation
        def multiply(self, a: int, b: int) -> int:         def step(self, action): ...
            '''Multiply two numbers. Args: ...'''              -> observation, reward, done
        def get_reward(self) -> float: ...

Toolbox form: every public method is a tool, except `reset`, `get_reward` and `close`. Gym form: a class with
`step`. Methods may be async. What TRL takes as `environment_factory`, a class or a function that makes
objects, is in toolbox form. Loads no torch: this runs in the process that has imported the author's module.
"""

from __future__ import annotations

import asyncio
import functools
import inspect
import typing
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.errors import ConfigError
from lockstep.rollout.reward_functions import text_of

RESERVED = ("reset", "step", "get_reward", "close")
"""Public methods that are no tools."""
LISTING = ("_list_tools", "_call_tool")
"""Methods of a class whose objects are asked for their tools, as clients of servers are: `_list_tools()`
returns JSON schemas, `_call_tool(name, arguments)` a result."""
_SEE = "see docs/how-to/environments.md"


@dataclass(frozen=True, kw_only=True, slots=True)
class EnvironmentClass:
    """An author's class, and what its methods are for."""

    target: str
    """`module:Class`."""
    made: type
    make: Callable[[], Any]
    """Makes an object: the class, or a function."""
    form: Literal["toolbox", "gym"]
    tools: tuple[str, ...]
    """Names of methods in the order of definition, those of base classes first; none in gym form."""
    lists: bool
    """Whether its objects are asked for more tools, see LISTING."""
    reward: Literal["get_reward", "_reward", "step"] | None
    """The method that tells the reward; None: only reward functions of the run can."""
    reads: tuple[str, ...] | None
    """Columns of the row that `reset` names; None: it gets all."""
    asynchronous: tuple[str, ...]
    """Names of methods that are coroutine functions."""

    @classmethod
    def of(cls, value: Any, target: str) -> EnvironmentClass:
        """Look at a class, or at a function whose return type is one: `def make() -> Calculator`.

        Raises:
            ConfigError: it is no class, has no tools, or a tool lacks types or a docstring.
        """
        what = f"environment {target!r}"
        make, value = value, _class_of(value)
        if value is None:
            raise ConfigError(
                f"wrong-part: {what} is a {type(make).__name__}, neither a class nor a function whose return "
                f"type is one; {_SEE}"
            )
        methods = _methods(value)
        lists = all(name in methods for name in LISTING)
        tools = tuple(name for name in methods if name not in RESERVED and not name.startswith("_"))
        gym = "step" in methods
        if gym and tools:
            raise ConfigError(
                f"contradiction: {what} has `step`, so it is a game, and also tools ({', '.join(tools)}); "
                "begin the names of methods that are no tools with an underscore, or rename `step`"
            )
        if gym and "reset" not in methods:
            raise ConfigError(f"wrong-part: {what} has `step` but no `reset`, which returns the first prompt")
        if gym and lists:
            raise ConfigError(f"contradiction: {what} has `step`, so it is a game, and also {LISTING[0]}")
        if not gym and not tools and not lists:
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
            make=make,
            form="gym" if gym else "toolbox",
            tools=tools,
            lists=lists,
            reward=reward or ("step" if gym else None),
            reads=_columns(methods.get("reset")),
            asynchronous=tuple(n for n in methods if inspect.iscoroutinefunction(methods[n])),
        )

    def schemas(self) -> list[dict[str, Any]]:
        """Return the tools as transformers' `get_json_schema` describes them, and those that an object lists.
        Imports transformers, which takes a second and some 60 MB.

        Raises:
            ConfigError: a tool's docstring does not describe an argument, or a type has no JSON form; two
                tools have the same name.
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
        if self.lists:
            schemas += asyncio.run(_listed(self.make()))
        names = [schema["function"]["name"] for schema in schemas]
        if again := next((name for name in names if names.count(name) > 1), None):
            raise ConfigError(f"wrong-part: environment {self.target!r} has two tools {again!r}; rename one")
        return schemas


async def settled(value: Any) -> Any:
    """Return what an author's method returns, `async` or not."""
    return await value if inspect.isawaitable(value) else value


async def _listed(made: Any) -> list[dict[str, Any]]:
    """The tools that an object lists, which has no other use."""
    try:
        return list(await settled(made._list_tools()))
    finally:
        if hasattr(made, "close"):
            await settled(made.close())


def _class_of(value: Any) -> type | None:
    """The class, or that of the objects which a function makes."""
    while isinstance(value, functools.partial):
        value = value.func
    if inspect.isfunction(value):
        value = typing.get_type_hints(value).get("return")
    return value if inspect.isclass(value) and value is not type(None) else None


def _methods(made: type) -> dict[str, Callable[..., Any]]:
    """Methods by name, as an instance would have them, without those of the class, which make other objects;
    properties are not looked at, as that runs them."""
    names = dict.fromkeys(name for base in reversed(made.__mro__[:-1]) for name in vars(base))
    found = {name: inspect.getattr_static(made, name) for name in names}
    plain = {n: v.__func__ if isinstance(v, staticmethod) else v for n, v in found.items()}
    return {name: value for name, value in plain.items() if inspect.isfunction(value)}


def _columns(reset: Callable[..., Any] | None) -> tuple[str, ...] | None:
    parameters = {} if reset is None else inspect.signature(reset).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return None
    return tuple(name for name in parameters if name != "self")


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
