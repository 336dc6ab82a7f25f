"""Inference engines: token ids in, token ids and logprobs out."""

from lockstep.registry import Registry

ENGINES = Registry("inference engine", {"hf": "lockstep.engine.hf:HFEngine"})
"""The classes behind `engine.name`: Engine(config, model=LoadedModel)."""
