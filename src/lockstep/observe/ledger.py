"""ledger.jsonl: what became of every sample that a run asked for, and the check that none was lost or trained
twice.

    {"id": "3/12/5", "step": 3, "seed": 7, "policy_versions": [3], "attempt": 1, "trained_step": 3,
     "dropped": null}

The lines of a step are written after its update, all at once, and before its line in metrics.jsonl. Where a
version without a ledger began the run, the first line is {"step": N, "since": N}.
"""

from __future__ import annotations

import tomllib
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from lockstep.errors import DataError
from lockstep.observe.files import read_plain
from lockstep.observe.run_history import (
    is_step,
    ledger_since,
    read_lines,
    rollout_counts,
    rollout_gaps,
    saves_rollouts,
    trained_samples,
)

_SHOWN = 20
_MOST = 2**20
"""Samples of a prompt: what a damaged config may ask the check to look for."""
Sample = tuple[int, int, int]
"""Step, prompt_index, and number among the samples of the prompt."""


def sample_id(step: int, prompt_index: int, sample: int) -> str:
    """Return the id of a sample in its run."""
    return f"{step}/{prompt_index}/{sample}"


@dataclass(frozen=True, kw_only=True, slots=True)
class LedgerCheck:
    """What the ledger of a run says of its finished steps."""

    steps: int
    since: int
    """The first step that it has to have: of a run that a version without a ledger began, the first after."""
    samples: int
    """That were asked for."""
    trained: int
    dropped: Mapping[str, int]
    """By reason."""
    asked_again: int
    """Samples that were asked for more than once."""
    problems: tuple[str, ...]
    """Samples that were lost, or trained twice, by id; and lines that contradict themselves."""

    def text(self) -> str:
        """For a terminal."""
        dropped = ", ".join(f"{count} dropped ({reason})" for reason, count in self.dropped.items())
        counts = [f"{self.trained} trained", dropped or "none dropped"]
        if self.asked_again:
            counts.append(f"{self.asked_again} asked for more than once")
        verdict = "none lost, none trained twice"
        if self.problems:
            verdict = f"{len(self.problems)} problem{'s' * (len(self.problems) > 1)}"
        since = f" since step {self.since}" if self.since else ""
        steps = f"{self.steps} steps{since}"
        lines = [f"ledger: {self.samples} samples in {steps}: {', '.join(counts)}; {verdict}"]
        more = len(self.problems) - _SHOWN
        shown = [*self.problems[:_SHOWN], *([f"... and {more} more"] if more > 0 else [])]
        return "\n".join(f"  {line}" for line in (*shown, *lines))

    def as_dict(self) -> dict[str, Any]:
        """As JSON."""
        return asdict(self)


def check_ledger(run: Path) -> LedgerCheck:
    """Check the ledger of a run against its config and the steps in metrics.jsonl. Lines of the step that was
    going on when the run ended do not count: --resume does that step again.

    Raises:
        DataError: the run has no ledger.
        CheckpointError: a file is damaged.
    """
    path, trained, begin = run / "ledger.jsonl", trained_samples(run), ledger_since(run)
    if not path.is_file() and (begin is None or begin not in trained):
        raise DataError(f"no-such-file: {run}: has no ledger.jsonl: it is no RL run, or has finished no step")
    steps, going_on = sorted(trained), max(trained, default=-1) + 1
    problems, rows, since = list[str](), dict[Sample, list[Mapping[str, Any]]](), 0
    for number, row in enumerate(read_lines(path) if path.is_file() else (), 1):
        if number == 1 and is_step(row.get("since")):
            since = row["since"]
            continue
        sample, wrong = _sample(row)
        if wrong is not None:
            problems.append(f"line {number}: {wrong}")
        if sample is not None and sample[0] != going_on:
            rows.setdefault(sample, []).append(row)
    trained = {step: count for step, count in trained.items() if step >= since}
    if begin is not None and begin < since:
        problems.append(f"the ledger begins with step {since}, the run with step {begin}: lines were lost")
    problems += rollout_gaps(run, steps, saves=saves_rollouts(run)) + rollout_counts(run, trained)
    problems += _repeated(rows) + _missing(rows, trained, *_asked_per_step(run / "config.toml"))
    every = [row for same in rows.values() for row in same]
    dropped = Counter(str(row["dropped"]) for row in every if row.get("dropped") is not None)
    return LedgerCheck(
        steps=len({step for step, _, _ in rows}),
        since=since,
        samples=len(rows),
        trained=sum(row.get("trained_step") is not None for row in every),
        dropped=dict(sorted(dropped.items())),
        asked_again=sum(same[0].get("attempt") != 1 for same in rows.values()),
        problems=tuple(problems),
    )


