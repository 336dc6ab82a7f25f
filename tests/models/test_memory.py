import dataclasses
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from lockstep.config.engine import EngineConfig
from lockstep.config.model import LoraConfig, ModelConfig
from lockstep.config.run import GRPORun, SFTRun
from lockstep.config.train import TrainConfig
from lockstep.models import memory
from lockstep.models.forward import hidden_states
from lockstep.models.load import load_model
from lockstep.models.memory import (
    MemoryPart,
    Parallelism,
    explain_oom,
    module_shape,
    plan_memory,
    planned_shape,
)
from lockstep.packing import pack
from lockstep.schema.batch import PackedBatch, TrainSample

CPU = torch.device("cpu")
GIB = memory.GIB


def documents(count: int, length: int) -> PackedBatch:
    mask = torch.arange(length) < length - 1
    samples = [
        TrainSample(token_ids=torch.randint(3, 200, (length,)), loss_mask=mask, sample_id=i)
        for i in range(count)
    ]
    return pack(samples, [torch.ones(length)] * count, bucket=None)


def saved_bytes_per_token(name: str, *, dtype: str, layers: int, kernel: str) -> float:
    """What autograd keeps of a forward, weights not counted."""
    config = ModelConfig(name=name, dtype=dtype, num_layers=layers)  # type: ignore[arg-type]
    module = load_model(config, attention=kernel, device=CPU).module.train()
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
    [("tiny-llama", "sdpa"), ("tiny-qwen3", "sdpa"), ("tiny-qwen3", "varlen"), ("tiny-gemma3", "varlen")],
)
def test_a_layer_keeps_what_the_formula_says(name: str, dtype: str, kernel: str) -> None:
    one, two = (saved_bytes_per_token(f"shape:{name}", dtype=dtype, layers=n, kernel=kernel) for n in (1, 2))
    config = ModelConfig(name=f"shape:{name}", dtype=dtype)  # type: ignore[arg-type]
    shape = planned_shape(config, dtype=getattr(torch, dtype))
    assert 0.85 < (two - one) / shape.activation_bytes_per_layer < 1.15


@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)])
def test_planned_sizes_are_those_of_the_loaded_model(lora: LoraConfig | None) -> None:
    config = ModelConfig(name="shape:tiny-qwen3", dtype="bfloat16", lora=lora)
    module = load_model(config, attention="sdpa", device=CPU).module
    assert planned_shape(config, dtype=torch.bfloat16) == module_shape(module)


def test_sizes_by_hand() -> None:
    shape = planned_shape(ModelConfig(name="shape:llama-3.1-8b"), dtype=torch.bfloat16)
    assert shape.kv_bytes_per_token == 2 * 32 * 8 * 128 * 2
    # norms 2 * 4096 * 8, attention 2 * 128 * (3 * 32 + 2 * 8), MLP 4 * 2 * 14336
    assert shape.activation_bytes_per_layer == 65536 + 28672 + 114688


def parts(
    train: TrainConfig, *, dtype_bytes: int = 2, micro_batches: int = 2, **more: object
) -> dict[str, int]:
    shape = planned_shape(ModelConfig(name="shape:llama-3.2-1b"), dtype=torch.bfloat16)
    shape = dataclasses.replace(shape, dtype_bytes=dtype_bytes)
    found = memory.train_parts(
        shape,
        train,
        tokens=1024,
        micro_batches=micro_batches,
        **{"device": "cuda"} | more,  # type: ignore[arg-type]
    )
    return {part.name: part.bytes for part in found if part.bytes and part.phase != "host"}


def test_optimizer_parts_follow_the_settings() -> None:
    count = 1_235_814_400
    usual = parts(TrainConfig())
    assert usual["parameters"] == 2 * count
    assert usual["float32 master weights"] == usual["gradients, summed in float32"] == 4 * count
    assert usual["optimizer states"] == 8 * count
    assert parts(TrainConfig(), ref=True)["reference model"] == 2 * count
    assert parts(TrainConfig(), micro_batches=1)["gradients"] == 2 * count
    assert parts(TrainConfig(grad_accum_dtype="model"))["gradients"] == 2 * count
    assert parts(TrainConfig(optimizer="adamw8bit"))["optimizer states"] == 2 * count
    assert "optimizer states" not in parts(TrainConfig(optimizer="sgd"))
    assert "optimizer states" not in parts(TrainConfig(optimizer_device="cpu"))
    assert "float32 master weights" not in parts(TrainConfig(), dtype_bytes=4)


def test_checkpointing_keeps_one_layer_and_the_inputs_of_the_others() -> None:
    whole = parts(TrainConfig())["activations"]
    less = parts(TrainConfig(activation_checkpointing=True))["activations, checkpointed"]
    # 15 of 16 layers keep their input only: 2 * 2048 bytes a token.
    layer = 2 * 2048 * 8 + 2 * 64 * (3 * 32 + 2 * 8) + 8 * 8192
    assert whole - less == 1024 * (15 * layer - 16 * 2 * 2048)


