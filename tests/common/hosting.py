"""Hosts of environments for tests: started in a folder, looked into, closed."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Coroutine, Iterator
from pathlib import Path
from typing import Any, TypeVar

import psutil

from lockstep.environments.host import ToolHost

T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T], seconds: float = 120.0) -> T:
    """Run it in an event loop of its own."""

    async def bounded() -> T:
        async with asyncio.timeout(seconds):
            return await coroutine

    return asyncio.run(bounded())


@contextlib.contextmanager
def hosted(target: str, folder: Path, **settings: Any) -> Iterator[ToolHost]:
    """A host whose module lies in `folder`."""
    with contextlib.chdir(folder):
        host = ToolHost(target, **settings)
    try:
        yield host
    finally:
        host.close()


def processes(host: ToolHost) -> list[psutil.Process]:
    """What runs below the process that has imported the module."""
    (zygote,) = psutil.Process(host._process.pid).children()
    return [p for p in zygote.children(recursive=True) if p.status() != psutil.STATUS_ZOMBIE]