def _sample(row: Mapping[str, Any]) -> tuple[Sample | None, str | None]:
    """The sample of a line, if it has an id, and what is wrong with the line."""
    name, step, versions = row.get("id"), row.get("step"), row.get("policy_versions")
    parts = name.split("/") if isinstance(name, str) else []
    if len(parts) != 3 or not all(part.isdecimal() and len(part) < 19 for part in parts):
        return None, f"id {name!r:.80} is not STEP/PROMPT/SAMPLE"
    sample = (int(parts[0]), int(parts[1]), int(parts[2]))
    trained, dropped = row.get("trained_step"), row.get("dropped")
    if step != sample[0]:
        return sample, f"sample {name} has step {step!r:.80}"
    if (trained is None) == (dropped is None):
        how = "neither trained nor dropped" if trained is None else "both trained and dropped"
        return sample, f"sample {name} was {how}"
    if trained not in (None, step):
        return sample, f"sample {name} was trained in step {trained!r:.80}"
    if not (isinstance(versions, list) and versions and all(is_step(v) and v <= sample[0] for v in versions)):
        return sample, f"sample {name} has policy_versions {versions!r:.80}"
    if not (is_step(row.get("attempt")) and row["attempt"] > 0):
        return sample, f"sample {name} has attempt {row.get('attempt')!r:.80}"
    return sample, None


def _repeated(rows: Mapping[Sample, Sequence[Mapping[str, Any]]]) -> list[str]:
    problems = []
    for sample, same in rows.items():
        times = sum(row.get("trained_step") is not None for row in same)
        if len(same) > 1:
            what = f"was trained {times} times" if times > 1 else f"has {len(same)} lines"
            problems.append(f"sample {sample_id(*sample)} {what}")
    return problems


def _missing(
    rows: Mapping[Sample, Sequence[Mapping[str, Any]]],
    trained: Mapping[int, float | None],
    prompts: int,
    group_size: int,
) -> list[str]:
    """What is not there of the samples that every finished step has asked for."""
    problems: list[str] = []
    found = defaultdict[int, dict[int, set[int]]](lambda: defaultdict(set))
    counts = Counter[int]()
    for (step, prompt, number), same in rows.items():
        found[step][prompt].add(number)
        counts[step] += same[0].get("trained_step") is not None
    for step in sorted(found.keys() | trained.keys()):
        if step not in trained:
            problems.append(f"step {step} is in the ledger, and not in metrics.jsonl")
            continue
        if step not in found:
            problems.append(f"step {step} has no line")
            continue
        lost = list(_lost(step, found[step], group_size))
        first = sum(any(number < group_size for number in numbers) for numbers in found[step].values())
        if first != prompts:
            lost.append(f"step {step} has samples of {first} prompts, and began with {prompts}")
        if not lost and trained[step] is not None and counts[step] != trained[step]:
            lost.append(f"step {step} trained {trained[step]} samples, and the ledger has {counts[step]}")
        problems += lost
    return problems


def _lost(step: int, found: Mapping[int, set[int]], group_size: int) -> Iterator[str]:
    """Samples are asked for in whole groups, one in each round of dynamic sampling."""
    for prompt, numbers in found.items():
        for asked in sorted({number // group_size for number in numbers}):
            for number in range(asked * group_size, (asked + 1) * group_size):
                if number not in numbers:
                    yield f"sample {sample_id(step, prompt, number)} was lost: it has no line"


def _asked_per_step(config: Path) -> tuple[int, int]:
    """Prompts of a step, and samples of a prompt. Raises DataError."""
    text = read_plain(config, DataError)
    try:
        rollout = tomllib.loads(text.decode("utf-8")).get("rollout")
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise DataError(f"not-toml: {config}: is not TOML: {error}") from error
    table = rollout if isinstance(rollout, dict) else {}
    prompts, group_size = table.get("prompts_per_step"), table.get("group_size")
    if not (isinstance(prompts, int) and isinstance(group_size, int) and prompts > 0 < group_size < _MOST):
        raise DataError(
            f"wrong-field: {config}: has no rollout.prompts_per_step and rollout.group_size, so nobody "
            "knows how many samples a step asked for; restore the file"
        )
    return prompts, group_size
