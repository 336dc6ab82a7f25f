"""A rank of test_vocab_parallel.py: python vocab_worker.py CUTS CASES.

CUTS are the bounds of the ranks' parts of the vocabulary, CASES a list of HeadOptions fields and "separable";
OUT/rank-N.pt gets one dict of figures per case and OUT/whole.pt those of the whole vocabulary.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.ops.logprobs import HeadOptions, VocabShard, linear_logprob_loss, linear_logprobs
from lockstep.processes.child import relax_gc
from lockstep.ranks.context import init_ranks

R, C = 7, 5
LABELS = torch.tensor([3, 0, -100, 10, 3, 7, -100])


def problem(vocab: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """hidden, of which an ignored row is NaN; weight; bias. Some logits are far apart."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(R, C, generator=generator, dtype=torch.float64)
    hidden[0] *= 30
    hidden[2] = torch.nan
    weight = torch.randn(vocab, C, generator=generator, dtype=torch.float64)
    bias = torch.linspace(-1, 1, vocab, dtype=torch.float64)
    return hidden.to(dtype), weight.to(dtype), bias.to(dtype)


def figures(case: dict[str, Any], *, vocab: int, shard: VocabShard | None) -> dict[str, Tensor]:
    """Logprobs, entropy, loss and the gradients of hidden, weight and bias."""
    options = dict(case)
    separable, dtype = options.pop("separable", True), getattr(torch, options.pop("dtype", "float64"))
    hidden, weight, bias = problem(vocab, dtype)
    own = slice(0, vocab) if shard is None else slice(shard.start, shard.stop)
    leaves = [hidden.requires_grad_(), weight[own].clone().requires_grad_()]
    if options.pop("bias", False):
        leaves.append(bias[own].clone().requires_grad_())
    head = HeadOptions(**options, bias=leaves[2] if len(leaves) == 3 else None, vocab=shard)
    scale = torch.linspace(0.5, 2.0, R, dtype=torch.float64).to(dtype)

    def loss(logprobs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        total = (scale[rows] * logprobs.square()).sum()
        return total + (scale[rows] * entropy).sum() if head.entropy_grad else total

    if separable:
        value, logprobs, entropy = linear_logprob_loss(hidden, leaves[1], LABELS, loss, head=head)
    else:
        logprobs, entropy = linear_logprobs(hidden, leaves[1], LABELS, head=head)
        value = loss(logprobs, entropy, slice(None))
    (value * 3.0).backward()
    found = {"loss": value, "logprobs": logprobs, "entropy": entropy}
    names = ("dhidden", "dweight", "dbias")
    found |= {n: x.grad for n, x in zip(names, leaves, strict=False) if x.grad is not None}
    return {name: tensor.detach() for name, tensor in found.items()}


def unknown_label(shard: VocabShard, *, vocab: int) -> Tensor:
    """[2]: logprobs of a label that nobody has, and of one that somebody has."""
    hidden, weight, _ = problem(vocab, torch.float64)
    labels = torch.tensor([vocab, 1])
    with torch.no_grad():
        return linear_logprobs(
            hidden[:2], weight[shard.start : shard.stop], labels, head=HeadOptions(vocab=shard)
        )[0]


def main(cuts: list[int], cases: list[dict[str, Any]]) -> None:
    with init_ranks(seconds=60) as ranks:
        shard = VocabShard(
            group=dist.new_group(), start=cuts[ranks.rank], stop=cuts[ranks.rank + 1], whole=cuts[-1]
        )
        results = [figures(case, vocab=cuts[-1], shard=shard) for case in cases]
        again = figures(cases[0], vocab=cuts[-1], shard=shard)
        assert all(torch.equal(again[name], value) for name, value in results[0].items())
        results.append({"unknown": unknown_label(shard, vocab=cuts[-1])})
        out = Path(os.environ["OUT"])
        torch.save(results, out / f"rank-{ranks.rank}.pt")
        if ranks.rank == 0:
            eager = [case | {"compiled": False} for case in cases]
            torch.save([figures(case, vocab=cuts[-1], shard=None) for case in eager], out / "whole.pt")


if __name__ == "__main__":
    relax_gc()
    main(json.loads(sys.argv[1]), json.loads(sys.argv[2]))
