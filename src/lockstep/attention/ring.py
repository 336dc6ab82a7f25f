"""Ring attention over packed documents: each rank keeps its queries, keys and values go round.

`lockstep.packing.ring_shard` assigns the slots to ranks. Each step is one call of torch's flash attention
ops, whose log-sum-exp lets outputs over different keys be merged exactly (Liu, Zaharia, Abbeel, Ring
Attention, arXiv 2310.01889; the zigzag is that of Llama 3 and of zhuzilin/ring-flash-attention).

Layout. A rank's two chunks of a document lie side by side, and a step that needs only one of them gives the
other an empty partner in cu_seqlens. So no half is ever copied out, every step is one kernel call for any
number of documents, step 0 is plain causal attention, and each message is one slice. The price: a step
against a later rank also merges rows that saw nothing. It is no loss of time, because in that same step the
last rank has to merge all of its rows anyway. Halves laid out one after the other would need two calls a
step.

Forward, step i: the keys of rank r - i are here; those of r - i - 1 are on their way while the kernel runs.
Backward: the same round again; a block's gradients follow from the *final* output and log-sum-exp. dk and dv
travel in float32, one kernel behind their keys, and reach home after R hops.

With `RingShard.keys` nothing goes round: keys and values of divided documents are gathered from all ranks,
and in one causal call each chunk of a document is a segment that ends where its keys end. The kernel counts
its key blocks from the document's first key, as in a pack of one rank, so a row has the bits that it has
there; a merge of blocks cannot promise that. Backward gathers them again, which is cheaper than keeping them,
exchanges the gradients and adds them up in rank order, in float32. The price: no message is hidden behind a
kernel, and a layer holds the keys and values of whole documents while it runs.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.attention.sinks import NO_SPLITS
from lockstep.attention.varlen import enable_cpu_reference
from lockstep.errors import ConfigError, ModelError
from lockstep.ops.rank_sums import add_in_order, exchange, gather_rows
from lockstep.schema.batch import RingShard, RingStep

# Two apart: a message is two tensors, which take a tag each.
_KV_TAG, _GRAD_TAG = 0, 2
# The ops behind torch's varlen_attn: a block's backward takes the log-sum-exp over all blocks, which that one
# cannot be given.
_flash = torch.ops.aten._flash_attention_forward
_flash_backward = torch.ops.aten._flash_attention_backward


@dataclass(frozen=True, kw_only=True, slots=True)
class Ring:
    """The ranks that share the slots of a pack, and this rank's shard."""

    shard: RingShard
    group: dist.ProcessGroup
    """Rank i of it is rank i of the ring."""


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    shard: RingShard,
    group: dist.ProcessGroup,
    scale: float | None = None,
) -> Tensor:
    """Causal attention of q [t, N, H] to the keys k and v [t, K, H] of all ranks -> [t, N, H].

    Rows are those of `shard`, on its device; every rank of the ring calls it, also one with t = 0. A ring of
    one is bitwise equal to `varlen`. Differentiable once.

    Args:
        scale: of the scores; None: H ** -0.5.

    Raises:
        ConfigError: float32 on CUDA, for which there is no flash kernel.
        ModelError: the rows are not those of the shard, or the group is not its ring.
    """
    here = (dist.get_rank(group), dist.get_world_size(group))
    if here != (shard.rank, shard.size):
        raise ModelError(
            f"out-of-range: the shard belongs to rank {shard.rank} of {shard.size}, but this is rank "
            f"{here[0]} of a group of {here[1]}; create it with ring_shard(..., rank={here[0]}, "
            f"size={here[1]})"
        )
    if q.shape[0] != shard.num_rows or k.shape[0] != shard.num_rows or k.shape != v.shape:
        raise ModelError(
            f"wrong-shape: rank {shard.rank} of the ring has {shard.num_rows} rows, which does not match q "
            f"{list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        )
    if shard.index.device != q.device:
        raise ModelError(
            f"missing-device: the ring's shard is on {shard.index.device}, but q is on {q.device}; move the "
            "shard with shard.to()"
        )
    if q.device.type == "cpu":
        enable_cpu_reference()
    elif q.dtype not in (torch.bfloat16, torch.float16):
        raise ConfigError(
            f"unsupported-combination: ring attention runs flash kernels, which do not support {q.dtype} on "
            f"{q.device.type}; set model.dtype = 'bfloat16'"
        )
    out: Tensor = _apply(q, k, v, Ring(shard=shard, group=group), scale)
    return out


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, ring: Ring, scale: float | None) -> Tensor:
        q, k, v = q.contiguous(), k.contiguous(), v.contiguous()
        if ring.shard.keys is None:
            out, lse = _forward(q, k, v, _RingPass(ring), scale)
        else:
            out, lse = _attend(q, *_gathered(k, v, ring), ring.shard.keys.step, scale, causal=True)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.ring, ctx.scale = ring, scale
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        # .contiguous(): gloo sends dense permuted tensors in memory order, and the kernels want rows.
        q, k, v, out, lse = ctx.saved_tensors
        saved = _Saved(grad=grad.contiguous(), q=q, k=k, v=v, out=out, lse=lse)
        if ctx.ring.shard.keys is None:
            return (*_backward(saved, _RingPass(ctx.ring), ctx.scale), None, None)
        return (*_backward_of_gathered(saved, ctx.ring, ctx.scale), None, None)


