"""The decoder's forward over a PackedBatch, in any layout; lockstep.ops.logprobs applies the head."""

from __future__ import annotations

import dataclasses
import itertools
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep import attention, invariant
from lockstep.attention import Ring
from lockstep.errors import ConfigError
from lockstep.execution import is_compiled
from lockstep.models.architectures import has_delta_nets, layer_windows
from lockstep.models.heads import Head, head_of
from lockstep.ops.masks import dense_mask, document_ids
from lockstep.packing import share
from lockstep.schema.batch import PackedBatch, RingShard, RingStep
from lockstep.schema.contract import KernelContract

ModelLayout = Literal["auto", "packed", "padded", "shared"]
"""auto: shared if the batch has SharedRows, else packed."""

__all__ = [
    "DecoderInputs",
    "Head",
    "ModelLayout",
    "Ring",
    "check_ring",
    "decoder_inputs",
    "dense_shape",
    "head_of",
    "hidden_states",
    "run_decoder",
]


def hidden_states(
    module: nn.Module,
    batch: PackedBatch,
    *,
    layout: ModelLayout = "packed",
    padding_side: Literal["left", "right"] = "right",
) -> Tensor:
    """Return the last hidden state of every slot of `batch`, [T, C]: the input of the head.

    `packed` runs the T slots through every layer as one row. `padded` runs a dense [B, L] batch, one document
    a row and pads computed, where (B, L) is `dense_shape(batch)`; rows of pad documents are then zeros.
    `shared` runs what documents begin with in common once (`SharedRows`; made here if the batch has none).

    Args:
        module: a transformers causal LM with an attention kernel of lockstep.attention, or transformers' own.
        batch: on the module's device.
    """
    inputs = decoder_inputs(module, batch, layout=layout, padding_side=padding_side)
    return run_decoder(module, inputs)


@dataclass(frozen=True, kw_only=True, slots=True)
class DecoderInputs:
    """The decoder's inputs for one batch: tensors and ints, made on the host before any graph."""

    token_ids: Tensor
    """[1, T] packed, [1, R] shared, [1, t] on a ring, [B, L] padded, int64."""
    positions: Tensor
    """The same shape, int64."""
    cells: Tensor | None
    """Padded: [num_tokens] int64, the index into [B * L] of every real slot in pack order. Shared: [T], the
    row of every slot. Packed: None."""
    num_slots: int
    """T; on a ring t, the rank's own rows."""
    kwargs: dict[str, Any]
    """Arguments of the attention implementation."""


def decoder_inputs(
    module: nn.Module,
    batch: PackedBatch,
    *,
    layout: ModelLayout = "packed",
    padding_side: Literal["left", "right"] = "right",
    compiled: bool | None = None,
    ring: Ring | None = None,
) -> DecoderInputs:
    """Make the decoder's inputs: the first half of `hidden_states`.

    Args:
        compiled: whether a compiled graph will read them; None: whether the module is compiled.
        ring: this rank runs its own rows of the pack only, `ring.shard.index`, and meets the others in
            attention; every rank of the ring must then run the same batch.

    Raises:
        ConfigError: a ring with anything but plain causal attention over documents, packed and eager.
    """
    base = getattr(module, str(module.base_model_prefix))
    # Private, in transformers 5.17 to 5.23, which keep the name nowhere else.
    kernel = attention.kernel_of(base.config._attn_implementation)
    compiled = is_compiled(module) if compiled is None else compiled
    if (kernel == "varlen" or ring is not None) and batch.token_ids.device.type == "cpu":
        attention.enable_cpu_reference()  # before any layer is traced: a compiled layer cannot register ops
    if ring is not None:
        check_ring(kernel, base.config, layout=layout, compiled=compiled, device=batch.token_ids.device)
        return _ring_inputs(batch, ring)
    if layout == "auto":
        layout = "packed" if batch.shared is None else "shared"
    if layout == "packed":
        return DecoderInputs(
            token_ids=batch.token_ids[None],
            positions=batch.positions[None],
            cells=None,
            num_slots=batch.num_slots,
            kwargs=_packed_kwargs(kernel, batch, base.config, compiled=compiled),
        )
    if layout == "shared":
        return _shared_inputs(kernel, batch, base.config, compiled=compiled)
    rows = _dense_rows(batch, padding_side)
    return DecoderInputs(
        token_ids=rows.token_ids,
        positions=rows.positions,
        cells=rows.cells,
        num_slots=batch.num_slots,
        kwargs=_padded_kwargs(kernel, rows, base.config, compiled=compiled),
    )


