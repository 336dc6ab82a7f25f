import dataclasses

import torch

from lockstep.config.model import LoraConfig, ModelConfig
from lockstep.config.train import TrainConfig
from lockstep.models.load import load_model
from lockstep.models.memory import planned_shape
from lockstep.train import memory
from lockstep.train import memory as deepspeed
from lockstep.train import memory as fsdp2
from lockstep.train.memory import Parallelism, StepSize


def parts(
    train: TrainConfig, *, dtype_bytes: int = 2, micro_batches: int = 2, **more: object
) -> dict[str, int]:
    shape = planned_shape(ModelConfig(name="shape:llama-3.2-1b"), dtype=torch.bfloat16)
    shape = dataclasses.replace(shape, dtype_bytes=dtype_bytes)
    step = StepSize(tokens=1024, micro_batches=micro_batches, **{"device": "cuda"} | more)  # type: ignore[arg-type]
    found = memory.local_parts(shape, train, step)
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


def rank_parts(
    parallelism: Parallelism,
    micro_batches: int = 4,
    lora: LoraConfig | None = None,
    *,
    tokens: int = 1024,
    **train: object,
) -> dict[str, int]:
    """On the device, of one rank, for llama-3.2-1b in bfloat16."""
    shape = planned_shape(ModelConfig(name="shape:llama-3.2-1b", lora=lora), dtype=torch.bfloat16)
    step = StepSize(
        tokens=tokens, micro_batches=micro_batches, device="cuda", parallelism=parallelism, ref=True
    )
    count = {"fsdp2": fsdp2.fsdp2_parts, "deepspeed": deepspeed.deepspeed_parts}[str(train["backend"])]
    found = count(shape, TrainConfig(**train), step)  # type: ignore[arg-type]
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
    assert "gradients" not in more and more["gradients in the update"] == COUNT
    each = rank_parts(
        Parallelism(ranks=4), micro_batches=5, backend="fsdp2", reduce_gradients="per_micro_batch"
    )
    assert "gradients between micro-batches, whole, in float32" not in each
    assert each["gradients"] == COUNT
    # A layer's in float32; with few tokens embedding and head's, in both dtypes, when the rest is freed.
    reduced = "gradients that are reduced at once"
    assert each[reduced] == 4 * LAYER
    few = rank_parts(Parallelism(ranks=4), tokens=64, backend="fsdp2")
    freed = few["activations"] + few["logits of one chunk"]
    assert few[reduced] == 6 * (COUNT - 16 * LAYER) - freed > 4 * LAYER
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


def test_experts_of_a_rank_by_hand() -> None:
    """Qwen3-30B-A3B: 48 layers of 128 experts, 3 * 768 * 2048 each, 8 of them for a token."""

    def parts(ep: int) -> dict[str, int]:
        shape = planned_shape(ModelConfig(name="shape:qwen3-30b-a3b"), dtype=torch.bfloat16)
        step = StepSize(tokens=1024, micro_batches=16, device="cuda", parallelism=Parallelism(ranks=8))
        found = fsdp2.fsdp2_parts(shape, TrainConfig(backend="fsdp2", ep=ep), step)
        return {part.name: part.bytes for part in found if part.bytes and part.phase != "host"}

    one, four = parts(1), parts(4)
    of_layer = 128 * 3 * 768 * 2048 * 3 // 4
    kept = "gradients between micro-batches, whole, in float32"
    assert one["gathered weights"] - four["gathered weights"] == 2 * 2 * of_layer
    assert one[kept] - four[kept] == 4 * 48 * of_layer
    assert four["rows of experts that are exchanged"] == 2 * 2 * 8 * 2048 * 1024
    same = one.keys() - {"gathered weights", kept}
    assert all(four[name] == one[name] for name in same)


def test_adapters_on_a_rank_of_fsdp2_by_hand() -> None:
    """Of a rank of 16: q and o 2 * (2048 + 2048), k and v 2 * (2048 + 512), gate, up and down
    3 * (2048 + 8192)."""
    adapters = 16 * 16 * (2 * 4096 + 2 * 2560 + 3 * 10240)
    four = rank_parts(Parallelism(ranks=4), backend="fsdp2", lora=LoraConfig(rank=16))
    assert four["parameters, this rank's"] == (2 * COUNT + 4 * adapters) / 4
    assert four["optimizer states"] == 2 * four["gradients"] == 2 * adapters
    assert "reference model, this rank's" not in four
    assert four["gradients that are reduced at once"] == 4 * adapters / 16
    more = rank_parts(Parallelism(ranks=4), 5, backend="fsdp2", lora=LoraConfig(rank=16))
    assert more["gradients between micro-batches, whole, in float32"] == 4 * adapters


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


def test_advice_names_the_setting() -> None:
    module = load_model(
        ModelConfig(name="shape:tiny-llama"), attention="sdpa", device=torch.device("cpu")
    ).module
    text = memory.advice(module, TrainConfig(token_budget=100_000), tokens=100_000, micro_batches=2)
    assert "activations" in text
    assert "train.token_budget (now 100000) or train.activation_checkpointing = true" in text
