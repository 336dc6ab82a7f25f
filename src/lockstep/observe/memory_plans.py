"""The memory plans in a run's manifest: the one it trains with, all of them by step, and those to go on with
where memory runs out all the same.

    "axes": {"memory": {"settings": {...}, "line": "fits in 71 of 79 GiB: ...", "why": ..., "then": [...]}}
    "plans": [{"from_step": 0, "line": ..., "settings": {...}, "why": ...}, ...]

The smaller plans are chosen at the start, with the plan itself, by every rank alike. What starts the ranks
again only moves the next one into place, while no rank runs: a run that goes on keeps the plan of its
manifest.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError
from lockstep.observe.files import read_json, write_json
from lockstep.observe.run_history import is_step, recorded_steps
from lockstep.observe.text import printable

REPLANS = 2
"""How many times a run goes on with a smaller plan."""
FIRST = "the fastest that fits"
"""Why a plan was chosen that no other came before."""
_GIB = 2**30


@dataclass(frozen=True, kw_only=True, slots=True)
class OutOfMemory:
    """A run with a smaller plan has run out of memory."""

    step: int
    run_dir: str
    """Empty: it was another rank."""

    @classmethod
    def of(cls, error: BaseException) -> OutOfMemory | None:
        """Return what `note` noted on the error; None: nothing."""
        found = vars(error).get("ran_out_of_memory")
        return found if isinstance(found, cls) else None

    def note(self, error: BaseException) -> None:
        """Note on the error that ends the run that it can go on. An attribute: the error itself is that of
        whoever ran out of memory, and stays what it is for a caller of the Python API."""
        vars(error)["ran_out_of_memory"] = self


def by_step(before: Sequence[Any], plan: Mapping[str, Any], done: int) -> list[Mapping[str, Any]]:
    """Return the plans of a run that goes on after `done` steps with `plan`.

    Args:
        before: those in its manifest. Those of later steps do not count: the run has gone back.
    """
    entries: list[Mapping[str, Any]] = [
        each for each in before if isinstance(each, dict) and is_step(each.get("from_step"))
    ]
    kept = [each for each in entries if each["from_step"] <= done]
    if kept and kept[-1].get("settings") == plan["settings"]:
        return kept
    return [*kept, {"from_step": done, **{name: plan[name] for name in ("line", "settings", "why")}}]


def can_go_on(run: Path, *, copied: bool) -> bool:
    """Return whether the run in a folder can be resumed: it has a checkpoint, a copy in memory, or no step is
    done."""
    return copied or bool(_saved(run)) or not recorded_steps(run)[0]


def take_smaller(run: Path, *, failed: int, copy: str | None = None) -> str | None:
    """Move the next smaller plan into the place of the one with which memory ran out.

    Args:
        run: the run's folder, which no process writes.
        failed: the step in which memory ran out.
        copy: the newest copy of the run's state in memory, in words, such as "step 5"; None: there is none.

    Returns:
        A line for the user; None: there is no smaller plan, or nothing to go on from.

    Raises:
        CheckpointError: the manifest is damaged.
    """
    if not (run / "manifest.json").is_file():  # on another machine
        return None
    manifest = read_json(run / "manifest.json", CheckpointError, root=run)
    axes = manifest.get("axes") if isinstance(manifest, dict) else None
    memory = axes.get("memory") if isinstance(axes, dict) else None
    then = memory.get("then") if isinstance(memory, dict) else None
    if not isinstance(axes, dict) or not isinstance(memory, dict) or not then:
        return None
    if not can_go_on(run, copied=copy is not None):
        return None
    try:
        needed, total = (round(memory[name] / _GIB) for name in ("peak_bytes", "total_bytes"))
        why = f"out of memory in step {failed} with the plan that was to fit in {needed} of {total} GiB"
        axes["memory"], line = {**then[0], "why": why, "then": then[1:]}, printable(str(then[0]["line"]))
    except (KeyError, TypeError) as error:
        raise CheckpointError(
            f"wrong-field: {run / 'manifest.json'}: axes.memory is not a plan that a run writes ({error!r}); "
            "restore the file from a copy",
            name="axes",
        ) from error
    write_json(run / "manifest.json", manifest)
    return f"{why}: goes on from {copy or f'step {max(_saved(run), default=0)}'} with: {line}"


def _saved(run: Path) -> list[int]:
    """The steps of its checkpoints."""
    return [
        int(file.parent.name.removeprefix("step-")) for file in run.glob("checkpoints/step-*/complete.json")
    ]
