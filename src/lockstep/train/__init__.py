"""Train backends: each owns the policy's Parameters, their float32 master, the optimizer and the schedule."""

from lockstep.config.declarations import backends
from lockstep.registry import Registry

BACKENDS = Registry("train backend", {name: backend.object for name, backend in backends().items()})
"""The classes behind `train.backend`: Backend(config, model=, total_steps=, temperature=, ref=)."""
