import json
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from raising import raises
from selected import exhaustive
from transformers import LlamaConfig, LlamaForSequenceClassification

from lockstep.config.batch import RewardRoleConfig
from lockstep.config.cluster import ClusterConfig
from lockstep.config.engine import EngineConfig
from lockstep.config.model import ModelConfig
from lockstep.config.ppo import PPORun, ValueConfig
from lockstep.config.rollout import RolloutConfig, SamplingConfig
from lockstep.config.run import DPORun, GRPORun, SFTRun
from lockstep.config.train import CheckpointConfig, TrainConfig
from lockstep.errors import ConfigError, ModelError
from lockstep.loop.memory_plan import MemoryPlan, peak_of, plan_memory
from lockstep.models.memory import GIB, MemoryPart, planned_shape

CPU = torch.device("cpu")
SMALL_LLAMA: dict[str, Any] = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_the_engine_has_weights_of_its_own_where_the_trainers_are_shards() -> None:
    def whole(**train: object) -> int:
        run = GRPORun(model=ModelConfig(name="shape:tiny-llama", dtype="float32"), train=TrainConfig(**train))  # type: ignore[arg-type]
        plan = plan_memory(run, device=CPU, ranks=2)
        assert plan.ranks == 2
        return sum(part.bytes for part in plan.parts if part.name == "weights of the engine, whole")

    count = planned_shape(ModelConfig(name="shape:tiny-llama"), dtype=torch.float32).parameters
    assert whole(backend="fsdp2") == whole(backend="deepspeed", zero_stage=3) == 4 * count
    assert whole(backend="deepspeed") == 0


def test_the_engine_of_the_trainers_process_sleeps_without_weights() -> None:
    def phase(**engine: Any) -> str:
        model = ModelConfig(name="shape:tiny-llama", dtype="float32")
        run = GRPORun(model=model, train=TrainConfig(backend="fsdp2"), engine=EngineConfig(**engine))
        plan = plan_memory(run, device=CPU, ranks=2)
        (found,) = (part.phase for part in plan.parts if part.name == "weights of the engine, whole")
        return found

    assert phase(name="native", offload=True) == "generate"
    assert phase(name="native", offload=False) == "always"
    assert phase(name="native", offload=True, process="separate") == "always"


def test_a_rank_samples_whole_groups() -> None:
    def cache(ranks: int) -> int:
        run = GRPORun(model=ModelConfig(name="shape:tiny-llama"), train=TrainConfig(backend="fsdp2"))
        plan = plan_memory(run, device=CPU, ranks=ranks)
        (found,) = (part.bytes for part in plan.parts if part.name == "KV cache")
        return found

    # 8 prompts of 8 samples; on 3 ranks one has 3 prompts, on 16 each that has any has one
    assert [cache(1) / cache(ranks) for ranks in (2, 8, 16)] == [2, 8, 8]
    assert cache(3) == 3 * cache(8)


def test_micro_batches_of_a_step() -> None:
    run = GRPORun(model=ModelConfig(name="shape:tiny-llama"))
    plan = plan_memory(run, device=CPU)
    # 8 prompts * 8 samples; 1024 + 128 tokens; 3 of them in 4096
    assert (plan.documents_per_step, plan.longest_document) == (64, 1152)
    assert (plan.micro_batches, plan.tokens_per_micro_batch) == (22, 3 * 1152)
    sft = plan_memory(SFTRun(model=ModelConfig(name="shape:tiny-llama"), batch_size=5), device=CPU)
    assert (sft.documents_per_step, sft.micro_batches, sft.tokens_per_micro_batch) == (5, 3, 4096)
    assert not any(part.name == "KV cache" for part in sft.parts)


