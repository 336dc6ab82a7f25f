"""throughput/mfu, by hand."""

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from resolving import resolved_on

from lockstep.config.load import load_run
from lockstep.config.model import ModelConfig
from lockstep.loop.metrics import TrainingWork
from lockstep.models.memory import planned_shape

CONFIG = SimpleNamespace(tie_word_embeddings=False, num_attention_heads=4, head_dim=16, num_hidden_layers=2)
RUN = load_run(kind="sft", overrides={"data.source": "x.jsonl"})


def work(name: str, *, tied: bool = False) -> TrainingWork:
    config = SimpleNamespace(**vars(CONFIG) | {"tie_word_embeddings": tied})
    shape = planned_shape(ModelConfig(name=name), dtype=torch.bfloat16)
    return TrainingWork.of_shape(shape, config, peak=1e9, run=RUN)


def test_of_experts_only_those_of_a_token_count() -> None:
    shape = planned_shape(ModelConfig(name="shape:tiny-mixtral"), dtype=torch.bfloat16)
    # 2 layers of 8 experts of 3 x 64 x 64, of which a token has 2
    assert shape.parameters - shape.active_parameters == 2 * 6 * 3 * 64 * 64
    assert work("shape:tiny-mixtral").per_token == 6 * (shape.active_parameters - 256 * 64)
    dense = planned_shape(ModelConfig(name="shape:tiny-llama"), dtype=torch.bfloat16)
    assert dense.active_parameters == dense.parameters
    # All memory is that of all experts.
    assert shape.layer_parameters >= 8 * 3 * 64 * 64


def test_an_embedding_that_is_only_looked_up_is_no_work() -> None:
    untied, tied = work("shape:tiny-llama"), work("shape:tiny-qwen3", tied=True)
    count = planned_shape(ModelConfig(name="shape:tiny-llama"), dtype=torch.bfloat16).parameters
    assert untied.per_token == 6 * (count - 256 * 64)
    assert (
        tied.per_token
        == 6 * planned_shape(ModelConfig(name="shape:tiny-qwen3"), dtype=torch.bfloat16).parameters
    )
    assert untied.per_squared_token == 3 * 2 * 4 * 16 * 2


def test_frozen_weights_have_no_gradient_to_compute() -> None:
    shape = planned_shape(ModelConfig(name="shape:tiny-llama"), dtype=torch.bfloat16)
    adapters = dataclasses.replace(shape, lora=True, trained=1000)
    found = TrainingWork.of_shape(adapters, CONFIG, peak=1e9, run=RUN)
    assert found.per_token == 4 * (shape.parameters - 256 * 64) + 2 * 1000


def test_the_share_of_the_peak() -> None:
    one = TrainingWork(per_token=6e3, per_squared_token=10.0, peak=1e6, passes=2)
    values = {"input/tokens": 40.0, "input/squared_tokens": 800.0}
    times = {"time/forward_backward": 0.5, "time/forward": 0.25, "time/backward": 0.25, "time/step": 9.0}
    # 2 x (6,000 x 40 + 10 x 800) in a second
    assert one.metrics(values | times) == {"throughput/mfu": pytest.approx(0.496)}
    assert one.metrics(values) == {}


def test_a_cpu_has_no_peak() -> None:
    assert TrainingWork.of(resolved_on(RUN, "cpu"), CONFIG, ranks=2) is None
