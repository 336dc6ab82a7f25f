"""SGLang engines over the fake server, for the tests of this folder."""

import json
import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from sampled import engine_spec
from transformers import LlamaConfig

from lockstep.config.engine import EngineConfig
from lockstep.engine.sglang.engine import SGLangServer
from lockstep.schema.rollout import GenerationRequest, SamplingParams
from lockstep.schema.weights import UpdateSession, WeightBucket
from lockstep.wire.buckets import Layout

FAKE = Path(__file__).with_name("fake")
EOS = 250
VOCAB = 256
LENGTH = 600


def model_folder(folder, *, tied=True):
    LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
        tie_word_embeddings=tied,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)
    return folder


def weights(*, tied=True):
    """Every weight of the model of `model_folder`: value number i of the n-th weight is n + i / 1024."""
    shapes = {
        "model.embed_tokens.weight": (VOCAB, 16),
        "model.layers.0.self_attn.q_proj.weight": (16, 16),
        "model.layers.0.self_attn.k_proj.weight": (8, 16),
        "model.layers.0.self_attn.v_proj.weight": (8, 16),
        "model.layers.0.self_attn.o_proj.weight": (16, 16),
        "model.layers.0.mlp.gate_proj.weight": (24, 16),
        "model.layers.0.mlp.up_proj.weight": (24, 16),
        "model.layers.0.mlp.down_proj.weight": (16, 24),
        "model.layers.0.input_layernorm.weight": (16,),
        "model.layers.0.post_attention_layernorm.weight": (16,),
        "model.norm.weight": (16,),
    }
    found = {
        name: (torch.arange(torch.Size(shape).numel()) / 1024 + n).reshape(shape)
        for n, (name, shape) in enumerate(shapes.items())
    }
    return found | {"lm_head.weight": found["model.embed_tokens.weight"].clone()}


def write_plan(folder, *starts):
    path = Path(folder) / "plan.json"
    path.write_text(json.dumps({"starts": list(starts) or [{}]}))
    return path


def asked(folder, *paths):
    """What the server was asked, [path, body] in order; of these paths only, if any are given."""
    lines = (Path(folder) / "plan.log").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return [entry for entry in found if not paths or entry[0] in paths]


def spec_in(folder, **settings):
    own = {
        "folder": Path(folder) / "model",
        "weights": "folder",
        "vocab_size": VOCAB,
        "max_model_len": LENGTH - 8,
        "eos_token_ids": (EOS,),
        "device": "cuda:0",
        "shares_device": True,
        "work_dir": Path(folder) / "engine",
    }
    return engine_spec(**own | settings)


def engine_in(folder, *starts, spec=None, **config):
    """An engine over a fake server with this plan for each of its starts."""
    if not (Path(folder) / "model").is_dir():
        model_folder(Path(folder) / "model")
    plan = write_plan(folder, *starts)
    values = {
        "name": "sglang",
        "unseeded": True,
        "start_seconds": 30.0,
        "request_seconds": 20.0,
        "env": {"PYTHONPATH": str(FAKE), "FAKE_SGLANG_PLAN": str(plan)},
        "python": Path(sys.executable),
    }
    return SGLangServer(EngineConfig(**values | config), spec=spec_in(folder, **spec or {}))


def request(last, *, samples=1, max_tokens=4, **sampling):
    """Its completions are last + 1, last + 2, ..."""
    return GenerationRequest(
        prompt_token_ids=(1, 2, last),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        seeds=tuple(range(samples)),
    )


def session(version=1, *, seconds=20.0, run_id="run"):
    return UpdateSession(policy_version=version, run_id=run_id, deadline=time.monotonic() + seconds)


def layout_of(tensors):
    layout = Layout(1 << 30)
    for name, tensor in tensors.items():
        layout.place(name, tensor)
    return layout


def file_bucket(folder, tensors, *, index=0):
    """A bucket in a file, as the disk sender makes it."""
    layout = layout_of(tensors)
    path = Path(folder) / f"bucket-{index}.safetensors"
    save_file(tensors, path)
    return WeightBucket(
        index=index,
        specs=tuple(layout.specs),
        num_bytes=layout.num_bytes,
        transport="disk",
        handle={"path": str(path)},
    )


def push(engine, folder, *, version=1, tensors=None, run_id="run"):
    """One whole update."""
    one = session(version, run_id=run_id)
    engine.begin_update(one)
    engine.receive(file_bucket(folder, weights() if tensors is None else tensors))
    engine.finish_update(one)