_apply: Callable[..., Tensor] = _RingAttention.apply  # torch gives it no type


@dataclass(frozen=True, kw_only=True, slots=True)
class _Saved:
    grad: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    out: Tensor
    lse: Tensor

    def divided(self, rows: int) -> _Saved:
        """Only the rows of divided documents, which come first."""
        return _Saved(
            grad=self.grad[:rows],
            q=self.q[:rows],
            k=self.k[:rows],
            v=self.v[:rows],
            out=self.out[:rows],
            lse=self.lse[:, :rows].contiguous(),  # the kernel goes by its pointer: [N, rows] without gaps
        )


def _forward(q: Tensor, k: Tensor, v: Tensor, ring: _RingPass, scale: float | None) -> tuple[Tensor, Tensor]:
    """out [t, N, H], lse [N, t]."""
    shard, rows = ring.shard, ring.rows
    in_flight = ring.send_on((k[:rows], v[:rows]), step=1, tag=_KV_TAG)
    out, lse = _attend(q, k, v, shard.own, scale, causal=True)
    if not shard.others:
        return out, lse
    # Only rows of divided documents have keys elsewhere, and they come first.
    merged, merged_lse = out[:rows], lse[:, :rows].contiguous()
    for i, step in enumerate(shard.others, start=1):
        kv = in_flight.wait()
        in_flight = ring.send_on(kv, step=i + 1, tag=_KV_TAG)
        # The keys are sent on first: they travel while this kernel runs.
        block = _attend(q[:rows], *kv, step, scale, causal=False)
        # float32 between the merges; the last one also rounds.
        dtype = q.dtype if i == len(shard.others) else _sum_dtype(q)
        merged, merged_lse = _merge(merged, merged_lse, *block, dtype)
    if rows == len(out):
        return merged, merged_lse
    out[:rows], lse[:, :rows] = merged, merged_lse
    return out, lse


