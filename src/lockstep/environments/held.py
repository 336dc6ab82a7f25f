"""A context that is entered, used and left in different tasks."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Held(Generic[T]):
    """Holds an async context in a task of its own, because clients and servers that are made of tasks must be
    left in the task that has entered them. All methods belong to one event loop.

    Args:
        make: makes the context, at the first `get`.
    """

    def __init__(self, make: Callable[[], AbstractAsyncContextManager[T]]) -> None:
        self._make = make
        self._task: asyncio.Task[None] | None = None

    async def get(self) -> T:
        """Return what the context gives; raises what entering it raised."""
        if self._task is None:
            self._value: asyncio.Future[T] = asyncio.get_running_loop().create_future()
            self._over = asyncio.Event()
            self._task = asyncio.create_task(self._hold())
        either: list[asyncio.Future[Any]] = [self._value, self._task]
        await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
        if not self._value.done():
            try:
                await self._task
            except ExceptionGroup as group:
                raise _first(group) from group
        return self._value.result()

    async def close(self) -> None:
        """Leave the context, if it was entered; what entering it raised, `get` has raised."""
        if self._task is not None:
            self._over.set()
            await asyncio.wait([self._task])
            if self._value.done():
                await self._task

    async def _hold(self) -> None:
        async with self._make() as value:
            self._value.set_result(value)
            await self._over.wait()


def _first(error: Exception) -> Exception:
    while isinstance(error, ExceptionGroup):
        error = error.exceptions[0]
    return error
