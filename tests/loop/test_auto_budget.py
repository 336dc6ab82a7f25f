"""train.token_budget = "auto": the largest micro-batch that fits."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from resolving import resolved_on

from lockstep.config.load import load_run
from lockstep.config.run import RunConfig
from lockstep.errors import ConfigError
from lockstep.loop.memory_plan import plan_memory
from lockstep.loop.resolve import MARGIN, SIZES, choose_token_budget
from lockstep.models.memory import GIB

MB = 10**6


def sft(**settings: Any) -> RunConfig:
    fields = {"batch_size": 1000, "data.max_length": 1000} | {
        k.replace("__", "."): v for k, v in settings.items()
    }
    return load_run(kind="sft", overrides=fields)


def budget(run: RunConfig, *, device: str = "cuda", total_bytes: int = 10**15, ranks: int = 1) -> int:
    """With a plan of 2 GB and 1 MB a token."""
    choice = choose_token_budget(
        run, device=device, total_bytes=total_bytes, ranks=ranks, peak=lambda tokens: (2000 + tokens) * MB
    )
    return choice.value


def test_on_a_cpu_it_is_what_it_was_or_the_longest_document() -> None:
    assert budget(sft(), device="cpu") == 4096
    assert budget(sft(data__max_length=5000), device="cpu") == 5000
    pairs = load_run(kind="dpo", overrides={"data.max_length": 2100})
    assert budget(pairs, device="cpu") == 4200, "both answers of a pair are in one micro-batch"


def test_on_cuda_it_is_the_largest_that_fits_with_a_margin() -> None:
    # 1.5 * (2000 + 16384) = 27576 MB; 1.5 * (2000 + 24576) = 39864 MB
    assert [budget(sft(), total_bytes=mb * MB) for mb in (27575, 27576, 39863, 39864)] == [
        8192,
        16384,
        16384,
        24576,
    ]
    assert budget(sft()) == 32768 == SIZES[-1]
    nothing = choose_token_budget(sft(), device="cuda", total_bytes=1, ranks=1, peak=lambda tokens: tokens)
    assert nothing.value == 4096 and "may not fit" in nothing.reason


def test_it_holds_the_longest_document_and_not_much_more_than_a_step() -> None:
    assert budget(sft(data__max_length=10_000), total_bytes=1) == 16384
    assert budget(sft(data__max_length=40_000), total_bytes=1) == 40_000
    assert budget(sft(batch_size=4)) == 4096
    assert budget(sft(batch_size=5)) == 8192
    assert budget(sft(batch_size=8, train__backend="fsdp2"), ranks=2) == 4096


def test_where_there_is_no_plan_it_is_that_of_a_cpu() -> None:
    def no_plan(tokens: int) -> int:
        raise ConfigError("no attribute memory_parts", code="wrong-state")

    choice = choose_token_budget(sft(), device="cuda", total_bytes=1, ranks=1, peak=no_plan)
    assert choice.value == 4096 and "memory_parts" in choice.reason
    run = load_run(kind="grpo", overrides={"engine.name": "vllm"})
    assert budget(run) == 4096, "the engine takes memory that the plan does not count"


@pytest.mark.parametrize("gib", [24, 80, 140])
def test_the_plan_of_a_real_shape_has_room_for_it(gib: int) -> None:
    settings = {
        "model.name": "shape:llama-3.2-1b",
        "model.dtype": "bfloat16",
        "data.source": "ids",
        "rollout.prompts_per_step": 64,
        "rewards": [{"name": "ids"}],
        "steps": 1000,
    }
    run, cuda = load_run(kind="grpo", overrides=settings), torch.device("cuda")
    sized = resolved_on(run, "cuda", total_bytes=gib * GIB)
    train = sized.run.train
    assert (train.execution, train.token_budget) == ("compile", {24: 4096, 80: 8192, 140: 32768}[gib])
    assert sized.auto_execution and f"of {gib}.00 GiB" in sized.auto_token_budget
    fits = plan_memory(sized.run, device=cuda).peak_bytes * MARGIN <= gib * GIB
    assert fits is (gib > 24), "on 24 GiB even the smallest may not fit, which the reason says"
    named = load_run(
        kind="grpo", overrides=settings | {"train.token_budget": 5000, "train.execution": "eager"}
    )
    kept = resolved_on(named, "cuda", total_bytes=gib * GIB)
    assert (kept.token_budget, kept.execution, kept.reasons) == (5000, "eager", [])
