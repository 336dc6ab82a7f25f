"""The environment of `tool_turns.py checks`: it answers each turn, and never ends."""

import random


class Repeats:
    """A game whose observations are words of the policy's turn."""

    async def reset(self) -> str:
        """Begin."""
        return "Write."

    async def step(self, action: str) -> tuple[str, float, bool]:
        """Return some words, and a reward."""
        return " ".join(action.split()[:12])[:80] or "Go on.", random.random() / 20, False
