"""Training clients on several ranks: every rank has a replica of each model and computes its share of a call.

    rank 0    HTTP, sessions, checkpoints, sampling; its worker's thread broadcasts a Command and executes it
    others    `follow`: wait for a Command and execute it, until "end"

Datum k of an optimizer step goes to rank k % N, counted over all calls of the step, so splitting a call into
chunks changes no bit: each rank accumulates the same gradients in the same order. They are all-reduced once
per optimizer step, and every rank takes the same step. The forward is batch-invariant, so logprobs do not
depend on the rank.

Every collective has a deadline. Rank 0 broadcasts "idle" every few seconds, so waiting for the next Command
has one too.
"""

from __future__ import annotations

import dataclasses
import itertools
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import torch
from pydantic import JsonValue
from torch import Tensor

from lockstep.errors import LockstepError
from lockstep.observe.memory import is_out_of_memory
from lockstep.ranks.context import PeerFailed, RankContext, RankError
from lockstep.serve.losses import ServedLoss
from lockstep.serve.models import AdamSettings, AdapterSpec, BaseModel, TrainingModel
from lockstep.serve.wire import Datum
from lockstep.serve.work import no_memory

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class SentDatum:
    """A wire.Datum as JSON."""

    inputs: list[int]
    targets: list[int]
    floats: dict[str, list[float]]

    @classmethod
    def of(cls, datum: Datum) -> SentDatum:
        floats = {name: values.tolist() for name, values in datum.floats.items()}
        return cls(inputs=datum.inputs.tolist(), targets=datum.targets.tolist(), floats=floats)

    def datum(self) -> Datum:
        floats = {name: torch.tensor(values, dtype=torch.float32) for name, values in self.floats.items()}
        inputs, targets = (torch.tensor(ids, dtype=torch.int64) for ids in (self.inputs, self.targets))
        return Datum(inputs=inputs, targets=targets, floats=floats)


@dataclass(frozen=True, kw_only=True, slots=True)
class Command:
    """What every rank executes next."""

    op: Literal["make", "forward", "train", "step", "idle", "end"]
    model: int = 0
    """The number of a model."""
    dropped: list[int] = field(default_factory=list)
    """Models to forget before."""
    base: str = ""
    spec: AdapterSpec | None = None
    folder: Path | None = None
    """make: of the state to load; None: a new model."""
    optimizer: bool = False
    datums: list[SentDatum] = field(default_factory=list)
    loss: ServedLoss | None = None
    adam: AdamSettings | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Share:
    """The results of one rank's datums, in the order of the request."""

    logprobs: list[list[float]]
    """[L] of each datum."""
    losses: list[float]


class Replica:
    """One rank's copy of a model."""

    def __init__(self, model: TrainingModel) -> None:
        self.model = model
        self.taken = 0
        """Datums of this optimizer step so far, on all ranks."""


