"""Verify that an engine holds the trained weights: bitwise by the first values of every weight, where the
engine can be read back; and by logprobs of tokens that it samples, recomputed by the trainer."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, cast

import torch
from torch import Tensor

from lockstep.errors import EngineError
from lockstep.protocols.engine import InferenceEngine, ReceivesWeights, WeightTransfer
from lockstep.protocols.train import TrainBackend
from lockstep.ranks.context import RankContext
from lockstep.schema.batch import PackedBatch, TrainSample, rollout_samples
from lockstep.schema.rollout import Completion, GenerationRequest, SamplingParams, Trajectory

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
    return f"{len(wrong)} of {len(held)} weights are others: {', '.join(wrong[:5])}"


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
                    "from its prefix cache, which were computed with older weights. It was not flushed; "
                    "set engine.prefix_caching = false"
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
            f"after the weight update the engine's logprobs differ from the trainer's by {gap:.3g} nats "
            f"on average, more than the {limit:.2g} that rounding in {self.dtype} explains: it does not hold "
            "the trained weights, or answers from a cache of older ones. Compare with engine.name = 'hf', or "
            "look at it by `lockstep parity engines`"
        )


def probe_prompts(vocab_size: int, max_prompt_tokens: int) -> list[tuple[int, ...]]:
    """PROBES prompts of random ids that share no prefix."""
    length = min(max_prompt_tokens, PROBE_PROMPT_TOKENS)
    generator = torch.Generator().manual_seed(7)
    ids: Any = torch.randint(vocab_size, (PROBES, length), generator=generator)
    ids[:, 0] = torch.arange(PROBES) % vocab_size
    return [tuple(row) for row in ids.tolist()]
