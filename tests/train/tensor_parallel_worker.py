"""A rank of the tests of tensor parallel: the split module against the whole one, in float64.

python tensor_parallel_worker.py CASES, a JSON list of {"config": {...}, ...}; one result per case and rank
goes to OUT/rank-N.json.
"""

from __future__ import annotations

import copy
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from conftest import build_batch, random_documents
from torch import Tensor, nn
from transformers import AutoConfig

from lockstep import invariant
from lockstep.errors import ModelError
from lockstep.execution import compile_blocks
from lockstep.invariant.modules import linears
from lockstep.models.architectures import causal_lm
from lockstep.models.export import export_tensors
from lockstep.models.forward import head_of, hidden_states
from lockstep.models.heads import head_options
from lockstep.models.load import attention_implementation
from lockstep.models.shapes import random_model
from lockstep.models.source import kept_buffers, random_source
from lockstep.models.tensor_parallel import (
    TensorParallel,
    apply_tensor_parallel,
    tensor_parallel_plan,
)
from lockstep.ops import rank_sums
from lockstep.ops.logprobs import HeadOptions, linear_logprob_loss, linear_logprobs
from lockstep.processes.child import relax_gc
from lockstep.ranks.context import RankContext, init_ranks

CPU = torch.device("cpu")


def run(module: nn.Module, *, vocab: Any, separable: bool) -> tuple[Tensor, Tensor]:
    """Loss of logprobs and entropy, backward, and the logprobs."""
    batch = build_batch(random_documents(3, seed=1), weight=0.1)
    hidden = hidden_states(module, batch)
    head = head_of(module)
    options = HeadOptions(temperature=0.7, bias=head.bias, vocab=vocab, chunk_rows=7, entropy_grad=True)

    def loss(logprobs: Tensor, entropy: Tensor, rows: slice) -> Tensor:
        return (logprobs * batch.loss_weights[rows]).sum() + 0.1 * entropy.sum()

    if separable:
        value, logprobs, _ = linear_logprob_loss(hidden, head.weight, batch.labels, loss, head=options)
    else:
        logprobs, entropy = linear_logprobs(hidden, head.weight, batch.labels, head=options)
        value = loss(logprobs, entropy, slice(None))
    value.backward()
    return value.detach(), logprobs.detach()


def difference(found: Tensor, expected: Tensor) -> float:
    assert found.shape == expected.shape, (found.shape, expected.shape)
    return float((found - expected).norm() / expected.norm().clamp(min=1e-300))


def split(
    case: dict[str, Any], config: Any, attention: str, dtype: torch.dtype = torch.float64
) -> tuple[nn.Module, TensorParallel]:
    """From the meta device, as a backend that shards does it; `dtype` of the float32 weights."""
    group = dist.new_group()
    module, source = random_source(config, seed=3, dtype=torch.float32, device=CPU, attention=attention)
    plan = tensor_parallel_plan(module, size=group.size(), plan=case.get("plan", "auto"))
    if case.get("invariant"):
        invariant.convert(module)
    tp = apply_tensor_parallel(module, group=group, plan=plan)
    assert all(p.is_meta for p in module.parameters())
    with kept_buffers(module):
        module.to_empty(device=CPU)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            bounds = tp.bounds(name)
            if bounds is None:
                parameter.copy_(source.read(name, device=CPU))
            else:
                dim, start, stop = bounds
                part = source.read_part(name, dim=dim, start=start, stop=stop, device=CPU)
                assert part.shape == parameter.shape
                parameter.copy_(part)
    return module.to(dtype), tp


def export(module: nn.Module, tp: TensorParallel) -> None:
    """Into OUT/export, tensor by tensor; and where it may not: the same error on every rank."""

    def tensors() -> Iterator[tuple[str, Tensor]]:
        for name, parameter in module.named_parameters():
            yield name, tp.gather(name, parameter.detach())

    out = Path(os.environ["OUT"])
    export_tensors(
        module, tensors(), tokenizer=None, directory=out / "export", dtype=torch.float32, file_bytes=100_000
    )
    if tp.rank == 0:
        (out / "taken").mkdir()
        (out / "taken" / "thesis.tex").touch()
    dist.barrier(tp.group)
    try:
        export_tensors(module, tensors(), tokenizer=None, directory=out / "taken", dtype=torch.float32)
    except ModelError as error:
        assert "not a model folder" in str(error)
    else:
        raise AssertionError("it replaced a folder that is no model")


