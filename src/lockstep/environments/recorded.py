"""A live environment that takes what a journal knows from there, and is made only for what it does not."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import asdict
from typing import Any

from lockstep.environments.host import Instance, ToolHost
from lockstep.environments.journal import Entry, Journal, key_of
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
        self._key = key_of("" if journal is None else journal.run, host.target, sample.seed)
        self._first = self._key
        self._calls: dict[str, asyncio.Future[Entry]] = {}
        """What was asked, by key: also what an earlier `run` of the trajectory asked, which repeats it."""
        self._tip = self._key
        """The key of the last call that the live instance was asked."""
        self._past: list[_Ask] = []
        """What was asked before the next call."""
        self._state: str | None = None
        self._gone: str | None = None

    def park(self) -> RecordedInstance:
        """Let the instance wait for the step in which its trajectory goes on; a call that runs goes on."""
        if self._instance is not None:
            self._instance.park()
        return self

    def repeat(self, sample: Sampler) -> None:
        """Begin again, for a `run` that goes on with the trajectory: answers that are there are given
        again."""
        self._sample, self._key = sample, self._first
        self._past, self._state, self._gone = [], None, None
        if self._instance is not None:
            self._instance.unpark()

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
        before, self._key = self._key, key_of(self._key, *what)
        call = self._calls.get(self._key)
        if call is None:
            call = self._known(interrupted)
            if call is None:
                instance = await self._live(before)
                self._tip = self._key
                once = interrupted is not None
                call = asyncio.ensure_future(self._made(ask, instance, self._key, once=once))
                # Its error is raised where it is awaited, perhaps by a later `run`.
                call.add_done_callback(lambda one: one.cancelled() or one.exception())
            self._calls[self._key] = call
        entry = await self._awaited(call)
        self._past.append(ask)
        self._state, self._gone = entry["state"], entry["gone"]
        return entry["value"]

    def _known(self, interrupted: Callable[[], dict[str, Any]] | None) -> asyncio.Future[Entry] | None:
        """What the journal knows of the call; None: it is to be made."""
        entry = None if self._journal is None else self._journal.find(self._key)
        if entry is None:
            return None
        if "value" in entry and interrupted is not None:
            entry = entry | {"value": entry["value"] | {"seconds": 0.0}}
        elif "value" not in entry:
            if interrupted is None or self._repeats:
                return None
            entry = {"key": self._key, "value": interrupted(), "state": self._state, "gone": self._gone}
            assert self._journal is not None, "asked above"
            self._journal.write(entry)
        known: asyncio.Future[Entry] = asyncio.get_running_loop().create_future()
        known.set_result(entry)
        return known

    async def _made(self, ask: _Ask, instance: Instance, key: str, *, once: bool) -> Entry:
        """Make a call, and note it."""
        if self._journal is not None and once:
            await self._journal.begun(key)
        value = await ask(instance)
        entry = {"key": key, "value": value, "state": instance.state, "gone": instance.gone}
        if self._journal is not None:
            self._journal.write(entry)
        return entry

    async def _awaited(self, call: asyncio.Future[Entry]) -> Entry:
        """Await a call; when that is cancelled, wait for its end, so that a resumed run has its answer,
        unless this run goes on with it."""
        try:
            return await asyncio.shield(call)
        except asyncio.CancelledError:
            if not self._sample.goes_on:
                await _to_its_end(call)
            raise

    @property
    def _repeats(self) -> bool:
        return bool(self.described["repeatable"])

    async def _live(self, before: str) -> Instance:
        """The instance, as it was after the last call, whose key is `before`."""
        if self._instance is not None and self._tip != before:
            # An aborted step had asked it for more, and the policy has written something else this time.
            gone, self._instance = self._instance, None
            await gone.close()
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
                self._instance = await self._sample.in_line(self._opened(where))
        return self._instance

    async def _opened(self, where: str) -> Instance:
        host, sample = self._host, self._sample
        state = None if self._repeats else self._state
        sample.queued = True
        try:
            await host.enter()
        finally:
            sample.queued = False
        instance = await host.open(self._task.row, seed=sample.seed, where=where, state=state, has_room=True)
        try:
            for ask in self._past if self._repeats else ():
                await ask(instance)
        except BaseException:
            await instance.close()
            raise
        return instance

    async def end(self) -> None:
        """Wait for a call that runs, at most LAST_SECONDS, and end the instance."""
        for call in self._calls.values():
            await _to_its_end(call)
        await self.close()


async def _to_its_end(call: asyncio.Future[Entry]) -> None:
    """Wait for the end of a call, at most LAST_SECONDS; then it is cancelled."""
    loop = asyncio.get_running_loop()
    deadline = loop.time() + LAST_SECONDS
    while not call.done() and (left := deadline - loop.time()) > 0:
        with contextlib.suppress(asyncio.CancelledError):  # run_episodes cancels twice
            await asyncio.wait([call], timeout=left)
    call.cancel()
