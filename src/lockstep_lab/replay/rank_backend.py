"""Train backends of a replay on several ranks, real or simulated one after the other.

Both stand where a replay's own backend stands and change one thing: the gradients after `forward_backward`
are those of a step of all ranks, added up.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.packing import empty_batch
from lockstep.protocols.train import StepStats, TokenLoss
from lockstep.ranks.context import PeerFailed
from lockstep.ranks.guard import Desync, Guard
from lockstep.schema.batch import PackedBatch
from lockstep.train.optimizer import global_norm
from lockstep_lab.replay.policy import ReplayBackend
from lockstep_lab.replay.step_plan import PlannedStep, waits_in
from lockstep_lab.suite.process import error_line


class _Wrapped:
    """The wrapped backend, and what a replay uses of it as it is: nothing is agreed on or added up there."""

    def __init__(self, inner: ReplayBackend) -> None:
        self.inner = inner
        self.contract, self.reduces_gradients, self.spans = (
            inner.contract,
            inner.reduces_gradients,
            inner.spans,
        )
        self.logprobs_own, self.forward_backward_own = inner.logprobs_own, inner.forward_backward_own
        self.close = inner.close


class RankBackend(_Wrapped):
    """The backend of one real rank.

    Before forward and backward the ranks agree on what comes next, and afterwards on whether it worked; then
    gradients are added up. If one rank's input failed, the step has no gradients on any rank. Without
    `guard.checked` nothing is agreed on, as in most jobs.

    Args:
        terms: what must be the same on all ranks, such as the cell.
        spare: makes the batch that a rank without an input runs where collectives are inside of forward or
            backward (DeepSpeed).
    """

    def __init__(
        self,
        inner: ReplayBackend,
        guard: Guard,
        *,
        terms: Mapping[str, Any],
        spare: Callable[[], PackedBatch],
        zero_stage: int | None,
    ) -> None:
        super().__init__(inner)
        self.guard, self.terms, self.spare, self.zero_stage = guard, dict(terms), spare, zero_stage
        self.step: PlannedStep | None = None
        self.desync: Desync | None = None
        """Why the ranks cannot go on together; None: they can."""
        self.notes: list[str] = []
        """What happened to the current step's gradients."""
        self.delivered = False
        """Whether the current step's gradients were read, and there were any."""
        self.dropped = False
        """Whether the current step has no gradients because a rank failed in it."""
        self._entered = False
        self._peer_missing = False

    # --- a step ---------------------------------------------------------------------------------------------

    def start(self, step: PlannedStep) -> None:
        """Begin a step; a call of `forward_backward`, `logprobs` or `without_input` follows."""
        self.step, self._entered, self.notes = step, False, []
        self.delivered = self.dropped = self._peer_missing = False

    def forward_backward(self, batches: Sequence[PackedBatch], loss: TokenLoss) -> StepStats:
        """Run as the backend does; gradients are those of all ranks."""
        self._enter(batches)
        with self._guarded(f"forward and backward of {self._what()}"):
            try:
                stats = self.inner.forward_backward_own(batches, loss)
            except Exception as error:
                self._agree_on_outcome(error)
                raise
        self._agree_on_outcome(None)
        return stats

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Run as the backend does, which at ZeRO stage 3 gathers weights from all ranks."""
        self._enter(batches)
        with self._guarded(f"forward of {self._what()}"):
            return self.inner.logprobs_own(batches)

    def without_input(self, loss: TokenLoss, *, backward: bool) -> None:
        """Run an empty micro-batch with zero gradients: this rank has no input in this step."""
        if not self.reduces_gradients:
            self._enter([])
            if backward:
                self._agree_on_outcome(None)
        elif backward:
            self.forward_backward([empty_batch(self.spare())], loss)
        else:
            self.logprobs([empty_batch(self.spare())])

    def report_failure(self, error: str) -> None:
        """Tell the other ranks that this rank's input failed before it reached the backend."""
        if self._entered:
            return
        step = self._step()
        if self.guard.checked:
            with self._guarded():
                self.guard.agree(step, self._intent([], error=error), what=f"entering step {step}")

    def _step(self) -> int:
        assert self.step is not None
        return self.step.step

    def _what(self) -> str:
        assert self.step is not None
        index = self.step.inputs[self.guard.ranks.rank]
        return "an empty micro-batch" if index is None else f"input {index}"

    def _intent(self, batches: Sequence[PackedBatch], *, error: str | None = None) -> dict[str, Any]:
        return {
            "tokens": sum(batch.num_tokens for batch in batches),
            "terms": self.terms,
            "error": error,
        }

    def _enter(self, batches: Sequence[PackedBatch]) -> int:
        """Agree with the other ranks that all are at this step. Raises Desync; PeerFailed where DeepSpeed's
        collectives would wait for a rank that has failed."""
        step, self._entered = self._step(), True
        with self._guarded():
            intents = self.guard.agree(
                step, self._intent(batches), what=f"entering step {step} with {self._what()}", same=("terms",)
            )
            self.guard.at(step, f"forward and backward of {self._what()}")
        failed = [f"rank {r}: {f['error']}" for r, f in enumerate(intents) if f.get("error")]
        if failed:
            self._peers_failed(failed)
            if self.reduces_gradients:
                raise PeerFailed(
                    f"peer-failed: step {step}: not run, because another rank failed first "
                    f"({'; '.join(failed)}). In a real job the other ranks would now wait "
                    f"{waits_in(self.zero_stage)}"
                )
        self._peer_missing = bool(failed)
        return step

    def _agree_on_outcome(self, error: Exception | None) -> None:
        """Agree on whether forward and backward worked, then add up the gradients of all ranks."""
        step = self._step()
        if self._peer_missing:
            self._drop()
            return
        with self._guarded():
            if self.guard.checked:
                line = None if error is None else f"{type(error).__name__}: {error_line(error)}"
                outcomes = self.guard.agree(step, {"error": line}, what=f"the end of step {step}")
                failed = [f"rank {r}: {f['error']}" for r, f in enumerate(outcomes) if f["error"]]
                if failed:
                    self._peers_failed(failed)
                    self._drop()
                    return
            if error is None and not self.reduces_gradients:
                self._add_up(step)

    def _drop(self) -> None:
        """Drop the step's gradients, as every rank does."""
        self.dropped = True
        self.inner.drop_gradients()

    def _peers_failed(self, failed: Sequence[str]) -> None:
        self.notes.append(
            f"step {self._step()} has no gradients: {'; '.join(failed)}. In a real job the other ranks would "
            f"wait {waits_in(self.zero_stage)}"
        )

    def _add_up(self, step: int) -> None:
        """All-reduce every trained parameter's gradient; those that took no part count as zero."""
        live = self.inner.live_gradients()
        module: torch.nn.Module = self.inner.module  # type: ignore[attr-defined]
        # Every rank must reduce the same tensors: what took no part here may have on another rank.
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and name not in live:
                parameter.grad = torch.zeros_like(parameter)
        steps = self.guard.add_up(list(self.inner.live_gradients().values()), step=step)
        if set(steps) != {step}:
            where = ", ".join(f"rank {rank} at step {at}" for rank, at in enumerate(steps))
            self.notes.append(
                f"gradients of DIFFERENT steps were added up ({where}): the all-reduces have equal shapes, "
                "so neither gloo nor NCCL notices. In a job this trains on, with wrong gradients"
            )

    @contextlib.contextmanager
    def _guarded(self, what: str = "") -> Iterator[None]:
        """Keep a Desync that is raised in the body: a replay turns every exception into a row. A hang in
        `what` is explained where the backend runs collectives of its own, as DeepSpeed does."""
        explains = what and self.reduces_gradients
        try:
            with self.guard.explained(self._step(), what) if explains else contextlib.nullcontext():
                yield
        except Desync as error:
            self.desync = error
            raise

    # --- the rest -------------------------------------------------------------------------------------------

    def optimizer_step(self) -> dict[str, float]:
        """Step as the backend does; every rank has the same gradients, so the weights stay equal. Skipped if
        the step has no gradients."""
        if self.dropped:
            return {"grad_norm": math.nan, "lr": math.nan}
        with self._guarded("the optimizer step"):
            return self.inner.optimizer_step()

    def gradient_norm(self) -> float:
        """The norm of the step's gradients over all ranks; nan if it has none."""
        if self.dropped:
            return math.nan
        with self._guarded("the gradient norm"):
            return self.inner.gradient_norm()

    def live_gradients(self) -> dict[str, Tensor]:
        """The step's gradients, added up over ranks."""
        gradients = self.gradients() if self.reduces_gradients else self.inner.live_gradients()
        self.delivered = bool(gradients)
        return gradients

    def gradients(self) -> dict[str, Tensor]:
        """Copies of the gradients, float32 on the host."""
        with self._guarded("gathering gradients"):
            return self.inner.gradients()

    def drop_gradients(self) -> None:
        """Drop the backend's gradients."""
        self.inner.drop_gradients()


