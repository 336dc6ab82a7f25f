"""`lockstep score`: score the samples in a file.

lockstep score --data samples.jsonl --reward math --out scored.jsonl
lockstep score --data samples.jsonl --reward my_rewards:closeness format=0.2 --out scored.jsonl
lockstep score --data samples.jsonl --reward-model FOLDER --out scored.jsonl
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from lockstep.cli.batch_common import (
    BatchFlags,
    Rows,
    check_other_file,
    file_digest,
    parse_command,
    run_command,
)
from lockstep.config.batch import ScoreConfig
from lockstep.config.load import to_values
from lockstep.config.model import ModelConfig
from lockstep.errors import ConfigError, DataError, underway
from lockstep.loop.interrupt import Interrupt
from lockstep.observe.files import check_writable
from lockstep.observe.text import echo

if TYPE_CHECKING:
    from lockstep.rollout.rows import RowFile
    from lockstep.rollout.scoring import Judges, ScoreTotals, ToScore

USAGE = """usage: lockstep score [FILE.toml] --data FILE --reward NAME... --out FILE [OPTIONS]
       lockstep score --data FILE --reward-model MODEL --out FILE [OPTIONS]

Add `reward` to the rows of a file that `lockstep generate` wrote, or of any other file with prompts and
completions. Run the same command again to continue an interrupted one.

  --data FILE            samples, .jsonl or .parquet
  --reward NAME...       format, ids, length, math, verifier or module:attribute; NAME=WEIGHT; or a TOML table
                         in quotes: '{name = "math", answer = "boxed"}'
  --reward-model MODEL   a folder or hub name of a sequence classifier with one label
  --out FILE             output file

`lockstep score --help-all` lists every setting."""
SHORT = {"--reward": "--rewards...", "--rewards": "--rewards...", "--reward-model": "--reward-model.name"}


@dataclass(frozen=True, kw_only=True)
class Flags(BatchFlags):
    """Flags that are not settings."""

    data: Annotated[Path | None, tyro.conf.arg(help="Samples, .jsonl or .parquet.", metavar="FILE")]


@dataclass(frozen=True, kw_only=True)
class Command(Flags):
    """A parsed command line."""

    config: ScoreConfig


def main(argv: Sequence[str]) -> int:
    """0 when all rows are there, 130 or 143 when a signal came before.

    Raises:
        ConfigError, DataError, ModelError, RewardError: what is in the file stays.
    """
    if not argv or argv[0] in ("-h", "--help"):
        echo(USAGE)
        return 0 if argv else 2
    command = parse(argv)
    return run_command("score", command, command.config, score, verdict)


def parse(argv: Sequence[str]) -> Command:
    """Check a command line down to the last setting; loads no torch.

    Raises:
        ConfigError: for everything that cannot be right.
    """
    config, values = parse_command("lockstep score", argv, ScoreConfig, flags=Flags, start={}, short=SHORT)
    if not values["print_config"]:
        for name in ("data", "out"):
            if values[name] is None:
                raise ConfigError(
                    f"missing-setting: --{name} is missing: lockstep score --data SAMPLES --out SCORED"
                )
        check_other_file(values["out"], values["data"])
    check_writable(values["json"])
    return Command(config=config, **values)


def score(command: Command, _: Interrupt) -> dict[str, Any]:
    """Score what is missing; the result."""
    from lockstep.rollout.rows import RowFile, check_out, read_rows
    from lockstep.rollout.scoring import check_columns, samples

    data, out, config = command.data, command.out, command.config
    assert data is not None and out is not None
    check_out(out)
    count = 0
    first: ToScore | None = None
    for item in samples(read_rows(data), str(data)):  # all of them, before anything is paid for
        first = first or item
        count += 1
    if first is None:
        raise DataError(f"nothing-left: --data {str(data)!r} has no rows; give a file with samples")
    check_columns(config, first)
    rows = RowFile(
        out,
        command="score",
        identity=identity(config, data),
        expected=count,
        overwrite=command.overwrite,
        may_differ=("settings.reward_model.token_budget",),
    )
    result: dict[str, Any] = {"data": str(data), "out": str(out), "settings": to_values(config)}
    with rows:
        if rows.complete:
            return result | {"outcome": "complete", "rows": count, "new_rows": 0}
        return result | _scored(command, rows, _judges(config, data))


def _scored(command: Command, rows: RowFile, judges: Judges) -> dict[str, Any]:
    from lockstep.rollout.rows import read_rows
    from lockstep.rollout.scoring import Hooks, samples, score_rows

    assert command.data is not None
    before, started = len(rows.done), time.perf_counter()
    if not command.quiet:
        there = f", of which {before} are there" if before else ""
        echo(f"score: {rows.expected} rows{there}", flush=True)
        for note in judges.rewards.notes() if judges.rewards is not None else ():
            echo(f"score: {note}", flush=True)
    try:
        with underway(lambda: len(rows.done) > before), Rows("score", quiet=command.quiet) as progress:
            items = samples(read_rows(command.data), str(command.data))
            window, hooks = command.config.window, Hooks(on_row=progress)
            totals = score_rows(items, judges, window=window, sink=rows, hooks=hooks)
    finally:
        judges.close()
    result = _result(rows, totals, before=before, seconds=time.perf_counter() - started)
    rows.finish(result)
    return result


def _result(rows: RowFile, totals: ScoreTotals, *, before: int, seconds: float) -> dict[str, Any]:
    good = totals.rows - totals.failed
    return {
        "outcome": "finished",
        "rows": len(rows.done),
        "resumed_rows": before,
        "new_rows": totals.rows,
        "mean_reward": totals.sum / good if good else None,
        "failed": totals.failed,
        "truncated": totals.truncated,
        "counts": dict(totals.counts),
        "seconds": seconds,
    }


def _judges(config: ScoreConfig, data: Path) -> Judges:
    from lockstep.rollout.rewards import RewardSet
    from lockstep.rollout.scoring import Judges

    rewards = RewardSet(config.rewards, search_paths=[data.parent]) if config.rewards else None
    if config.reward_model is None:
        return Judges(rewards=rewards, model=None)
    import torch

    from lockstep.models.reward import RewardModel

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = RewardModel(config.reward_model, device=device)
    return Judges(rewards=rewards, model=model, model_weight=config.reward_model.weight)


def identity(config: ScoreConfig, data: Path) -> dict[str, Any]:
    """The settings that decide every row, except a reward function's code: an earlier file's must be the
    same."""
    weights = None
    if config.reward_model is not None:
        from lockstep.models.export import weights_fingerprint

        name, revision = config.reward_model.name, config.reward_model.revision
        weights = weights_fingerprint(ModelConfig(name=name, revision=revision))
    return {"settings": to_values(config), "reward_model": weights, "data": file_digest(data)}


def verdict(result: Mapping[str, Any]) -> str:
    """The last line."""
    if result["outcome"] == "complete":
        return f"score: nothing to do: {result['out']} is complete, {result['rows']} rows"
    mean = result["mean_reward"]
    parts = [
        f"finished, {result['rows']} rows",
        "no reward" if mean is None else f"mean reward {mean:.4g}",
        *([f"{result['failed']} failed"] if result["failed"] else []),
        *([f"{result['truncated']} truncated"] if result["truncated"] else []),
        *(f"{count} {name}" for name, count in result["counts"].items()),
        f"{result['seconds']:.1f} s",
        str(result["out"]),
    ]
    return "score: " + ", ".join(parts)
