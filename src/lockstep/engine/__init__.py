"""Inference engines: token ids in, token ids and logprobs out."""

from lockstep.registry import Registry

ENGINES = Registry(
    "inference engine",
    {
        "native": "lockstep.engine.native:NativeEngine",
        "hf": "lockstep.engine.hf:HFEngine",
        "vllm": "lockstep.engine.vllm_choice:VLLM",
        "sglang": "lockstep.engine.sglang:SGLangServer",
    },
)
"""EngineConfig.name -> a class called as Engine(config, model=LoadedModel), or, with `external = True`, as
Engine(config, place=EnginePlace). `lockstep.engine.build.make_engine` calls it."""
