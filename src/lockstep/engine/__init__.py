"""Inference engines: token ids in, token ids and logprobs out."""

from lockstep.registry import Registry

ENGINES = Registry("inference engine", {"hf": "lockstep.engine.hf:HFEngine"})
"""EngineConfig.name -> a class called as Engine(config, model=LoadedModel)."""