def rank_parts(parallelism: Parallelism, micro_batches: int = 4, **train: object) -> dict[str, int]:
    """On the device, of one rank, for llama-3.2-1b in bfloat16."""
    shape = planned_shape(ModelConfig(name="shape:llama-3.2-1b"), dtype=torch.bfloat16)
    found = memory.rank_parts(
        shape,
        TrainConfig(**train),  # type: ignore[arg-type]
        parallelism=parallelism,
        step=(1024, micro_batches),
        device="cuda",
        ref=True,
    )
    return {part.name: part.bytes for part in found if part.bytes and part.phase != "host"}


LAYER = 2048 * 64 * (2 * 32 + 2 * 8) + 3 * 2048 * 8192
NORMS = (2 * 16 + 1) * 2048
COUNT = 16 * LAYER + NORMS + 128256 * 2048


def test_a_rank_of_fsdp2_by_hand() -> None:
    four = rank_parts(Parallelism(ranks=4), backend="fsdp2")
    assert four["parameters, this rank's"] == four["gradients"] == COUNT
    assert four["optimizer states"] == 2 * COUNT
    assert four["reference model, this rank's"] == COUNT / 2
    assert four["gathered weights"] == 2 * (COUNT - 16 * LAYER + 2 * LAYER)
    assert "float32 master weights" not in four
    # One micro-batch a rank: nothing has to wait for the others.
    assert "gradients between micro-batches, whole, in float32" not in four
    more = rank_parts(Parallelism(ranks=4), micro_batches=5, backend="fsdp2")
    assert more["gradients between micro-batches, whole, in float32"] == 4 * COUNT
    kept = rank_parts(Parallelism(ranks=4), backend="fsdp2", reshard_after_forward=False)
    assert kept["gathered weights"] == 2 * COUNT
    joint = rank_parts(Parallelism(ranks=4), backend="fsdp2", execution="joint")
    assert joint["gathered weights"] == joint["gradients of a joint graph"] == 2 * COUNT
    assert joint["gradients that are reduced at once"] == 4 * COUNT
    off = rank_parts(Parallelism(ranks=4), backend="fsdp2", optimizer_device="cpu")
    assert off["parameters, this rank's"] == COUNT / 2
    assert "optimizer states" not in off and "float32 master weights" not in off
    assert "parameters, this rank's" not in rank_parts(
        Parallelism(ranks=4), backend="fsdp2", parameter_device="cpu"
    )


def test_tensor_parallel_and_ring_attention_split_what_they_split() -> None:
    alone = rank_parts(Parallelism(ranks=1), 1, backend="fsdp2")
    tp = rank_parts(Parallelism(ranks=2, tp=2), 1, backend="fsdp2", tp=2)
    ring = rank_parts(Parallelism(ranks=2, ring=2), 1, backend="fsdp2", ring=2)
    for split in (tp, ring):
        assert split["parameters, this rank's"] == alone["parameters, this rank's"] / 2 == 2 * COUNT
    assert ring["gathered weights"] == alone["gathered weights"] == 2 * tp["gathered weights"]
    assert ring["activations"] == alone["activations"] / 2
    # Norms are computed whole: 2 * 2048 * 8 bytes a token and layer.
    assert tp["activations"] > alone["activations"] / 2 + 1024 * 16 * 2048 * 8


def test_a_rank_of_deepspeed_by_hand() -> None:
    stages = [rank_parts(Parallelism(ranks=4), backend="deepspeed", zero_stage=stage) for stage in range(4)]
    weights = [2 * COUNT] * 3 + [COUNT / 2]
    states = [8 * COUNT] + [2 * COUNT] * 3
    gradients = [2 * COUNT] * 2 + [COUNT] * 2
    for stage, found in enumerate(stages):
        assert found["parameters, this rank's" if stage == 3 else "parameters"] == weights[stage]
        assert found["optimizer states"] == 2 * found["float32 master weights"] == states[stage]
        assert found["gradients"] == gradients[stage]
        assert ("gathered weights" in found) == (stage == 3)


def test_the_engine_has_weights_of_its_own_where_the_trainers_are_shards() -> None:
    def whole(**train: object) -> int:
        run = GRPORun(model=ModelConfig(name="shape:tiny-llama", dtype="float32"), train=TrainConfig(**train))  # type: ignore[arg-type]
        plan = plan_memory(run, device=CPU, ranks=2)
        assert plan.ranks == 2
        return sum(part.bytes for part in plan.parts if part.name == "weights of the engine, whole")

    count = planned_shape(ModelConfig(name="shape:tiny-llama"), dtype=torch.float32).parameters
    assert whole(backend="fsdp2") == whole(backend="deepspeed", zero_stage=3) == 4 * count
    assert whole(backend="deepspeed") == 0


def test_micro_batches_of_a_step() -> None:
    run = GRPORun(model=ModelConfig(name="shape:tiny-llama"))
    plan = plan_memory(run, device=CPU)
    # 8 prompts * 8 samples; 1024 + 128 tokens; 3 of them in 4096
    assert (plan.documents_per_step, plan.longest_document) == (64, 1152)
    assert (plan.micro_batches, plan.tokens_per_micro_batch) == (22, 3 * 1152)
    sft = plan_memory(SFTRun(model=ModelConfig(name="shape:tiny-llama"), batch_size=5), device=CPU)
    assert (sft.documents_per_step, sft.micro_batches, sft.tokens_per_micro_batch) == (5, 3, 4096)
    assert not any(part.name == "KV cache" for part in sft.parts)


