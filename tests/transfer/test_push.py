"""A session of a weight update: its order, and what a failure at any step of it leaves."""

from __future__ import annotations

import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from external import ExternalHF
from holder import Source
from raising import raises
from sampled import engine_spec

from lockstep.config.engine import EngineConfig
from lockstep.config.model import LoraConfig, ModelConfig
from lockstep.config.train import TrainConfig
from lockstep.engine.hf.engine import HFEngine
from lockstep.errors import EngineError
from lockstep.loop.engines import write_model_folder
from lockstep.models.load import LoadedModel, load_model
from lockstep.schema.rollout import GenerationRequest, SamplingParams
from lockstep.train.local import LocalBackend
from lockstep.transfer import InProcessTransfer, make_transfer
from lockstep.transfer.buckets import BucketTransfer
from lockstep.transfer.senders import Packed, Packer
from lockstep.wire.buckets import TensorSpec

CPU = torch.device("cpu")
REQUEST = GenerationRequest(
    prompt_token_ids=(5, 6, 7), sampling=SamplingParams(max_tokens=8, temperature=0.0), seeds=(0,)
)


def policy(*, lora: bool = False, seed: int = 0) -> LoadedModel:
    config = ModelConfig(
        name="shape:tiny-llama", dtype="float32", seed=seed, lora=LoraConfig(rank=2) if lora else None
    )
    return load_model(config, attention="sdpa", device=CPU)


def engine_of(model: LoadedModel, tmp_path: Any, **settings: Any) -> ExternalHF:
    spec = engine_spec(
        folder=write_model_folder(model, tmp_path / "model"),
        model_name=model.name,
        vocab_size=256,
        eos_token_ids=(),
        temperatures=frozenset({0.0, 1.0}),
        work_dir=tmp_path,
    )
    return ExternalHF(EngineConfig(), spec=spec, **settings)


def transfer_to(engine: Any, *, bucket_bytes: int = 60_000, **settings: Any) -> BucketTransfer:
    config = EngineConfig(name="external:ExternalHF", **settings)
    made = make_transfer(config, engine, device="cpu")
    assert isinstance(made, BucketTransfer)
    made._packer = Packer(bucket_bytes=bucket_bytes, device=CPU)
    return made


def source_of(model: LoadedModel) -> Source:
    return Source(dict(model.module.state_dict()))


def greedy(engine: Any) -> list[float]:
    return list(engine.generate([REQUEST])[0][0].logprobs)


def test_a_push_is_one_session_of_several_buckets_and_the_engine_samples_as_hf(tmp_path: Any) -> None:
    model = policy()
    engine = engine_of(model, tmp_path)
    with raises(EngineError, "wrong-state"):
        engine.generate([REQUEST])
    transfer_to(engine).push(source_of(model), engine, policy_version=4)
    buckets = [entry for entry in engine.log if entry.startswith("receive")]
    assert len(buckets) > 2
    assert engine.log == ["begin", *(f"receive {i}" for i in range(len(buckets))), "finish"]
    completion = engine.generate([REQUEST])[0][0]
    expected = HFEngine(EngineConfig(), model=model).generate([REQUEST])[0][0]
    assert (completion.token_ids, completion.logprobs) == (expected.token_ids, expected.logprobs)
    assert completion.policy_version == 4


@pytest.mark.parametrize("where", ["begin", "receive 0", "receive 2", "finish"])
def test_a_failure_at_any_step_leaves_the_engine_dirty_and_the_next_push_is_whole(
    where: str, tmp_path: Any
) -> None:
    model = policy()
    engine = engine_of(model, tmp_path)
    transfer = transfer_to(engine)
    source = source_of(model)
    transfer.push(source, engine, policy_version=1)
    names = source.read
    engine.faults.add(where)
    engine.log.clear()
    with raises(EngineError, "wrong-state"):
        transfer.push(source, engine, policy_version=2)
    assert engine.dirty and engine.log[-1] == "fail" and where in engine.reason
    assert source.read == 2 * names, "the others' collective: every tensor was gone through"
    with raises(EngineError, "wrong-state"):
        engine.generate([REQUEST])
    engine.faults.clear()
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.mul_(1.1)
    transfer.push(source, engine, policy_version=3)
    assert source.read == 3 * names
    assert greedy(engine) == greedy(HFEngine(EngineConfig(), model=model))


