"""Inference engines: token ids in, token ids and logprobs out."""

from lockstep.registry import Registry

ENGINES = Registry(
    "inference engine",
    {
        "native": "lockstep.engine.native:NativeEngine",
        "hf": "lockstep.engine.hf.engine:HFEngine",
        "vllm": "lockstep.engine.vllm.choice:VLLM",
        "sglang": "lockstep.engine.sglang.engine:SGLangServer",
    },
)
"""EngineConfig.name -> a class called as Engine(config, model=LoadedModel), or, with `external = True`, as
Engine(config, spec=EngineSpec). `lockstep.engine.build.make_engine` calls it."""
