"""Samples that run together: a step is launched, and while it runs the one before it is read."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from lockstep.engine.embedded import EndedSample
from lockstep.engine.native.runner import Pending, Runner
from lockstep.engine.native.scheduler import Admission, Sample, Scheduler
from lockstep.engine.streaming import OnToken
from lockstep.observe.spans import Spans


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


@dataclass(frozen=True, kw_only=True, slots=True)
class Mode:
    """How steps are launched."""

    ahead: int
    """Steps that are launched before the first of them is read: 1 keeps a GPU busy, and costs a sample that
    ends one row; 0 where rows depend on tokens that only the host knows."""
    temperature: float | None
    """Of all samples; None: samples differ, or have more settings."""


class Generation:
    """Runs the samples of a scheduler until each has ended, or an abort.

    Args:
        mode: how steps are launched and tokens drawn; `add` may replace it.
    """

    def __init__(
        self,
        runner: Runner,
        scheduler: Scheduler,
        *,
        mode: Mode,
        counts: Counts,
        on_token: OnToken | None = None,
    ) -> None:
        self._runner, self.scheduler = runner, scheduler
        self.mode = mode
        self._counts, self._on_token = counts, on_token
        self._pending: deque[tuple[list[Sample], Pending]] = deque()
        self._ended: list[EndedSample] = []

    @property
    def idle(self) -> bool:
        """Whether no sample runs or waits: it may be replaced."""
        return not self.scheduler.unfinished()

    def add(self, samples: Iterable[Sample], *, mode: Mode, roomy: bool) -> None:
        """Let more samples run, between two steps."""
        self.scheduler.add(samples, roomy=roomy)
        self.mode = mode
        # The new mode may draw from what the host knows: then every token must have been read.
        while len(self._pending) > mode.ahead:
            self._read()

    def step(self, abort: threading.Event) -> list[EndedSample]:
        """Launch a step and read the one that is due; returns the samples that it ended. Must not be called
        when it is idle."""
        launched = self._launch(abort)
        if self._pending and (not launched or len(self._pending) > self.mode.ahead):
            self._read()
        else:
            assert launched or abort.is_set(), "samples wait, and nothing runs"
        ended, self._ended = self._ended, []
        return ended

    def abort(self) -> list[EndedSample]:
        """End all samples; it cannot go on afterwards."""
        return [*self._ended, *((sample, ("abort", None)) for sample in self.scheduler.unfinished())]

    def drain(self) -> None:
        """Read the steps that were launched for samples that have ended since, so that they are counted."""
        while self._pending:
            self._read()

    def _launch(self, abort: threading.Event) -> bool:
        """Launch the next step; False when there is none now, or an abort came."""
        scheduler, spans = self.scheduler, self._counts.spans
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
            temperature = self.mode.temperature
            states = None if temperature is not None else [row.state for row in rows]
            pending = self._runner.step(scheduler.columns(), temperature=temperature, states=states)
        for row in rows:
            row.in_flight += 1
        self._pending.append((rows, pending))
        self._counts.steps += 1
        self._counts.step_rows += len(rows)
        return True

    def _bring_up(self, admission: Admission, abort: threading.Event) -> None:
        # In this order: a copy reads what the prompts' forwards wrote, and the rest attends to what was
        # copied.
        for parts in (admission.prompts, admission.rest):
            if parts is admission.rest:
                self.scheduler.copies(admission)
            for chunk in self.scheduler.chunks(
                parts, tokens=self._runner.chunk_for, documents=self._runner.documents
            ):
                if abort.is_set():
                    return
                self._runner.prefill(chunk)
                self._counts.prefill_forwards += 1
                self._counts.prefill_tokens += len(chunk.token_ids)

    def _read(self) -> None:
        """Append the tokens of the oldest unread step, and note the samples that they end."""
        rows, pending = self._pending.popleft()
        with self._counts.spans("wait"):
            tokens, logprobs = pending.read()
        with self._counts.spans("record"):
            for sample, token, logprob in zip(rows, tokens, logprobs, strict=True):
                sample.in_flight -= 1
                if sample.done:
                    self._counts.wasted_rows += 1
                    continue
                ending = sample.add(token, logprob, self._on_token)
                if ending is not None:
                    self.scheduler.finish(sample)
                    self._ended.append((sample, ending))