def test_ranks_with_one_micro_batch_each_share_the_documents() -> None:
    def tokens(ranks: int, **train: Any) -> int:
        settings = {"token_budget": 32768, "backend": "fsdp2", **train}
        run = DPORun(
            model=ModelConfig(name="shape:tiny-llama"),
            batch_size=33,
            data={"source": "x.jsonl", "max_length": 1024},  # type: ignore[arg-type]
            train=TrainConfig(**settings),
        )
        return plan_memory(run, device=CPU, ranks=ranks).tokens_per_micro_batch

    # 33 pairs: 32 documents in a micro-batch, with two ranks and with one; 9 pairs on each of 4, 5 of 8
    assert [tokens(ranks) for ranks in (1, 2, 4, 8)] == [32 * 1024, 32 * 1024, 18 * 1024, 10 * 1024]
    assert tokens(8, ring=2) == tokens(4)
    # static capacities are quarters of the budget
    assert tokens(4, static_capacity=True) == 24576
    assert tokens(4, static_capacity=True, layout="padded") == 32768


def test_the_peak_is_the_largest_phase() -> None:
    plan = plan_memory(GRPORun(model=ModelConfig(name="shape:tiny-llama")), device=CPU)
    by_name = {part.name: part.bytes for part in plan.parts}
    # float32 or bfloat16, as the CPU decides; 2 layers, 2 key/value heads of 16, 64 samples of 1152 tokens
    assert by_name["KV cache"] == 2 * 2 * 2 * 16 * plan.shape.dtype_bytes * 64 * 1152
    assert plan.peak_bytes < sum(by_name.values())


def test_a_value_model_has_a_plan_of_its_own() -> None:
    """Its weights, masters and states are there beside the policy's; the two train one after the other: the
    larger one's activations count. Settings are named in its own table, where it has them."""
    shared: dict[str, Any] = {
        "model": ModelConfig(name="shape:tiny-llama", dtype="bfloat16"),
        "rollout": RolloutConfig(sampling=SamplingConfig(max_tokens=64)),
    }
    alone = plan_memory(GRPORun(**shared), device=CPU)
    run = PPORun(**shared, value=ValueConfig(dtype="float32", optimizer="sgd"))
    both = plan_memory(run, device=CPU)
    value = {part.name: part for part in both.parts if part.role == "value"}
    assert [part for part in both.parts if part.role == "policy"] == list(alone.parts)
    count = planned_shape(run.model, dtype=torch.float32, head="scalar").parameters
    assert value["value model: parameters"].bytes == 4 * count
    assert "value model: optimizer states" not in value and "value model: float32 master weights" not in value
    always = sum(part.bytes for part in value.values() if part.phase == "always")
    assert both.peak_bytes >= alone.peak_bytes + always
    assert both.peak_bytes < alone.peak_bytes + sum(part.bytes for part in value.values())
    assert "value.name" in value["value model: parameters"].setting
    activations = value["value model: activations"].setting
    assert "train.token_budget" in activations and "value.activation_checkpointing = true" in activations