def check(case: dict[str, Any], ranks: RankContext) -> dict[str, Any]:
    config = AutoConfig.for_model(**case["config"])
    attention = attention_implementation(case.get("attention", "sdpa"))
    whole = random_model(
        copy.deepcopy(config), seed=3, dtype=torch.float32, device=CPU, attention=attention
    ).double()
    module, tp = split(case, config, attention)
    if case.get("export"):
        export(module, tp)
    if backend := case.get("compile"):
        compile_blocks(module, backend=backend)
    if case.get("checkpointing"):
        causal_lm(module).train()
        causal_lm(module).gradient_checkpointing_enable({"use_reentrant": False})
    separable = case.get("separable", True)
    expected = run(whole, vocab=None, separable=separable)
    found = run(module, vocab=tp.vocab, separable=separable)
    own = dict(module.named_parameters())
    gradients: dict[str, Tensor] = {n: p.grad for n, p in own.items() if p.grad is not None}
    tp.add_up(gradients)
    reference = dict(whole.named_parameters())
    assert [*own] == [*reference] == [*gradients]
    weights = sum(not torch.equal(tp.gather(n, p), reference[n]) for n, p in own.items())
    errors = {n: difference(tp.gather(n, gradients[n]), reference[n].grad) for n in own}
    worst = max(errors, key=lambda n: errors[n])
    return {
        "loss": difference(found[0], expected[0]),
        "logprobs": difference(found[1], expected[1]),
        "other_weights": weights,
        "worst": worst,
        "gradient": errors[worst],
        "share": sum(p.numel() for p in own.values()) / sum(p.numel() for p in reference.values()),
        "vocab": None if tp.vocab is None else [tp.vocab.start, tp.vocab.stop],
    }


def check_sums() -> None:
    """Both ways to an ordered sum have its bits, those of float32 sums in rank order, for any rows."""
    group = dist.group.WORLD
    assert group is not None
    size, rank = group.size(), dist.get_rank()
    for dtype in (torch.bfloat16, torch.float32):
        parts = torch.randn(size, 37, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
        expected = parts[0].float()
        for part in parts[1:]:
            expected = expected + part.float()
        for add in (rank_sums.gathered_sum, rank_sums.exchanged_sum):
            for rows in (slice(0, 37), slice(3, 4), slice(30, 37)):
                assert torch.equal(add(parts[rank, rows], group), expected[rows].to(dtype)), (add, rows)


def check_invariant(case: dict[str, Any], ranks: RankContext) -> dict[str, Any]:
    """A converted module in parts: how many logprobs of a pack differ from those of its documents alone."""
    check_sums()
    config = AutoConfig.for_model(**case["config"])
    module, tp = split(case, config, attention_implementation("varlen"), dtype=getattr(torch, case["dtype"]))
    tested = invariant.self_test(module, split=True, cache=False)
    head = head_options(module, temperature=0.7, compiled=False, vocab=tp.vocab)
    weight, found = head_of(module).weight.detach(), []
    documents = random_documents(5, seed=1)
    for together in (documents, *([document] for document in documents)):
        batch = build_batch(together, weight=0.1)
        with torch.no_grad():
            hidden = hidden_states(module, batch)
            found.append(linear_logprobs(hidden, weight, batch.labels, head=head)[0])
    alone = torch.cat(found[1:])
    return {
        "differ": int((found[0] != alone).sum()),
        "logprobs": alone.tolist(),
        "tested": [*tested],
        "linears": sorted({f"{p.out_features}x{p.in_features}" for _, p in linears(module)}),
    }


def main(cases: list[dict[str, Any]]) -> None:
    with init_ranks(seconds=60) as ranks:
        results = [(check_invariant if c.get("invariant") else check)(c, ranks) for c in cases]
        Path(os.environ["OUT"], f"rank-{ranks.rank}.json").write_text(json.dumps(results))


if __name__ == "__main__":
    relax_gc()
    main(json.loads(sys.argv[1]))
