"""The tool of the recipe tools-demo, and the conversations of its warm start."""

from __future__ import annotations

import random
from typing import Any


class Calculator:
    """An environment of one tool. The reward is the verifier's, on the last turn."""

    def multiply(self, a: int, b: int) -> int:
        """Multiply two whole numbers.

        Args:
            a: The first number.
            b: The second number.
        """
        return a * b


def transcripts(count: int = 64, seed: int = 0) -> list[dict[str, Any]]:
    """Return made conversations: a product of three-digit numbers, the call, its result, and the answer."""
    from transformers.utils.chat_template_utils import get_json_schema  # slow, and no part of the tool

    tools, draw = [get_json_schema(Calculator().multiply)], random.Random(seed)
    pairs = [(draw.randint(100, 999), draw.randint(100, 999)) for _ in range(count)]
    return [{"tools": tools, "messages": _conversation(a, b)} for a, b in pairs]


def _conversation(a: int, b: int) -> list[dict[str, Any]]:
    question = f"Solve the following multiplication: {a} * {b}. Give only the result as your final answer."
    call = {"type": "function", "function": {"name": "multiply", "arguments": {"a": a, "b": b}}}
    return [
        {"role": "user", "content": question},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "multiply", "content": str(a * b)},
        {"role": "assistant", "content": str(a * b)},
    ]
