"""Keys and values of running samples, stored so that a group shares its prompt, and attention over them.

Two stores per layer, both preallocated and written in place:

    prompts      [P, K, A, H]    one entry per prompt, computed once, read by all its samples
    completions  [R, K, S, H]    one entry per running sample, appended to at every step

A layer with a gated delta net has states instead, of one size whatever the length: one entry per prompt,
which its samples begin with, and one per running sample, replaced at every step.

A decode step attends from each sample's one query to both stores and merges the two results by their
log-sum-exps (exact; the split of FlashAttention, Dao et al. 2022, and of cascade attention). R running
samples, P prompts in use, M samples per prompt at most, A and S allocated lengths, N query heads, K key/value
heads, G = N / K, H head dim, T tokens of a prefill.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from lockstep.attention.sdpa import dense
from lockstep.attention.sinks import with_sinks
from lockstep.models.architectures import causal_lm
from lockstep.models.delta_net import DeltaNet
from lockstep.models.heads import head_of
from lockstep.models.load import share_parameters
from lockstep.ops.masks import band

IMPLEMENTATION = "lockstep_cached"
"""Name in transformers' AttentionInterface. It has no mask function, so transformers builds no masks for
it."""
_LENGTH_STEP = 64
"""Allocated lengths are multiples of this, and grow by half at least."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Prefill:
    """A forward over whole prompts, laid end to end."""

    lengths: tuple[int, ...]
    slots: tuple[int, ...]
    """The prompt entry that each document is stored in."""


@dataclass(kw_only=True, slots=True)
class Decode:
    """A forward over one new token per running sample."""

    prompt_of: Tensor
    """[R] int64: the prompt entry of each row."""
    prompt_lengths: Tensor
    """[P] int64."""
    max_prompt: int
    uniform_prompts: bool
    """Whether all prompts in use have max_prompt tokens."""
    gather: Tensor
    """[P * M] int64: the row that is the m-th sample of prompt p, any row where there is none; M samples at
    most."""
    scatter: Tensor
    """[R] int64: where row r stands in `gather`."""
    identity: bool
    """Whether gather and scatter change nothing."""
    counts: Tensor
    """[R] int64: completion tokens stored before this step."""
    max_count: int
    uniform_counts: bool
    masks: dict[int | None, tuple[Tensor | None, Tensor | None]]
    """Additive masks (prompts, completions) by sliding window, made once per step."""