class RankModels:
    """The models of one rank.

    Raises:
        RankError: by every method: another rank is gone, or did not arrive in time.
    """

    def __init__(self, bases: Sequence[BaseModel], ranks: RankContext) -> None:
        self._bases, self._ranks = {base.name: base for base in bases}, ranks
        self._replicas: dict[int, Replica] = {}
        self._numbers = itertools.count(1)
        self._dropped: deque[int] = deque()
        """Numbers of models that rank 0 no longer has, from whichever thread let go of one."""

    # rank 0

    def make(
        self,
        base: BaseModel,
        spec: AdapterSpec | None,
        folder: Path | None = None,
        *,
        optimizer: bool = False,
    ) -> RankedModel:
        """Make a model on every rank: a new one, or one that was saved. Raises as TrainingModel.load."""
        number = next(self._numbers)
        command = Command(
            op="make", model=number, base=base.name, spec=spec, folder=folder, optimizer=optimizer
        )
        self.send(command)
        model = RankedModel(number, self._replicas[number].model, self)
        weakref.finalize(model, self._dropped.append, number)
        return model

    def send(self, command: Command) -> Any:
        """Have every rank execute a command; returns the result. From one thread only."""
        dropped = [self._dropped.popleft() for _ in range(len(self._dropped))]
        command = dataclasses.replace(command, dropped=dropped)
        return self._execute(self._ranks.broadcast(command, Command, what=f"command {command.op!r}"))

    def idle(self) -> None:
        """Tell the others that this rank is there."""
        self.send(Command(op="idle"))

    def end(self) -> None:
        """Let the others end."""
        self.send(Command(op="end"))

    # the others

    def follow(self) -> None:
        """Execute what rank 0 broadcasts, until it ends."""
        while True:
            command = self._ranks.broadcast(Command(op="idle"), Command, what="the next command")
            if command.op == "end":
                return
            try:
                self._execute(command)
            except PeerFailed:  # a bug fails a request on rank 0; the ranks are in step
                continue
            except RankError:
                raise
            except LockstepError:  # every rank has it, and rank 0 answers with it
                continue

    # every rank

    def _execute(self, command: Command) -> Any:
        for number in command.dropped:
            self._replicas.pop(number, None)  # None: it could not be made
        executed: Mapping[str, Callable[[Command], Any]] = {
            "make": self._make,
            "forward": self._forward,
            "train": self._train,
            "step": self._step,
        }
        return executed[command.op](command) if command.op in executed else None

    def _gathered(self, make: Callable[[], T], kind: Any, command: Command) -> list[T]:
        def guarded() -> T:
            try:
                return make()
            except Exception as error:
                if isinstance(error, LockstepError) or not is_out_of_memory(error):
                    raise
                raise no_memory(f"{command.op!r} of model {command.model}", error) from None

        return self._ranks.gather_results(guarded, kind, what=f"{command.op!r} of model {command.model}")

    def _make(self, command: Command) -> None:
        base, made = self._bases[command.base], []

        def make() -> None:
            if command.folder is None:
                made.append(TrainingModel(base, command.spec))
            else:
                made.append(
                    TrainingModel.load(base, command.spec, command.folder, optimizer=command.optimizer)
                )

        self._gathered(make, JsonValue, command)
        self._replicas[command.model] = Replica(made[0])

    def _mine(self, command: Command, taken: int) -> list[Datum]:
        first = (self._ranks.rank - taken) % self._ranks.world_size
        return [datum.datum() for datum in command.datums[first :: self._ranks.world_size]]

    def _in_order(self, shares: Sequence[list[T]], taken: int) -> list[T]:
        """Put what each rank has of its own datums into the order of the request."""
        parts, size = [iter(share) for share in shares], self._ranks.world_size
        return [next(parts[(taken + index) % size]) for index in range(sum(map(len, shares)))]

    def _forward(self, command: Command) -> list[Tensor]:
        model, mine = self._replicas[command.model].model, self._mine(command, 0)
        shares = self._gathered(lambda: _lists(model.forward(mine)), list[list[float]], command)
        return _tensors(self._in_order(shares, 0))

    def _train(self, command: Command) -> tuple[list[Tensor], dict[str, float]]:
        replica = self._replicas[command.model]
        model, taken = replica.model, replica.taken
        mine, loss = self._mine(command, taken), cast(ServedLoss, command.loss)

        def share() -> Share:
            if not mine:
                return Share(logprobs=[], losses=[])
            logprobs, losses = model.add_gradients(mine, loss)
            return Share(logprobs=_lists(logprobs), losses=losses)

        # Another rank's datum may be the one that fails: this rank drops the gradients of its own then.
        with model.backend.keeping_gradients():
            shares = self._gathered(share, Share, command)
        replica.taken += len(command.datums)
        logprobs = self._in_order([share.logprobs for share in shares], taken)
        losses = self._in_order([share.losses for share in shares], taken)
        return _tensors(logprobs), loss.total(losses)

    def _step(self, command: Command) -> dict[str, float]:
        replica, adam = self._replicas[command.model], cast(AdamSettings, command.adam)
        replica.model.backend.all_reduce_gradients(self._ranks)
        try:
            made = self._gathered(lambda: replica.model.optim_step(adam), dict[str, float], command)
        finally:
            replica.taken = 0
        return made[0]


class RankedModel:
    """A model that all ranks train, for rank 0: what TrainingModel is to one process.

    Only rank 0 saves, since all have the same weights.
    """

    def __init__(self, number: int, model: TrainingModel, ranks: RankModels) -> None:
        self._number, self._ranks = number, ranks
        self.base = model.base
        self.save, self.save_weights, self.export = model.save, model.save_weights, model.export

    def forward(self, datums: Sequence[Datum]) -> list[Tensor]:
        """See TrainingModel."""
        sent = [SentDatum.of(datum) for datum in datums]
        logprobs: list[Tensor] = self._ranks.send(Command(op="forward", model=self._number, datums=sent))
        return logprobs

    def forward_backward(
        self, datums: Sequence[Datum], loss: ServedLoss
    ) -> tuple[list[Tensor], dict[str, float]]:
        """See TrainingModel."""
        sent = [SentDatum.of(datum) for datum in datums]
        command = Command(op="train", model=self._number, datums=sent, loss=loss)
        results: tuple[list[Tensor], dict[str, float]] = self._ranks.send(command)
        return results

    def optim_step(self, adam: AdamSettings) -> dict[str, float]:
        """See TrainingModel."""
        metrics: dict[str, float] = self._ranks.send(Command(op="step", model=self._number, adam=adam))
        return metrics


def _lists(tensors: Sequence[Tensor]) -> list[list[float]]:
    return [tensor.tolist() for tensor in tensors]


def _tensors(lists: Sequence[list[float]]) -> list[Tensor]:
    return [torch.tensor(values, dtype=torch.float32) for values in lists]
