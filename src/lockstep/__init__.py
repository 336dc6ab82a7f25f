"""Lockstep: RL post-training whose parts are interchangeable and proven to agree.

    >>> from lockstep import load_run, train_online
    >>> run = load_run("demo", overrides={"train.lr": 2e-5})
    >>> summary = train_online(run)  # doctest: +SKIP
    >>> summary["eval_after"]["lenient_accuracy"]  # doctest: +SKIP

Public names are imported on first use: `import lockstep` itself does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from lockstep.version import __version__

if TYPE_CHECKING:
    from lockstep.config.load import load_run as load_run
    from lockstep.config.ppo import PPORun as PPORun
    from lockstep.config.run import DPORun as DPORun
    from lockstep.config.run import GRPORun as GRPORun
    from lockstep.config.run import SFTRun as SFTRun
    from lockstep.loop.build import OnlineParts as OnlineParts
    from lockstep.loop.build import build_online as build_online
    from lockstep.loop.offline import train_offline as train_offline
    from lockstep.loop.online import OnlineTrainer as OnlineTrainer
    from lockstep.loop.online import train_online as train_online
    from lockstep.recording.hooks.record import record as record

_HOMES = {
    "DPORun": "lockstep.config.run",
    "GRPORun": "lockstep.config.run",
    "OnlineParts": "lockstep.loop.build",
    "OnlineTrainer": "lockstep.loop.online",
    "PPORun": "lockstep.config.ppo",
    "SFTRun": "lockstep.config.run",
    "build_online": "lockstep.loop.build",
    "load_run": "lockstep.config.load",
    "record": "lockstep.recording.hooks.record",
    "train_offline": "lockstep.loop.offline",
    "train_online": "lockstep.loop.online",
}
"""Public name -> the module that defines it."""

__all__ = [
    "DPORun",
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
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
