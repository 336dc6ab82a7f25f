"""`lockstep select`: best-of-n and rejection sampling, from scored samples to a set for SFT.

lockstep select --data scored.jsonl --best-of-n --out sft.jsonl
lockstep select --data scored.jsonl --min-reward 1 --top-k 4 --unique --out sft.jsonl
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.cli import arguments
from lockstep.cli.arguments import positive
from lockstep.errors import ConfigError, DataError
from lockstep.observe.files import check_writable, json_lines, write_atomic, write_json
from lockstep.observe.text import echo


def main(argv: Sequence[str]) -> int:
    """Select samples; 0 when any were selected.

    Raises:
        ConfigError: an argument is wrong.
        DataError: the rows are not scored, or none is good enough; nothing is written.
    """
    args = parser().parse_args(argv)
    if not args.best_of_n and args.top_k is None and args.min_reward is None:
        raise ConfigError("nothing to select by: give --best-of-n, --top-k K or --min-reward X")
    from lockstep.rollout.rows import check_out, read_rows
    from lockstep.rollout.select import Choice, select, sft_row

    check_out(args.out)
    check_writable(args.json)
    if args.out.resolve() == args.data.resolve():
        raise ConfigError(f"--out {args.out} is the file of --data; write to another file")
    if args.out.exists() and not args.overwrite:
        raise ConfigError(f"--out {str(args.out)!r} exists; choose another file, or give --overwrite")
    choice = Choice(
        top_k=1 if args.best_of_n else args.top_k,
        min_reward=args.min_reward,
        finished=args.finished,
        unique=args.unique,
    )
    selection = select(read_rows(args.data), choice, source=str(args.data))
    if not selection.rows:
        raise DataError(
            f"no sample of the {selection.prompts} prompts in {args.data} is left "
            f"({dict(selection.left_out)}); lower --min-reward, or sample more of each prompt"
        )
    rows = [sft_row(row) for row in selection.rows]
    write(args.out, rows)
    result: dict[str, Any] = {
        "data": str(args.data),
        "out": str(args.out),
        "rows": len(rows),
        "prompts": selection.prompts,
        "chosen_prompts": selection.chosen_prompts,
        "left_out": dict(selection.left_out),
        "mean_reward": sum(row["reward"] for row in rows) / len(rows),
        "train": train_command(args.out, rows),
    }
    if args.json is not None:
        write_json(args.json, result)
    echo(f"train on it: {result['train']}")
    echo(verdict(result))
    return 0


def parser() -> argparse.ArgumentParser:
    """The command line of `lockstep select`."""
    result = argparse.ArgumentParser(
        prog="lockstep select",
        description="Best-of-n and rejection sampling: from scored samples to a set for SFT.",
        allow_abbrev=False,
    )
    result.add_argument(
        "--data", type=arguments.path, required=True, metavar="FILE", help="rows of `lockstep score`"
    )
    result.add_argument(
        "--out", type=arguments.path, required=True, metavar="FILE", help=".jsonl or .parquet"
    )
    best = result.add_mutually_exclusive_group()
    best.add_argument("--best-of-n", action="store_true", help="keep the best sample of each prompt")
    best.add_argument("--top-k", type=positive, metavar="K", help="keep the best K samples of each prompt")
    result.add_argument("--min-reward", type=number, metavar="X", help="leave out samples below it")
    result.add_argument("--finished", action="store_true", help="leave out samples that were cut off")
    result.add_argument("--unique", action="store_true", help="leave out repeated answers to a prompt")
    result.add_argument("--overwrite", action="store_true", help="replace the file")
    result.add_argument("--json", type=arguments.path, metavar="FILE", help="write the result to this file")
    return result


def number(text: str) -> float:
    """A finite number. Raises ArgumentTypeError."""
    import math

    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is no number")
    return value


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """All rows, or none of them. Raises DataError when the disk is full."""
    from lockstep.rollout.rows_parquet import write_parquet

    if path.suffix == ".parquet":
        write_parquet(path, rows)
        return
    try:
        write_atomic(path, json_lines(rows))
    except OSError as error:
        raise DataError(f"cannot write {path}: {error.strerror}; make room and run it again") from error


def train_command(path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """The command that trains on the rows: plain-text prompts must not get a chat template now."""
    plain = any("prompt" in row for row in rows)
    words = ["lockstep", "train", "sft", "--model.name", "MODEL", "--data.source", str(path)]
    return shlex.join([*words, *(["--data.chat-template", "none"] if plain else [])])


def verdict(result: Mapping[str, Any]) -> str:
    """The last line."""
    left_out = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in result["left_out"].items())
    parts = [
        f"{result['rows']} samples of {result['chosen_prompts']} of {result['prompts']} prompts",
        f"mean reward {result['mean_reward']:.4g}" + (f" (left out: {left_out})" if left_out else ""),
        str(result["out"]),
    ]
    return "select: " + ", ".join(parts)
