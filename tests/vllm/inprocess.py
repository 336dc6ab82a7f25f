"""An in-process vLLM, a model for it, and a trainer's end of a weight session."""

import time
from collections.abc import Iterable, Mapping
from pathlib import Path

import torch
from conformance import EOS, MAX_MODEL_LEN, VOCAB
from torch import Tensor

from lockstep.config.engine import EngineConfig
from lockstep.engine.spec import EngineSpec
from lockstep.engine.vllm.engine import VLLMEngine
from lockstep.loop.engines import write_model_folder
from lockstep.models.load import LoadedModel
from lockstep.schema.weights import UpdateSession, WeightBucket
from lockstep.wire.buckets import Layout, pack

KV_BYTES = 1 << 26


def spec_of(model: LoadedModel, work_dir: Path, **changes) -> EngineSpec:
    fields = {
        "folder": write_model_folder(model, work_dir / "model"),
        "weights": "pushed",
        "model_name": model.name,
        "dtype": str(model.dtype).removeprefix("torch."),
        "vocab_size": VOCAB,
        "max_model_len": MAX_MODEL_LEN,
        "eos_token_ids": (EOS,),
        "tokenizer": model.tokenizer,
        "device": "cpu",
        "shares_device": False,
        "temperatures": frozenset({0.0, 1.0}),
        "work_dir": work_dir,
    }
    return EngineSpec(**{**fields, **changes})


def start(model: LoadedModel, folder: Path, *, spec: Mapping = {}, **config) -> VLLMEngine:
    """An engine without weights; `config` and `spec` are fields of EngineConfig and EngineSpec."""
    options = {"kv_cache_memory_bytes": KV_BYTES, **config.pop("options", {})}
    settings = {"name": "vllm", "eager": True, "max_batch": 64, "options": options, **config}
    return VLLMEngine(EngineConfig(**settings), spec=spec_of(model, folder, **spec))


def session(version: int = 1, *, seconds: float = 60.0) -> UpdateSession:
    return UpdateSession(policy_version=version, run_id="test", deadline=time.monotonic() + seconds)


def weights_of(model: LoadedModel) -> dict[str, Tensor]:
    """By Hugging Face name, tied ones under both names."""
    return dict(model.module.state_dict())


def send(engine: VLLMEngine, tensors: Iterable[tuple[str, Tensor]], *, capacity: int = 1 << 15) -> int:
    """Receive all of them, in buckets of `capacity` bytes that are overwritten at once; how many buckets."""
    layout, kept, count = Layout(capacity), [], 0

    def flush() -> None:
        nonlocal count
        data = torch.empty(layout.num_bytes, dtype=torch.uint8)
        pack(data, layout.specs, kept)
        bucket = WeightBucket(
            index=count,
            specs=tuple(layout.specs),
            num_bytes=layout.num_bytes,
            transport="memory",
            data=data,
        )
        engine.receive(bucket)
        data.fill_(255)  # NaN in every dtype: nobody may still read it
        count += 1

    for name, tensor in tensors:
        if layout.place(name, tensor) is None:
            flush()
            layout, kept = Layout(capacity), []
            layout.place(name, tensor)
        kept.append(tensor)
    if kept:
        flush()
    return count


def push(engine: VLLMEngine, model: LoadedModel, version: int = 1, **kwargs) -> int:
    """A whole session with the weights of `model`."""
    opened = session(version)
    engine.begin_update(opened)
    try:
        count = send(engine, weights_of(model).items(), **kwargs)
        engine.finish_update(opened)
    except BaseException:
        engine.fail_update("the test's trainer failed")
        raise
    return count
