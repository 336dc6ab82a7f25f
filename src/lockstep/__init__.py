"""Lockstep: RL post-training whose parts are interchangeable and proven to agree.

    >>> from lockstep import load_run, train_online
    >>> run = load_run("demo", overrides={"train.lr": 2e-5})
    >>> summary = train_online(run)  # doctest: +SKIP
    >>> summary["eval_after"]["lenient_accuracy"]  # doctest: +SKIP

Public names are imported on first use: `import lockstep` itself does not load torch.
"""

from __future__ import annotations

import importlib
import warnings
from typing import TYPE_CHECKING, Any

from lockstep.version import __version__

if TYPE_CHECKING:
    from lockstep.config.load import load_run as load_run
    from lockstep.config.ppo import PPORun as PPORun
    from lockstep.config.run import DPORun as DPORun
    from lockstep.config.run import GRPORun as GRPORun
    from lockstep.config.run import SFTRun as SFTRun
    from lockstep.loop.build import Builder as Builder
    from lockstep.loops import train_offline as train_offline
    from lockstep.loops import train_online as train_online
    from lockstep.loops.online import OnlineParts as OnlineParts
    from lockstep.loops.online import OnlineTrainer as OnlineTrainer
    from lockstep.loops.online import build_online as build_online
    from lockstep.recording.hooks import record as record
    from lockstep.rollout.environment import Environment as Environment

_HOMES = {
    "Builder": "lockstep.loop.build",
    "DPORun": "lockstep.config.run",
    "Environment": "lockstep.rollout.environment",
    "GRPORun": "lockstep.config.run",
    "OnlineParts": "lockstep.loops.online",
    "OnlineTrainer": "lockstep.loops.online",
    "PPORun": "lockstep.config.ppo",
    "SFTRun": "lockstep.config.run",
    "build_online": "lockstep.loops.online",
    "load_run": "lockstep.config.load",
    "record": "lockstep.recording.hooks",
    "train_offline": "lockstep.loops",
    "train_online": "lockstep.loops",
}
"""Public name -> the module that defines it."""

_REMOVED_IN_0_2 = {
    "OnlineParts": "Builder",
    "OnlineTrainer": "Builder",
    "build_online": "Builder",
}
"""Public name -> what takes its place."""

__all__ = [
    "Builder",
    "DPORun",
    "Environment",
    "GRPORun",
    "OnlineParts",
    "OnlineTrainer",
    "PPORun",
    "SFTRun",
    "__version__",
    "build_online",
    "load_run",
    "record",
    "train_offline",
    "train_online",
]


def __getattr__(name: str) -> Any:
    """Import a public name on first use (PEP 562)."""
    if name not in _HOMES:
        raise AttributeError(f"module 'lockstep' has no attribute {name!r}; it has {', '.join(__all__)}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    if name in _REMOVED_IN_0_2:
        instead = f"use lockstep.{_REMOVED_IN_0_2[name]}, as examples/own_loop.py does"
        warnings.warn(f"lockstep.{name} will be removed in 0.2; {instead}", DeprecationWarning, stacklevel=2)
        return value
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
