"""From logits to tokens and canonical logprobs.

The logprob of a token is `log_softmax(logits / temperature)[token]` in float32 (temperature 0 counts as 1):
what a trainer computes from the same logits. Everything else only decides *which* token is drawn, in this
order, each as in transformers' logits processors (generation/logits_process.py); presence and frequency as in
the OpenAI API:

    repetition penalty (prompt + output), presence and frequency penalty (output), eos and stop ids suppressed
    below min_tokens, temperature, top_k, top_p, min_p, then Gumbel-max (or argmax at temperature 0)

R rows (one sample each), V vocabulary.

The noise of a sample is a pure function of (seed, position).

Gumbel-max draws `argmax_i (z_i + g_i)` with independent Gumbel g_i, which has the distribution softmax(z).
Done literally it needs one noise value per vocabulary entry and token. Here it is done twice over blocks of
BLOCK entries:

    block = argmax_b (log sum_{i in b} exp z_i + g_b)        one value per block
    token = argmax_{i in block} (z_i + g_i)                  one value per entry of that block

P(token) = P(block) * P(token | block) = softmax(z)[token] exactly, with V / BLOCK + BLOCK values instead of V
(448 instead of 49152 for SmolLM2). Like plain Gumbel-max, a small change of the logits changes the token only
at a near tie.

The values come from SplitMix64 (Steele, Lea, Flood 2014, "Fast splittable pseudorandom number generators") as
a counter-based hash of (seed, position, counter): integer arithmetic, the same on every device, and torch's
generators are neither read nor advanced. Block b has counter b; vocabulary entry i has counter 2**32 + i.
`-log(u)` with u uniform in (0, 1) at 53 bits is exponential, and argmin_i e_i / p_i is argmax_i (log p_i +
g_i).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lockstep.schema.rollout import SamplingParams

BLOCK = 256
"""Vocabulary entries per block. Part of the definition of the noise: another value gives other samples."""

# As int64 has them: torch has no unsigned arithmetic, and products modulo 2**64 have the same bits. The
# factor of positions differs from that of counters, so that one token's noise is not the next one's, shifted.
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_POSITION = 0xD1342543DE82EF95 - (1 << 64)
_MIX_1 = 0xBF58476D1CE4E5B9 - (1 << 64)
_MIX_2 = 0x94D049BB133111EB - (1 << 64)
ENTRY_COUNTER = 1 << 32
"""Vocabulary entry i has the counter ENTRY_COUNTER + i."""

_CPU_CHUNK_ROWS = 8
"""Rows worked on at a time on CPU, so that several passes over their float32 logits stay in cache."""
_TOP_P_HEAD = 1024
"""top_p first looks at this many tokens; only where they do not reach the mass is the whole row sorted."""
_NEVER = float("-inf")


@dataclass(kw_only=True, slots=True)
class SampleState:
    """The state of one sample that sampling depends on."""

    params: SamplingParams
    seed: int
    prompt_token_ids: tuple[int, ...]
    end_ids: tuple[int, ...]
    """Ids that may not be sampled before min_tokens."""
    token_ids: list[int] = field(default_factory=list)
    shaped: bool = field(init=False)
    """Whether any setting besides temperature changes the distribution that tokens are drawn from."""

    def __post_init__(self) -> None:
        p = self.params
        self.shaped = is_shaped(p)

    @property
    def position(self) -> int:
        """The index that the next token will have in prompt + completion."""
        return len(self.prompt_token_ids) + len(self.token_ids)


def is_shaped(params: SamplingParams) -> bool:
    """Whether tokens are drawn from anything but softmax(logits / temperature)."""
    return (
        has_penalties(params)
        or params.min_tokens > 0
        or (params.temperature > 0 and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0))
    )


def has_penalties(params: SamplingParams) -> bool:
    """Whether the logits depend on which tokens occurred before."""
    return (
        params.repetition_penalty != 1.0 or params.presence_penalty != 0.0 or params.frequency_penalty != 0.0
    )


class Sampler:
    """Draws the next token of each row. Holds scratch memory only: results depend on the arguments alone."""

    def __init__(self) -> None:
        self._scratch: Tensor | None = None

    def sample(self, logits: Tensor, rows: Sequence[SampleState]) -> tuple[Tensor, Tensor]:
        """One token per row.

        Args:
            logits: [R, V], any floating dtype; not changed.
            rows: the R samples, their tokens so far included.

        Returns:
            token ids [R] int64, logprobs [R] float32.
        """
        seeds = torch.tensor([r.seed for r in rows], device=logits.device)
        positions = torch.tensor([r.position for r in rows], device=logits.device)
        keys = noise_keys(seeds, positions)
        chunk = _CPU_CHUNK_ROWS if logits.device.type == "cpu" else len(rows)
        parts = [
            self._sample_chunk(logits[i : i + chunk], rows[i : i + chunk], keys[i : i + chunk])
            for i in range(0, len(rows), chunk)
        ]
        return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])

    def _sample_chunk(
        self, logits: Tensor, rows: Sequence[SampleState], keys: Tensor
    ) -> tuple[Tensor, Tensor]:
        x = self._float_logits(logits)
        scaled, vocab = x[:, : logits.shape[1]], logits.shape[1]
        shaped = [i for i, row in enumerate(rows) if row.shaped]
        drawn = None
        if shaped:  # before the scaling in place: penalties act on the logits themselves
            drawn = draw_logits(scaled[shaped], [rows[i] for i in shaped])
        _scale(scaled, rows)
        # Subtracted before exp: the largest weight is 1, so that no sum overflows, and none is 0.
        peak = scaled.amax(-1, keepdim=True)
        greedy = [row.params.temperature == 0 for row in rows]
        weights = (x - peak).exp_()
        log_total = weights.sum(-1).log_()
        if drawn is not None:
            weights[shaped, :vocab] = torch.softmax(drawn, -1)
        tokens = sample_blocks(weights, keys)
        if any(greedy):  # decided on the host, without waiting for a GPU
            tokens = torch.where(torch.tensor(greedy, device=x.device), weights.argmax(-1), tokens)
        picked = scaled.gather(-1, tokens.unsqueeze(-1))
        return tokens, (picked - peak).squeeze(-1) - log_total

    def _float_logits(self, logits: Tensor) -> Tensor:
        """[R, V rounded up to whole blocks] float32 scratch; -inf beyond the vocabulary."""
        rows, vocab = logits.shape
        width = -(-vocab // BLOCK) * BLOCK
        scratch = self._scratch
        if (
            scratch is None
            or scratch.shape[0] < rows
            or scratch.shape[1] != width
            or scratch.device != logits.device
        ):
            scratch = self._scratch = torch.empty(rows, width, device=logits.device)
        x = scratch[:rows]
        x[:, :vocab].copy_(logits)
        x[:, vocab:].fill_(_NEVER)
        return x


def draw_logits(logits: Tensor, rows: Sequence[SampleState]) -> Tensor:
    """The logits that tokens are drawn from, temperature included; -inf for tokens that may not be drawn.

    Args:
        logits: [R, V] float32; not changed.

    Returns:
        [R, V] float32.
    """
    z = logits.clone()
    for i, row in enumerate(rows):
        if has_penalties(row.params):
            _penalise(z[i], row)
        if len(row.token_ids) < row.params.min_tokens and row.end_ids:
            z[i, torch.tensor(row.end_ids, device=z.device)] = _NEVER
    _scale(z, rows)
    for params in {row.params for row in rows}:
        same = [i for i, row in enumerate(rows) if row.params == params]
        if params.temperature > 0 and (params.top_k > 0 or params.top_p < 1.0 or params.min_p > 0.0):
            z[same] = truncate(z[same], params)
    return z


def truncate(z: Tensor, params: SamplingParams) -> Tensor:
    """Set the logits that top_k, top_p and min_p leave out to -inf; [R, V] float32 in and out.

    At least one token per row stays.
    """
    if 0 < params.top_k < z.shape[-1]:
        floor = z.topk(params.top_k, dim=-1).values[:, -1:]
        z = z.masked_fill(z < floor, _NEVER)
    if params.top_p < 1.0:
        z = _top_p(z, params.top_p)
    if params.min_p > 0.0:
        probs = torch.softmax(z, -1)
        z = z.masked_fill(probs < params.min_p * probs.amax(-1, keepdim=True), _NEVER)
    return z


def _top_p(z: Tensor, top_p: float) -> Tensor:
    """Keeps the most likely tokens, as few as reach the mass `top_p`."""
    probs = torch.softmax(z, -1)
    width = min(_TOP_P_HEAD, z.shape[-1])
    head, index = probs.topk(width, dim=-1)
    if width < z.shape[-1] and bool((head.sum(-1) < top_p).any()):
        head, index = probs.sort(-1, descending=True)
    # Under deterministic algorithms CUDA has no cumsum of floats.
    slow = head.is_cuda and torch.are_deterministic_algorithms_enabled()
    mass = head.cpu().cumsum(-1).to(head.device) if slow else head.cumsum(-1)
    keep = (mass - head) < top_p
    keep[:, 0] = True
    return torch.full_like(z, _NEVER).scatter(-1, index, z.gather(-1, index).masked_fill(~keep, _NEVER))


def _penalise(z: Tensor, row: SampleState) -> None:
    """Repetition, presence and frequency penalties on one row's logits [V], in place."""
    params = row.params
    output = torch.tensor(row.token_ids, dtype=torch.int64, device=z.device)
    if params.repetition_penalty != 1.0:
        prompt = torch.tensor(row.prompt_token_ids, dtype=torch.int64, device=z.device)
        seen = torch.cat([prompt, output]).unique()
        value = z[seen]
        z[seen] = torch.where(value < 0, value * params.repetition_penalty, value / params.repetition_penalty)
    if len(output):
        ids, counts = output.unique(return_counts=True)
        z[ids] -= params.presence_penalty + params.frequency_penalty * counts


