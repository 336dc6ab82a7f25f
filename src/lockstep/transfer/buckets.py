"""Weights to an engine that has its own: all of them, in buckets, in one session.

begin_update ─► receive ─► receive ─► ... ─► finish_update ─► the engine is clean and has this version
     │             │                              │
     └─────────────┴───────── an error ───────────┴─► fail_update: dirty until a whole session succeeds
"""

from __future__ import annotations

import contextlib
import statistics
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal, TypeVar, cast

import torch
from torch import Tensor

from lockstep.config.engine import EngineConfig
from lockstep.errors import EngineError
from lockstep.observe.memory import GIB, is_out_of_memory, peak_rss_bytes
from lockstep.protocols.engine import InferenceEngine, ReceivesWeights, WeightTransfer, receives_weights
from lockstep.protocols.train import TrainBackend
from lockstep.ranks.context import RankContext, RankError
from lockstep.schema.batch import PackedBatch, TrainSample, rollout_samples
from lockstep.schema.rollout import Completion, GenerationRequest, SamplingParams, Trajectory
from lockstep.schema.weights import MemoryReport, Transport, UpdateSession
from lockstep.transfer.senders import MIB, BucketSender, Packed, Packer
from lockstep.wire.buckets import TensorSpec, WireError, split_heads

# Verify that an engine holds the trained weights: bitwise by the first values of every weight, where the
# engine can be read back; and by logprobs of tokens that it samples, recomputed by the trainer.


PROBES = 2
"""Prompts per rank."""
PROBE_PROMPT_TOKENS = 300
"""More than two blocks of any engine's prefix cache; fewer where the run's own prompts are shorter."""
PROBE_TOKENS = 8
PROBE_LIMITS = {"float32": 2e-3, "bfloat16": 0.15, "float16": 0.05}
"""Mean |engine - trainer| over the probes' tokens, nats at temperature 1 and above: rounding stays well below
(1e-6, 0.03 and 0.005 were measured), a stale or missing tensor is mostly far above."""


def compare_heads(sent: Mapping[str, Tensor], held: Mapping[str, Tensor]) -> str | None:
    """Describe what is wrong with the first values that an engine holds; None if nothing is.

    Args:
        sent: by name, flat, of every weight.
        held: likewise, of the weights that the engine can return; in the dtype that was sent, or in float32.
    """
    unknown = sorted(held.keys() - sent.keys())
    if unknown:
        return f"it names {unknown[:3]}, which were not sent"
    wrong = []
    for name, ours in sent.items():
        if name not in held:
            continue
        theirs = held[name].detach().cpu().flatten()
        if theirs.numel() != ours.numel():
            wrong.append(f"{name} ({theirs.numel()} values were read back instead of {ours.numel()})")
        elif not _bitwise_equal(ours, theirs):
            gap = float((ours.double() - theirs.double()).abs().max())
            wrong.append(f"{name} (values differ by up to {gap:.3g})")
    if not wrong:
        return None
    return f"{len(wrong)} of {len(held)} weights differ: {', '.join(wrong[:5])}"


def _bitwise_equal(ours: Tensor, theirs: Tensor) -> bool:
    if theirs.dtype == torch.float32 and ours.dtype in (torch.bfloat16, torch.float16):
        ours = ours.float()  # exact
    if ours.dtype != theirs.dtype:
        return False
    # As bytes: by value a NaN equals nothing, and -0.0 equals 0.0.
    return bool(torch.equal(ours.contiguous().view(torch.uint8), theirs.contiguous().view(torch.uint8)))