def test_what_has_a_gpu_of_its_own_is_planned_there() -> None:
    """On a CPU, whose memory all share, and with a shared GPU, everything is in one place."""
    roles = [["policy"], ["ref"], ["value"]]
    settings: dict[str, Any] = {
        "model": ModelConfig(name="shape:tiny-llama", dtype="bfloat16"),
        "algorithm": {"kl": {"coef": 0.1}},
        "train": TrainConfig(token_budget=2048),
        "engine": EngineConfig(name="native", process="separate"),
    }

    def planned(device: str = "cuda", **cluster: Any) -> MemoryPlan:
        run = PPORun(**settings, cluster=ClusterConfig(colocate=roles, **cluster))
        return plan_memory(run, device=torch.device(device))

    shared, own = planned(), planned(dedicated_gpus=True, engine_gpus=1)
    on_cpu = planned("cpu", dedicated_gpus=True, engine_gpus=1)
    assert list(shared.by_place) == list(on_cpu.by_place) == [""]
    assert list(own.by_place) == ["", "remote group 1", "remote group 2", "engines"]
    named = {place: {part.name for part in parts} for place, parts in own.by_place.items()}
    assert "parameters" in named[""] and "reference model" in named["remote group 1"]
    assert "weights of the engine, whole" in named["engines"] and "KV cache" in named["engines"]
    assert all(name.startswith("value model: ") for name in named["remote group 2"] - {of_group(2)})
    for number in (1, 2):
        assert of_group(number) in named[f"remote group {number}"]
    both = {part.name: part.bytes for part in shared.parts}
    apart = {part.name: part.bytes for part in own.parts}
    # Only where nothing larger is computed does scoring count, and an engine its libraries.
    more = {
        "Python, torch, libraries of the engine",
        *(n for n in apart if n.startswith("reference model: ")),
    }
    assert {name: size for name, size in apart.items() if name not in more} == both
    assert {name for name in apart if name not in both} == more and len(more) == 3
    peaks = {place: peak_of(parts)[0] for place, parts in own.by_place.items()}
    assert own.peak_bytes == max(peaks.values()) < shared.peak_bytes
    assert own.fullest == max(peaks, key=lambda place: peaks[place])


def of_group(number: int) -> str:
    return f"Python, torch, libraries of remote group {number}"


def test_reward_models_are_in_the_plan(tmp_path: Path) -> None:
    """Two of them, in their own dtype: weights, on every rank, and nothing to train them."""
    counts = []
    for name, layers in (("one", 1), ("two", 2)):
        config = LlamaConfig(**SMALL_LLAMA, num_hidden_layers=layers, num_labels=1)
        config.save_pretrained(tmp_path / name)
        counts.append(sum(p.numel() for p in LlamaForSequenceClassification(config).parameters()))
    role = RewardRoleConfig(name=str(tmp_path / "one"), others=(str(tmp_path / "two"),), dtype="bfloat16")
    model = ModelConfig(name="shape:tiny-llama", dtype="float32")
    alone = plan_memory(GRPORun(model=model), device=CPU)
    both = plan_memory(GRPORun(model=model, reward_model=role), device=CPU, ranks=1)
    (part,) = [part for part in both.parts if part.role == "reward_model"]
    assert (part.name, part.bytes) == ("reward models: parameters", 2 * sum(counts))
    assert both.peak_bytes == alone.peak_bytes + part.bytes
    gone = RewardRoleConfig(name=str(tmp_path / "three"))
    with raises(ModelError, "no-such-file: three"):
        plan_memory(GRPORun(model=model, reward_model=gone), device=CPU)


def test_saves_in_the_background_need_a_copy_of_the_state() -> None:
    def copy(device: str = "cpu", dtype: str = "bfloat16", **checkpoint: Any) -> int:
        run = SFTRun(
            model=ModelConfig(name="shape:tiny-llama", dtype=dtype),
            steps=20,
            checkpoint=CheckpointConfig(**checkpoint),
        )
        plan = plan_memory(run, device=torch.device(device))
        assert plan.shape.parameters == count
        found = [part for part in plan.parts if part.name.startswith("copy for saves")]
        assert all(part.phase == ("always" if device == "cpu" else "host") for part in found)
        return sum(part.bytes for part in found)

    count = planned_shape(ModelConfig(name="shape:tiny-llama"), dtype=torch.float32).parameters
    assert copy(every=5) == copy("cuda", every=5) == 14 * count
    assert copy(every=5, dtype="float32") == 12 * count
    assert copy(every=5, background=False) == copy(every=20) == copy() == 0


def test_the_value_model_is_copied_too() -> None:
    run = PPORun(
        model=ModelConfig(name="shape:tiny-llama", dtype="bfloat16"),
        steps=20,
        checkpoint=CheckpointConfig(every=5),
    )
    (part,) = [p for p in plan_memory(run, device=CPU).parts if p.name.startswith("value model: copy for")]
    assert part.bytes == 14 * planned_shape(run.model, dtype=torch.float32, head="scalar").parameters


