"""One call of `generate`: a step is launched, and while it runs the one before it is read."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from lockstep.engine.native.runner import Pending, Runner
from lockstep.engine.native.scheduler import Admission, Sample, Scheduler
from lockstep.errors import EngineError
from lockstep.observe.spans import Spans
from lockstep.schema.rollout import FinishReason

OnToken = Callable[[int, int, Sequence[int]], None]
"""Called after each token with (request index, sample index, token ids so far)."""
OnFinish = Callable[[Sample, FinishReason, int | str | None], None]
"""Called once per sample with the reason, and the stop token or string that ended it."""


@dataclass(slots=True)
class Counts:
    """Counters of an engine since its construction."""

    steps: int = 0
    step_rows: int = 0
    wasted_rows: int = 0
    """Rows that were computed for samples that had ended."""
    prefill_forwards: int = 0
    prefill_tokens: int = 0
    preemptions: int = 0
    spans: Spans = field(default_factory=Spans)


class Generation:
    """Runs samples until each has ended, or an abort.

    Args:
        ahead: steps that are launched before the first of them is read: 1 keeps a GPU busy, and costs a
            sample that ends one row; 0 where rows depend on tokens that only the host knows.
        temperature: of all samples; None: samples differ, or have more settings.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        ahead: int,
        temperature: float | None,
        counts: Counts,
        on_finish: OnFinish,
    ) -> None:
        self._runner, self._scheduler = runner, scheduler
        self._ahead, self._temperature = ahead, temperature
        self._counts, self._on_finish = counts, on_finish
        self._pending: deque[tuple[list[Sample], Pending]] = deque()

    def run(self, *, abort: threading.Event, on_token: OnToken | None = None) -> None:
        """Run all samples; each is reported to `on_finish` once."""
        while not abort.is_set():
            launched = self._launch(abort)
            if not launched and not self._pending:
                assert abort.is_set() or not self._scheduler.waiting, "samples wait, and nothing runs"
                break
            if not launched or len(self._pending) > self._ahead:
                self._read(on_token)
        for sample in self._scheduler.unfinished():
            self._on_finish(sample, "abort", None)
        self._counts.preemptions += self._scheduler.preemptions

    def _launch(self, abort: threading.Event) -> bool:
        """Launch the next step; False when there is none now, or an abort came."""
        scheduler, spans = self._scheduler, self._counts.spans
        with spans("schedule"):
            scheduler.advance()
            admission = scheduler.admit()
        if admission is not None:
            with spans("prefill"):
                self._bring_up(admission, abort)
        rows = list(scheduler.rows)
        if not rows or abort.is_set():
            return False
        with spans("launch"):
            states = None if self._temperature is not None else [row.state for row in rows]
            pending = self._runner.step(scheduler.columns(), temperature=self._temperature, states=states)
        for row in rows:
            row.in_flight += 1
        self._pending.append((rows, pending))
        self._counts.steps += 1
        self._counts.step_rows += len(rows)
        return True

    def _bring_up(self, admission: Admission, abort: threading.Event) -> None:
        for parts in (admission.prompts, admission.rest):
            if parts is admission.rest:
                self._scheduler.copies(admission)
            for chunk in self._scheduler.chunks(
                parts, tokens=self._runner.chunk_for, documents=self._runner.documents
            ):
                if abort.is_set():
                    return
                self._runner.prefill(chunk)
                self._counts.prefill_forwards += 1
                self._counts.prefill_tokens += len(chunk.token_ids)

    def _read(self, on_token: OnToken | None) -> None:
        """Append the tokens of the oldest unread step, and report the samples that they end."""
        rows, pending = self._pending.popleft()
        with self._counts.spans("wait"):
            tokens, logprobs = pending.read()
        if np.isnan(logprobs).any():
            self._refuse_nan(rows, logprobs)
        with self._counts.spans("record"):
            for sample, token, logprob in zip(rows, tokens, logprobs, strict=True):
                sample.in_flight -= 1
                if sample.done:
                    self._counts.wasted_rows += 1
                    continue
                sample.state.token_ids.append(token)
                sample.logprobs.append(logprob)
                if on_token is not None:
                    on_token(sample.group.index, sample.index, sample.state.token_ids)
                ended = _finish_reason(sample, token)
                if ended is not None:
                    self._scheduler.finish(sample)
                    self._on_finish(sample, *ended)

    def _refuse_nan(self, rows: Sequence[Sample], logprobs: Sequence[float]) -> None:
        for sample, logprob in zip(rows, logprobs, strict=True):
            if logprob != logprob and not sample.done:
                raise EngineError(
                    f"request {sample.group.index}: the logits of token {len(sample.state.token_ids)} of "
                    f"sample {sample.index} are not finite; the weights have diverged or the compute dtype "
                    "overflows (model.dtype)"
                )


def _finish_reason(sample: Sample, token: int) -> tuple[FinishReason, int | str | None] | None:
    state, params = sample.state, sample.state.params
    if token in state.end_ids:
        return "stop", token
    if sample.stops is not None:
        stop_string = sample.stops.find(state.token_ids)
        if stop_string is not None and len(state.token_ids) >= params.min_tokens:
            return "stop", stop_string
    if state.position >= sample.end:
        return "length", None
    return None