@dataclass(kw_only=True, slots=True)
class Verifier:
    """Checks an engine after pushes, as `when` says. On several ranks all make the same calls, and an
    error on one rank is raised on all."""

    when: Literal["off", "first", "always"]
    backend: TrainBackend
    engine: InferenceEngine
    transfer: WeightTransfer
    plan: Callable[[Sequence[TrainSample], Sequence[Tensor]], list[PackedBatch]]
    vocab_size: int
    max_prompt_tokens: int
    max_tokens: int
    """Limit of the run's completions, as `max_prompt_tokens` of its prompts: probes are no longer, so that
    they fit too."""
    temperature: float
    dtype: str
    ranks: RankContext = field(default_factory=RankContext.alone)
    pushes: int = 0
    """Number of pushes so far."""

    def __call__(self) -> dict[str, float]:
        """Verify; call it after every push.

        Returns:
            Metrics: engine/verify_gap, the mean gap of the probes in nats; empty when this push is not
            checked.

        Raises:
            EngineError: the engine does not hold the trainer's weights; it is dirty now.
        """
        self.pushes += 1
        if self.when == "off" or (self.when == "first" and self.pushes > 1):
            return {}
        with self.ranks.fail_together("reading weights back"):
            self.transfer.check(self.engine)
        sampled = self.ranks.gather_results(
            self._sample, list[Completion], what="sampling to verify the weights"
        )
        gap = self._gap([completion for completions in sampled for completion in completions])
        complaint = self._complaint(gap)
        if complaint is not None:
            cast(ReceivesWeights, self.engine).fail_update(complaint)
            raise EngineError(complaint, code="values-differ")
        return {"engine/verify_gap": gap}

    def _sample(self) -> list[Completion]:
        """The same prompts and seeds every time: what an engine kept from earlier weights would be used."""
        params = SamplingParams(
            max_tokens=min(self.max_tokens, PROBE_TOKENS), temperature=self.temperature, ignore_eos=True
        )
        requests = [
            GenerationRequest(prompt_token_ids=ids, sampling=params, seeds=(index,))
            for index, ids in enumerate(probe_prompts(self.vocab_size, self.max_prompt_tokens))
        ]
        completions = [group[0] for group in self.engine.generate(requests)]
        for completion in completions:
            if completion.cached_tokens:
                text = (
                    f"right after a weight update the engine took {completion.cached_tokens} prompt tokens "
                    "from its prefix cache, which were computed with older weights. The cache was not "
                    "flushed; set engine.prefix_caching = false"
                )
                cast(ReceivesWeights, self.engine).fail_update(text)
                raise EngineError(text, code="values-differ")
        return completions

    def _gap(self, completions: Sequence[Completion]) -> float:
        """Mean |engine's - trainer's| logprob, nats. Collective."""
        samples = rollout_samples(map(Trajectory.of, completions))
        batches = self.plan(samples, [sample.loss_mask.float() for sample in samples])
        gaps: list[float] = []
        for batch, logprobs in zip(batches, self.backend.logprobs(batches), strict=True):
            for index, ours in zip(batch.sample_ids, batch.split(logprobs.cpu()), strict=True):
                theirs = samples[index].rollout_logprobs
                mask = samples[index].loss_mask
                gaps += (ours[mask].double() - theirs[mask].double()).abs().tolist()
        return statistics.fmean(gaps)

    def _complaint(self, gap: float) -> str | None:
        # Logits that are divided by a low temperature differ by more, too.
        limit = PROBE_LIMITS[self.dtype] / min(self.temperature, 1.0)
        if gap <= limit:
            return None
        return (
            f"after the weight update the engine's logprobs differ from the trainer's by {gap:.3g} nats on "
            f"average, more than the {limit:.2g} that rounding in {self.dtype} explains: it does not have "
            "the trained weights, or uses a cache computed with older ones. Compare with engine.name = "
            "'hf', or check it with `lockstep parity engines`"
        )


def probe_prompts(vocab_size: int, max_prompt_tokens: int) -> list[tuple[int, ...]]:
    """PROBES prompts of random ids that share no prefix."""
    length = min(max_prompt_tokens, PROBE_PROMPT_TOKENS)
    generator = torch.Generator().manual_seed(7)
    ids: Any = torch.randint(vocab_size, (PROBES, length), generator=generator)
    ids[:, 0] = torch.arange(PROBES) % vocab_size
    return [tuple(row) for row in ids.tolist()]


