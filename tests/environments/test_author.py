"""An author's class: what is a tool of it, and what is wrong with it."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest
from raising import raises

from lockstep.environments.author import EnvironmentClass
from lockstep.errors import ConfigError

TARGET = "m:E"


class Base:
    def shared(self, text: str) -> str:
        """Return it.

        Args:
            text: What to return.
        """
        return text


class Tools(Base):
    def reset(self, **row: Any) -> None: ...

    async def search(self, query: str, most: int = 3) -> list[str]:
        """Search.

        Args:
            query: The words.
            most: Most results.
        """
        return [query] * most

    @staticmethod
    def now() -> str:
        """Tell the time."""
        return "noon"

    @property
    def secret(self) -> str:
        raise AssertionError("a property is not looked at")

    def _private(self, untyped): ...  # type: ignore[no-untyped-def]

    def get_reward(self) -> float:
        return 1.0

    def close(self) -> None: ...


class Game:
    def reset(self) -> str:
        return ""

    def step(self, action: str) -> tuple[str, float, bool]:
        return "", 0.0, True


def test_public_methods_are_tools() -> None:
    found = EnvironmentClass.of(Tools, TARGET)
    assert (found.form, found.tools) == ("toolbox", ("shared", "search", "now"))
    assert (found.reward, found.asynchronous) == ("get_reward", ("search",))
    shared, search, now = (schema["function"] for schema in found.schemas())
    assert search["parameters"] == {
        "type": "object",
        "properties": {
            "query": {"type": "string", "description": "The words."},
            "most": {"type": "integer", "description": "Most results."},
        },
        "required": ["query"],
    }
    assert (now["name"], now["description"], now["parameters"]["properties"]) == ("now", "Tell the time.", {})
    assert shared["parameters"]["required"] == ["text"]


def test_a_class_with_step_is_a_game() -> None:
    found = EnvironmentClass.of(Game, TARGET)
    assert (found.form, found.tools, found.reward) == ("gym", (), "step")


def test_a_reward_from_the_trajectory() -> None:
    class WithReward(Base):
        def _reward(self, trajectory: Any) -> float:
            return 0.0

    assert EnvironmentClass.of(WithReward, TARGET).reward == "_reward"
    assert EnvironmentClass.of(Base, TARGET).reward is None


def bad(**methods: Any) -> type:
    return type("E", (), methods)


def untyped(self, a): ...  # type: ignore[no-untyped-def]


def variadic(self: Any, *a: int) -> None:
    """Docs."""


untyped.__doc__ = "Docs."


@pytest.mark.parametrize(
    "value, message",
    [
        (len, "wrong-part: is a builtin_function_or_method"),
        (bad(), "wrong-part: has no tools"),
        (bad(reset=untyped), "wrong-part: has no tools"),
        (bad(act=lambda self: 1), "wrong-part: tool 'act' has no docstring"),
        (bad(act=untyped), "wrong-part: tool 'act', argument 'a' has no type"),
        (bad(act=variadic), "wrong-part: tool 'act' has the argument"),
        (bad(step=untyped), "wrong-part: has `step` but no `reset`"),
        (bad(step=untyped, reset=untyped, act=untyped), "contradiction: has `step`, and also tools"),
    ],
)
def test_what_is_no_environment(value: Any, message: str) -> None:
    with raises(ConfigError, message):
        EnvironmentClass.of(value, TARGET)


@pytest.mark.parametrize("hint, docs", [(int, "Act."), (asyncio.Lock, "Act.\n\nArgs:\n    a: It.")])
def test_a_tool_that_has_no_schema(hint: Any, docs: str) -> None:
    def act(self: Any, a: Any) -> None: ...

    act.__annotations__["a"], act.__doc__ = hint, docs
    act.__annotations__.pop("self")
    found = EnvironmentClass.of(bad(act=act), TARGET)
    with raises(ConfigError, "wrong-part: environment 'm:E': tool 'act'"):
        found.schemas()


def test_the_examples_are_at_most_fifteen_lines_of_code() -> None:
    import ast

    folder = Path(__file__).parents[2] / "examples"
    tree = ast.parse((folder / "calculator.py").read_text())
    (made,) = [node for node in tree.body if isinstance(node, ast.ClassDef)]
    statements = [node for node in ast.walk(made) if isinstance(node, ast.stmt)]
    docstrings = [n for n in statements if isinstance(n, ast.Expr) and isinstance(n.value, ast.Constant)]
    assert len(statements) - len(docstrings) <= 15