def test_what_native_keeps_between_rollouts() -> None:
    def cache(*, device: torch.device, **engine: Any) -> MemoryPart:
        model = ModelConfig(name="shape:tiny-llama", dtype="bfloat16")
        run = GRPORun(model=model, engine=EngineConfig(**engine))
        (found,) = (part for part in plan_memory(run, device=device).parts if part.name == "KV cache")
        return found

    cuda = torch.device("cuda")
    assert cache(device=CPU).phase == cache(device=CPU, name="hf").phase == "generate"
    assert cache(device=CPU, name="native").phase == cache(device=cuda).phase == "always"
    assert cache(device=cuda, name="native", offload=True).phase == "generate"
    # 2 layers, keys and values, 2 heads of 16, 2 bytes
    assert cache(device=cuda, name="native", kv_cache_tokens=4000).bytes == 2 * 2 * 2 * 16 * 2 * 4000


def test_cuda_graphs_have_gradients_of_their_own() -> None:
    train = TrainConfig(device="cuda", execution="joint", cuda_graph=True)
    run = GRPORun(model=ModelConfig(name="shape:tiny-llama", dtype="bfloat16"), train=train)
    plan = plan_memory(run, device=torch.device("cuda"))
    (found,) = (part for part in plan.parts if part.name.startswith("gradients of CUDA graphs"))
    assert (found.bytes, found.phase) == (4 * 2 * plan.shape.trained, "always")


def test_a_backend_of_the_users_counts_its_own_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    run = SFTRun(
        model=ModelConfig(name="shape:tiny-llama"), train=TrainConfig(backend="their_backend:Theirs")
    )
    theirs = types.SimpleNamespace()
    monkeypatch.setitem(sys.modules, "their_backend", types.SimpleNamespace(Theirs=theirs))
    with raises(ConfigError, "wrong-part: memory_parts"):
        plan_memory(run, device=CPU)
    theirs.memory_parts = lambda shape, train, step: [
        MemoryPart(name="mine", bytes=step.micro_batches * shape.trained, phase="train", setting="model.name")
    ]
    plan = plan_memory(run, device=CPU)
    assert [part.name for part in plan.parts] == ["Python, torch, libraries", "mine"]
    assert plan.parts[1].bytes == plan.micro_batches * plan.shape.trained


MEASURE = """
import json, sys, torch
from lockstep.config.run import SFTRun
from lockstep.config.model import ModelConfig
from lockstep.config.train import TrainConfig
from lockstep.models.load import load_model
from lockstep.loop.memory_plan import plan_memory
from lockstep.observe.memory import peak_rss_bytes
from lockstep.packing import pack
from lockstep.protocols.train import LossOutput
from lockstep.schema.batch import TrainSample
from lockstep.train.local import LocalBackend

class Loss:
    separable, entropy_grad, terms = True, False, ()
    def __call__(self, logprobs, entropy, batch, rows):
        return LossOutput(-(logprobs * batch.loss_weights[rows]).sum())

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
@pytest.mark.parametrize("dtype", exhaustive(["float32", "bfloat16"], quick=["bfloat16"]))
def test_the_peak_of_a_tiny_model_with_a_large_budget(dtype: str) -> None:
    peak, planned = measured("shape:tiny-llama", dtype, 512, 64, 16384)
    print(f"peak {peak / GIB:.2f} GiB, planned {planned / GIB:.2f} GiB")
    assert planned / 1.5 < peak < planned * 1.5


@pytest.mark.exhaustive
def test_the_peak_of_the_bundled_model() -> None:
    pytest.importorskip("gguf")
    peak, planned = measured("bundled:smollm2-135m", "bfloat16", 256, 4, 512)
    print(f"peak {peak / GIB:.2f} GiB, planned {planned / GIB:.2f} GiB")
    assert planned / 1.5 < peak < planned * 1.5