class SampleCache(Cache):
    """A transformers cache of two stores, a pair of tensors per layer each; `plan` describes the forward that
    calls `update`, or `recur` where the layer has states."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.plan: Prefill | Decode | None = None
        self.prompts: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values [P_cap, K, A, H], by layer."""
        self.completions: dict[int, tuple[Tensor, Tensor]] = {}
        """Keys and values [R_cap, K, S, H]."""
        self.prompt_states: dict[int, tuple[Tensor, Tensor]] = {}
        """Of `DeltaNet.go_on`: [P_cap, W - 1, C] and [P_cap, M, H, D], by layer."""
        self.states: dict[int, tuple[Tensor, Tensor]] = {}
        """The same of running samples, [R_cap, ...]."""
        self._sizes = (0, 0, 0, 0)

    def reserve(self, *, prompts: int, prompt_length: int, rows: int, length: int) -> None:
        """Make room and keep existing entries. Sizes never shrink."""
        needed = (prompts, prompt_length, rows, length)
        new = list(self._sizes)
        for i, (want, have, step) in enumerate(
            zip(needed, self._sizes, (1, _LENGTH_STEP, 1, _LENGTH_STEP), strict=True)
        ):
            if want > have:
                # By half: growing copies everything, which a stream
                # of ever longer samples must not do at every step.
                new[i] = -(-max(want, have + have // 2) // step) * step
        if tuple(new) == self._sizes:
            return
        self._sizes = (new[0], new[1], new[2], new[3])
        for store, shape in ((self.prompts, new[:2]), (self.completions, new[2:])):
            for layer, (keys, values) in store.items():
                store[layer] = (_resized(keys, *shape), _resized(values, *shape))
        for states, entries in ((self.prompt_states, new[0]), (self.states, new[2])):
            for layer, (before, state) in states.items():
                states[layer] = (_with_entries(before, entries), _with_entries(state, entries))

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores [1, K, T, H] new keys and values and returns them; attention reads the stores itself."""
        # In the first forward, as only the layer's own keys say
        # how many heads it has, their size and their dtype.
        if layer_idx not in self.prompts:
            for layers, sizes in ((self.prompts, self._sizes[:2]), (self.completions, self._sizes[2:])):
                shape = (sizes[0], key_states.shape[1], sizes[1], key_states.shape[3])
                # zeros: NaN would pass a mask
                layers[layer_idx] = (key_states.new_zeros(shape), value_states.new_zeros(shape))
        if isinstance(self.plan, Prefill):
            start = 0
            for length, slot in zip(self.plan.lengths, self.plan.slots, strict=True):
                for store, new in zip(self.prompts[layer_idx], (key_states, value_states), strict=True):
                    store[slot, :, :length] = new[0, :, start : start + length]
                start += length
        elif isinstance(self.plan, Decode):
            rows = key_states.shape[2]
            for store, new in zip(self.completions[layer_idx], (key_states, value_states), strict=True):
                new_RKH = new[0].transpose(0, 1)
                if self.plan.uniform_counts:
                    store[:rows, :, self.plan.max_count] = new_RKH
                else:
                    index = torch.arange(rows, device=store.device)
                    store[index, :, self.plan.counts] = new_RKH
        return key_states, value_states

    def recur(self, part: DeltaNet, mixed: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """See lockstep.models.delta_net.StateCache."""
        layer: int = part.layer_idx
        if isinstance(self.plan, Prefill):
            outs, start = [], 0
            for length, slot in zip(self.plan.lengths, self.plan.slots, strict=True):
                span = slice(start, start + length)
                start += length
                out, before, state = part.begin(mixed[span], decay[span], beta[span])
                outs.append(out)
                if layer not in self.prompt_states:  # sizes as in `update`
                    prompts, rows = self._sizes[0], self._sizes[2]
                    for stores, entries in ((self.prompt_states, prompts), (self.states, rows)):
                        sizes = (entries, *before.shape), (entries, *state.shape)
                        stores[layer] = before.new_zeros(sizes[0]), state.new_zeros(sizes[1])
                _put(self.prompt_states[layer], slot, before, state)
            return torch.cat(outs)
        used = slice(mixed.shape[0])
        before, state = self.states[layer]
        out, before, state = part.go_on(mixed, decay, beta, before[used], state[used])
        _put(self.states[layer], used, before, state)
        return out

    def start(self, first: int, slots: Sequence[int]) -> None:
        """Let the rows from `first` on begin with the states of the prompts in `slots`."""
        for layer, stores in self.states.items():
            for store, prompts in zip(stores, self.prompt_states[layer], strict=True):
                store[first : first + len(slots)] = prompts[torch.tensor(slots, device=prompts.device)]

    def move_prompts(self, moves: Sequence[tuple[int, int]], *, used: int) -> None:
        """Copy prompts over others: (source, target) each, their first `used` tokens."""
        _move(self.prompts, moves, used=used)
        _move(self.prompt_states, moves)

    def move_rows(self, moves: Sequence[tuple[int, int]], *, used: int) -> None:
        """The same of running samples, and their completions' tokens."""
        _move(self.completions, moves, used=used)
        _move(self.states, moves)

    def clear(self) -> None:
        """Free the memory."""
        for store in self._stores:
            store.clear()
        self._sizes = (0, 0, 0, 0)
        self.plan = None

    @property
    def num_bytes(self) -> int:
        """Bytes allocated now."""
        pairs = (pair for store in self._stores for pair in store.values())
        return sum(t.numel() * t.element_size() for pair in pairs for t in pair)

    @property
    def _stores(self) -> tuple[dict[int, tuple[Tensor, Tensor]], ...]:
        return self.prompts, self.completions, self.prompt_states, self.states

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always passed in, so transformers need not count."""
        return 0


def additive_masks(plan: Decode, window: int | None) -> tuple[Tensor | None, Tensor | None]:
    """Float32 masks of one decode step for layers with this sliding window; None where nothing is masked.

    Masked entries are -1e30, not -inf: a row whose prompt lies wholly outside the window then has a finite
    result, with a weight of exactly 0 in the merge.

    Returns:
        prompts [P, 1, 1 or M, max_prompt] or None, completions [R, 1, 1, max_count + 1] or None.
    """
    device = plan.counts.device
    own_length = plan.prompt_lengths[plan.prompt_of]
    position = own_length + plan.counts
    index = torch.arange(plan.max_prompt, device=device)
    suffix_index = torch.arange(plan.max_count + 1, device=device)
    windowed = window is not None and plan.max_prompt + plan.max_count >= window
    prompt_ok = completion_ok = None
    if not plan.uniform_prompts:
        prompt_ok = (index < plan.prompt_lengths[:, None])[:, None]
    if not plan.uniform_counts:
        completion_ok = suffix_index <= plan.counts[:, None]
    if windowed:
        assert window is not None
        first = (position - window + 1)[plan.gather].view(len(plan.prompt_lengths), -1, 1)
        visible = index >= first
        prompt_ok = visible if prompt_ok is None else prompt_ok & visible
        inside = suffix_index + own_length[:, None] > (position - window)[:, None]
        completion_ok = inside if completion_ok is None else completion_ok & inside
    return (
        None if prompt_ok is None else torch.where(prompt_ok.unsqueeze(1), 0.0, -1e30),
        None if completion_ok is None else torch.where(completion_ok[:, None, None], 0.0, -1e30),
    )


def _resized(old: Tensor, entries: int, tokens: int) -> Tensor:
    if old.shape[0] == entries and old.shape[2] == tokens:
        return old
    new = old.new_zeros(entries, old.shape[1], tokens, old.shape[3])
    new[: old.shape[0], :, : old.shape[2]] = old
    return new


def _put(store: tuple[Tensor, Tensor], at: int | slice, before: Tensor, state: Tensor) -> None:
    store[0][at], store[1][at] = before, state


def _with_entries(old: Tensor, entries: int) -> Tensor:
    new = old.new_zeros(entries, *old.shape[1:])
    new[: old.shape[0]] = old
    return new


def _move(
    stores: dict[int, tuple[Tensor, Tensor]], moves: Sequence[tuple[int, int]], *, used: int | None = None
) -> None:
    """Copy entries over others in every layer; `used`: their first tokens only."""
    if not moves:
        return
    for tensor in (tensor for pair in stores.values() for tensor in pair):
        source, target = torch.tensor(moves, device=tensor.device).unbind(1)
        if used is None:
            tensor[target] = tensor[source]
        else:
            tensor[target, :, :used] = tensor[source, :, :used]


def register_attention() -> None:
    """Make IMPLEMENTATION known to transformers; idempotent."""
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, cached_attention)


def cached_attention(  # signature: transformers' AttentionInterface
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    *,
    sample_cache: SampleCache,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Called by the model's attention layers with query [1, N, T, H] and new keys and values [1, K, T, H].

    Returns:
        [1, T, N, H] and None (no attention weights).
    """
    plan = sample_cache.plan
    options = ScoreOptions(scaling=scaling, window=sliding_window, softcap=softcap, sinks=s_aux)
    if isinstance(plan, Prefill):
        return _prefill(query, key, value, plan, options), None
    assert isinstance(plan, Decode)
    return _decode(query, module.layer_idx, sample_cache, plan, options), None  # type: ignore[arg-type]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoreOptions:
    """What a layer makes of its scores; see lockstep.attention."""

    scaling: float | None
    window: int | None
    softcap: float | None
    sinks: Tensor | None


def _prefill(query: Tensor, key: Tensor, value: Tensor, plan: Prefill, options: ScoreOptions) -> Tensor:
    """Causal attention inside each document; [1, T, N, H]."""
    out = torch.empty_like(query.transpose(1, 2), memory_format=torch.contiguous_format)
    start = 0
    # A call each: one over all documents would need a mask that is quadratic in their sum.
    for length in plan.lengths:
        span = slice(start, start + length)
        start += length
        mask = None
        if options.window is not None and length > options.window:
            mask = band(torch.arange(length, device=query.device), window=options.window)
        out[:, span] = dense(
            query[:, :, span],
            key[:, :, span],
            value[:, :, span],
            mask=mask,
            scale=options.scaling,
            sinks=options.sinks,
            softcap=options.softcap,
        ).transpose(1, 2)
    return out


def _decode(query: Tensor, layer: int, cache: SampleCache, plan: Decode, options: ScoreOptions) -> Tensor:
    """One query per row over its prompt and its completion; [1, R, N, H]."""
    window, scores = options.window, (options.scaling, options.softcap)
    if window not in plan.masks:
        plan.masks[window] = additive_masks(plan, window)
    prompt_mask, completion_mask = plan.masks[window]
    q_RNH = query[0].transpose(0, 1)
    rows, heads, dim = q_RNH.shape
    prompts = len(plan.prompt_lengths)

    keys, values = cache.prompts[layer]
    kv_heads = keys.shape[1]
    grouped = q_RNH if plan.identity else q_RNH.index_select(0, plan.gather)
    # the G query heads of a key/value head and the M samples of a prompt are queries of one matrix product
    grouped = grouped.view(prompts, -1, kv_heads, heads // kv_heads, dim).permute(0, 2, 3, 1, 4)
    samples = grouped.shape[3]
    grouped = grouped.reshape(prompts, kv_heads, -1, dim)
    if prompt_mask is not None and prompt_mask.shape[2] > 1:
        prompt_mask = prompt_mask.repeat(1, 1, heads // kv_heads, 1)
    used = slice(plan.max_prompt)
    out_p, lse_p = attend(grouped, keys[:prompts, :, used], values[:prompts, :, used], prompt_mask, *scores)
    out_p = out_p.reshape(prompts, heads, samples, dim).transpose(1, 2).reshape(-1, heads, dim)
    lse_p = lse_p.reshape(prompts, heads, samples).transpose(1, 2).reshape(-1, heads)
    if not plan.identity:
        out_p, lse_p = out_p.index_select(0, plan.scatter), lse_p.index_select(0, plan.scatter)

    keys, values = cache.completions[layer]
    used = slice(plan.max_count + 1)
    own = q_RNH.reshape(rows, kv_heads, heads // kv_heads, dim)
    out_c, lse_c = attend(own, keys[:rows, :, used], values[:rows, :, used], completion_mask, *scores)
    out_c, lse_c = out_c.reshape(rows, heads, dim), lse_c.reshape(rows, heads)

    # exp(lse_p) / (exp(lse_p) + exp(lse_c)), without an exponential that could overflow.
    share = torch.sigmoid(lse_p - lse_c).unsqueeze(-1)
    # In float32: one attention over both stores would round to the model's dtype once, too.
    merged = torch.lerp(out_c.float(), out_p.float(), share)
    if options.sinks is not None:
        merged = with_sinks(merged, torch.logaddexp(lse_p, lse_c).t(), options.sinks)
    return merged.to(query.dtype).unsqueeze(0)


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention and the log-sum-exp of its scores.

    Args:
        q: [B, K, Q, H]; k, v: [B, K, S, H]; mask: additive float32, broadcastable to [B, K, Q, S], or None.

    Returns:
        out [B, K, Q, H] in q's dtype, lse [B, K, Q] float32.
    """
    if q.device.type == "cpu" and softcap is None:
        # Private: it is what F.scaled_dot_product_attention calls on a CPU, and that drops the log-sum-exp.
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, attn_mask=mask, scale=scaling
        )
        return out, lse
    return attend_plainly(q, k, v, mask, scaling, softcap)


def attend_plainly(  # signature: `attend`'s
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    scaling: float | None,
    softcap: float | None = None,
) -> tuple[Tensor, Tensor]:
    """`attend` by matrix products: for caps, and for devices without a fused kernel that returns the
    log-sum-exp."""
    scores = (q @ k.transpose(-1, -2)).float() * (q.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    lse = torch.logsumexp(scores, -1)
    return (scores - lse.unsqueeze(-1)).exp_().to(q.dtype) @ v, lse


# The generation skeleton: a second module over the trainer's Parameters, how its logits are computed, and
# its linears on a CPU.


_ROWS_HINT = 64
"""Rows the layout of packed linears is chosen for; any number of rows is computed correctly."""


class Skeleton:
    """The decoder and the head of a causal LM, with attention over a SampleCache."""

    def __init__(self, module: nn.Module) -> None:
        register_attention()
        self.module = share_parameters(module, attention=f"hf:{IMPLEMENTATION}")
        self._decoder: nn.Module = causal_lm(self.module).get_decoder()
        self._output: nn.Module = causal_lm(self.module).get_output_embeddings()
        self._head = head_of(self.module)
        self.linears = PackedLinears(self.module)
        self.vocab_size: int = self._head.weight.shape[0]
        self.device: torch.device = self._head.weight.device

    def hidden_states(self, token_ids: Tensor, positions: Tensor, cache: SampleCache) -> Tensor:
        """[T, C] of [T] tokens; `cache.plan` says what they are."""
        out = self._decoder(
            input_ids=token_ids.unsqueeze(0),
            position_ids=positions.unsqueeze(0),
            past_key_values=cache,
            use_cache=True,
            sample_cache=cache,
        )
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """[R, V] of [R, C], in the compute dtype; float32 when the model scales or caps its logits."""
        logits: Tensor = self._output(hidden)
        if self._head.logit_scale != 1.0:
            logits = logits.float() * self._head.logit_scale
        if self._head.softcap is not None:
            logits = torch.tanh(logits.float() / self._head.softcap) * self._head.softcap
        return logits


def can_pack(weight: Tensor) -> bool:
    """Whether packing makes linears over this weight faster: bfloat16 on an x86 CPU whose oneDNN computes in
    bfloat16."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.bfloat16
        and platform.machine() in ("x86_64", "AMD64")
        and torch.backends.mkldnn.is_available()
        and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    )


class PackedLinears:
    """Linears with pre-arranged weights, for bfloat16 generation on x86 CPUs.

    Symptom: `F.linear` on CPU rearranges a bfloat16 weight into oneDNN's blocked layout at every call, which
    for the few rows of a decode step is a large part of its time. torch has the operators
    (`torch.ops.mkldnn`, used by Inductor's freezing pass, torch/_inductor/fx_passes/mkldnn_fusion.py) but no
    public call.
    Remove when torch caches the layout itself, or has a public packed linear.

    The arranged copy costs the memory of the weights once more. It is made anew when a weight has changed.
    """

    def __init__(self, module: nn.Module) -> None:
        self._linears = [m for m in module.modules() if type(m) is nn.Linear and can_pack(m.weight)]
        self._weights: dict[int, Tensor] = {}
        self._versions: list[tuple[int, int]] = []
        for linear in self._linears:
            linear.forward = functools.partial(self._forward, linear)  # type: ignore[method-assign]

    def refresh(self) -> None:
        """Arrange the weights if any of them was changed in place since the last time."""
        versions = [(m.weight.data_ptr(), m.weight._version) for m in self._linears]
        if versions == self._versions:
            return
        self.clear()
        with torch.no_grad():
            for linear in self._linears:
                packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), _ROWS_HINT)
                self._weights[id(linear)] = packed
        self._versions = versions

    def clear(self) -> None:
        """Free the memory; the linears work without arranged weights too, only slower."""
        self._weights.clear()
        self._versions = []

    def _forward(self, linear: nn.Linear, x: Tensor) -> Tensor:
        packed = self._weights.get(id(linear))
        if packed is None:
            return nn.functional.linear(x, linear.weight, linear.bias)
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, packed, linear.bias, "none", [], "")
        return out