def test_a_source_that_fails_amid_the_update_leaves_the_engine_dirty(tmp_path: Any) -> None:
    model = policy()
    engine = engine_of(model, tmp_path)

    def tensors():
        yield from list(model.module.state_dict().items())[:5]
        raise ZeroDivisionError("a rank is gone")

    source = SimpleNamespace(weights=lambda policy_version: SimpleNamespace(tensors=tensors))
    with pytest.raises(ZeroDivisionError):
        transfer_to(engine).push(source, engine, policy_version=1)
    assert engine.dirty and engine.reason == "ZeroDivisionError: a rank is gone"


def test_ctrl_c_amid_an_update_leaves_the_engine_dirty_and_gathers_no_further(tmp_path: Any) -> None:
    model = policy()
    engine = engine_of(model, tmp_path)

    def receive(bucket):
        raise KeyboardInterrupt

    engine.receive = receive
    source = source_of(model)
    with pytest.raises(KeyboardInterrupt):
        transfer_to(engine).push(source, engine, policy_version=1)
    assert engine.dirty and source.read < len(source.tensors)


def test_a_name_that_comes_twice(tmp_path: Any) -> None:
    model = policy()
    engine = engine_of(model, tmp_path)
    items = list(model.module.state_dict().items())
    source = SimpleNamespace(
        weights=lambda policy_version: SimpleNamespace(tensors=lambda: iter([*items, items[3]]))
    )
    with raises(EngineError, "duplicate: model.layers.0.self_attn.k_proj.weight"):
        transfer_to(engine).push(source, engine, policy_version=1)
    assert engine.dirty


def test_weights_of_another_model_are_refused_and_named(tmp_path: Any) -> None:
    model = policy()
    engine = engine_of(model, tmp_path)
    weights = dict(model.module.state_dict())
    weights["model.norm.weight"] = torch.ones(3)
    with raises(EngineError, "wrong-shape: model.norm.weight"):
        transfer_to(engine).push(Source(weights), engine, policy_version=1)
    del weights["model.norm.weight"]
    with raises(EngineError, "wrong-weights", missing=["model.norm.weight"]):
        transfer_to(engine).push(Source(weights), engine, policy_version=1)
    assert engine.dirty


def test_an_update_that_takes_too_long(tmp_path: Any) -> None:
    model = policy()
    engine = engine_of(model, tmp_path)
    receive = engine.receive

    def slow(bucket):
        time.sleep(0.15)
        receive(bucket)

    engine.receive = slow
    with raises(EngineError, "deadline: engine.update_seconds"):
        transfer_to(engine, update_seconds=0.1).push(source_of(model), engine, policy_version=1)
    assert engine.dirty


def test_every_name_of_a_tied_weight_is_sent() -> None:
    config = ModelConfig(name="shape:tiny-llama", dtype="float32")
    model = load_model(config, attention="sdpa", device=CPU)
    model.module.lm_head.weight = model.module.model.embed_tokens.weight  # tied, as the config may ask
    backend = LocalBackend(TrainConfig(device="cpu"), model=model, total_steps=0, temperature=1.0, ref=False)
    sent = dict(backend.weights(policy_version=0).tensors())
    assert {"lm_head.weight", "model.embed_tokens.weight"} <= sent.keys()
    packed = list(Packer(bucket_bytes=10**6, device=CPU).fill(sent.items()))
    assert [spec.name for each in packed for spec in each.specs] == list(sent)


def test_lora_arrives_merged_under_the_names_of_the_plain_model(tmp_path: Any) -> None:
    model = policy(lora=True)
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if "lora_B" in name:
                parameter.normal_(generator=torch.Generator().manual_seed(1))
    backend = LocalBackend(TrainConfig(device="cpu"), model=model, total_steps=0, temperature=1.0, ref=False)
    engine = engine_of(model, tmp_path)  # refuses unknown and missing names
    transfer_to(engine).push(backend, engine, policy_version=1)
    theirs, ours = greedy(engine), greedy(HFEngine(EngineConfig(), model=model))
    assert theirs == pytest.approx(ours, abs=1e-5)
    plain = policy()
    assert theirs != pytest.approx(greedy(HFEngine(EngineConfig(), model=plain)), abs=1e-3)