class SimulatedBackend(_Wrapped):
    """The backend of all ranks of a step, one after the other in this process.

    Gradients stay until the last rank of a step has added its own; a rank that fails leaves the step without
    any, as RankBackend does.
    """

    def __init__(self, inner: ReplayBackend, *, want_gradients: Callable[[], bool]) -> None:
        super().__init__(inner)
        self.want_gradients = want_gradients
        self.last = True
        """Whether the current rank is the last one of the step that has an input."""
        self.failed = False
        self.delivered = False
        self._sum: dict[str, Tensor] = {}

    def start(self) -> None:
        """Begin a step."""
        self.failed, self.last, self.delivered = False, False, False
        self._sum = {}
        self.inner.drop_gradients()

    def fail(self) -> None:
        """Drop the step's gradients: a rank's input failed."""
        self.failed = True
        self._sum = {}
        self.inner.drop_gradients()

    def forward_backward(self, batches: Sequence[PackedBatch], loss: TokenLoss) -> StepStats:
        """Run as the backend does; gradients are added to those of the step."""
        stats = self.inner.forward_backward(batches, loss)
        if self.failed:
            self.inner.drop_gradients()
        elif self.reduces_gradients:
            if self.want_gradients():
                for name, gradient in self.inner.gradients().items():
                    self._sum[name] = self._sum[name] + gradient if name in self._sum else gradient
            self.inner.drop_gradients()
        return stats

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Run as the backend does."""
        return self.inner.logprobs(batches)

    def live_gradients(self) -> dict[str, Tensor]:
        """The step's gradients, at its last rank; none before that."""
        if self.failed or not self.last:
            return {}
        gradients = self._sum if self.reduces_gradients else self.inner.live_gradients()
        self.delivered = bool(gradients)
        return gradients

    def gradient_norm(self) -> float:
        """The norm of the step's gradients at its last rank; nan before that, and where DeepSpeed's gradients
        are not kept."""
        if self.failed or not self.last:
            return math.nan
        if not self.reduces_gradients:
            return self.inner.gradient_norm()
        return float(global_norm(list(self._sum.values()))) if self._sum else math.nan

    def gradients(self) -> dict[str, Tensor]:
        """Copies of the gradients, float32 on the host."""
        return {name: g.to("cpu", torch.float32, copy=True) for name, g in self.live_gradients().items()}

    def optimizer_step(self) -> dict[str, float]:
        """Step once for all ranks, at the last one."""
        if not self.last:
            return {"grad_norm": math.nan, "lr": math.nan}
        return self.inner.optimizer_step()

    def drop_gradients(self) -> None:
        """Drop gradients, but only after the last rank."""
        if self.last:
            self._sum = {}
            self.inner.drop_gradients()