def test_the_peak_is_the_largest_phase() -> None:
    plan = plan_memory(GRPORun(model=ModelConfig(name="shape:tiny-llama")), device=CPU)
    by_name = {part.name: part.bytes for part in plan.parts}
    # float32 or bfloat16, as the CPU decides; 2 layers, 2 key/value heads of 16, 64 samples of 1152 tokens
    assert by_name["KV cache"] == 2 * 2 * 2 * 16 * plan.shape.dtype_bytes * 64 * 1152
    assert plan.peak_bytes < sum(by_name.values())


def test_what_native_keeps_between_rollouts() -> None:
    def cache(*, device: torch.device, **engine: Any) -> MemoryPart:
        model = ModelConfig(name="shape:tiny-llama", dtype="bfloat16")
        run = GRPORun(model=model, engine=EngineConfig(**engine))
        (found,) = (part for part in plan_memory(run, device=device).parts if part.name == "KV cache")
        return found

    cuda = torch.device("cuda")
    assert cache(device=CPU).phase == cache(device=CPU, name="hf").phase == "generate"
    assert cache(device=CPU, name="native").phase == cache(device=cuda).phase == "always"
    assert cache(device=cuda, name="native", sleep=True).phase == "generate"
    # 2 layers, keys and values, 2 heads of 16, 2 bytes
    assert cache(device=cuda, name="native", kv_cache_tokens=4000).bytes == 2 * 2 * 2 * 16 * 2 * 4000


def test_cuda_graphs_have_gradients_of_their_own() -> None:
    train = TrainConfig(device="cuda", execution="joint", cuda_graph=True)
    run = GRPORun(model=ModelConfig(name="shape:tiny-llama", dtype="bfloat16"), train=train)
    plan = plan_memory(run, device=torch.device("cuda"))
    (found,) = (part for part in plan.parts if part.name.startswith("gradients of CUDA graphs"))
    assert (found.bytes, found.phase) == (4 * 2 * plan.shape.trained, "always")


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


def test_advice_names_the_setting() -> None:
    module = load_model(ModelConfig(name="shape:tiny-llama"), attention="sdpa", device=CPU).module
    text = memory.advice(module, TrainConfig(token_budget=100_000), tokens=100_000, micro_batches=2)
    assert "activations" in text
    assert "train.token_budget (now 100000) or train.activation_checkpointing = true" in text


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


MEASURE = """
import json, sys, torch
from lockstep.config.run import SFTRun
from lockstep.config.model import ModelConfig
from lockstep.config.train import TrainConfig
from lockstep.models.load import load_model
from lockstep.models.memory import plan_memory
from lockstep.observe.memory import peak_rss_bytes
from lockstep.packing import pack
from lockstep.schema.batch import TrainSample
from lockstep.train.local import LocalBackend

class Loss:
    separable, entropy_grad = True, False
    def __call__(self, logprobs, entropy, batch, rows):
        return -(logprobs * batch.loss_weights[rows]).sum()

name, dtype, length, count, budget = json.loads(sys.argv[1])
run = SFTRun(model=ModelConfig(name=name, dtype=dtype), batch_size=count,
             train=TrainConfig(token_budget=budget, attention="sdpa"),
             data={"max_length": length, "source": "x.jsonl"})
device = torch.device("cpu")
model = load_model(run.model, attention="sdpa", device=device)
backend = LocalBackend(run.train, model=model, total_steps=1)
mask = torch.arange(length) < length - 1
per = budget // length
samples = [TrainSample(token_ids=torch.randint(3, 200, (length,)), loss_mask=mask) for _ in range(per)]
batch = pack(samples, [torch.ones(length) / length] * per, bucket=None)
for _ in range(2):
    backend.forward_backward([batch] * (count // per), Loss())
    backend.optimizer_step()
print(json.dumps([peak_rss_bytes(), plan_memory(run, device=device).peak_bytes]))
"""


def measured(*arguments: object) -> tuple[int, int]:
    """(peak resident bytes, planned) of a process that trains two steps."""
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, json.dumps(arguments)], capture_output=True, text=True, check=True
    )
    peak, planned = json.loads(done.stdout.splitlines()[-1])
    return peak, planned


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_peak_of_a_tiny_model_with_a_large_budget(dtype: str) -> None:
    peak, planned = measured("shape:tiny-llama", dtype, 512, 64, 16384)
    print(f"peak {peak / GIB:.2f} GiB, planned {planned / GIB:.2f} GiB")
    assert planned / 1.5 < peak < planned * 1.5


@pytest.mark.slow
def test_the_peak_of_the_bundled_model() -> None:
    pytest.importorskip("gguf")
    peak, planned = measured("bundled:smollm2-135m", "bfloat16", 256, 4, 512)
    print(f"peak {peak / GIB:.2f} GiB, planned {planned / GIB:.2f} GiB")
    assert planned / 1.5 < peak < planned * 1.5