def _scale(z: Tensor, rows: Sequence[SampleState]) -> None:
    """Divides each row by its temperature, in place; temperature 0 counts as 1."""
    temperatures = [row.params.temperature or 1.0 for row in rows]
    if any(t != 1.0 for t in temperatures):
        z.div_(torch.tensor(temperatures, device=z.device).unsqueeze(-1))


# --- noise ---


def noise_keys(seeds: Tensor, positions: Tensor) -> Tensor:
    """The 64-bit key of each (seed, position).

    Args:
        seeds: [R] int64.
        positions: [R] int64, >= 0; the index that the sampled token will have in prompt + completion.

    Returns:
        [R] int64.
    """
    return _mix(_mix(seeds + _GOLDEN) + (positions + 1) * _POSITION)


def exponential(keys: Tensor, counters: Tensor) -> Tensor:
    """Independent Exp(1) values, one per (key, counter): [R, M] float64, > 0. Arguments as of `uniform`."""
    return uniform(keys, counters).log_().neg_()


def uniform(keys: Tensor, counters: Tensor) -> Tensor:
    """Independent uniform values, one per (key, counter). Every operation is exact, so that a compiler may
    fuse them.

    Args:
        keys: [R] int64, from `noise_keys`.
        counters: [M] or [R, M] int64, >= 0.

    Returns:
        [R, M] float64, in (0, 1).
    """
    bits = _mix(keys.unsqueeze(-1) + (counters + 1) * _GOLDEN)
    bits.bitwise_right_shift_(11).bitwise_and_((1 << 53) - 1)
    # Half a step up: the logarithm of 0 would be infinite.
    return bits.to(torch.float64).add_(0.5).mul_(2.0**-53)