def _backward(saved: _Saved, ring: _RingPass, scale: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    shard, rows = ring.shard, ring.rows
    in_flight = ring.send_on((saved.k[:rows], saved.v[:rows]), step=1, tag=_KV_TAG)
    dq, dk, dv = _attend_backward(saved, saved.k, saved.v, shard.own, scale, causal=True)
    if not shard.others:
        return dq, dk, dv
    part, total = saved.divided(rows), dq[:rows]
    sums = (dk[:rows].to(_sum_dtype(dk)), dv[:rows].to(_sum_dtype(dv)))
    homeward = ring.send_on(sums, step=1, tag=_GRAD_TAG)
    for i, step in enumerate(shard.others, start=1):
        kv = in_flight.wait()
        in_flight = ring.send_on(kv, step=i + 1, tag=_KV_TAG)
        block_dq, block_dk, block_dv = _attend_backward(part, *kv, step, scale, causal=False)
        sums = homeward.wait()  # of the keys that are here: sent off by the rank that had them before
        sums[0].add_(block_dk)
        sums[1].add_(block_dv)
        last = i == len(shard.others)
        if last:  # nothing will be added any more: rounded before the hop that no kernel hides, not after
            sums = (sums[0].to(dk.dtype), sums[1].to(dv.dtype))
        homeward = ring.send_on(sums, step=i + 1, tag=_GRAD_TAG)
        total = _add(total, block_dq, dq.dtype if last else _sum_dtype(dq))
    home = homeward.wait()
    if rows == len(dq):
        return total, *home
    dq[:rows], dk[:rows], dv[:rows] = total, *home
    return dq, dk, dv


# --- gathered keys ------------------------------------------------------------------------------------------


def _gathered(k: Tensor, v: Tensor, ring: Ring) -> tuple[Tensor, Tensor]:
    """Keys and values [S, K, H] of the segments of `RingKeys`."""
    shard, keys = ring.shard, ring.shard.keys
    assert keys is not None
    rows = shard.divided[shard.rank]
    both = torch.stack([k, v], 1)
    sent = both.new_zeros(max(shard.divided), *both.shape[1:])
    sent[:rows] = both[:rows]
    found = torch.cat([gather_rows(sent, ring.group), both[rows:]]).index_select(0, keys.index)
    return found[:, 0], found[:, 1]


def _backward_of_gathered(saved: _Saved, ring: Ring, scale: float | None) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of q, k and v."""
    shard, keys = ring.shard, ring.shard.keys
    assert keys is not None
    k, v = _gathered(saved.k, saved.v, ring)
    dq, dk, dv = _attend_backward(saved, k, v, keys.step, scale, causal=True)
    shares = torch.stack([dk, dv], 1).to(_sum_dtype(dk))
    size, most, rows = shard.size, max(shard.divided), shard.divided[shard.rank]
    total = shares.new_zeros(size * most + len(saved.k) - rows, *shares.shape[1:])
    # No row comes twice in either, so the order of the additions is fixed.
    total.index_copy_(0, keys.index[keys.late], shares[keys.late])
    total.index_add_(0, keys.index[keys.early], shares[keys.early])
    divided, whole = total[: size * most], total[size * most :]
    here = add_in_order(exchange(divided.view(size, most, *divided.shape[1:]), ring.group))
    mine = torch.cat([here[:rows], whole]).to(dk.dtype)
    return dq, mine[:, 0].contiguous(), mine[:, 1].contiguous()


# --- one block ----------------------------------------------------------------------------------------------


def _attend(
    q: Tensor, k: Tensor, v: Tensor, step: RingStep, scale: float | None, *, causal: bool
) -> tuple[Tensor, Tensor]:
    """out [t, N, H], lse [N, t]; a row without keys has out 0 and lse infinite, of either sign."""
    if len(q) == 0:
        return torch.empty_like(q), q.new_empty(q.shape[1], 0, dtype=_sum_dtype(q))
    out, lse, *_ = _flash(
        q,
        k,
        v,
        step.cu_q,
        step.cu_k,
        step.max_q,
        step.max_k,
        0.0,
        causal,
        False,
        scale=scale,
        window_size_left=-1,
        window_size_right=0 if causal else -1,
        **NO_SPLITS,
    )
    if lse.shape != (q.shape[1], q.shape[0]):
        raise ModelError(
            f"unsupported-version: torch {torch.__version__} returns the log-sum-exp of packed documents "
            f"with shape {list(lse.shape)}, not [{q.shape[1]}, {q.shape[0]}]; ring attention needs torch "
            "2.11 or later"
        )
    return out, lse


def _attend_backward(
    saved: _Saved, k: Tensor, v: Tensor, step: RingStep, scale: float | None, *, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """A block's share of dq, and dk and dv; keys without queries get zeros."""
    if len(saved.q) == 0:
        return torch.zeros_like(saved.q), torch.zeros_like(k), torch.zeros_like(v)
    dq, dk, dv = _flash_backward(
        saved.grad,
        saved.q,
        k,
        v,
        saved.out,
        saved.lse,
        step.cu_q,
        step.cu_k,
        step.max_q,
        step.max_k,
        0.0,
        causal,
        torch.zeros(2, dtype=torch.uint64, device=k.device),  # the random state of dropout, which is off
        torch.empty(0, device=k.device),
        scale=scale,
        window_size_left=-1,
        window_size_right=0 if causal else -1,
    )
    return dq, dk, dv


def _merge(
    out: Tensor, lse: Tensor, block: Tensor, block_lse: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Attention over the keys of both: softmax is an average, weighted by exp(lse).

    Args:
        out: [n, N, H], float32 or, the first time, the kernel's dtype; `block` likewise.
        lse: [N, n]; `block_lse` likewise.
        dtype: of the result.
    """
    merge = _fuse_merged if out.is_cuda else _merged
    return merge(out, lse, block, block_lse, dtype)


def _add(total: Tensor, block: Tensor, dtype: torch.dtype) -> Tensor:
    """The sum of two shares of dq [n, N, H]."""
    add = _fuse_added if total.is_cuda else _added
    return add(total, block, dtype)


def _merged(
    out: Tensor, lse: Tensor, block: Tensor, block_lse: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    # No keys: CUDA's flash kernel says +inf, others -inf. It must weigh nothing.
    block_lse = torch.where(block_lse == float("inf"), float("-inf"), block_lse)
    # exp(block_lse) / (exp(lse) + exp(block_lse)), without exponentials that overflow.
    weight = torch.sigmoid(block_lse - lse).t()[:, :, None]
    exact = _sum_dtype(out)
    merged = torch.lerp(out.to(exact), block.to(exact), weight)
    return merged.to(dtype), torch.logaddexp(lse, block_lse)


def _added(total: Tensor, block: Tensor, dtype: torch.dtype) -> Tensor:
    exact = _sum_dtype(total)
    return (total.to(exact) + block.to(exact)).to(dtype)


def _sum_dtype(x: Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def _fuse_merged(
    out: Tensor, lse: Tensor, block: Tensor, block_lse: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    _varies(0, out, block)
    _varies(1, lse, block_lse)
    both: tuple[Tensor, Tensor] = _fused(_merged)(out, lse, block, block_lse, dtype)
    return both


def _fuse_added(total: Tensor, block: Tensor, dtype: torch.dtype) -> Tensor:
    _varies(0, total, block)
    added: Tensor = _fused(_added)(total, block, dtype)
    return added


@functools.cache
def _fused(function: Callable[..., Any]) -> Callable[..., Any]:
    """One kernel on CUDA: these are bound by memory, and op by op would move two to three times as much. Each
    pair of dtypes has its own: bfloat16 to float32, float32, back to bfloat16."""
    return torch.compile(function)


def _varies(dim: int, *tensors: Tensor) -> None:
    """The number of rows changes from pack to pack: one kernel must serve all. Heads do not change, and
    divisions by them must not be left for the kernel."""
    for tensor in tensors:
        # maybe: torch specialises a length of 0 or 1, for which mark_dynamic would raise.
        torch._dynamo.maybe_mark_dynamic(tensor, dim)


# --- communication ------------------------------------------------------------------------------------------


class _RingPass:
    """One pass round the ring: each rank sends to the next one and receives from the one before."""

    def __init__(self, ring: Ring) -> None:
        self.shard, self._group = ring.shard, ring.group
        self.rows = self.shard.divided[self.shard.rank]
        """Rows of divided documents here."""

    def send_on(self, tensors: tuple[Tensor, Tensor], *, step: int, tag: int) -> _InFlight:
        """Start to send two tensors of the same rows, and to receive those that this rank works on in `step`,
        or, as gradients, adds to in it. Gradients of step R are this rank's own again.

        Nothing is sent where no document is divided, nor keys that every rank has had.
        """
        shard = self.shard
        if not shard.others or (step == shard.size and tag == _KV_TAG):
            return _InFlight(tensors, [], None)
        rows = shard.divided[(shard.rank - step) % shard.size]
        staged = tensors[0].is_cuda and self._backend(tensors[0].device) == "gloo"
        out = [x.cpu() for x in tensors] if staged else list(tensors)
        received = [x.new_empty(rows, *x.shape[1:]) for x in out]
        after, before = (
            dist.get_global_rank(self._group, (shard.rank + offset) % shard.size) for offset in (1, -1)
        )
        # One tag each: on gloo nothing else tells two messages of one rank apart; NCCL goes by their order.
        ops = [dist.P2POp(dist.isend, x, after, self._group, tag + i) for i, x in enumerate(out)]
        ops += [dist.P2POp(dist.irecv, x, before, self._group, tag + i) for i, x in enumerate(received)]
        works = dist.batch_isend_irecv(ops)
        return _InFlight((received[0], received[1]), works, tensors[0].device if staged else None, out)

    def _backend(self, device: torch.device) -> str:
        pairs = [pair.split(":") for pair in dist.get_backend_config(self._group).split(",")]
        return dict(pairs).get(device.type, "")


@dataclass(slots=True)
class _InFlight:
    """Two tensors that are being received."""

    tensors: tuple[Tensor, Tensor]
    works: list[Any]
    device: torch.device | None
    """The device to move them to after they arrive: several ranks on one GPU communicate through the host."""
    sent: list[Tensor] | None = None
    """The sent tensors, kept alive until they have left."""

    def wait(self) -> tuple[Tensor, Tensor]:
        """Wait for the tensors and return them; on CUDA the stream waits, not the host."""
        for work in self.works:
            work.wait()
        self.sent = None
        if self.device is None:
            return self.tensors
        return self.tensors[0].to(self.device), self.tensors[1].to(self.device)
