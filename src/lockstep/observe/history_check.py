"""Whether metrics.jsonl, ledger.jsonl and rollouts/ of a run tell of the same steps.

A step writes its ledger lines and its rollouts before its line of metrics.jsonl: a step that has the last has
all three. From which step on a run has a ledger is in its manifest.
"""

from __future__ import annotations

import tomllib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import CheckpointError
from lockstep.observe.files import open_plain, read_json
from lockstep.observe.run_history import LEDGER_SINCE, STEP_FILE, is_step, last_step, objects, read_lines


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerCounts:
    """Lines of ledger.jsonl by step."""

    since: int | None
    """The first step that it has to have, by its first line; None: the line does not say."""
    lines: Mapping[int, int]
    trained: Mapping[int, int]


def count_ledger(path: Path) -> LedgerCounts:
    """Count the lines of a ledger; none if there is no such file. Raises CheckpointError: it is damaged."""
    since, lines, trained = None, Counter[int](), Counter[int]()
    if path.exists():
        with open_plain(path, CheckpointError) as file:
            for number, _, row in objects(file, path):
                step = row.get("step")
                if number == 1 and is_step(row.get("since")):
                    since = row["since"]
                elif is_step(step):
                    lines[step] += 1
                    trained[step] += row.get("trained_step") is not None
    return LedgerCounts(since=since, lines=lines, trained=trained)


def trained_samples(run: Path) -> dict[int, float | None]:
    """Return the steps in metrics.jsonl, and how many samples each was trained on; None: its line does not
    say."""
    path = run / "metrics.jsonl"
    rows = read_lines(path) if path.is_file() else []
    steps = (row for row in rows if "evaluation" not in row and is_step(row.get("step")))
    return {row["step"]: row.get("rollout/samples") for row in steps}


def ledger_since(run: Path) -> int | None:
    """Return the first step of which the run has to have ledger lines; None: it was begun by a version that
    does not say, or is no RL run."""
    if not (run / "manifest.json").is_file():
        return None
    manifest = read_json(run / "manifest.json", CheckpointError, root=run)
    since = manifest.get(LEDGER_SINCE) if isinstance(manifest, dict) else None
    return since if is_step(since) else None


def check_against_ledger(run: Path, *, done: int, saved: Sequence[int]) -> int:
    """Check that ledger.jsonl has the samples of every step that is done, as many as metrics.jsonl says.

    Args:
        saved: steps of the checkpoints that there are.

    Returns:
        The first step of which the ledger has lines, or will have.

    Raises:
        CheckpointError: names the first step that it lacks, and the ways to go on.
    """
    path = run / "ledger.jsonl"
    counts, samples = count_ledger(path), trained_samples(run)
    since = counts.since
    if since is None and not counts.lines:
        since = ledger_since(run)
        if since is None:
            return done
    since = since or 0
    for step in range(since, done):
        expected = samples.get(step)
        if counts.lines.get(step) and expected in (None, counts.trained[step]):
            continue
        found = "no line of" if not counts.lines.get(step) else f"{counts.trained[step]} trained samples of"
        told = f"{expected:.0f}" if isinstance(expected, int | float) else "some"
        earlier = sorted(each for each in saved if 0 < each <= step)
        back = f" go back by --checkpoint STEP (there are {earlier})," if earlier else ""
        raise CheckpointError(
            f"incomplete: {path}: has {found} step {step}, and metrics.jsonl has {told}: lines were lost. "
            "Restore the "
            f'file from a copy,{back} or leave only the line {{"step": {done}, "since": {done}}} in it: the '
            "ledger then begins there, and `lockstep status --ledger` says what it lacks",
            name=f"step {step}",
        )
    return since


def gaps(run: Path, steps: Sequence[int], *, running: bool = False) -> list[str]:
    """Say where the files of a run do not tell of the same steps; quick, so by their first and last lines and
    by their names.

    Args:
        steps: those in metrics.jsonl.
        running: it may have done more steps since they were read.
    """
    config = _config(run / "config.toml")
    if config.get("kind") not in ("grpo", "ppo") or not steps:
        return []
    last, found = max(steps), list[str]()
    since, ledger = ledger_since(run), run / "ledger.jsonl"
    told = last_step(ledger)
    if since is not None and since <= last and (told is None or told < last):
        lacks = since if told is None else told + 1
        found.append(f"ledger.jsonl lacks the lines of step {lacks}; metrics.jsonl has steps up to {last}")
    if told is not None and told > last + 1 and not running:
        found.append(f"ledger.jsonl has lines of step {told}; metrics.jsonl has steps up to {last}")
    return found + rollout_gaps(run, steps, saves=_saves(config), running=running)


def rollout_gaps(run: Path, steps: Sequence[int], *, saves: bool, running: bool = False) -> list[str]:
    """Say which files rollouts/ lacks, or has too many, for the steps in metrics.jsonl. running: as of
    `gaps`."""
    folder = run / "rollouts"
    names = [match for path in folder.glob("*.jsonl") if (match := STEP_FILE.fullmatch(path.name))]
    there = {int(match[2]) for match in names if not match[1]}
    found, lacks = list[str](), sorted(set(steps) - there)
    if saves and lacks:
        found.append(f"rollouts/ lacks the files of {len(lacks)} steps; the first is step {lacks[0]}")
    if running:
        return found
    most = max(steps, default=-1) + 1
    found += [f"rollouts/ has step {step}; metrics.jsonl has not" for step in sorted(there) if step > most]
    return found


def rollout_counts(run: Path, samples: Mapping[int, float | None]) -> list[str]:
    """Say which files of rollouts/ have more or fewer rows than their step was trained on."""
    found = list[str]()
    for step, count in sorted(samples.items()):
        path = run / "rollouts" / f"step-{step:06d}.jsonl"
        if count is None or not path.is_file():
            continue
        with open_plain(path, CheckpointError) as file:
            rows = sum(block.count(b"\n") for block in iter(lambda: file.read(1 << 20), b""))
        if rows != count:
            found.append(f"rollouts/{path.name} has {rows} lines, and its step trained {count:.0f} samples")
    return found


def saves_rollouts(run: Path) -> bool:
    """Return whether the run writes rollouts/."""
    return _saves(_config(run / "config.toml"))


def _saves(config: Mapping[str, Any]) -> bool:
    rollout = config.get("rollout")
    return isinstance(rollout, dict) and rollout.get("save") is True


def _config(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):  # whoever needs it says what is wrong with it
        return {}
