"""Inference engines: token ids in, token ids and logprobs out."""

from lockstep.config.declarations import engines
from lockstep.registry import Registry

ENGINES = Registry("inference engine", {name: engine.object for name, engine in engines().items()})
"""EngineConfig.name -> a class called as Engine(config, model=LoadedModel), or, with `external = True`, as
Engine(config, spec=EngineSpec). `lockstep.engine.build.make_engine` calls it."""
