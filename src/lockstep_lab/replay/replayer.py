"""Run a replay's policy on recorded inputs, one row of results each."""

from __future__ import annotations

import faulthandler
import gc
import os
import sys
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lockstep.execution import CompileWatch
from lockstep.models.dtypes import DTYPES
from lockstep.observe.metrics import Spans
from lockstep.observe.text import echo
from lockstep.schema.batch import PackedBatch
from lockstep.schema.recording import RecordedInput
from lockstep_lab.replay.buckets import computed_slots, memory_limit, plan_buckets, select_inputs, shape_of
from lockstep_lab.replay.cell import ReplayOptions, check_cell
from lockstep_lab.replay.losses import token_loss
from lockstep_lab.replay.outputs import KeptOutputs
from lockstep_lab.replay.policy import (
    Match,
    Policy,
    check_ids,
    check_inputs_fit,
    check_tail,
    check_usable,
    model_config,
    model_head,
    model_size,
)
from lockstep_lab.replay.results import ReplayFiles, ReplayRow
from lockstep_lab.suite.machine import PeakMemory
from lockstep_lab.suite.process import error_line, is_out_of_memory

if TYPE_CHECKING:
    from lockstep.recording import Recording


class Deadline:
    """A context manager around all inputs; `start` and `stop` around each.

    When one takes longer, the stacks of all threads go to OUT/tracebacks, the results so far are written, and
    the process ends with status 1.

    Args:
        seconds: of one input; None: no deadline.
        on_expiry: called with the input's index, to write what there is.
        leave: ends the process.
    """

    def __init__(
        self,
        seconds: float | None,
        *,
        files: ReplayFiles | None,
        on_expiry: Callable[[int], None],
        leave: Callable[[int], None] = os._exit,
    ) -> None:
        self.seconds, self.files, self.on_expiry, self.leave = seconds, files, on_expiry, leave
        self._timer: threading.Timer | None = None

    def __enter__(self) -> Deadline:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def start(self, index: int) -> None:
        """Start the clock for input `index`."""
        if self.seconds is not None:
            self._timer = threading.Timer(self.seconds, self._expire, [index])
            self._timer.daemon = True
            self._timer.start()

    def stop(self) -> None:
        """Stop the clock: the input is done. If it has just expired, wait: the process ends."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer.join()

    def _expire(self, index: int) -> None:
        where = "no traceback was kept"
        if self.files is not None:
            (self.files.out / "tracebacks").mkdir(parents=True, exist_ok=True)
            path = self.files.out / f"tracebacks/{index:06d}.txt"
            with path.open("w", encoding="utf-8") as file:
                faulthandler.dump_traceback(file)
            where = f"all threads' stacks are in {path}"
        try:
            self.on_expiry(index)
        finally:
            echo(
                f"replay: input {index} took more than --timeout {self.seconds:g} s; {where}",
                file=sys.stderr,
                flush=True,
            )
            sys.stdout.flush()
            self.leave(1)


class Replayer:
    """A loaded policy that replays inputs of one recording.

    Args:
        files: where tracebacks are kept; None: nowhere.

    Raises:
        ConfigError, RecordingError, ModelError: before the first forward.
    """

    def __init__(
        self, recording: Recording, options: ReplayOptions, *, files: ReplayFiles | None = None
    ) -> None:
        self.recording, self.options, self.files = recording, options, files
        cell = options.cell
        check_cell(cell)
        self.order = select_inputs(recording, options)
        config = model_config(recording.header, options)
        self.size = model_size(config, dtype=DTYPES[cell.dtype], head=model_head(recording.header))
        check_inputs_fit(recording, self.order, self.size, name=config.name)
        self.loss = token_loss(recording.header, options.loss)
        limit = memory_limit(cell, self.size.shape, backward=options.backward, max_bytes=options.max_memory)
        planned = plan_buckets(recording, self.order, options, max_positions=self.size.max_positions)
        self.bucketing = replace(planned, limit=limit)
        self.device = torch.device(cell.device)
        if self.device.type == "cuda" and self.device.index is not None:
            torch.cuda.set_device(self.device)
        synchronize = torch.cuda.synchronize if self.device.type == "cuda" else None
        self._spans = Spans(synchronize=synchronize)
        self.memory = PeakMemory(self.device)
        self.watch = CompileWatch()
        started = time.perf_counter()
        self.policy = Policy(
            recording, options, order=self.order, bucketing=self.bucketing, spans=self._spans
        )
        self.load_seconds = time.perf_counter() - started
        self.weights_description = self.policy.describe_weights(recording.metas[self.order[0]])
        self.outputs = None
        if options.keep_outputs:
            self.outputs = KeptOutputs(
                options.gradient_inputs if options.backward else 0, options.gradient_entries
            )
        self.matches: Counter[Match] = Counter()
        self.recompiles = 0
        self.broken: str | None = None
        """Why the device cannot be used any more; None: it can."""
        self._seen_shapes: set[Any] = set()
        self._graphs = 0

    # --- one input ------------------------------------------------------------------------------------------

    def run(self, index: int) -> ReplayRow:
        """Replay one input. An exception becomes the row's error; only KeyboardInterrupt propagates."""
        base = self._base(index)
        if self.broken is not None:
            return ReplayRow(**base, status="skipped")
        try:
            values = self._replay(index)
        except Exception as error:  # kept with its traceback, counted, shown
            return self._failed(index, base, error)
        return ReplayRow(**base, status="ok", **values)

    def timed_out_row(self, index: int) -> ReplayRow:
        """Return the row of an input that took longer than `timeout`."""
        line = f"it took more than {self.options.timeout} s"
        log = f"tracebacks/{index:06d}.txt"
        return ReplayRow(
            **self._base(index), status="failed", error={"type": "Timeout", "line": line, "log": log}
        )

    def _base(self, index: int) -> dict[str, Any]:
        meta, lengths = self.recording.metas[index], self.recording.lengths[index]
        where = {name: getattr(meta, name) for name in ("step", "update", "micro_batch", "rank")}
        return where | {
            "index": index,
            "documents": len(lengths),
            "tokens": sum(lengths),
            "longest": max(lengths, default=0),
            "shortest": min(lengths, default=0),
        }

    def _replay(self, index: int) -> dict[str, Any]:
        recorded = self.recording[index]
        check_usable(recorded.meta, index=index)
        name = self.policy.config.name
        check_ids(recorded.batch, index=index, vocab_size=self.size.vocab_size, name=name)
        check_tail(recorded.batch, index=index, max_positions=self.size.max_positions, name=name)
        batch = self.bucketing.fit(recorded.batch)
        match = self.policy.use(recorded.meta)
        self.matches[match] += 1
        if recorded.rng is not None:
            # As before the recorded forward: dropout drops the same again.
            torch.set_rng_state(recorded.rng)
        self._spans.start()
        self.memory.reset()
        loss, logprobs = self._compute(batch)
        times = self._spans.flush()
        peak = self.memory.peak()
        values: dict[str, Any] = {"weights": match, "peak_memory_bytes": peak}
        values |= self._timing(batch, times) | self._count_graphs(batch)
        values["loss"] = None if loss is None else float(loss)
        values |= self._differences(recorded, values["loss"], logprobs)
        values["grad_norm"] = self._after_backward(index) if self.options.backward else None
        if self.outputs is not None:
            self.outputs.add_logprobs(index, logprobs, batch)
        return values

    def _compute(self, batch: PackedBatch) -> tuple[Tensor | None, Tensor]:
        """Return (loss, logprobs [T]). Forward only: the loss of a policy that has not moved, or None if the
        loss needs the entropy or has router losses."""
        backend = self.policy.backend
        if self.options.backward:
            stats = backend.forward_backward([batch], self.loss)
            return stats.losses[0], stats.logprobs[0]
        with self._spans("forward"):
            logprobs = backend.logprobs([batch])[0]
        has_more = self.options.loss == "recorded" and self.recording.header.router_losses
        if self.loss.entropy_grad or has_more or not bool(batch.loss_mask.any()):
            return None, logprobs
        moved = batch.to(logprobs.device)
        every = slice(0, batch.num_slots)
        return self.loss(logprobs, torch.zeros_like(logprobs), moved, every).loss, logprobs

    def _timing(self, batch: PackedBatch, times: dict[str, float]) -> dict[str, Any]:
        forward, backward = times.get("time/forward", 0.0), times.get("time/backward")
        seconds, slots = forward + (backward or 0.0), computed_slots(batch, self.options.cell)
        return {
            "forward_ms": forward * 1000,
            "backward_ms": None if backward is None else backward * 1000,
            "tokens_per_second": batch.num_tokens / seconds if seconds else None,
            "slots_per_second": slots / seconds if seconds else None,
            "computed_slots": slots,
        }

    def _count_graphs(self, batch: PackedBatch) -> dict[str, Any]:
        """Count new graphs; a graph compiled for a shape seen before is a recompile."""
        compiled = self.options.cell.execution != "eager"
        shape = shape_of(batch)
        key = shape if compiled else None
        first, new = key not in self._seen_shapes, 0
        self._seen_shapes.add(key)
        if compiled:
            graphs = self.watch.report().graphs
            new, self._graphs = graphs - self._graphs, graphs
            self.recompiles += 0 if first else new
        return {"shape": shape, "first_call": first, "new_graphs": new}

    def _differences(self, recorded: RecordedInput, loss: float | None, logprobs: Tensor) -> dict[str, Any]:
        recorded_outputs = recorded.outputs
        if recorded_outputs is None:
            return {}
        differences: dict[str, Any] = {"loss_recorded": recorded_outputs.loss}
        if loss is not None and recorded_outputs.loss is not None and self.options.loss == "recorded":
            differences["loss_difference"] = loss - recorded_outputs.loss
        if recorded_outputs.logprobs is not None:
            used = recorded.batch.num_tokens
            mask = recorded.batch.loss_mask[:used]
            if bool(mask.any()):
                difference = (logprobs[:used].cpu() - recorded_outputs.logprobs[:used])[mask].abs()
                differences["logprob_max_difference"] = float(difference.max())
                differences["logprob_mean_difference"] = float(difference.mean())
        return differences

    def _after_backward(self, index: int) -> float | None:
        """Keep the gradients, measure them, and apply or drop them."""
        backend = self.policy.backend
        norm = backend.gradient_norm()
        if self.outputs is not None and self.outputs.wants_gradients:
            self.outputs.add_gradients(index, backend.live_gradients())
        if self.options.optimizer_step:
            self.policy.moved = True
            return backend.optimizer_step()["grad_norm"]
        backend.drop_gradients()
        return norm

    def _failed(self, index: int, base: dict[str, Any], error: Exception) -> ReplayRow:
        log = "" if self.files is None else self.files.traceback(index, error)
        memory = is_out_of_memory(error)
        line, kind = error_line(error), type(error).__name__
        # The frames hold activations; without this the next input would start with less memory.
        cause: BaseException | None = error
        while cause is not None:
            traceback.clear_frames(cause.__traceback__)
            cause = cause.__cause__ or cause.__context__
        # A CUDA error other than lack of memory loses the
        # context: every later call of this process would fail.
        if not memory and self.device.type == "cuda" and "CUDA error" in str(error):
            self.broken = line
        else:
            self._cleared(memory)
        return ReplayRow(
            **base, status="oom" if memory else "failed", error={"type": kind, "line": line, "log": log}
        )

    def _cleared(self, memory: bool) -> None:
        self.policy.backend.drop_gradients()
        if memory:
            # First: the allocator can give back only what no cycle of a traceback refers to.
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()

    def warm_up(self, deadline: Deadline) -> None:
        """Run the first inputs once, unmeasured; an error shows again when they are measured."""
        for index in self.order[: self.options.warmup]:
            outputs, self.outputs = self.outputs, None
            files, self.files = self.files, None
            deadline.start(index)
            self.run(index)
            deadline.stop()
            self.outputs, self.files = outputs, files
        self.matches.clear()

    def close(self) -> None:
        """Close the policy."""
        self.policy.close()