def run_decoder(
    module: nn.Module, inputs: DecoderInputs, slots: Tensor | slice | Literal["rows"] | None = None
) -> Tensor:
    """Return [T, C], on a ring [t, C]: the second half of `hidden_states`, only tensor operations.

    Args:
        slots: return those only; on a ring, rows of this rank. None: all. "rows": [R, C], what was computed,
            where documents share rows. A gather would give the same, but its backward would add up all
            padding rows into one, one after the other on a GPU.
    """
    base = getattr(module, str(module.base_model_prefix))
    output = base(input_ids=inputs.token_ids, position_ids=inputs.positions, use_cache=False, **inputs.kwargs)
    hidden: Tensor = output.last_hidden_state
    if slots == "rows":
        assert "shared" in inputs.kwargs, "rows are shared"
        return hidden[0]
    if inputs.cells is None:
        hidden = hidden[0, : inputs.num_slots]
    elif "shared" in inputs.kwargs:  # [T, C] may be many times larger than the rows that were computed
        return hidden[0].index_select(0, inputs.cells if slots is None else inputs.cells[slots])
    else:
        real = hidden.flatten(0, 1).index_select(0, inputs.cells)
        hidden = F.pad(real, (0, 0, 0, inputs.num_slots - real.shape[0]))
    return hidden if slots is None or isinstance(slots, slice) else hidden.index_select(0, slots)


