"""`lockstep.record`: record the inputs of any torch module that trains a policy, by hooks on its forward.

    handle = lockstep.record(model, "recording")      one line; closed at exit
    with lockstep.record(model, "recording"): ...      or here, with the error if there is one

A forward is seen three times: before it (arguments, written at once, so that a crash leaves them), after it
(logprobs of the next tokens, fingerprints) and when its gradient arrives (dL/dlogprob). An update ends with
the optimizer's step, and then its inputs are complete.
"""

from __future__ import annotations

import atexit
import dataclasses
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from lockstep.errors import RecordingError
from lockstep.observe.text import echo
from lockstep.recording.calls import ForeignCall, bound_arguments, unusable_call, watched_call
from lockstep.recording.program import (
    ForeignModule,
    foreign_header,
    foreign_module,
    inner_optimizer,
    save_foreign_weights,
)
from lockstep.recording.seen import SeenCall, recorded_input, watch_output
from lockstep.recording.writer import InputError, RecordingWriter
from lockstep.schema.recording import RecordedInput, RecordingHeader

StepSignal = torch.optim.Optimizer | Literal["manual", "backward"] | None

_WEIGHTS = "weights/step-000000"
_OUTPUT_REFUSALS = (RuntimeError, TypeError, ValueError, IndexError)
"""What an output of a shape that belongs to no input raises; it becomes a remark on the input."""
_MUCH = 0.02
"""A relative residual that is reported at the end; logits of bfloat16 leave about 0.005."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RecordOptions:
    """The keyword arguments of `record`."""

    output_grad: bool = False
    temperature: float = 1.0
    every: int = 1
    first_call: int = 0
    last_call: int | None = None
    weights: str = "first"
    forwards: str = "grad"
    rank: int | None = None
    world_size: int | None = None
    ranks: Sequence[int] | None = None
    step: StepSignal = None

    def __post_init__(self) -> None:
        checks = {
            "every": (
                self.every,
                isinstance(self.every, int) and self.every >= 1,
                "a whole number of at least 1",
            ),
            "first_call": (self.first_call, self.first_call >= 0, "a whole number of at least 0"),
            "last_call": (
                self.last_call,
                self.last_call is None or self.last_call >= self.first_call,
                "None or at least first_call",
            ),
            "temperature": (self.temperature, self.temperature > 0, "above 0; greedy sampling counts as 1.0"),
            "weights": (self.weights, self.weights in ("first", "none"), "'first' or 'none'"),
            "forwards": (self.forwards, self.forwards in ("grad", "all"), "'grad' or 'all'"),
            "step": (
                self.step,
                self.step in (None, "manual", "backward") or isinstance(self.step, torch.optim.Optimizer),
                "a torch optimizer, 'manual', 'backward' or None",
            ),
        }
        for name, (value, good, rule) in checks.items():
            if not good:
                raise RecordingError(f"out-of-range: record: {name} = {value!r}; it must be {rule}")


def record(module: nn.Module, directory: Path | str, **options: Any) -> RecordHandle:
    """Record what `module` is trained on from now on, until the handle is closed or the program ends.

    The run's numbers do not change. On several ranks every rank calls this, with one directory.

    Args:
        module: the policy, or what holds it: the innermost transformers causal LM in it is hooked, or, if
            there is none, the module itself. May be wrapped by DDP, FSDP2 or DeepSpeed, or compiled.
        directory: the recording; must not hold one yet.
        output_grad: keep the whole gradient of the logits too. Its size is printed first.
        temperature: what the loss divides logits by before the softmax.
        every: only every k-th forward.
        first_call, last_call: only forwards from first_call to last_call, counted from 0.
        weights: "first" stores the weights as they are now (under weights/); "none" does not.
        forwards: "grad": those that build a graph, the training inputs. "all": also those that do not, but
            for decoding with a cache.
        rank, world_size: None: of torch.distributed, else of the environment, else 0 of 1.
        ranks: those that record; None: all. The others may call this too, and must if the weights are
            sharded (FSDP2): their handle does nothing.
        step: what ends an update. None: the step of any torch optimizer that holds one of the module's
            Parameters (found for DeepSpeed too). An optimizer: its step. "manual": `handle.step()`.
            "backward": every backward that is followed by another forward.

    Returns:
        The handle; a context manager with `close` and `step`.

    Raises:
        RecordingError: a bad argument, a directory that holds a recording, several policies in `module`, or
            weights that cannot be stored from here.
    """
    unknown = sorted(set(options) - set(RecordOptions.__dataclass_fields__))
    if unknown:
        raise RecordingError(
            f"unknown-setting: record: unknown argument {unknown[0]!r}; known: "
            f"{', '.join(RecordOptions.__dataclass_fields__)}"
        )
    return RecordHandle(module, Path(directory), RecordOptions(**options))


@dataclass(slots=True)
class _Counts:
    """Counters of a recording in progress."""

    update: int = 0
    micro_batches: int = 0
    """Forwards of this update so far, recorded or not."""
    calls: int = 0
    """Forwards that qualify, since the start."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Forwards that do not qualify, by reason."""
    capacity: dict[str, int] = field(
        default_factory=lambda: {"token_budget": 1, "max_seqlen": 1, "max_documents": 1}
    )
    paddings: set[str] = field(default_factory=set)
    unusable: int = 0
    """Inputs that are kept as they were called with, not as documents."""
    residual: float = 0.0
    """Largest relative residual of an input."""


