"""The history in a run's files: which steps are done, and whether metrics.jsonl has all of them."""

from __future__ import annotations

import os
import re
import shlex
import tomllib
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeGuard

from lockstep.errors import CheckpointError
from lockstep.observe.files import JSON_BYTES, check_inside, open_plain, parse_json, read_json
from lockstep.observe.text import counted

EVALUATION = "evaluation"
"""The key that marks an evaluation's line in metrics.jsonl."""
EVALUATIONS = ("before", "during", "after")
"""Its values."""

_TAIL = 1 << 16
"""Bytes in which the last line of a ledger is looked for."""

STEP_FILE = re.compile(r"(evaluation-)?step-(\d{1,18})\.jsonl")
"""A file of rollouts/."""

FLAGS = "resume_flags"
"""Field of manifest.json: what `--resume RUN_DIR` needs more, to have the ranks that the run had."""

_FLAGS = re.compile(r"--ranks \d{1,7}|\(on \d{1,7} ranks, under the launcher that started them\)")

LEDGER_SINCE = "ledger_since"
"""Field of manifest.json: the first step of which the run has lines in ledger.jsonl."""

RANK_TIMEOUT = "rank_timeout"
"""Field of manifest.json: seconds that a rank waits for another; null for a single process."""

FILES = (
    "config.toml",
    "manifest.json",
    "metrics.jsonl",
    "ledger.jsonl",
    "left_out.jsonl",
    "summary.json",
    "lock",
)
FOLDERS = ("rollouts", "checkpoints", "logs", "recordings", "export", "engine", "journal")


@dataclass(frozen=True, kw_only=True, slots=True)
class Line:
    """One line of metrics.jsonl or of ledger.jsonl."""

    number: int
    """Counted from 1."""
    raw: bytes
    """With its line end."""
    step: int
    evaluation: str | None
    """None: a training step."""


def check_layout(run: Path) -> None:
    """Check that a run directory consists of plain files and folders, and of no link that leads out of it.

    Raises:
        CheckpointError: one of them is of another kind (a fifo, a device), or a link out of the directory.
    """
    logs = run / "logs"
    for path in [*(run / name for name in FOLDERS), *(logs.iterdir() if logs.is_dir() else ())]:
        if path.is_symlink() or path.exists():
            check_inside(path, CheckpointError, root=run)
            if not path.is_dir() and (path.parent == run or not path.is_file()):
                raise CheckpointError(f"not-a-file: {path} is not a folder; move it away")
    for path in (run / name for name in FILES):
        if path.is_symlink() or path.exists():
            check_inside(path, CheckpointError, root=run)
            if not path.is_file():
                raise CheckpointError(f"not-a-file: {path} is not a regular file; move it away")


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Read the objects of a JSONL file; a last line that a crash truncated is left out.

    Raises:
        CheckpointError: any other line is not a JSON object, or the file cannot be read.
    """
    with open_plain(path, CheckpointError) as file:
        return [row for _, _, row in objects(file, path)]


def metric_lines(path: Path) -> list[Line]:
    """Read the lines of metrics.jsonl or ledger.jsonl, except a truncated last one; none if there is no such
    file.

    Raises:
        CheckpointError: a line is no JSON object with a step, and maybe an evaluation.
    """
    if not path.exists():
        return []
    with open_plain(path, CheckpointError) as file:
        return [_line(number, raw, row, path) for number, raw, row in objects(file, path)]


def bytes_before(path: Path, step: int) -> int:
    """Return how many bytes of ledger.jsonl, whose lines are in the order of their steps, are of the steps
    before `step`. Raises as `metric_lines`."""
    size = 0
    with open_plain(path, CheckpointError) as file:
        for number, raw, row in objects(file, path):
            if _line(number, raw, row, path).step >= step:
                break
            size = file.tell()
    return size


def objects(file: BinaryIO, path: Path) -> Iterator[tuple[int, bytes, dict[str, Any]]]:
    """Yield (number, bytes, value) of each whole line that is not blank."""
    number = 0
    while raw := file.readline(JSON_BYTES + 1):
        number += 1
        where = f"{path}, line {number}"
        if not raw.endswith(b"\n"):
            if len(raw) > JSON_BYTES:
                raise CheckpointError(
                    f"too-large: {where} has more than {JSON_BYTES:,} bytes; no line is that long"
                )
            return
        if not raw.strip():
            continue
        row = parse_json(raw, where, CheckpointError)
        if not isinstance(row, dict):
            raise CheckpointError(f"wrong-type: {where}: expected a JSON object, got {type(row).__name__}")
        yield number, raw, row


def _line(number: int, raw: bytes, row: dict[str, Any], path: Path) -> Line:
    step, evaluation = row.get("step"), row.get(EVALUATION)
    if not is_step(step):
        raise CheckpointError(
            f"wrong-field: {path}, line {number}: field 'step' is {step!r:.80}, not a number of steps; the "
            "file is damaged"
        )
    if evaluation is not None and evaluation not in EVALUATIONS:
        raise CheckpointError(
            f"wrong-field: {path}, line {number}: field {EVALUATION!r} is {evaluation!r:.80}, not one of "
            f"{', '.join(EVALUATIONS)}; the file is damaged"
        )
    return Line(number=number, raw=raw, step=step, evaluation=evaluation)


def is_step(value: Any) -> TypeGuard[int]:
    """Return whether a JSON value can be a number of steps."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 10**18


