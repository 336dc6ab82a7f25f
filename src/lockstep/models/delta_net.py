"""Gated delta nets with a forward of ours, over documents laid end to end: transformers' own reads on across
their borders, or refuses packs.

transformers' modules, their names and Parameters stay: `install` swaps the class.

    hidden ─► linears ─► convolution ─► delta rule ─► norm, gated ─► linear
                         └── both begin anew with each document ──┘
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.invariant.forms import FORMS, GatedDeltaNet
from lockstep.invariant.modules import swap
from lockstep.ops.delta_rule import Heads, chunked, convolve, delta_net, step
from lockstep.ops.masks import SharedKeys, document_ids, gather


class StateCache(Protocol):
    """A cache of the states of running documents."""

    def recur(self, part: DeltaNet, mixed: Tensor, decay: Tensor, beta: Tensor) -> Tensor:
        """Run `part.begin` or `part.go_on` for the tokens [T] of its documents, and keep the states. Returns
        [T, M, D]."""
        ...


class DeltaNet:
    """The forward of a gated delta net."""

    in_proj_qkv: nn.Module
    in_proj_z: nn.Module
    in_proj_b: nn.Module
    in_proj_a: nn.Module
    out_proj: nn.Module
    norm: nn.Module
    conv1d: nn.Conv1d
    layer_idx: int
    A_log: Tensor
    dt_bias: Tensor
    heads: Heads

    def forward(
        self,
        hidden_states: Tensor,
        cache_params: StateCache | None = None,
        attention_mask: Tensor | None = None,
        *,
        cu_seqlens: Tensor | None = None,
        shared: SharedKeys | None = None,
        **_: Any,
    ) -> Tensor:
        """[B, L, C] of [B, L, C]; the rest is what hidden_states passes on."""
        rows = hidden_states.flatten(0, 1)
        mixed, z, b, a = self.project(rows)
        decay = -self.A_log.float().exp() * F.softplus(a.float() + self.dt_bias)
        beta = b.sigmoid()
        if cache_params is not None:
            out = cache_params.recur(self, mixed, decay, beta)
        elif shared is not None:
            assert cu_seqlens is not None, "made with the shared rows"
            out = self._over_keys(mixed, decay, beta, cu_seqlens, shared)
        else:
            documents = _documents(hidden_states, cu_seqlens, attention_mask)
            out = self._over_documents(mixed, decay, beta, documents)
        out = self.norm(out.reshape(-1, self.heads.value_dim), z.reshape(-1, self.heads.value_dim))
        projected: Tensor = self.out_proj(out.view(rows.shape[0], -1))
        return projected.view_as(hidden_states)

    def project(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Return queries, keys and values [T, C'], gates [T, M D], and what becomes beta and decay, [T, M]
        each."""
        return self.in_proj_qkv(rows), self.in_proj_z(rows), self.in_proj_b(rows), self.in_proj_a(rows)

    def _over_documents(self, mixed: Tensor, decay: Tensor, beta: Tensor, documents: Tensor) -> Tensor:
        h = self.heads
        out: Tensor = delta_net(
            mixed, self._weight, decay, beta, documents, h.keys, h.values, h.key_dim, h.value_dim
        )
        return out

    def _over_keys(
        self, mixed: Tensor, decay: Tensor, beta: Tensor, cu_rows: Tensor, shared: SharedKeys
    ) -> Tensor:
        """Of rows that documents share, the rule is computed for each document: its gathered keys are all its
        tokens, in order."""
        mixed, figures = gather(mixed, torch.stack((decay, beta.to(decay.dtype)), 1), shared)
        decay, wide = figures.unbind(1)
        documents = document_ids(shared["cu_keys"], mixed.shape[0])
        out = self._over_documents(mixed, decay, wide.to(beta.dtype), documents)
        # A segment's last row is its last key.
        places = torch.arange(shared["ends"].shape[0] - 1, device=mixed.device)
        segments = document_ids(cu_rows, places.shape[0]) + 1
        return out.index_select(0, places + shared["cu_keys"][segments] - cu_rows[segments])

    # cached decode

    def begin(self, mixed: Tensor, decay: Tensor, beta: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Return out [T, M, D] of a document's first tokens, and what `go_on` needs of them: the last inputs
        of the convolution [W - 1, C'], zeros where there are none, and the state [M, H, D]."""
        documents = torch.zeros(mixed.shape[0], dtype=torch.int64, device=mixed.device)
        out, state = chunked(convolve(mixed, self._weight, documents), decay, beta, documents, self.heads)
        width = self._weight.shape[1] - 1
        before = F.pad(mixed, (0, 0, max(0, width - mixed.shape[0]), 0))
        return out, before[before.shape[0] - width :], state

    def go_on(
        self, mixed: Tensor, decay: Tensor, beta: Tensor, before: Tensor, state: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """`begin` for one more token of each of R documents.

        Args:
            before: [R, W - 1, C']; state: [R, M, H, D].
        """
        inputs = torch.cat((before, mixed[:, None]), 1)
        wide = torch.promote_types(mixed.dtype, torch.float32)
        convolved = F.silu((inputs.to(wide) * self._weight.t().to(wide)).sum(1)).to(mixed.dtype)
        out, state = step(convolved, decay, beta, state, self.heads)
        return out, inputs[:, 1:], state

    @property
    def _weight(self) -> Tensor:
        return self.conv1d.weight.squeeze(1)


class FusedDeltaNet(DeltaNet):
    """Of Qwen3-Next, whose linears give what belongs to a key head side by side."""

    in_proj_qkvz: nn.Module
    in_proj_ba: nn.Module

    def project(self, rows: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """See DeltaNet."""
        h = self.heads
        group = h.values // h.keys
        sizes = (h.key_dim, h.key_dim, group * h.value_dim, group * h.value_dim)
        q, k, v, z = self.in_proj_qkvz(rows).unflatten(-1, (h.keys, -1)).split(sizes, -1)
        b, a = self.in_proj_ba(rows).unflatten(-1, (h.keys, -1)).split((group, group), -1)
        mixed = torch.cat([x.flatten(1) for x in (q, k, v)], -1)
        return mixed, z.flatten(1), b.flatten(1), a.flatten(1)


def _documents(hidden: Tensor, cu_seqlens: Tensor | None, attention_mask: Tensor | None) -> Tensor:
    """[B L]: the document of each row."""
    batch, length = hidden.shape[:2]
    if cu_seqlens is not None:
        return document_ids(cu_seqlens, batch * length)
    # transformers' own kernels, padded: a row is a document, and its pads are one too.
    ids = 2 * torch.arange(batch, device=hidden.device)[:, None].expand(batch, length)
    return (ids if attention_mask is None else ids + attention_mask).flatten()


def install(module: nn.Module) -> None:
    """Swap the gated delta nets of a causal LM, in place. Idempotent."""
    for part in module.modules():
        form = FORMS.get(type(part).__name__)
        if isinstance(form, GatedDeltaNet) and not isinstance(part, DeltaNet):
            own: Any = part
            heads = Heads(
                keys=own.num_k_heads,
                values=own.num_v_heads,
                key_dim=own.head_k_dim,
                value_dim=own.head_v_dim,
            )
            swap(part, FusedDeltaNet if form.fused else DeltaNet, heads=heads)