class RecordHandle:
    """A recording in progress; see `record`."""

    def __init__(self, module: nn.Module, directory: Path, options: RecordOptions) -> None:
        self.directory, self.options = directory, options
        self.policy: ForeignModule = foreign_module(
            module, rank=options.rank, world_size=options.world_size, temperature=options.temperature
        )
        self._ranks = _recording_ranks(options.ranks, self.policy.world_size)
        first = self.policy.rank == self._ranks[0]
        if first and (directory / "recording.json").exists():
            raise RecordingError(
                f"already-exists: {directory / 'recording.json'}: the directory already contains a "
                "recording; give record() another directory, or remove the recording"
            )
        self.closed = False
        self._counts = _Counts()
        self._open: list[SeenCall] = []
        self._current: SeenCall | None = None
        self._writer: RecordingWriter | None = None
        self._header: RecordingHeader | None = None
        self._fingerprint: str | None = None
        self._reported_size = False
        if options.weights == "first":
            self._fingerprint = save_foreign_weights(self.policy, directory / _WEIGHTS, writes=first)
        if self.policy.rank not in self._ranks:
            self.closed = True
            return
        self._removers = self._hook(module)
        atexit.register(self._at_exit)

    def _hook(self, outer: nn.Module) -> list[Callable[[], None]]:
        # torch.compile must neither trace them nor break a graph over them
        before = torch.compiler.disable(self._before, recursive=True)
        after = torch.compiler.disable(self._after, recursive=True)
        # Hooks inside a compiled call would be traced, or not be seen by what is compiled already.
        around = self.policy.compiled_around  # no `or`: a compiled module forwards len()
        target = self.policy.module if around is None else around
        if target._compiled_call_impl is not None:
            removers = [_around_compiled_call(target, before, after)]
        else:
            removers = [
                target.register_forward_pre_hook(before, with_kwargs=True).remove,
                # always_call: after an error too, with None as the output.
                target.register_forward_hook(after, with_kwargs=True, always_call=True).remove,
            ]
        signal = self.options.step
        if signal is None:
            signal = inner_optimizer(outer)
        if isinstance(signal, torch.optim.Optimizer):
            removers.append(signal.register_step_post_hook(lambda *_: self._optimizer_stepped()).remove)
        elif signal is None:
            removers.append(register_optimizer_step_post_hook(self._any_optimizer).remove)
        return removers

    # --- the three sights of a forward ----------------------------------------------------------------------

    def _before(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._current = None
        # A forward inside a backward is activation checkpointing running this very module again.
        # Private, in torch 2.11 to 2.13: nothing public says that a backward is running.
        if torch._C._current_graph_task_id() != -1:
            return
        reason = self._reason_to_skip(kwargs)
        if reason is not None:
            self._counts.skipped[reason] = self._counts.skipped.get(reason, 0) + 1
            return
        if self.options.step == "backward" and any(seen.gradient is not None for seen in self._open):
            self.step()
        number = self._counts.calls - self.options.first_call
        last = self.options.last_call
        is_due = number >= 0 and number % self.options.every == 0
        is_due = is_due and (last is None or self._counts.calls <= last)
        micro_batch = self._counts.micro_batches
        self._counts.calls += 1
        self._counts.micro_batches += 1
        if is_due:
            named = bound_arguments(self.policy.module.forward, args, kwargs)
            self._current = self._begin(named, micro_batch)

    def _reason_to_skip(self, kwargs: Mapping[str, Any]) -> str | None:
        cache = kwargs.get("past_key_values")
        if cache is not None and _cached_tokens(cache):
            return "decoding with a cache"
        if self.options.forwards == "all":
            return None
        if not torch.is_grad_enabled():
            return "no graph"
        if not any(parameter.requires_grad for parameter in self.policy.module.parameters()):
            return "nothing to train"
        return None

    def _begin(self, named: Mapping[str, Any], micro_batch: int) -> SeenCall:
        """Write the call. No input raises: an unusable one is kept, marked."""
        seen = SeenCall(
            call=watched_call(named),
            update=self._counts.update,
            micro_batch=micro_batch,
            time=time.time(),
            keep=named.get("logits_to_keep"),
            autocast=_autocast(self.policy.device),
            graph=torch.is_grad_enabled(),
        )
        writer = self._writer or self._opened(seen)
        try:
            writer.begin([self._recorded(seen, outcome="pending", of=micro_batch + 1)])
        except InputError as error:
            seen.call = unusable_call(named, error)
            writer.begin([self._recorded(seen, outcome="pending", of=micro_batch + 1)])
        self._count(seen.call)
        self._open.append(seen)
        return seen

    def _count(self, call: ForeignCall) -> None:
        lengths, largest = call.layout.lengths, self._counts.capacity
        for name, value in (
            ("token_budget", sum(lengths)),
            ("max_seqlen", max(lengths)),
            ("max_documents", len(lengths)),
        ):
            largest[name] = max(largest[name], value)
        self._counts.paddings.update(call.layout.padding)
        if call.unusable is not None:
            self._counts.unusable += 1

    def _opened(self, seen: SeenCall) -> RecordingWriter:
        """The writer; the first input says what the header needs."""
        self._header = foreign_header(
            self.policy,
            seen,
            capacity=dict(self._counts.capacity),
            notes=self._notes(),
            weights=None if self._fingerprint is None else self.directory / _WEIGHTS,
        )
        self._writer = RecordingWriter(self.directory, self._header, rank=self.policy.rank, ranks=self._ranks)
        return self._writer

    def _after(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        seen, self._current = self._current, None
        if seen is None:
            return
        error = sys.exc_info()[1] if output is None else None
        if error is not None:
            seen.error = f"{type(error).__name__}: {error}"
            return
        with torch.no_grad():
            try:
                watch_output(
                    seen,
                    output,
                    temperature=self.options.temperature,
                    keep_gradient=self._keep_gradient if self.options.output_grad else None,
                )
            except _OUTPUT_REFUSALS as error:
                seen.remarks.append(f"the output could not be read ({type(error).__name__}: {error})"[:2000])

    def _keep_gradient(self, gradient: Tensor) -> Tensor:
        """Copy to the host; reports the size before the first copy."""
        if not self._reported_size:
            self._reported_size = True
            size = gradient.numel() * gradient.element_size()
            echo(
                f"lockstep: output_grad=True keeps the gradient of the logits of every input; this one is "
                f"{list(gradient.shape)} {gradient.dtype}, {size / 2**20:.1f} MiB",
                file=sys.stderr,
                flush=True,
            )
        return gradient.detach().to("cpu", copy=True)

    # --- updates --------------------------------------------------------------------------------------------

    def step(self) -> None:
        """End an update after an optimizer step: the calls since the last step are complete."""
        if self._counts.micro_batches == 0:
            return
        self._finish(self._open)
        self._counts.update += 1
        self._counts.micro_batches = 0

    def _optimizer_stepped(self) -> None:
        self.step()

    def _any_optimizer(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        own = {id(parameter) for parameter in self.policy.module.parameters()}
        if any(id(parameter) in own for group in optimizer.param_groups for parameter in group["params"]):
            self.step()

    def _finish(self, seen: Sequence[SeenCall], error: str | None = None) -> None:
        if not seen or self._writer is None:
            return
        for one in seen:
            if error is not None and one.error is None:
                one.error = error
            self._counts.residual = max(self._counts.residual, one.relative_residual())
        try:
            self._writer.finish([self._finished(one) for one in seen])
        except InputError:
            self._finish_apart(seen, self._writer)
        self._open = []

    def _finished(self, seen: SeenCall) -> RecordedInput:
        outcome: Literal["finished", "failed"] = "finished" if seen.error is None else "failed"
        return self._recorded(seen, outcome=outcome, of=self._counts.micro_batches)

    def _finish_apart(self, seen: Sequence[SeenCall], writer: RecordingWriter) -> None:
        """Finish calls one by one: those that cannot be stored with their outputs keep only their
        arguments."""
        for one in seen:
            try:
                writer.finish([self._finished(one)])
            except InputError as error:
                one.give_up(error)
                self._counts.unusable += 1
                writer.finish([self._finished(one)])

    def _recorded(
        self, seen: SeenCall, *, outcome: Literal["finished", "pending", "failed"], of: int
    ) -> RecordedInput:
        first = seen.update == 0
        return recorded_input(
            seen,
            outcome=outcome,
            num_micro_batches=of,
            rank=(self.policy.rank, self.policy.world_size),
            weights=self._fingerprint if first else None,
            checkpoint=_WEIGHTS if first and self._fingerprint is not None else None,
        )

    # --- the end --------------------------------------------------------------------------------------------

    def _notes(self) -> dict[str, Any]:
        notes = {
            "hooked": self.policy.path,
            "gradients": self.policy.reduction,
            "padding": sorted(self._counts.paddings),
            "skipped_forwards": dict(self._counts.skipped),
            "calls": self._counts.calls,
            "largest_relative_residual": self._counts.residual,
        }
        if self._counts.unusable:
            notes["unusable_inputs"] = self._counts.unusable
        if self.options.every > 1 or self.options.first_call or self.options.last_call is not None:
            notes["selection"] = {
                "every": self.options.every,
                "first_call": self.options.first_call,
                "last_call": self.options.last_call,
            }
        return notes

    def close(self, error: BaseException | None = None) -> None:
        """Remove the hooks and complete the recording. Calls without an optimizer step are kept; with
        `error`, as failed. Idempotent."""
        if self.closed:
            return
        self.closed = True
        atexit.unregister(self._at_exit)
        for remove in self._removers:
            remove()
        text = None if error is None else f"{type(error).__name__}: {error}"
        self._finish(self._open, text)
        if self._writer is not None and self._header is not None:
            self._writer.update_header(
                dataclasses.replace(self._header, capacity=dict(self._counts.capacity), notes=self._notes())
            )
            self._writer.close()
        self._report()

    def _report(self) -> None:
        """Report skipped and unusable inputs on stderr."""
        counts = self._counts
        if self._writer is None:
            skipped = ", ".join(f"{n} {reason}" for reason, n in counts.skipped.items()) or "none at all"
            echo(
                f"lockstep: {self.directory}: rank {self.policy.rank} recorded no forward of "
                f"{type(self.policy.module).__name__} (other forwards: {skipped})",
                file=sys.stderr,
                flush=True,
            )
            return
        if counts.unusable:
            echo(
                f"lockstep: {self.directory}: {counts.unusable} inputs are no documents of the model; "
                "they are kept as it was called with them (`lockstep recording list` marks them)",
                file=sys.stderr,
                flush=True,
            )
        if counts.residual > _MUCH:
            echo(
                f"lockstep: {self.directory}: dL/dlogprob leaves {counts.residual:.0%} of dL/dlogits "
                "unexplained (in the worst input): the loss does not divide logits by "
                f"temperature={self.options.temperature}, or has other terms, such as entropy",
                file=sys.stderr,
                flush=True,
            )

    def _at_exit(self) -> None:
        # Python keeps the error that ends a program there, before it calls what atexit has.
        self.close(getattr(sys, "last_value", None))

    def __enter__(self) -> RecordHandle:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close(error)


def _cached_tokens(cache: Any) -> bool:
    """Whether a `past_key_values` holds any; what is no cache is the model's business."""
    try:
        return int(cache.get_seq_length() if hasattr(cache, "get_seq_length") else len(cache)) > 0
    except (TypeError, ValueError):
        return False


def _recording_ranks(requested: Sequence[int] | None, world_size: int) -> tuple[int, ...]:
    ranks = tuple(range(world_size)) if requested is None else tuple(sorted(set(requested)))
    if not ranks or ranks[0] < 0 or ranks[-1] >= world_size:
        raise RecordingError(
            f"out-of-range: record: ranks = {requested!r}; they must be ranks from 0 to {world_size - 1}"
        )
    return ranks


def _around_compiled_call(
    target: nn.Module, before: Callable[..., None], after: Callable[..., None]
) -> Callable[[], None]:
    """Install hooks on a module whose hooks torch would compile too (`module.compile()`).

    Returns:
        A function that removes them.
    """
    # Private, in torch 2.11 to 2.13: module.compile() keeps its compiled call there, hooks and all, and a
    # call of the module runs it alone. torch has no hook around it.
    compiled = target._compiled_call_impl
    assert compiled is not None

    def call(*args: Any, **kwargs: Any) -> Any:
        before(target, args, kwargs)
        output = None
        try:
            output = compiled(*args, **kwargs)
            return output
        finally:
            after(target, args, kwargs, output)

    def remove() -> None:
        if target._compiled_call_impl is call:
            target._compiled_call_impl = compiled

    target._compiled_call_impl = call
    return remove


def _autocast(device: torch.device) -> str | None:
    """The dtype that autocast runs matmuls in, if it is on."""
    if not torch.is_autocast_enabled(device.type):
        return None
    return str(torch.get_autocast_dtype(device.type)).removeprefix("torch.")