def recorded_steps(run: Path) -> tuple[int, Path]:
    """Return the largest number of done steps in a run's files, except checkpoints, and the file with it.

    The rollouts and the ledger lines of a step are written before its line of metrics: they only show that
    the steps before are done.

    Raises:
        CheckpointError: metrics.jsonl is damaged, or a file cannot be read.
    """
    metrics, summary, rollouts = run / "metrics.jsonl", run / "summary.json", run / "rollouts"
    ledger = run / "ledger.jsonl"
    counts = [(line.step + (line.evaluation is None), metrics) for line in metric_lines(metrics)]
    if summary.exists():
        counts.append((_steps_of_summary(summary), summary))
    if (begun := last_step(ledger)) is not None:
        counts.append((begun, ledger))
    for file in rollouts.iterdir() if rollouts.is_dir() else ():
        if match := STEP_FILE.fullmatch(file.name):
            counts.append((int(match[2]), file))
    return max(counts, default=(0, metrics), key=lambda each: each[0])


def last_step(ledger: Path) -> int | None:
    """Return the step of the last whole line; None: there is none."""
    if not ledger.exists():
        return None
    with open_plain(ledger, CheckpointError) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - _TAIL))
        lines = file.read().split(b"\n")[:-1]
    if not any(line.strip() for line in lines):
        return None
    row = parse_json([line for line in lines if line.strip()][-1], f"{ledger}, last line", CheckpointError)
    step = row.get("step") if isinstance(row, dict) else None
    return step if is_step(step) else None


def way_on(run: Path, flags: str | None = None) -> str:
    """Return the command that goes on with an unfinished run: `--resume`; or, where steps are done and none
    of them is in a checkpoint, `--restart`.

    Args:
        flags: that spread it over ranks; None: those in its manifest.

    Raises:
        CheckpointError: as `recorded_steps`.
    """
    saved = any(run.glob("checkpoints/step-*/complete.json"))
    how = "--resume" if saved or not recorded_steps(run)[0] else "--restart"
    if flags is None:
        flags = _recorded_flags(run / "manifest.json")
    command = f"lockstep train {how} {shlex.quote(str(run))}"
    return f"{command} {flags}" if flags else command


def _recorded_flags(manifest: Path) -> str:
    """The flags in a manifest, if they are what a run writes: they become part of a command."""
    try:
        value = read_json(manifest, CheckpointError)
    except CheckpointError:  # what reads it for a resume says what is wrong with it
        return ""
    flags = value.get(FLAGS) if isinstance(value, dict) else None
    return flags if isinstance(flags, str) and _FLAGS.fullmatch(flags) else ""


def recorded_ranks(run: Path) -> int:
    """Return the number of ranks that a run's manifest names; 1 if it names none."""
    words = _recorded_flags(run / "manifest.json").split()
    return int(words[1]) if words[:1] == ["--ranks"] else 1


def _steps_of_summary(path: Path) -> int:
    """The steps in a summary; 0 if it has none: every run writes its summary again."""
    value = read_summary(path)
    steps = value.get("steps") if value is not None else None
    return steps if is_step(steps) else 0


def read_summary(path: Path) -> dict[str, Any] | None:
    """Read summary.json; None: there is none, or its text is damaged (a resumed run writes it again).

    Raises:
        CheckpointError: it cannot be read, or is no plain file.
    """
    if not path.exists():
        return None
    with open_plain(path, CheckpointError, root=path.parent) as file:
        raw = file.read(JSON_BYTES)
    try:
        value = parse_json(raw, str(path), CheckpointError)
    except CheckpointError:
        return None
    return value if isinstance(value, dict) else None


