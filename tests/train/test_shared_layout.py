"""Layout shared against packed: the same losses, logprobs and gradients from fewer rows."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from lockstep import invariant
from lockstep.config.model import LoraConfig
from lockstep.config.train import TrainConfig
from lockstep.packing import PackLimits, plan_micro_batches
from lockstep.schema.batch import PackedBatch, TrainSample
from lockstep.train.local import LocalBackend

LORA = LoraConfig(rank=4, alpha=8.0, target_modules=("q_proj", "v_proj", "down_proj"))


def samples() -> list[TrainSample]:
    """Three groups of four: prompts of 1, 6 and 17 tokens, completions of 1 to 12."""
    generator, made = torch.Generator().manual_seed(3), []
    for length in (1, 6, 17):
        prompt = torch.randint(3, 200, (length,), generator=generator)
        for completion in torch.randint(1, 13, (4,), generator=generator).tolist():
            ids = torch.cat([prompt, torch.randint(3, 200, (completion,), generator=generator)])
            mask = torch.arange(len(ids)).ge(length - 1) & torch.arange(len(ids)).lt(len(ids) - 1)
            made.append(TrainSample(token_ids=ids, loss_mask=mask, sample_id=len(made)))
    return made


def batches(layout: str, *, static: bool = False, min_packs: int = 2) -> list[PackedBatch]:
    limits = PackLimits(
        token_budget=128,
        layout=layout,  # type: ignore[arg-type]
        static_capacity=static,
        max_seqlen=32 if static else None,
        min_packs=min_packs,
    )
    made = samples()
    return plan_micro_batches(made, [0.01 * (1 + s.sample_id) * torch.ones(len(s)) for s in made], limits)


def measured(
    model: Any, layout: str, loss: Any, *, static: bool = False, **train: Any
) -> tuple[float, dict[int, Tensor], Tensor]:
    """The loss of a step, logprobs by sample, and all gradients end to end."""
    config = TrainConfig(layout=layout, static_capacity=static, batch_invariant=False, **train)
    backend = LocalBackend(config, model=model, total_steps=0, temperature=0.7)
    packs = batches(layout, static=static)
    stats = backend.forward_backward(packs, loss)
    found: dict[int, Tensor] = {}
    for batch, logprobs, scored in zip(packs, stats.logprobs, backend.logprobs(packs), strict=True):
        torch.testing.assert_close(scored, logprobs, rtol=0, atol=1e-5)
        found |= dict(zip(batch.sample_ids, batch.split(logprobs), strict=True))
    gradients = torch.cat([g.flatten() for g in backend.gradients().values()])
    backend.close()
    return float(sum(stats.losses)), found, gradients


def assert_same(shared: Any, packed: Any, *, atol: float) -> None:
    assert shared[0] == pytest.approx(packed[0], rel=1e-6)
    assert shared[1].keys() == packed[1].keys() == set(range(12))
    for index, logprobs in packed[1].items():
        torch.testing.assert_close(shared[1][index], logprobs, rtol=0, atol=atol)
    assert float((shared[2] - packed[2]).norm() / packed[2].norm()) <= 1e-6


def test_fewer_rows_are_computed() -> None:
    packed, shared = batches("packed"), batches("shared")
    assert sum(b.num_rows for b in packed) == sum(len(s) for s in samples())
    assert sum(b.num_rows for b in shared) == sum(b.num_rows for b in packed) - 3 * (5 + 16)


@pytest.mark.parametrize("separable", [True, False])
@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("kernel", ["sdpa", "varlen"])
def test_loss_logprobs_and_gradients(
    tiny_model: Any, request: Any, kernel: str, static: bool, separable: bool
) -> None:
    loss = request.getfixturevalue("loss" if separable else "whole_loss")
    packed = measured(tiny_model(attention=kernel), "packed", loss)
    shared = measured(tiny_model(attention=kernel), "shared", loss, static=static)
    assert_same(shared, packed, atol=3e-6)


@pytest.mark.parametrize("settings", [{}, {"activation_checkpointing": True}])
@pytest.mark.parametrize("lora", [None, LORA])
def test_batch_invariant_logprobs_have_the_bits_of_packed(
    tiny_model: Any, loss: Any, lora: LoraConfig | None, settings: dict[str, bool]
) -> None:
    results = []
    for layout in ("packed", "shared"):
        model = tiny_model(attention="varlen", lora=lora)
        invariant.convert(model.module)
        results.append(measured(model, layout, loss, **settings))
    assert_same(results[1], results[0], atol=0.0)


def test_a_head_that_sees_every_row_gathers_none(tiny_model: Any, loss: Any) -> None:
    """The backward of a gather would add up all padding rows into one."""
    model = tiny_model(attention="varlen")
    backend = LocalBackend(TrainConfig(static_capacity=True), model=model, total_steps=0)
    (batch,) = batches("shared", static=True, min_packs=1)
    assert batch.shared is not None and batch.num_rows > batch.shared.num_rows, "there is padding"
    with torch.profiler.profile() as seen:
        backend.forward_backward([batch], loss)
    assert not [event.name for event in seen.events() if "IndexSelectBackward" in event.name]


@pytest.mark.exhaustive
@pytest.mark.parametrize("execution", ["compile", "joint"])
def test_one_graph_serves_packs_of_one_shape(tiny_model: Any, loss: Any, execution: str) -> None:
    torch._dynamo.reset()
    packed = measured(tiny_model(attention="varlen"), "packed", loss)
    train = {"execution": execution, "max_recompiles": 0}
    shared = measured(tiny_model(attention="varlen"), "shared", loss, static=True, **train)
    assert_same(shared, packed, atol=1e-5)


def test_a_mini_batch_in_two_packs_has_the_prompt_in_both() -> None:
    packs = batches("shared", min_packs=6)
    assert len(packs) == 6 and {len(b.sample_ids) for b in packs} != {12}


def test_layout_auto_of_a_backend_is_that_of_its_batches(tiny_model: Any, loss: Any) -> None:
    model = tiny_model(attention="varlen")
    backend = LocalBackend(TrainConfig(), model=model, total_steps=0)
    rows: list[int] = []
    model.module.model.layers[0].register_forward_hook(lambda _m, args, _o: rows.append(args[0].shape[1]))
    for layout in ("packed", "shared"):
        batch = batches(layout)[0]
        backend.logprobs([batch])
        assert rows.pop() == batch.num_rows
