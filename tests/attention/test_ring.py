"""Ring attention on gloo ranks against torch's sdpa in one process; ring_worker.py says what is measured."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from raising import raises
from selected import exhaustive
from torch._dynamo.utils import counters

from lockstep.attention import KERNELS, Ring, ring, ring_attention
from lockstep.config.model import ModelConfig
from lockstep.errors import ConfigError, ModelError
from lockstep.models.forward import decoder_inputs
from lockstep.models.load import load_model
from lockstep.packing import pack, ring_shard
from lockstep.ranks.launch import launch_command
from lockstep.ranks.process_group import ensure_process_group
from lockstep.schema.batch import TrainSample

WORKER = Path(__file__).with_name("ring_worker.py")
# Of the output the largest gap over the largest entry, of gradients ||g - r|| / ||r||. bfloat16: each block
# is rounded to 8 bits, and so is their sum.
LIMITS = {"torch.float64": 1e-14, "torch.float32": 1e-6, "torch.bfloat16": 8e-3}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")


@pytest.fixture
def alone() -> Iterator[dist.ProcessGroup]:
    """The default process group of this process alone."""
    had_one = dist.is_initialized()
    ensure_process_group(torch.device("cpu"))
    group = dist.group.WORLD
    assert group is not None
    yield group
    if not had_one:
        dist.destroy_process_group()


def measured(ranks: int, out: Path) -> list[dict[str, Any]]:
    command = [sys.executable, str(WORKER), str(out)]
    status = launch_command(command, ranks=ranks, timeout=200, log_dir=out / "logs")
    assert status == 0, (out / "logs" / "rank-0.err.log").read_text()[-3000:]
    return [json.loads((out / f"rank-{rank}.json").read_text()) for rank in range(ranks)]


@pytest.mark.slow
@pytest.mark.parametrize("ranks", exhaustive([2, 3, 4], quick=[3]))
def test_equals_one_process(ranks: int, tmp_path: Path) -> None:
    """Ragged documents, documents on all ranks and on one, grouped heads; a whole model with checkpointing,
    with pads, and with ranks that own nothing."""
    found = measured(ranks, tmp_path)
    for of_rank in found:
        assert len(of_rank["attention"]) == 90 and len(of_rank["model"]) == 7
        for case in of_rank["attention"]:
            limit = LIMITS[case["dtype"]]
            assert max(case[name] for name in ("out", "dq", "dk", "dv")) <= limit, case
        for case in of_rank["model"]:
            assert case["parameters"] > 10 and case["hidden"] <= 5e-6 and case["gradient"] <= 1e-5, case
    nothing = [case["sizes"] for case in found[0]["model"] if case["lengths"] == [3]]
    assert nothing == [[3] + [0] * (ranks - 1)] * 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_ring_of_one_is_varlen_to_the_bit(alone: dist.ProcessGroup, dtype: torch.dtype) -> None:
    lengths = (37, 5, 1, 64, 13)
    cu_seqlens = torch.tensor([0, 37, 42, 43, 107, 120], dtype=torch.int32)
    inputs = [torch.randn(120, n, 16, dtype=dtype, requires_grad=True) for n in (6, 2, 2)]
    ours = ring_attention(*inputs, shard=ring_shard(lengths, rank=0, size=1), group=alone, scale=0.2)
    options: dict[str, Any] = {"max_seqlen": 64, "lengths": lengths, "scale": 0.2, "window": None}
    varlen = KERNELS["varlen"](*inputs, cu_seqlens=cu_seqlens, **options)
    assert torch.equal(ours, varlen)
    direction = torch.randn_like(ours)
    pairs = [torch.autograd.grad(out, inputs, direction) for out in (ours, varlen)]
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(*pairs, strict=True))


@pytest.mark.slow
def test_fused_sums_serve_any_number_of_rows() -> None:
    """What CUDA runs in place of op by op: the same numbers, and one graph for any number of rows."""
    before = counters["stats"]["unique_graphs"]
    for rows in (40, 17, 128, 2):
        out, block = torch.randn(rows, 4, 16), torch.randn(rows, 4, 16).bfloat16()
        lse, block_lse = torch.randn(4, rows), torch.randn(4, rows)
        block_lse[:, : rows // 2] = float("inf")  # no keys, in the words of CUDA's kernel
        fused, fused_lse = ring._fuse_merged(out, lse, block, block_lse, torch.bfloat16)
        expected = lse.logaddexp(block_lse.masked_fill(block_lse == float("inf"), float("-inf")))
        torch.testing.assert_close(fused_lse, expected)
        weights = (lse - expected).exp().t()[:, :, None]
        average = weights * out + (1 - weights) * block.float()
        torch.testing.assert_close(fused, average.bfloat16())
        assert torch.equal(fused[: rows // 2], out[: rows // 2].bfloat16())
        total = ring._fuse_added(out, block, torch.bfloat16)
        torch.testing.assert_close(total, (out + block.float()).bfloat16())
    assert counters["stats"]["unique_graphs"] - before == 2


# --- what is refused ----------------------------------------------------------------------------------------


def ring_and_batch(name: str, kernel: str, group: dist.ProcessGroup) -> tuple[Any, Any, Ring]:
    config = ModelConfig(name=f"shape:{name}", dtype="float32")
    module = load_model(config, attention=kernel, device=torch.device("cpu")).module
    sample = TrainSample(token_ids=torch.arange(3, 9), loss_mask=torch.zeros(6, dtype=torch.bool))
    batch = pack([sample], [torch.ones(6)])
    shard = ring_shard(batch.lengths, rank=0, size=1)
    return module, batch, Ring(shard=shard, group=group)


@pytest.mark.parametrize(
    ("model", "kernel", "options", "message"),
    [
        ("tiny-llama", "varlen", {"layout": "padded"}, "unsupported-combination: train.layout"),
        ("tiny-llama", "varlen", {"compiled": True}, "unsupported-combination: train.execution"),
        ("tiny-llama", "flex", {}, "unsupported-combination: train.attention"),
        ("tiny-llama", "hf:sdpa", {}, "unsupported-combination: train.attention"),
        ("tiny-gemma3", "varlen", {}, "unsupported-combination: train.ring"),
        ("tiny-mistral", "varlen", {}, "unsupported-combination: train.ring"),
    ],
)
def test_what_a_ring_cannot_do(
    alone: dist.ProcessGroup, model: str, kernel: str, options: dict[str, Any], message: str
) -> None:
    module, batch, ring = ring_and_batch(model, kernel, alone)
    with raises(ConfigError, message):
        decoder_inputs(module, batch, ring=ring, **options)


def test_rows_that_are_not_the_shard_s(alone: dist.ProcessGroup) -> None:
    shard = ring_shard([6], rank=0, size=1)
    q = torch.zeros(5, 2, 8)
    with raises(ModelError, "wrong-shape"):
        ring_attention(q, q, q, shard=shard, group=alone)
    other = ring_shard([6], rank=1, size=2)
    with raises(ModelError, "out-of-range: rank"):
        ring_attention(q, q, q, shard=other, group=alone)
    q = torch.zeros(6, 2, 8, device="meta")
    with raises(ModelError, "missing-device"):
        ring_attention(q, q, q, shard=shard, group=alone)
    on_meta = dataclasses.replace(shard, index=shard.index.to("meta"))
    with raises(ConfigError, "unsupported-combination: model.dtype"):
        ring_attention(q, q, q, shard=on_meta, group=alone)
