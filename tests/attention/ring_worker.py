"""One rank of the ring tests: ring_worker.py OUT. Writes what it measured to OUT/rank-N.json.

Every case is computed whole in this process as well, by torch's own sdpa, and the rank's rows are compared.
"""

from __future__ import annotations

import json
import sys
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.attention import KERNELS, Ring, ring_attention
from lockstep.config.model import ModelConfig
from lockstep.models.architectures import checkpoint_activations
from lockstep.models.forward import decoder_inputs, hidden_states, run_decoder
from lockstep.models.load import load_model
from lockstep.packing import Bucket, pack, ring_shard
from lockstep.processes.child import relax_gc
from lockstep.ranks.context import init_ranks
from lockstep.schema.batch import PackedBatch, TrainSample

PACKS = [[37, 5, 1, 64, 13], [200], [16, 8, 24], [2, 1, 1], [3]]
HEADS = [(4, 4), (6, 2), (4, 1)]


def max_gap(mine: Tensor, theirs: Tensor) -> float:
    return float((mine - theirs).abs().max()) if mine.numel() else 0.0


def relative_gap(mine: Tensor, theirs: Tensor) -> float:
    """Of the whole ring: every rank's rows together."""
    squares = torch.stack([(mine - theirs).double().square().sum(), theirs.double().square().sum()])
    dist.all_reduce(squares)
    return float((squares[0] / squares[1].clamp(min=1e-30)).sqrt())


def whole(inputs: list[Tensor], lengths: list[int], scale: float | None) -> Tensor:
    return KERNELS["sdpa"](
        *inputs,
        cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32),
        max_seqlen=max(lengths),
        lengths=tuple(lengths),
        scale=scale,
        window=None,
    )


def attention_case(
    lengths: list[int], heads: tuple[int, int], dtype: torch.dtype, *, gather: bool
) -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    generator = torch.Generator().manual_seed(sum(lengths))
    num_q, num_kv = heads
    # Permuted like what transformers hands over, and like the gradient that sdpa's backward yields.
    q, k, v, grad = (
        torch.randn(n, sum(lengths), 16, generator=generator, dtype=torch.float64).to(dtype).transpose(0, 1)
        for n in (num_q, num_kv, num_kv, num_q)
    )
    scale = 0.3 if num_q == num_kv else None
    exact = dtype if dtype != torch.bfloat16 else torch.float32
    reference = [x.detach().to(exact).requires_grad_() for x in (q, k, v)]
    expected = whole(reference, lengths, scale)
    expected_grads = torch.autograd.grad(expected, reference, grad.to(exact))

    shard = ring_shard(lengths, rank=dist.get_rank(), size=dist.get_world_size(), gather=gather)
    local = [x.detach()[shard.index].requires_grad_() for x in (q, k, v)]
    out = ring_attention(*local, shard=shard, group=group, scale=scale)
    assert out.dtype == dtype and out.shape == local[0].shape
    rows = grad[shard.index].transpose(0, 1).contiguous().transpose(0, 1)
    grads = torch.autograd.grad(out, local, rows)
    assert [g.dtype for g in grads] == [dtype] * 3
    if gather:
        cu_seqlens = torch.tensor([0, *accumulate(lengths)], dtype=torch.int32)
        options: Any = {"max_seqlen": max(lengths), "lengths": None, "scale": scale, "window": None}
        alone = KERNELS["varlen"](q, k, v, cu_seqlens=cu_seqlens, **options)
        assert torch.equal(out, alone[shard.index]), "other bits than one rank's"
        again = torch.autograd.grad(
            ring_attention(*local, shard=shard, group=group, scale=scale), local, rows
        )
        assert all(map(torch.equal, grads, again)), "other bits the second time"
    found: dict[str, Any] = {"lengths": lengths, "heads": heads, "dtype": str(dtype), "sizes": shard.sizes}
    largest = float(expected.detach().abs().max())
    found["out"] = max_gap(out.detach(), expected.detach()[shard.index]) / largest
    for name, mine, theirs in zip(("dq", "dk", "dv"), grads, expected_grads, strict=True):
        found[name] = relative_gap(mine.to(exact), theirs[shard.index])
    return found