T = TypeVar("T")


class BucketTransfer:
    """Implements lockstep.protocols.WeightTransfer for engines with weights of their own.

    On several ranks each pushes to its own engine, all together: gathering weights is collective, so every
    rank goes through all of them, also when its engine failed.
    """

    def __init__(self, config: EngineConfig, sender: BucketSender, *, device: torch.device) -> None:
        self.before: MemoryReport | None = None
        """Memory before the last push; `after`: after it."""
        self.after: MemoryReport | None = None
        self.run_id = uuid.uuid4().hex
        self._config, self._sender, self._device = config, sender, device
        host = sender.packs_on_host or device.type != "cuda"
        self._packer = Packer(
            bucket_bytes=config.bucket_mb * MIB, device=torch.device("cpu") if host else device
        )
        self._heads: list[tuple[tuple[TensorSpec, ...], Tensor]] = []
        self._keep_heads = config.verify != "off"
        self._restarts = 0
        self._last: tuple[TrainBackend, InferenceEngine, int] | None = None
        self._ranks: RankContext | None = None
        """Those that `serve` each other now."""

    @property
    def transport(self) -> Transport:
        """The transport of the buckets."""
        return self._sender.transport

    def push(self, source: TrainBackend, target: InferenceEngine, *, policy_version: int) -> None:
        """Afterwards `target` samples from `source`'s weights and stamps `policy_version` on completions.

        Raises:
            EngineError: the update failed; the engine is dirty, and the next push sends everything again.
        """
        receiver = cast(ReceivesWeights, target)
        self.before, self.after = take_memory_report(target, device=self._device), None
        if receiver.dirty:  # new, or started again: it knows nothing of what was shared with it before
            self._sender.reset()
        self._last = (source, target, policy_version)
        # An engine that starts its server again in the middle of a generation gets the weights back by it.
        receiver.recover = self._recover
        self._send(source, receiver, policy_version=policy_version)
        self.after = take_memory_report(target, device=self._device)

    def check(self, target: InferenceEngine) -> bool:
        """Compare the first values of every weight of the last push with what the engine has.

        Returns:
            False: the engine cannot be read back, or the last push kept nothing to compare (config.verify).

        Raises:
            EngineError: it holds other values; it is dirty now.
        """
        if not self._heads:
            return False
        sent: dict[str, Tensor] = {}
        for specs, values in self._heads:
            sent |= split_heads(values.cpu(), specs)
        receiver = cast(ReceivesWeights, target)
        held = receiver.read_back(list(sent))
        if not held:
            return False
        complaint = compare_heads(sent, held)
        if complaint is not None:
            text = f"after the weight update the engine does not have the trainer's weights: {complaint}"
            receiver.fail_update(text)
            raise EngineError(text, code="values-differ")
        self._keep_heads = self._config.verify == "always"
        return True

    def serve(self, make: Callable[[], T], *, ranks: RankContext) -> T:
        """Return what `make` returns, which samples and has no collectives of its own. Collective.

        Where weights are spread over ranks, an engine that is started again meanwhile gets them back: its
        rank waits until the others have made their calls, and then all ranks gather.

        Raises:
            RankError; and what `make` raises, once no other rank needs weights.
        """
        if self._last is None or ranks.world_size == 1 or not self._spread():
            return make()
        self._ranks = ranks
        try:
            try:
                made = make()
            except RankError:  # of a recovery: another one would only wait again for who is gone
                raise
            except Exception:  # not Ctrl-C, which the others get as well
                self._serve_others(ranks)
                raise
            self._serve_others(ranks)
            return made
        finally:
            self._ranks = None

    def _serve_others(self, ranks: RankContext) -> None:
        while self._gather_again(None, ranks):
            pass

    def _spread(self) -> bool:
        """Whether no rank has the weights of the last push whole."""
        assert self._last is not None
        source, _, policy_version = self._last
        return source.weights(policy_version=policy_version).shared_module is None

    def close(self) -> None:
        """Free memory, files and groups."""
        self._sender.close()
        self._packer.free()
        self._heads.clear()
        self._last = None

    def _send(self, source: TrainBackend, target: ReceivesWeights, *, policy_version: int) -> None:
        session = UpdateSession(
            policy_version=policy_version,
            run_id=self.run_id,
            deadline=time.monotonic() + self._config.update_seconds,
        )
        tensors = source.weights(policy_version=policy_version).tensors()
        self._heads.clear()
        try:
            with _as_engine_error(self._config):
                target.begin_update(session)
                self._reset_after_restart(target)
                for packed in _one_ahead(self._packer.fill(_once_each(tensors))):
                    if time.monotonic() > session.deadline:
                        raise EngineError(
                            f"deadline: the weight update was still at bucket {packed.index} after "
                            f"engine.update_seconds = {self._config.update_seconds:g}; raise it"
                        )
                    if self._keep_heads:
                        # Now: the buffer is filled again for the bucket after the next.
                        self._heads.append((packed.specs, packed.heads()))
                    self._sender.send(target, packed, session)
                target.finish_update(session)
        except BaseException as error:
            target.fail_update(f"{type(error).__name__}: {error}")
            self._sender.reset()
            self._heads.clear()
            # Not after Ctrl-C, which the other ranks get as well and leave the gathering by.
            if isinstance(error, Exception):
                for _ in tensors:  # collective: other ranks still gather
                    pass
            raise

    def _reset_after_restart(self, target: ReceivesWeights) -> None:
        """Reset the sender if the server was restarted, perhaps by `begin_update`: it shares nothing yet."""
        restarts = target.stats().restarts
        if restarts != self._restarts:
            self._sender.reset()
            self._restarts = restarts

    def _recover(self, target: InferenceEngine | None = None) -> None:
        """Send the weights of the last push again, to an engine that was restarted.

        Raises:
            EngineError: there was no push, or no rank has these weights whole and they are not in `serve`.
        """
        if self._last is None:
            raise EngineError("wrong-state: the engine was restarted before any weights were sent to it")
        target = self._last[1] if target is None else target
        if not self._spread():
            self._send_again(target)
        elif self._ranks is not None:
            self._gather_again(target, self._ranks)
        else:
            raise EngineError(
                "wrong-state: a restarted engine cannot get its weights back now: they are sharded over the "
                "ranks, and gathering them takes all ranks, but not all of them are sampling. Resume the "
                "run from its last checkpoint"
            )

    def _gather_again(self, target: InferenceEngine | None, ranks: RankContext) -> bool:
        """Gather the weights of the last push again if a rank's engine needs them; return whether one did.
        Collective.

        Args:
            target: of this rank; None: none of its engines needs them.
        """
        assert self._last is not None
        source, _, policy_version = self._last
        if not ranks.any(target is not None, what="looking for engines that were started again"):
            return False
        cuda = self._device.type == "cuda"
        # The thread of a replica has another current device than the one that trains.
        with torch.cuda.device(self._device) if cuda else contextlib.nullcontext():
            if target is not None:
                self._send_again(target)
            else:
                for _ in source.weights(policy_version=policy_version).tensors():
                    pass
        return True

    def _send_again(self, target: InferenceEngine) -> None:
        assert self._last is not None
        source, known, policy_version = self._last
        self._sender.reset()
        self._keep_heads = self._config.verify != "off"
        self._send(source, cast(ReceivesWeights, target), policy_version=policy_version)
        if target is not known:
            self._sender.reset()  # what was shared with one replica is no good for all
        self.check(target)


