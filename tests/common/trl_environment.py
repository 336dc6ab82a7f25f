"""A class as TRL's `environment_factory` takes it, which runs here as it is."""

from __future__ import annotations

import functools
from typing import Any


class Shop:
    """Its tools are in alphabetical order, as TRL lists them."""

    def __init__(self, currency: str = "euros") -> None:
        self.currency = currency

    @classmethod
    def in_pounds(cls, _untyped=None):
        """Not a tool: it makes another object."""
        return cls("pounds")

    @property
    def total(self) -> int:
        raise AssertionError("a property is not looked at")

    def reset(self, **row: Any) -> str:
        self.price, self.basket = row["price"], 0
        return f"Buy {row['wanted']} apples."

    async def buy(self, count: int, note: str | None = None) -> str:
        """Put apples into the basket.

        Args:
            count: How many.
            note: For the shop.

        Returns:
            What is in the basket.
        """
        self.basket += count
        return f"{self.basket} apples"

    def describe(self) -> list[dict[str, str]]:
        """Describe the shop in content blocks."""
        return [{"type": "text", "text": "Apples, "}, {"type": "text", "text": "fresh."}]

    def fail(self) -> str:
        """Fail."""
        raise LookupError("by design")

    @staticmethod
    def now() -> str:
        """Tell the time."""
        return "noon"

    def price_of(self, count: int = 1) -> float:
        """Tell what apples cost.

        Args:
            count: How many.
        """
        return self.price * count

    async def get_reward(self) -> float:
        return self.basket / 4


def shop() -> Shop:
    return Shop("dollars")


partly = functools.partial(Shop, currency="yen")
