"""A live environment that takes what a journal knows from there, and is made only for what it does not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import asdict
from typing import Any

from lockstep.environments.host import Instance, ToolHost
from lockstep.environments.journal import Journal, key_of
from lockstep.environments.results import EnvironmentFailure, ToolResult
from lockstep.rollout.environment import Sampler
from lockstep.schema.rollout import Prompt

LAST_SECONDS = 10.0
"""That a run which is asked to stop waits for a call that is running."""
_Ask = Callable[[Instance], Awaitable[Any]]


class RecordedInstance:
    """The instance of a sample, made when it is first needed; the methods are those of `Instance`.

    A call that the journal knows is answered from there. At the first one that it does not, the instance is
    made as it was: of the state after the last call, or, if the class is repeatable, by making all calls
    again. A call that was running when the run was killed is answered by an error.

    Args:
        journal: None: nothing is kept.
    """

    def __init__(self, host: ToolHost, task: Prompt, sample: Sampler, *, journal: Journal | None) -> None:
        self._host, self._task, self._sample, self._journal = host, task, sample, journal
        self._instance: Instance | None = None
        self._key = "" if journal is None else key_of(journal.run, host.target, sample.seed)
        self._past: list[_Ask] = []
        """What the journal has answered."""
        self._state: str | None = None
        self._gone: str | None = None

    @property
    def described(self) -> Mapping[str, Any]:
        """What the class is, see ToolHost.describe."""
        return self._host.describe()

    async def reset(self) -> str | list[dict[str, str]] | None:
        """See Instance."""
        value: str | list[dict[str, str]] | None = await self._asked(lambda one: one.reset(), "reset")
        return value

    async def call(self, name: str, arguments: Any, *, turn: int, call: int) -> ToolResult:
        """See Instance."""
        return await self._result(
            lambda one: one.call(name, arguments, turn=turn, call=call), name, arguments, turn, call
        )

    async def step(self, action: str, *, turn: int) -> ToolResult:
        """See Instance."""
        return await self._result(lambda one: one.step(action, turn=turn), "step", action, turn, 0, game=True)

    async def reward(self, trajectory: Mapping[str, Any]) -> float | dict[str, float] | None:
        """See Instance."""
        value: float | dict[str, float] | None
        value = await self._asked(lambda one: one.reward(trajectory), "reward", dict(trajectory))
        return value

    async def close(self) -> None:
        """See Instance."""
        if self._instance is not None:
            await self._instance.close()

    async def _result(
        self, ask: _Ask, name: str, given: Any, turn: int, call: int, *, game: bool = False
    ) -> ToolResult:
        async def asked(instance: Instance) -> dict[str, Any]:
            return asdict(await ask(instance))

        def interrupted() -> dict[str, Any]:
            return asdict(self._host.interrupted(name, where=self._task.where, game=game))

        value = await self._asked(asked, "call", name, given, turn, call, interrupted=interrupted)
        return ToolResult(**value)

    async def _asked(
        self, ask: _Ask, *what: Any, interrupted: Callable[[], dict[str, Any]] | None = None
    ) -> Any:
        """The answer, from the journal or to it.

        Args:
            what: identifies the call among those of the instance.
            interrupted: the answer to a call that has begun and may not be made again; None: it may.
        """
        if self._journal is None:
            return await ask(await self._live())
        self._key = key_of(self._key, *what)
        entry = self._journal.find(self._key)
        if entry is not None and "value" in entry:
            self._past.append(ask)
            self._state, self._gone = entry["state"], entry["gone"]
            value = entry["value"]
            return {**value, "seconds": 0.0} if interrupted is not None else value
        if entry is not None and interrupted is not None and not self._repeats:
            value = interrupted()
        else:
            instance = await self._live()
            return await _to_the_end(self._noted(ask, instance, once=interrupted is not None))
        self._write(value)
        return value

    async def _noted(self, ask: _Ask, instance: Instance, *, once: bool) -> Any:
        assert self._journal is not None, "asked for"
        if once:
            await self._journal.begun(self._key)
        value = await ask(instance)
        self._state, self._gone = instance.state, instance.gone
        self._write(value)
        return value

    def _write(self, value: Any) -> None:
        assert self._journal is not None, "asked for"
        self._journal.write({"key": self._key, "value": value, "state": self._state, "gone": self._gone})

    @property
    def _repeats(self) -> bool:
        return bool(self.described["repeatable"])

    async def _live(self) -> Instance:
        """The instance, as it was after the last call."""
        if self._instance is None:
            host, where = self._host, self._task.where or "a sample"
            if self._past and not self._repeats and self._gone is not None:
                self._instance = host.ended(self._gone, where=where)
            elif self._past and not self._repeats and self._state is None:
                raise EnvironmentFailure(
                    f"{where}: environment {host.target!r}: the run was killed between two calls, and the "
                    "object cannot be made again, because its attributes are not plain data; set _repeatable "
                    "= True in the class, or delete journal/ in the run's folder, to make the calls again",
                    kind="interrupted",
                )
            else:
                state = None if self._repeats else self._state
                opened = host.open(self._task.row, seed=self._sample.seed, where=where, state=state)
                self._instance = await self._sample.in_line(opened)
                for ask in self._past if self._repeats else ():
                    await ask(self._instance)
        return self._instance


async def _to_the_end(call: Coroutine[Any, Any, Any]) -> Any:
    """Await a call; when that is cancelled, wait for its end, at most LAST_SECONDS, so that a resumed run has
    its answer."""
    task, loop = asyncio.ensure_future(call), asyncio.get_running_loop()
    try:
        return await asyncio.shield(task)
    except asyncio.CancelledError:
        deadline = loop.time() + LAST_SECONDS
        while not task.done() and (left := deadline - loop.time()) > 0:
            with contextlib.suppress(asyncio.CancelledError):  # run_episodes cancels twice
                await asyncio.wait([task], timeout=left)
        if not task.cancel() and not task.cancelled():
            task.exception()  # nobody asks for it any more
        raise