def test_an_engine_that_was_started_again_gets_the_weights_of_the_last_push(tmp_path: Any) -> None:
    model = policy()
    engine, replica = engine_of(model, tmp_path), engine_of(model, tmp_path)
    transfer = transfer_to(engine, verify="always")
    with raises(EngineError, "wrong-state"):
        transfer._recover(engine)
    transfer.push(source_of(model), engine, policy_version=7)
    expected = greedy(engine)
    engine.dirty = True
    engine.recover()
    assert not engine.dirty and greedy(engine) == expected
    engine.recover(replica)  # a dispatcher's: it alone
    assert not replica.dirty and greedy(replica) == expected and replica.stats().policy_version == 7
    replica.faults.add("one wrong")
    with raises(EngineError, "values-differ"):
        engine.recover(replica)
    assert replica.dirty


def test_weights_that_no_rank_has_whole_cannot_be_sent_again_in_mid_step(tmp_path: Any) -> None:
    model = policy()
    engine = engine_of(model, tmp_path)
    transfer = transfer_to(engine)
    transfer.push(Source(dict(model.module.state_dict()), whole=False), engine, policy_version=1)
    with raises(EngineError, "wrong-state"):
        engine.recover()


def test_buffers_are_as_large_as_needed_and_used_again() -> None:
    packer = Packer(bucket_bytes=1000, device=CPU)
    small = {"a": torch.zeros(10), "b": torch.zeros(10)}
    assert [p.num_bytes for p in packer.fill(small.items())] == [88]  # 0..40, 48..88
    assert packer.num_bytes == 88
    many = {str(i): torch.full((50,), float(i)) for i in range(9)}  # 200 bytes, 208 apart: 4 to a bucket
    seen = []
    for packed in packer.fill(many.items()):
        seen.append(
            (packed.index, packed.slot, len(packed.specs), packed.num_bytes, packed.buffer.data_ptr())
        )
    assert [entry[:4] for entry in seen] == [(0, 0, 4, 824), (1, 1, 4, 824), (2, 0, 1, 200)]
    assert packer.num_bytes == 2000 and seen[0][4] == seen[2][4]
    again = [packed.buffer.data_ptr() for packed in packer.fill(many.items())]
    assert again == [entry[4] for entry in seen], "memory that others have opened stays the same"
    large = list(packer.fill({"large": torch.zeros(1000)}.items()))
    assert (large[0].num_bytes, packer.num_bytes) == (4000, 5000)
    packer.free()
    assert packer.num_bytes == 0


def test_what_is_chosen() -> None:
    def engine(*ways: str) -> Any:
        return SimpleNamespace(transports=ways, external=True)

    def transport(config: EngineConfig, *ways: str) -> str:
        return make_transfer(config, engine(*ways), device="cpu").transport

    auto = EngineConfig(name="m:C")
    assert transport(auto, "memory", "disk") == "memory"
    assert transport(auto, "ipc", "collective", "disk") == "collective", "no IPC from the CPU"
    assert transport(EngineConfig(name="m:C", transfer="disk"), "memory", "disk") == "disk"
    with raises(EngineError, "unsupported-combination: engine.transfer"):
        make_transfer(EngineConfig(name="m:C", transfer="ipc"), engine("ipc", "disk"), device="cpu")
    with raises(EngineError, "unsupported-combination: engine.transfer"):
        make_transfer(auto, engine("ipc"), device="cpu")
    shares = HFEngine(EngineConfig(), model=policy())
    assert isinstance(make_transfer(EngineConfig(), shares, device="cpu"), InProcessTransfer)


def test_heads_of_a_bucket_on_the_host_are_read_after_its_copies() -> None:
    buffer = torch.zeros(8, dtype=torch.uint8)

    class Copies:
        def synchronize(self) -> None:
            buffer.fill_(7)

    spec = TensorSpec(name="a", dtype="float32", shape=(2,), offset=0, num_bytes=8)
    packed = Packed(index=0, slot=0, specs=(spec,), buffer=buffer, num_bytes=8, done=Copies())  # type: ignore[arg-type]
    assert packed.heads().tolist() == [7] * 8
