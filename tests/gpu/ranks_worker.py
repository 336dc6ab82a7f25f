"""One rank of test_ranks.py. Prints one JSON object: what each check found. It runs on a CPU as well, without
graphs."""

from __future__ import annotations

import itertools
import json
from itertools import accumulate
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.attention import KERNELS, ring_attention
from lockstep.ops import rank_sums
from lockstep.packing import ring_shard
from lockstep.processes.child import relax_gc
from lockstep.ranks.context import init_ranks

CUDA = torch.cuda.is_available()
BORDERS = (63, 64, 65, 127, 128, 129, 191, 192, 193, 255, 256, 257, 1000)
"""Lengths around the key blocks of flash attention, which have 64 or 128 keys. Alone in a pack a document is
divided."""
PACKS = [*([n] for n in BORDERS), [513, 130, 70, 20], [257, 2000, 129]]
HEADS = [(8, 2, 128), (4, 4, 128), (8, 2, 64)]


def normal(*shape: int, seed: int, device: torch.device) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device, torch.bfloat16)


def ring(device: torch.device) -> dict[str, Any]:
    """Gathered keys against one rank's kernel: values that differ, and the gradients' error."""
    group = dist.group.WORLD
    assert group is not None
    differ, again, error = 0, 0, 0.0
    for lengths, (heads, kv_heads, head_dim) in itertools.product(PACKS, HEADS):
        total = sum(lengths)
        inputs = [normal(total, n, head_dim, seed=n, device=device) for n in (heads, kv_heads, kv_heads)]
        grad = normal(total, heads, head_dim, seed=9, device=device)
        alone = [x.clone().requires_grad_() for x in inputs]
        expected = KERNELS["varlen"](
            *alone,
            cu_seqlens=torch.tensor([0, *accumulate(lengths)], dtype=torch.int32, device=device),
            max_seqlen=max(lengths),
            lengths=None,
            scale=None,
            window=None,
        )
        gradients = torch.autograd.grad(expected, alone, grad)
        shard = ring_shard(lengths, rank=group.rank(), size=group.size(), gather=True).to(device)
        found: list[tuple[Tensor, ...]] = []
        for _ in range(2):
            local = [x[shard.index].requires_grad_() for x in inputs]
            out = ring_attention(*local, shard=shard, group=group)
            found.append((out, *torch.autograd.grad(out, local, grad[shard.index])))
        differ += int((found[0][0] != expected[shard.index]).sum())
        again += sum(int((a != b).sum()) for a, b in zip(*found, strict=True))
        for mine, theirs in zip(found[0][1:], gradients, strict=True):
            squares = torch.stack(
                [
                    (mine.double() - theirs[shard.index].double()).square().sum(),
                    theirs.double().square().sum(),
                ]
            )
            dist.all_reduce(squares[:1])
            error = max(error, float((squares[0] / squares[1]).sqrt()))
    return {"differ": differ, "again": again, "gradient": error}


def sums(device: torch.device) -> dict[str, Any]:
    """Ordered sums: rows that depend on other rows, in both forms, and in a CUDA graph."""
    group = dist.group.WORLD
    assert group is not None
    name, rank = str(group.group_name), group.rank()
    differ = replayed = 0
    for rows, width in ((1, 2048), (128, 4096), (512, 4096), (4096, 4096), (777, 5120)):
        x = normal(rows, width, seed=rank, device=device)
        every = [normal(rows, width, seed=r, device=device) for r in range(group.size())]
        expected = every[0].float()
        for other in every[1:]:
            expected = expected + other.float()
        whole = torch.ops.lockstep.tp_ordered_sum(x, name)
        differ += int((whole != expected.bfloat16()).sum())
        for part in (slice(0, 1), slice(rows // 2, rows), slice(rows - 1, rows)):
            for add in (rank_sums.gathered_sum, rank_sums.exchanged_sum):
                differ += int((add(x[part], group) != whole[part]).sum())
        if CUDA:
            graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
            with torch.cuda.stream(stream):
                torch.ops.lockstep.tp_ordered_sum(x, name)
            torch.cuda.synchronize()
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                total = torch.ops.lockstep.tp_ordered_sum(x, name)
            for _ in range(3):
                total.zero_()
                graph.replay()
                torch.cuda.synchronize()
                replayed += int((total != whole).sum())
    return {"differ": differ, "replayed": replayed}


def main() -> None:
    with init_ranks(device="cuda" if CUDA else "cpu", seconds=120.0) as ranks:
        torch.use_deterministic_algorithms(True, warn_only=True)
        print(json.dumps({"ring": ring(ranks.device), "sums": sums(ranks.device)}))


if __name__ == "__main__":
    relax_gc()
    main()
