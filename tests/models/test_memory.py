from pathlib import Path

import pytest
import torch

from lockstep import invariant
from lockstep.config.model import LoraConfig, ModelConfig
from lockstep.execution import compile_blocks
from lockstep.models import memory
from lockstep.models.forward import hidden_states
from lockstep.models.load import load_model
from lockstep.models.memory import GIB, MemoryPart, explain_oom, module_shape, planned_shape
from lockstep.packing import pack
from lockstep.schema.batch import PackedBatch, TrainSample

CPU = torch.device("cpu")


def documents(count: int, length: int) -> PackedBatch:
    mask = torch.arange(length) < length - 1
    samples = [
        TrainSample(token_ids=torch.randint(3, 200, (length,)), loss_mask=mask, sample_id=i)
        for i in range(count)
    ]
    return pack(samples, [torch.ones(length)] * count, bucket=None)


def saved_bytes_per_token(
    name: str, *, dtype: str, layers: int, kernel: str, compiled: bool = False, invariant_ops: bool = False
) -> float:
    """What autograd keeps of a forward, weights not counted."""
    config = ModelConfig(name=name, dtype=dtype, num_layers=layers)  # type: ignore[arg-type]
    module = load_model(config, attention=kernel, device=CPU).module.train()
    if invariant_ops:
        invariant.convert(module)
    if compiled:
        torch._dynamo.reset()
        compile_blocks(module)
    own = {t.untyped_storage().data_ptr() for t in [*module.parameters(), *module.buffers()]}
    kept, sizes = [], {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept.append(tensor)  # or its address could be used again
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            sizes[storage.data_ptr()] = storage.nbytes()
        return tensor

    batch = documents(8, 64)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda t: t):
        hidden_states(module, batch)
    return sum(sizes.values()) / batch.num_slots


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("name", "kernel"),
    # tiny-gemma3's two layers have different windows, and sdpa keeps a mask for each.
    [
        ("tiny-llama", "sdpa"),
        ("tiny-qwen3", "sdpa"),
        ("tiny-qwen3", "varlen"),
        ("tiny-gemma3", "varlen"),
        ("tiny-qwen3-moe", "sdpa"),
    ],
)
def test_a_layer_keeps_what_the_formula_says(name: str, dtype: str, kernel: str) -> None:
    one, two = (saved_bytes_per_token(f"shape:{name}", dtype=dtype, layers=n, kernel=kernel) for n in (1, 2))
    config = ModelConfig(name=f"shape:{name}", dtype=dtype)  # type: ignore[arg-type]
    shape = planned_shape(config, dtype=getattr(torch, dtype))
    assert 0.85 < (two - one) / shape.activation_bytes_per_layer() < 1.15


@pytest.mark.parametrize("invariant_ops", [False, True])
def test_a_compiled_layer_keeps_what_the_formula_says(invariant_ops: bool) -> None:
    how = {"compiled": True, "invariant_ops": invariant_ops, "dtype": "bfloat16", "kernel": "varlen"}
    one, two = (saved_bytes_per_token("shape:tiny-llama", layers=n, **how) for n in (1, 2))  # type: ignore
    shape = planned_shape(ModelConfig(name="shape:tiny-llama", dtype="bfloat16"), dtype=torch.bfloat16)
    assert 0.97 < (two - one) / shape.activation_bytes_per_layer(compiled=True) < 1.03


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_planned_sizes_are_those_of_the_loaded_model(lora: LoraConfig | None) -> None:
    config = ModelConfig(name="shape:tiny-qwen3", dtype="bfloat16", lora=lora)
    module = load_model(config, attention="sdpa", device=CPU).module
    assert planned_shape(config, dtype=torch.bfloat16) == module_shape(module)


def test_sizes_by_hand() -> None:
    shape = planned_shape(ModelConfig(name="shape:llama-3.1-8b"), dtype=torch.bfloat16)
    assert shape.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    # norms 2 * 4096 * 8, attention 2 * 128 * (3 * 32 + 2 * 8), MLP 4 * 2 * 14336
    assert shape.activation_bytes_per_layer() == 65536 + 28672 + 114688


def part(name: str, size: float, setting: str = "a.b") -> MemoryPart:
    return MemoryPart(name=name, bytes=int(size * GIB), phase="always", setting=setting)


def test_explain_oom_names_what_grew_else_what_is_largest() -> None:
    before = [part("parameters", 10, "model.name"), part("KV cache", 1, "engine.max_batch")]
    after = [part("parameters", 10, "model.name"), part("KV cache", 4, "engine.max_batch")]
    assert explain_oom(after) == (
        "the largest part is parameters (10.00 GiB); to make it smaller, change model.name"
    )
    assert explain_oom(after, before=before) == (
        "KV cache grew by 3.00 GiB to 4.00 GiB; to make it smaller, change engine.max_batch"
    )
    assert "parameters" in explain_oom(after, before=after)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({"memory.max": "1000", "memory.current": "700", "memory.stat": "anon 1\ninactive_file 100"}, 400),
        ({"memory.max": "max", "memory.current": "700"}, None),
        ({}, None),
    ],
)
def test_a_cgroup_limit_counts(files: dict[str, str], expected: int | None, tmp_path: Path) -> None:
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert memory._cgroup_left(tmp_path) == expected