def dense_shape(batch: PackedBatch) -> tuple[int, int]:
    """Return (B, L) of the padded layout: one row per document of max_seqlen tokens.

    A pack with a static capacity that has fewer documents gets as many rows as its slots can hold at full
    length, so that packs of one bucket have one shape.
    """
    return max(len(batch.sample_ids), batch.num_slots // batch.max_seqlen), batch.max_seqlen


def _ring_inputs(batch: PackedBatch, ring: Ring) -> DecoderInputs:
    """The inputs of this rank's rows. A rank without rows runs one, which `run_decoder` drops: transformers'
    layers cannot take none, and the collectives of sharded weights need a forward and a backward of every
    rank."""
    shard = ring.shard if ring.shard.num_rows else _one_row(ring.shard)
    shard = shard.to(batch.token_ids.device)
    return DecoderInputs(
        token_ids=batch.token_ids.index_select(0, shard.index)[None],
        positions=batch.positions.index_select(0, shard.index)[None],  # in the document, not on the rank
        cells=None,
        num_slots=ring.shard.num_rows,
        kwargs={"ring": Ring(shard=shard, group=ring.group)},
    )


def _one_row(shard: RingShard) -> RingShard:
    """The shard of a rank that owns nothing: the pack's first slot as a document of its own, so nothing is
    sent."""
    cu_seqlens = torch.tensor([0, 1], dtype=torch.int32, device=shard.index.device)
    return dataclasses.replace(
        shard,
        index=shard.index.new_zeros(1),
        lengths=(1,),
        sizes=(*shard.sizes[: shard.rank], 1, *shard.sizes[shard.rank + 1 :]),
        own=RingStep(cu_q=cu_seqlens, cu_k=cu_seqlens, max_q=1, max_k=1),
    )


def check_ring(kernel: str, config: Any, *, layout: str, compiled: bool, device: torch.device) -> None:
    """Raise unless ring attention supports these settings; the same on every rank.

    Raises:
        ConfigError: says what to set.
    """
    if layout not in ("auto", "packed"):
        raise ConfigError(
            f"unsupported-combination: ring attention needs packs, but train.layout = {layout!r}; set "
            "'packed', or ring = 1"
        )
    if compiled:
        raise ConfigError(
            "unsupported-combination: ring attention communicates with other ranks inside a layer, which "
            "is impossible in compiled layers; set train.execution = 'eager', or train.ring = 1"
        )
    windows = {window for window in layer_windows(config) if window is not None}
    if windows:
        raise ConfigError(
            f"unsupported-combination: ring attention has no sliding windows, but this {config.model_type} "
            f"model has windows of {', '.join(map(str, sorted(windows)))} tokens; set train.ring = 1"
        )
    if has_delta_nets(config):
        raise ConfigError(
            "unsupported-combination: ring attention divides documents between ranks, but the delta nets of "
            f"this {config.model_type} model need all tokens of a document in order; set train.ring = 1"
        )
    # On a CPU both names mean the reference kernels of attention/varlen.py.
    kernels = ("varlen", "sdpa") if device.type == "cpu" else ("varlen",)
    if kernel not in kernels:
        raise ConfigError(
            "unsupported-combination: ring attention uses the kernels of 'varlen', but train.attention = "
            f"{kernel!r} on {device.type}; set 'varlen', or train.ring = 1"
        )


def _shared_inputs(kernel: str, batch: PackedBatch, config: Any, *, compiled: bool) -> DecoderInputs:
    """The inputs of the rows that are computed. Positions are those in the document.

    Raises:
        ConfigError: an attention implementation of transformers' own.
    """
    if kernel.startswith("hf:"):
        raise ConfigError(
            f"unsupported-combination: train.layout = 'shared' with train.attention = {kernel!r}: "
            "transformers' implementations assume that a document's keys are its rows; set train.attention "
            "= 'varlen', 'sdpa' or 'flex', or train.layout = 'packed'"
        )
    if batch.shared is None:
        batch = share(batch).to(batch.token_ids.device)
    shared = batch.shared_rows
    assert shared is not None
    keys = attention.Keys(shared.cu_keys, shared.max_keys, None if compiled else shared.key_lengths)
    of_graph: attention.SharedKeys = {
        "keys": shared.keys,
        "order": shared.order,
        "ends": shared.ends,
        "cu_keys": shared.cu_keys,
        "max_keys": shared.max_keys,
    }
    kwargs: dict[str, Any] = {
        "cu_seqlens": shared.cu_rows,
        "max_seqlen": shared.max_rows,
        "shared": of_graph,
    }
    if kernel == "flex" or (kernel == "sdpa" and compiled):
        sizes = {"num_slots": batch.num_rows, "num_keys": shared.keys.shape[0]}
        kwargs["masks"] = {
            window or 0: attention.build_mask(kernel, shared.cu_rows, window=window, keys=keys, **sizes)
            for window in dict.fromkeys(layer_windows(config))
        }
    elif not compiled:
        kwargs |= {"lengths": shared.row_lengths, "key_lengths": shared.key_lengths}
    return DecoderInputs(
        token_ids=batch.token_ids.index_select(0, shared.slots)[None],
        positions=batch.positions.index_select(0, shared.slots)[None],
        cells=shared.rows,
        num_slots=batch.num_slots,
        kwargs=kwargs,
    )


def _packed_kwargs(kernel: str, batch: PackedBatch, config: Any, *, compiled: bool) -> dict[str, Any]:
    """Return the arguments of the attention implementation `kernel` for a pack."""
    if kernel.startswith("hf:"):
        return _hf_packed_kwargs(kernel, batch, config)
    kwargs: dict[str, Any] = {"cu_seqlens": batch.cu_seqlens, "max_seqlen": batch.max_seqlen}
    if kernel == "flex" or (kernel == "sdpa" and compiled):
        kwargs["masks"] = {
            window or 0: attention.build_mask(
                kernel, batch.cu_seqlens, num_slots=batch.num_slots, window=window
            )
            for window in dict.fromkeys(layer_windows(config))
        }
    elif not compiled:
        # A compiled graph must not see lengths: it would be specialised to this very pack.
        kwargs["lengths"] = batch.lengths
    return kwargs


def _hf_packed_kwargs(kernel: str, batch: PackedBatch, config: Any) -> dict[str, Any]:
    """transformers' own kernels: flash takes these four; the others find the documents in position_ids."""
    more = {"cu_seqlens": batch.cu_seqlens} if has_delta_nets(config) else {}  # they get no position_ids
    # All four, or none: with fewer transformers derives the documents from position_ids in every layer, which
    # waits for the GPU and breaks a compiled graph.
    if not kernel.startswith("hf:flash_attention"):
        return more
    return more | {
        "cu_seq_lens_q": batch.cu_seqlens,
        "cu_seq_lens_k": batch.cu_seqlens,
        "max_length_q": batch.max_seqlen,
        "max_length_k": batch.max_seqlen,
    }


@dataclass(frozen=True, kw_only=True, slots=True)
class _DenseRows:
    """A pack laid out as a dense batch."""

    token_ids: Tensor
    """[B, L] int64; 0 in pads."""
    positions: Tensor
    """[B, L] int64; 0-based in each document; pads count up from 0 on the left, go on counting on the
    right."""
    cells: Tensor
    """[num_tokens] int64; index into the flattened [B * L] of every real slot, in pack order."""
    pads: Tensor
    """[B, L] bool."""
    cu_seqlens: Tensor
    """[2 * B + 1] (left) or [B + 1] (right) int32 over the flattened rows. Left pads are documents of their
    own, so that no token sees them; right pads are behind every token of their row."""
    left: bool


def _dense_rows(batch: PackedBatch, side: Literal["left", "right"]) -> _DenseRows:
    num_rows, width = dense_shape(batch)
    lengths = list(batch.lengths[: len(batch.sample_ids)])
    lengths += [0] * (num_rows - len(lengths))
    left = side == "left"
    firsts = [row * width + (width - length if left else 0) for row, length in enumerate(lengths)]
    columns = torch.arange(width)
    lengths_column = torch.tensor(lengths)[:, None]
    if left:
        starts = width - lengths_column
        positions = torch.where(columns < starts, columns, columns - starts)
        pads = columns < starts
        bounds = [
            0,
            *itertools.chain.from_iterable((first, (row + 1) * width) for row, first in enumerate(firsts)),
        ]
    else:
        positions = columns.expand(num_rows, width)
        pads = columns >= lengths_column
        bounds = [row * width for row in range(num_rows + 1)]
    cells = torch.cat(
        [torch.arange(first, first + length) for first, length in zip(firsts, lengths, strict=True)]
    )
    device = batch.token_ids.device
    cells, positions, pads = cells.to(device), positions.to(device), pads.to(device)
    flat = torch.zeros(num_rows * width, dtype=torch.int64, device=device)
    return _DenseRows(
        token_ids=flat.index_copy(0, cells, batch.token_ids[: batch.num_tokens]).view(num_rows, width),
        positions=positions,
        cells=cells,
        pads=pads,
        cu_seqlens=torch.tensor(bounds, dtype=torch.int32, device=device),
        left=left,
    )


def _padded_kwargs(kernel: str, rows: _DenseRows, config: Any, *, compiled: bool) -> dict[str, Any]:
    if kernel.startswith("hf:"):
        return {"attention_mask": (~rows.pads).long()}
    num_rows, width = rows.token_ids.shape
    kwargs: dict[str, Any] = {"cu_seqlens": rows.cu_seqlens, "max_seqlen": width}
    if kernel not in ("sdpa", "flex"):  # a row is a document, pads are one too
        return kwargs
    windows = dict.fromkeys(layer_windows(config))
    if kernel == "flex":
        num_slots = num_rows * width
        masks = {
            w or 0: attention.build_mask(kernel, rows.cu_seqlens, num_slots=num_slots, window=w)
            for w in windows
        }
    else:
        kwargs["dense"] = True
        masks = {w or 0: _dense_row_mask(rows, w) for w in windows}
    return {**kwargs, "masks": masks}


def _dense_row_mask(rows: _DenseRows, window: int | None) -> Tensor | None:
    """[B, 1, L, L] bool; None where a causal mask over the whole row is the same."""
    num_rows, width = rows.token_ids.shape
    if not rows.left and (window is None or window >= width):
        return None
    ids = document_ids(rows.cu_seqlens, num_rows * width).view(num_rows, width)
    return dense_mask(ids, window=window)


# The kernel contract of a causal LM as it runs here: see lockstep.schema.contract.


_COMPILED = {"eager": "eager", "compile": "inductor", "joint": "inductor"}
"""Execution mode -> the compiler that decides the bits of a forward."""


def kernel_contract(
    module: nn.Module,
    *,
    attention: str,
    execution: str,
    dtype: torch.dtype,
    device: torch.device,
    tp: int = 1,
) -> KernelContract | None:
    """Return the kernel contract of `module`'s forward; None: it is not batch-invariant, or runs in a mode
    for which this is not known.

    Args:
        attention: the kernel that it attends with, such as varlen; of the native engine also varlen.
        execution: eager, compile or joint.
        dtype: compute dtype, of weights and activations.
        device: where it runs.
        tp: ranks that share every matrix; the module is one rank's part then.
    """
    if attention != "varlen" or execution not in _COMPILED or not invariant.is_converted(module):
        return None
    kernels = invariant.kernels_of(module, device=device)
    name = str(dtype).removeprefix("torch.")
    on_gpu = device.type == "cuda"
    return KernelContract(
        gemm=kernels["gemm"],
        attention="aten flash" if on_gpu else "aten flash (cpu reference)",
        attention_splits=1,
        norm=kernels["norm"],
        activation=kernels["activation"],
        logprob=kernels["logprob"] if tp == 1 else f"partial_{kernels['logprob']}",
        lm_head_dtype=name,
        logits_dtype=name,
        collectives="none" if tp == 1 else f"sums over {tp} ranks in rank order, float32",
        compile=_COMPILED[execution],
        dtype=name,
        weights_dtype=name,
        device=device_name(device),
        torch=str(torch.__version__),
        # ATen splits sums over a CPU's threads.
        threads=0 if on_gpu else torch.get_num_threads(),
    )


def device_name(device: torch.device) -> str:
    """Return the device's name, such as "NVIDIA H200" or "cpu AVX512": kernels of another one may add up in
    another order."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()}"