def documents(lengths: list[int], bucket: Bucket | None) -> PackedBatch:
    samples = []
    for i, length in enumerate(lengths):
        ids = torch.randint(3, 200, (length,), generator=torch.Generator().manual_seed(i))
        samples.append(TrainSample(token_ids=ids, loss_mask=torch.arange(length) < length - 1, sample_id=i))
    return pack(samples, [torch.ones(length) for length in lengths], bucket=bucket)


def model_case(
    lengths: list[int],
    *,
    bucket: Bucket | None = None,
    kernel: str = "varlen",
    checkpointing: bool = False,
    gather: bool = False,
) -> dict[str, Any]:
    group = dist.group.WORLD
    assert group is not None
    config = ModelConfig(name="shape:tiny-llama", dtype="float32")
    module = load_model(config, attention=kernel, device=torch.device("cpu")).module.train()
    batch = documents(lengths, bucket)
    real = batch.num_tokens
    expected = hidden_states(module, batch)[:real]
    weights = torch.randn(expected.shape, generator=torch.Generator().manual_seed(1))
    (expected * weights).sum().backward()
    gradients = {name: p.grad.clone() for name, p in module.named_parameters() if p.grad is not None}
    module.zero_grad(set_to_none=True)

    if checkpointing:
        checkpoint_activations(module)
    size = dist.get_world_size()
    shard = ring_shard(
        batch.lengths, rank=dist.get_rank(), size=size, num_documents=len(lengths), gather=gather
    )
    hidden = run_decoder(module, decoder_inputs(module, batch, ring=Ring(shard=shard, group=group)))
    assert hidden.shape == (shard.num_rows, expected.shape[1]) and bool(hidden.isfinite().all())
    mine = shard.index[shard.index < real]
    kept = hidden[shard.index < real]
    (kept * weights[mine]).sum().backward()  # also where `mine` is empty: there is a graph
    gaps = {}
    for name, parameter in module.named_parameters():
        if name in gradients:
            assert parameter.grad is not None, f"{name}: no gradient"
            dist.all_reduce(parameter.grad)
            gap = (parameter.grad - gradients[name]).norm() / gradients[name].norm()
            gaps[name] = float(gap) if gradients[name].norm() > 0 else float(parameter.grad.norm())
    return {
        "lengths": lengths,
        "kernel": kernel,
        "checkpointing": checkpointing,
        "sizes": shard.sizes,
        "hidden": max_gap(kept.detach(), expected.detach()[mine]),
        "gradient": max(gaps.values()),
        "parameters": len(gaps),
    }


def main(out: Path) -> None:
    torch.set_num_threads(1)
    with init_ranks(device="cpu", seconds=60.0) as ranks:
        found: dict[str, Any] = {"attention": [], "model": []}
        for lengths in PACKS:
            for heads in HEADS:
                for dtype in (torch.float32, torch.float64, torch.bfloat16):
                    for gather in (False, True):
                        found["attention"].append(attention_case(lengths, heads, dtype, gather=gather))
        found["model"] = [
            model_case([37, 5, 1, 64, 13]),
            model_case([37, 5, 1, 64, 13], kernel="sdpa", checkpointing=True),
            model_case([37, 5, 1, 64, 13], checkpointing=True, gather=True),
            model_case([3]),
            model_case([3], gather=True),
            model_case([30, 20], bucket=Bucket(tokens=128, documents=8, max_seqlen=64), gather=True),
            model_case([30, 20], bucket=Bucket(tokens=128, documents=8, max_seqlen=64)),
        ]
        (out / f"rank-{ranks.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    relax_gc()
    main(Path(sys.argv[1]))
