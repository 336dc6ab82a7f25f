"""SFT before RL: the run that `warm_start` names, and the RL run that begins from its export."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any, cast

from lockstep.config.load import load_run, override, to_values
from lockstep.config.run import GRPORun, SFTRun
from lockstep.errors import CheckpointError
from lockstep.observe.run_history import read_summary

FOLDER = "warm_start"
"""Of the run directory."""


def warm_start_of(run: GRPORun, folder: Path) -> SFTRun:
    """Return the run that `run.warm_start` names, with the model, seed and chat template of `run`, to be
    trained in `folder`/warm_start.

    Raises:
        ConfigError: there is no such file or recipe, or it is not of kind sft.
    """
    assert run.warm_start is not None, "the run has a warm start"
    own: dict[str, Any] = {
        "run_dir": str(folder / FOLDER),
        "seed": run.seed,
        "model": to_values(run.model),
        "data.chat_template": run.data.chat_template,
        "data.chat_template_kwargs": run.data.chat_template_kwargs,
        "checkpoint.export_at_end": True,
    }
    return cast(SFTRun, load_run(run.warm_start, kind="sft", overrides=own))


def after_warm_start(run: GRPORun, folder: Path) -> GRPORun:
    """Return the run in `folder` that begins from the export of its warm start."""
    model = {"model.name": str(folder / FOLDER / "export"), "model.revision": None}
    own = {"run_dir": str(folder), "warm_start": None, **model}
    return cast(GRPORun, override(run, own, origin="warm_start"))


def warm_start_seconds(folder: Path) -> dict[str, float]:
    """Return warm_start_seconds for the summary of the run in `folder`; empty if it began without one."""
    with contextlib.suppress(CheckpointError):  # a run does not fail at its end for want of this number
        seconds = (read_summary(folder / FOLDER / "summary.json") or {}).get("wall_seconds")
        if isinstance(seconds, int | float):
            return {"warm_start_seconds": seconds}
    return {}
