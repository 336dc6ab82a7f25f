"""run_state.json of a checkpoint: what the loop needs to go on, and whether that is what it has written."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError
from lockstep.observe.run_dir import is_evaluation
from lockstep.observe.run_history import EVALUATIONS, is_step
from lockstep.observe.text import printable


def seen_field(role: str) -> str:
    """The field of run_state.json with the number of inputs that a recorder has seen."""
    return "inputs_seen" if role == "policy" else f"inputs_seen_{role}"


def checked_run_state(state: dict[str, Any], path: Path) -> dict[str, Any]:
    """Return the run_state, its fields checked to be what `Session` writes. Raises CheckpointError."""
    evaluations = state.get("evaluations")
    known = isinstance(evaluations, dict) and all(
        name in EVALUATIONS and is_evaluation(each) for name, each in evaluations.items()
    )
    if known:  # what is set by default is missing where an earlier version wrote it
        state.setdefault("evaluated", [[each["step"], name] for name, each in state["evaluations"].items()])
    state.setdefault("inputs_seen", 0)
    state.setdefault("gap_checked", True)
    evaluated, seconds = state.get("evaluated"), state.get("wall_seconds")
    good = {
        "step": is_step(state.get("step")),
        "wall_seconds": isinstance(seconds, int | float) and 0 <= seconds < 1e12,
        "trained_tokens": is_step(state.get("trained_tokens")),
        "inputs_seen": is_step(state["inputs_seen"]),
        "gap_checked": isinstance(state["gap_checked"], bool),
        "inputs_seen_value": is_step(state.get("inputs_seen_value", 0)),
        "evaluations": known,
        "evaluated": isinstance(evaluated, list) and all(map(_is_evaluated, evaluated)),
    }
    if known and good["evaluated"]:
        last = {name: step for step, name in state["evaluated"]}
        good["evaluations"] = last == {name: each["step"] for name, each in state["evaluations"].items()}
    for name, right in good.items():
        if not right:
            raise CheckpointError(
                f"wrong-field: {path}: field {name!r} of run_state.json is {state.get(name)!r:.200}",
                name=name,
            )
    return state


def _is_evaluated(value: Any) -> bool:
    """Return whether `value` is [steps done, name of an evaluation]."""
    return isinstance(value, list) and len(value) == 2 and is_step(value[0]) and value[1] in EVALUATIONS


def algorithm_notes(now: Mapping[str, Any] | None, then: Mapping[str, Any]) -> Iterator[str]:
    """Say where an option that the config leaves open means something else than when the run began.

    Args:
        now: the algorithm's resolved options; None: a run without an algorithm.
        then: the manifest.
    """
    before = then.get("algorithm")
    if now is None or "axes" not in then:
        return
    if before is None:  # begun before 2026-11-22, when these two were corrected
        if now["name"] == "rloo" or now["kl"]["coef"] > 0:
            yield (
                "the run was started by a version in which rloo had a ratio per token and KL other "
                "estimators and bounds (CHANGELOG.md): from here on its loss may be another one"
            )
        return
    for key, value in now.items():
        old = before.get(key) if isinstance(before, Mapping) else None
        if old != value:
            yield (
                f"the run was started with algorithm.{key} = {printable(str(old))} and goes on with {value}"
            )
