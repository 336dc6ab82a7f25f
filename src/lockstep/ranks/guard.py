"""Collectives that cannot hang: a rank posts its position before each one, and every wait has a deadline.

Positions are kept in the store that all ranks share, so that a rank that waits in vain can name the missing
rank and its last position; the launcher reads them too when a rank has died.

    guard = Guard(ranks)
    guard.agree(3, {"input": 7}, what="step 3")        # all ranks are about to do step 3
    guard.add_up([gradient], step=3)                    # summed over ranks, in place
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.observe import flight
from lockstep.ranks.context import RankContext, RankError, is_peer_failure
from lockstep.ranks.launch import ENDED_KEY, ERROR_KEY, POSITION_KEY

_FIRST_PAUSE, _LAST_PAUSE = 0.0005, 0.05
"""Seconds between two polls of a waiting rank; at the longest it also looks for ranks that died."""
_SETTLE_SECONDS = 2.0
"""After a failed collective: time for the others to post their positions."""
_STORED_BYTES = 1 << 24
"""Of one object in the store."""
_CHUNK = 1 << 24
"""Elements of one all-reduce of gradients."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """The collective that a rank is about to enter."""

    rank: int
    step: int
    """-1: before the first."""
    what: str
    """Such as "all_reduce of gradients, [4096] float32"."""
    time: float
    """Unix seconds."""

    @property
    def text(self) -> str:
        """The position as shown to the user."""
        where = f"step {self.step}" if self.step >= 0 else "the start"
        return f"{where}: {self.what}"


class Desync(RankError):
    """Ranks are out of step: one waits for another that does something else, or has gone."""

    def __init__(self, message: str, *, step: int, positions: Mapping[int, Position | None]) -> None:
        super().__init__(message, code="out-of-step", step=step)
        self.step = step
        """The step of the rank that noticed."""
        self.positions = dict(positions)
        """The position of every rank; None: it has posted none."""


class Guard:
    """The collectives of one rank.

    Args:
        checked: False: `agree` exchanges nothing, so that a step that does not match is really entered.
        seconds: deadline of every wait; None: that of `ranks`.
    """

    def __init__(self, ranks: RankContext, *, checked: bool = True, seconds: float | None = None) -> None:
        self.ranks, self.checked = ranks, checked
        self.seconds = ranks.seconds if seconds is None else seconds
        self._round = 0
        self.position: Position | None = None

    def at(self, step: int, what: str) -> None:
        """Post what this rank is about to do."""
        rank = self.ranks.rank
        self.position = Position(rank=rank, step=step, what=what, time=time.time())
        value = asdict(self.position) | {"text": self.position.text}
        self.ranks.store.set(POSITION_KEY.format(rank=rank), json.dumps(value))

    def positions(self) -> dict[int, Position | None]:
        """Return the last position of every rank."""
        return {rank: self._read(rank) for rank in range(self.ranks.world_size)}

    def _read(self, rank: int) -> Position | None:
        key = POSITION_KEY.format(rank=rank)
        if not self.ranks.store.check([key]):
            return None
        record = self._stored(key)
        return Position(
            rank=rank, step=int(record["step"]), what=str(record["what"]), time=float(record["time"])
        )

    def _stored(self, key: str) -> dict[str, Any]:
        """Read a JSON object from the store. Raises RankError for anything else, which no rank wrote."""
        data = self.ranks.store.get(key)
        try:
            value = json.loads(data) if len(data) <= _STORED_BYTES else None
        except ValueError:
            value = None
        if not isinstance(value, dict):
            raise RankError(
                f"bad-reply: the store of the ranks holds {len(data):,} bytes under {key} that no rank wrote"
            )
        return value

    # --- exchange of intents --------------------------------------------------------------------------------

    def agree(
        self, step: int, intent: Mapping[str, Any], *, what: str, same: Sequence[str] = ()
    ) -> list[dict[str, Any]]:
        """Exchange what every rank is about to do, as JSON values.

        Args:
            same: keys whose values must be equal on all ranks.

        Returns:
            Every rank's intent, by rank; only this rank's own with `checked=False`.

        Raises:
            Desync: a rank did not come, or is about to do something else.
        """
        self.at(step, what)
        if not self.checked:
            return [dict(intent)]
        return self.exchange(step, intent, what=what, same=("step", *same))

    def exchange(
        self,
        step: int,
        intent: Mapping[str, Any],
        *,
        what: str,
        same: Sequence[str] = (),
        name: str | None = None,
    ) -> list[dict[str, Any]]:
        """Exchange intents as `agree` does, whether checked or not, and without posting a position.

        Args:
            name: of this round, for ranks that are out of step; each name can be used once.

        Raises:
            Desync: as `agree`.
        """
        me, store = self.ranks.rank, self.ranks.store
        prefix = f"lockstep/exchange/{self._round if name is None else name}"
        store.set(f"{prefix}/{me}", json.dumps({"step": step} | dict(intent)))
        if name is None:
            self._round += 1
            # everybody has read those: nobody enters a round before it has read all of the one before
            store.delete_key(f"lockstep/exchange/{self._round - 3}/{me}")
        intents: list[dict[str, Any]] = []
        deadline = time.monotonic() + self.seconds
        for rank in range(self.ranks.world_size):
            self._await(f"{prefix}/{rank}", rank, deadline=deadline, step=step, what=what)
            intents.append(self._stored(f"{prefix}/{rank}"))
        for key in same:
            if any(other.get(key) != intents[me].get(key) for other in intents):
                values = ", ".join(f"rank {rank}: {other.get(key)!r}" for rank, other in enumerate(intents))
                raise self._desync(step, f"the ranks do not agree on {key!r} of {what} ({values})")
        return intents

    def _await(self, key: str, rank: int, *, deadline: float, step: int, what: str) -> None:
        """Wait until a rank has written its part of a round. Raises Desync: it has died, or the deadline has
        passed."""
        store, pause = self.ranks.store, _FIRST_PAUSE
        while True:
            # `wait` with a short timeout would do too, but torch logs a warning each time it passes.
            try:
                if store.check([key]):
                    return
            except dist.DistNetworkError as error:
                raise RankError(
                    f"unreachable: rank {self.ranks.rank}: the store is gone ({error})"
                ) from error
            left = deadline - time.monotonic()
            time.sleep(max(0.0, min(pause, left)))
            pause = min(2 * pause, _LAST_PAUSE)
            if pause < _LAST_PAUSE:
                continue
            if store.check([ERROR_KEY.format(rank=rank)]):
                failure = self._stored(ERROR_KEY.format(rank=rank))
                line = str(failure.get("text")).strip().splitlines()[-1]
                raise self._desync(step, f"{what} waits for rank {rank}, which has failed: {line}")
            if store.check([ENDED_KEY.format(rank=rank)]):
                how = store.get(ENDED_KEY.format(rank=rank)).decode()
                raise self._desync(step, f"{what} waits for rank {rank}, which {how}")
            if left <= 0:
                raise self._desync(
                    step, f"{what} waits for rank {rank}, which did not arrive within {self.seconds:g} s"
                )

    # --- collectives ----------------------------------------------------------------------------------------

    def add_up(self, tensors: Sequence[Tensor], *, step: int, what: str = "gradients") -> list[int]:
        """Sum tensors over all ranks, in place, in float32 whatever their dtype. A rank that has nothing to
        add gives zeros.

        Returns:
            The step that each rank is at. It is not `step` where collectives of different steps have met:
            their shapes are equal, so that nothing else would show it.

        Raises:
            Desync: a rank did not enter it.
        """
        total = sum(tensor.numel() for tensor in tensors)
        device = tensors[0].device if tensors else self.ranks.device
        steps = torch.zeros(self.ranks.world_size, dtype=torch.int64, device=device)
        steps[self.ranks.rank] = step
        self._reduce(steps, step=step, what=f"all_reduce of the step's number before {what}")
        for part in _parts(tensors):
            flat = torch.cat([tensor.detach().reshape(-1).float() for tensor in part])
            name = f"all_reduce of {what}, {flat.numel():,} of {total:,} float32"
            self._reduce(flat, step=step, what=name)
            sizes = [tensor.numel() for tensor in part]
            for tensor, values in zip(part, flat.split(sizes), strict=True):
                tensor.detach().copy_(values.view_as(tensor))
        return [int(at) for at in steps.tolist()]

    def _reduce(self, tensor: Tensor, *, step: int, what: str) -> None:
        with self.explained(step, what):
            work = dist.all_reduce(tensor, async_op=True)
            work.wait(timedelta(seconds=self.seconds))
            if tensor.device.type == "cuda":
                # So that a failure on the device shows here, under the position that was posted.
                torch.cuda.synchronize(tensor.device)

    def explained(self, step: int, what: str) -> _Explained:
        """Return a context for collectives: it posts this rank's position, and turns their timeouts and lost
        connections into a Desync."""
        return _Explained(self, step, what)

    def _desync(self, step: int, reason: str) -> Desync:
        positions = self.positions()
        return Desync(describe_desync(self.ranks.rank, reason, positions), step=step, positions=positions)


class _Explained:
    def __init__(self, guard: Guard, step: int, what: str) -> None:
        self.guard, self.step, self.what = guard, step, what
        self.purpose = flight.purpose(what)

    def __enter__(self) -> None:
        self.guard.at(self.step, self.what)
        self.purpose.__enter__()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self.purpose.__exit__(None, None, None)
        if isinstance(error, RuntimeError) and not isinstance(error, RankError) and collective_failed(error):
            time.sleep(_SETTLE_SECONDS)
            reason = (
                f"{self.what}: another rank is gone"
                if is_peer_failure(error)
                else f"{self.what}: not all ranks entered it within {self.guard.seconds:g} s"
            )
            first = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            raise self.guard._desync(self.step, f"{reason} (torch says: {first})") from error


def collective_failed(error: BaseException) -> bool:
    """Return whether a RuntimeError comes from a collective: a timeout, a mismatch or a lost connection."""
    text = str(error).lower()
    words = ("gloo", "nccl", "timed out", "timeout", "collective", "process group")
    return is_peer_failure(error) or isinstance(error, dist.DistError) or any(word in text for word in words)


def describe_desync(rank: int, reason: str, positions: Mapping[int, Position | None]) -> str:
    """Return the message of a rank that waited in vain: for which rank, and the position of every rank."""
    lines = [f"ranks are out of step. Rank {rank} at {reason}"]
    now = time.time()
    for other, position in sorted(positions.items()):
        if position is None:
            lines.append(f"  rank {other}: has not reported anything yet")
        else:
            lines.append(f"  rank {other}: {position.text} ({max(0.0, now - position.time):.0f} s ago)")
    steps = {other: p.step for other, p in positions.items() if p is not None}
    if len(set(steps.values())) > 1:
        low, high = min(steps.values()), max(steps.values())
        behind = ", ".join(str(other) for other, step in steps.items() if step == low)
        ahead = ", ".join(str(other) for other, step in steps.items() if step == high)
        lines.append(
            f"rank {ahead} is {high - low} step{'s' if high - low > 1 else ''} ahead of rank {behind}. In a "
            "real job the number of micro-batches differs between ranks: agree on it before the step, and "
            "let ranks that have fewer run an empty micro-batch"
        )
    return "\n".join(lines)


def _parts(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Tensors in order, cut where one all-reduce would exceed _CHUNK elements."""
    parts: list[list[Tensor]] = []
    size = 0
    for tensor in tensors:
        if not parts or size + tensor.numel() > _CHUNK:
            parts.append([])
            size = 0
        parts[-1].append(tensor)
        size += tensor.numel()
    return parts


FAILED_TOGETHER_SECONDS = 10.0
"""How long a rank that failed waits to hear that all others failed with it."""


def failed_together(ranks: RankContext, error: BaseException, *, where: str) -> bool:
    """Return whether all ranks have failed at the same place, so that they can still save together."""
    if ranks.world_size == 1:
        return True
    if isinstance(error, RankError):
        return False
    guard = Guard(ranks, seconds=FAILED_TOGETHER_SECONDS)
    with contextlib.suppress(Desync):  # the others are elsewhere, or gone: the error itself goes on
        guard.exchange(-1, {}, what="saving what is there", name=f"failed {where}")
        return True
    return False