def serving(transfer: WeightTransfer, ranks: RankContext) -> Callable[[Callable[[], Any]], Any] | None:
    """Return what makes a call that samples on these ranks; None: nothing is to be done around it."""
    return partial(transfer.serve, ranks=ranks) if isinstance(transfer, BucketTransfer) else None


def _once_each(tensors: Iterator[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors. Raises EngineError when a name is repeated."""
    names = set()
    for name, tensor in tensors:
        if name in names:
            raise EngineError(f"duplicate: the weight update contains {name!r} twice")
        names.add(name)
        yield name, tensor


def _one_ahead(buckets: Iterator[Packed]) -> Iterator[Packed]:
    """Yield each bucket once the next one's copies have been launched: they run while an engine reads this
    one."""
    previous: Packed | None = None
    for packed in buckets:
        if previous is not None:
            yield previous
        previous = packed
    if previous is not None:
        yield previous


@contextlib.contextmanager
def _as_engine_error(config: EngineConfig) -> Iterator[None]:
    try:
        yield
    except WireError as error:
        raise EngineError(f"transfer-failed: the weight update failed: {error}") from error
    except (torch.OutOfMemoryError, RuntimeError) as error:
        if not is_out_of_memory(error):
            raise
        raise EngineError(
            "out-of-memory: the trainer ran out of memory while packing weights for the engine into buffers "
            f"of engine.bucket_mb = {config.bucket_mb}; lower it, or set engine.transfer = 'disk'"
        ) from error


# Memory of trainer and engine before and after the last weight update: they may share a GPU, and an
# allocator's own message knows only one of them.


def take_memory_report(engine: InferenceEngine, *, device: torch.device) -> MemoryReport:
    """Report what trainer and engine hold now.

    Args:
        engine: one with weights of its own reports its memory; another one's is the trainer's.
        device: of the trainer.
    """
    try:
        theirs = engine.memory() if receives_weights(engine) else None
    except EngineError:  # it has died, perhaps of the error that this report explains
        theirs = None
    return MemoryReport(trainer=trainer_memory(device), engine=theirs)


def trainer_memory(device: torch.device) -> dict[str, float]:
    """Memory of this process in bytes; on CUDA also the free memory of the whole device."""
    if device.type != "cuda":
        return {"rss_peak": float(peak_rss_bytes())}
    free, total = torch.cuda.mem_get_info(device)
    return {
        "allocated": float(torch.cuda.memory_allocated(device)),
        "reserved": float(torch.cuda.memory_reserved(device)),
        "peak": float(torch.cuda.max_memory_allocated(device)),
        "device_free": float(free),
        "device_total": float(total),
    }


def ran_out_of_memory(error: BaseException) -> bool:
    """Whether the error or one of its causes is an out-of-memory error; an error of another process is
    recognised by its text."""
    cause: BaseException | None = error
    while cause is not None:
        if is_out_of_memory(cause) or "out of memory" in str(cause).lower():
            return True
        cause = cause.__cause__ or (None if cause.__suppress_context__ else cause.__context__)
    return False


def explain(
    process: str, *, before: MemoryReport | None, after: MemoryReport | None, now: MemoryReport
) -> str:
    """Text that an out-of-memory error gets in addition."""
    lines = [f"The {process} ran out of memory. Memory of trainer and engine:"]
    if before is not None:
        lines.append(f"  before the last weight update: {_shown(before)}")
    if after is not None:
        lines.append(f"  after it: {_shown(after)}")
    lines.append(f"  now: {_shown(now)}")
    return "\n".join(lines)


def _shown(report: MemoryReport) -> str:
    return f"trainer {_in_gib(report.trainer)}; engine {_in_gib(report.engine)}"


def _in_gib(values: Mapping[str, float] | None) -> str:
    if values is None:
        return "not reported"
    return ", ".join(f"{name} {value / GIB:.2f} GiB" for name, value in values.items()) or "nothing"
