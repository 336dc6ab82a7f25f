"""Every error Lockstep raises on purpose, in one tree.

    LockstepError
    ├── ConfigError(ValueError)      a setting is wrong or impossible; raised before any model is loaded
    ├── DataError(ValueError)        a dataset, row or prompt is not what it must be
    ├── RewardError(RuntimeError)    a reward raised or returned something that is not a finite number
    ├── ModelError(ValueError)       a model cannot be loaded, or its architecture is not supported
    ├── EngineError(RuntimeError)    an inference engine failed or returned something inconsistent
    ├── TrainError(RuntimeError)     a train step cannot go on (non-finite loss, out of memory, ...)
    ├── CheckpointError(ValueError)  a checkpoint is missing, damaged or belongs to something else
    ├── RecordingError(ValueError)   a recording is missing, damaged or does not fit what it is replayed on
    └── ParityError(AssertionError)  two things that must agree do not

A message names the value, the reason and what to set instead.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class LockstepError(Exception):
    """Root of the errors that Lockstep raises on purpose."""


class ConfigError(LockstepError, ValueError):
    """A setting is wrong, or a combination of settings is impossible."""


class DataError(LockstepError, ValueError):
    """A dataset, a row or a prompt is not what it must be."""


class RewardError(LockstepError, RuntimeError):
    """A reward raised, timed out, or returned something that is not a finite number."""


class ModelError(LockstepError, ValueError):
    """A model cannot be loaded, or its architecture is not supported."""


class EngineError(LockstepError, RuntimeError):
    """An inference engine failed or returned something inconsistent."""


class TrainError(LockstepError, RuntimeError):
    """A train step cannot go on."""


class CheckpointError(LockstepError, ValueError):
    """A checkpoint is missing, damaged, or belongs to something else."""


class RecordingError(LockstepError, ValueError):
    """A recording is missing, damaged, hostile, or does not fit the model it is replayed on."""


class ParityError(LockstepError, AssertionError):
    """Two things that must agree do not."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the message for an unknown name: the name, the nearest known names, then all of them.

    Example:
        >>> unknown_name("train backend", "fsdp", ["local", "fsdp2"])
        "unknown train backend 'fsdp'; did you mean 'fsdp2'? Known: fsdp2, local"
    """
    names = sorted(known)
    near = difflib.get_close_matches(name, names, n=3, cutoff=0.6)
    hint = f"; did you mean {' or '.join(repr(n) for n in near)}?" if near else "."
    return f"unknown {kind} {name!r}{hint} Known: {', '.join(names)}"