def check_lines(
    path: Path,
    lines: Sequence[Line],
    *,
    done: int,
    evaluations: Collection[tuple[int, str]],
    saved: Collection[int] = (),
) -> set[tuple[int, str]]:
    """Compare metrics.jsonl with a checkpoint: each step below `done` has one line, in order, and so have
    `evaluations`, (steps done, name), in between. saved: steps of the checkpoints that there are.

    Returns:
        Those of the `evaluations` that have a line. Only one of the checkpoint's own weights, which can be
        made again, may have none.

    Raises:
        CheckpointError: names the first line that is missing or stands twice, and the ways to go on.
    """
    steps = [line.step for line in lines if line.evaluation is None]
    expected, seen = 0, set[tuple[int, str]]()
    for line in lines:
        if line.evaluation is None:
            counts = line.step < done
        else:
            key = (line.step, line.evaluation)
            counts = line.step < done or key in evaluations
        if not counts:
            continue
        if line.step > expected and expected not in steps:
            break
        if line.step != expected or (line.evaluation is not None and key in seen):
            raise _misplaced(path, line)
        if line.evaluation is None:
            expected += 1
        else:
            seen.add(key)
    if expected < done:
        raise _missing(
            path,
            f"step {expected}",
            f'{{"step": {expected}}}',
            done=done,
            saved=[n for n in saved if n <= expected],
        )
    for step, name in sorted(evaluations):
        if (step, name) not in seen and step < done:
            text = f'{{"step": {step}, "{EVALUATION}": "{name}"}}'
            raise _missing(
                path,
                f"evaluation {name!r} after {step} steps",
                text,
                done=done,
                saved=[n for n in saved if n < step],
            )
    return seen & set(evaluations)


def _misplaced(path: Path, line: Line) -> CheckpointError:
    what = f"step {line.step}"
    if line.evaluation is not None:
        what = f"evaluation {line.evaluation!r} after {line.step} steps"
    return CheckpointError(
        f"out-of-order: {path}, line {line.number}: {what} occurs twice or out of order; the file was "
        "edited or damaged: restore it from a copy, or remove the extra line"
    )


def _missing(path: Path, what: str, text: str, *, done: int, saved: Collection[int]) -> CheckpointError:
    back = f"go back with --checkpoint STEP (available: {sorted(saved)}), " if saved else ""
    return CheckpointError(
        f"incomplete: {path} has no line for {what}, although the checkpoint is after {done} steps, so "
        f"lines were lost. Restore the file from a copy, {back}or insert the line {text} in its place, "
        "which marks the gap"
    )


# Whether metrics.jsonl, ledger.jsonl and rollouts/ of a run tell of the same steps.
#
# A step writes its ledger lines and its rollouts before its line of metrics.jsonl: a step that has the last
# has all three. From which step on a run has a ledger is in its manifest.


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
        back = f" go back with --checkpoint STEP (available: {earlier})," if earlier else ""
        raise CheckpointError(
            f"incomplete: {path} has {found} step {step}, but metrics.jsonl has {told}, so lines were lost. "
            f"Restore the file from a copy,{back} or "
            f'leave only the line {{"step": {done}, "since": {done}}} in it; '
            "the ledger then begins there, and `lockstep status --ledger` says what it lacks"
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
        found.append(f"ledger.jsonl has no lines for step {lacks}, but metrics.jsonl has steps up to {last}")
    if told is not None and told > last + 1 and not running:
        found.append(f"ledger.jsonl has lines for step {told}, but metrics.jsonl has only steps up to {last}")
    return found + rollout_gaps(run, steps, saves=_saves(config), running=running)


def rollout_gaps(run: Path, steps: Sequence[int], *, saves: bool, running: bool = False) -> list[str]:
    """Say which files rollouts/ lacks, or has too many, for the steps in metrics.jsonl. running: as of
    `gaps`."""
    folder = run / "rollouts"
    names = [match for path in folder.glob("*.jsonl") if (match := STEP_FILE.fullmatch(path.name))]
    there = {int(match[2]) for match in names if not match[1]}
    found, lacks = list[str](), sorted(set(steps) - there)
    if saves and lacks:
        many = counted(len(lacks), "step")
        found.append(f"rollouts/ lacks the files of {many}, beginning with step {lacks[0]}")
    if running:
        return found
    most = max(steps, default=-1) + 1
    found += [
        f"rollouts/ has step {step}, but metrics.jsonl does not" for step in sorted(there) if step > most
    ]
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
            found.append(
                f"rollouts/{path.name} has {rows} lines, but its step trained on {count:.0f} samples"
            )
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
