"""Keys and values of running samples, stored so that a group shares its prompt.

Two stores per layer, both preallocated and written in place:

    prompts      [P, K, A, H]    one entry per prompt, computed once, read by all its samples
    completions  [R, K, S, H]    one entry per running sample, appended to at every step

A decode step attends from each sample's one query to both stores and merges the two results by their
log-sum-exps (exact; the split of FlashAttention, Dao et al. 2022, and of cascade attention). R running
samples, P prompts in use, A and S allocated lengths, N query heads, K key/value heads, H head dim.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache

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
    """A transformers cache of two stores; `plan` describes the forward that calls `update`."""

    def __init__(self) -> None:
        super().__init__(layers=[])
        self.plan: Prefill | Decode | None = None
        self._prompts: list[tuple[Tensor, Tensor]] = []
        self._completions: list[tuple[Tensor, Tensor]] = []
        self._sizes = (0, 0, 0, 0)

    def reserve(self, *, prompts: int, prompt_length: int, rows: int, length: int) -> None:
        """Make room and keep existing entries. Sizes never shrink."""
        needed = (prompts, prompt_length, rows, length)
        new = tuple(
            have if want <= have else _rounded(want, have, step)
            for want, have, step in zip(needed, self._sizes, (1, _LENGTH_STEP, 1, _LENGTH_STEP), strict=True)
        )
        if new == self._sizes:
            return
        self._sizes = (new[0], new[1], new[2], new[3])
        for store, shape in ((self._prompts, new[:2]), (self._completions, new[2:])):
            for layer, (keys, values) in enumerate(store):
                store[layer] = (_resized(keys, *shape), _resized(values, *shape))

    def prompt_store(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [P_cap, K, A, H]."""
        return self._prompts[layer]

    def completion_store(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values [R_cap, K, S, H]."""
        return self._completions[layer]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Stores [1, K, T, H] new keys and values and returns them; attention reads the stores itself."""
        if layer_idx == len(self._prompts):
            self._allocate(key_states, value_states)
        if isinstance(self.plan, Prefill):
            start = 0
            for length, slot in zip(self.plan.lengths, self.plan.slots, strict=True):
                for store, new in zip(self._prompts[layer_idx], (key_states, value_states), strict=True):
                    store[slot, :, :length] = new[0, :, start : start + length]
                start += length
        elif isinstance(self.plan, Decode):
            rows = key_states.shape[2]
            for store, new in zip(self._completions[layer_idx], (key_states, value_states), strict=True):
                new_RKH = new[0].transpose(0, 1)
                if self.plan.uniform_counts:
                    store[:rows, :, self.plan.max_count] = new_RKH
                else:
                    index = torch.arange(rows, device=store.device)
                    store[index, :, self.plan.counts] = new_RKH
        return key_states, value_states

    def move_rows(self, source: Sequence[int], target: Sequence[int], *, used: int) -> None:
        """Copy completions of rows `source` over rows `target`, their first `used` tokens."""
        _move(self._completions, source, target, used)

    def move_prompts(self, source: Sequence[int], target: Sequence[int], *, used: int) -> None:
        """Copy prompt entries `source` over entries `target`, their first `used` tokens."""
        _move(self._prompts, source, target, used)

    def clear(self) -> None:
        """Free the memory."""
        self._prompts.clear()
        self._completions.clear()
        self._sizes = (0, 0, 0, 0)
        self.plan = None

    @property
    def num_bytes(self) -> int:
        """Bytes allocated now."""
        stores = (*self._prompts, *self._completions)
        return sum(t.numel() * t.element_size() for pair in stores for t in pair)

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Positions are always passed in, so transformers need not count."""
        return 0

    def _allocate(self, keys: Tensor, values: Tensor) -> None:
        prompts, prompt_length, rows, length = self._sizes

        def empty(like: Tensor, entries: int, tokens: int) -> Tensor:
            return like.new_zeros(entries, like.shape[1], tokens, like.shape[3])  # NaN would pass a mask

        self._prompts.append((empty(keys, prompts, prompt_length), empty(values, prompts, prompt_length)))
        self._completions.append((empty(keys, rows, length), empty(values, rows, length)))


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
        None if prompt_ok is None else _additive(prompt_ok.unsqueeze(1)),
        None if completion_ok is None else _additive(completion_ok[:, None, None]),
    )


def _additive(allowed: Tensor) -> Tensor:
    return torch.zeros(allowed.shape, device=allowed.device).masked_fill_(~allowed, -1e30)


def _rounded(want: int, have: int, step: int) -> int:
    target = max(want, have + have // 2)
    return -(-target // step) * step


def _resized(old: Tensor, entries: int, tokens: int) -> Tensor:
    if old.shape[0] == entries and old.shape[2] == tokens:
        return old
    new = old.new_zeros(entries, old.shape[1], tokens, old.shape[3])
    new[: old.shape[0], :, : old.shape[2]] = old
    return new


def _move(
    stores: list[tuple[Tensor, Tensor]], source: Sequence[int], target: Sequence[int], used: int
) -> None:
    if not source:
        return
    for pair in stores:
        for tensor in pair:
            index = torch.tensor(source, device=tensor.device)
            tensor[torch.tensor(target, device=tensor.device), :, :used] = tensor[index, :, :used]