def sample_blocks(weights: Tensor, keys: Tensor) -> Tensor:
    """One token per row, with probability proportional to its weight.

    Args:
        weights: [R, M * BLOCK] float32, >= 0, a positive sum per row; zeros beyond the vocabulary.
        keys: [R] int64, from `noise_keys`.

    Returns:
        [R] int64.
    """
    blocks = weights.unflatten(-1, (-1, BLOCK))
    mass = blocks.sum(-1)
    counters = torch.arange(mass.shape[1], device=keys.device)
    block: Tensor = (mass / exponential(keys, counters)).argmax(-1)
    inner = blocks[torch.arange(len(keys), device=keys.device), block]
    entries = block.unsqueeze(-1) * BLOCK + torch.arange(BLOCK, device=keys.device)
    within: Tensor = (inner / exponential(keys, entries + ENTRY_COUNTER)).argmax(-1)
    return block * BLOCK + within


def _mix(state: Tensor) -> Tensor:
    """SplitMix64's finaliser, in place. The masks make int64's arithmetic shift a logical one."""
    state.bitwise_xor_((state >> 30).bitwise_and_((1 << 34) - 1)).mul_(_MIX_1)
    state.bitwise_xor_((state >> 27).bitwise_and_((1 << 37) - 1)).mul_(_MIX_2)
    return state.bitwise_xor_((state >> 31).bitwise_and_((1 << 33) - 1))
