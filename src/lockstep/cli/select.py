"""`lockstep select`: turn scored samples into data for SFT (best-of-n, rejection sampling) or DPO (pairs).

lockstep select --data scored.jsonl --best-of-n --out sft.jsonl
lockstep select --data scored.jsonl --min-reward 1 --top-k 4 --unique --out sft.jsonl
lockstep select --data runs/demo-20260101-120000 --pairs --ends-in-number --out pairs.jsonl
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lockstep.cli import arguments
from lockstep.cli.arguments import Flags, positive
from lockstep.cli.batch_common import check_other_file
from lockstep.common_errors import already_exists, cannot_write
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
    if not args.best_of_n and args.top_k is None and args.min_reward is None and args.pairs is None:
        raise ConfigError(
            "missing-setting: nothing to select by; pass --best-of-n, --top-k K, --min-reward X or --pairs"
        )
    _check_flags(args)
    from lockstep.rollout.rows import check_out

    check_out(args.out)
    check_writable(args.json)
    check_other_file(args.out, args.data)
    if args.out.exists() and not args.overwrite:
        raise already_exists(f"--out {str(args.out)!r}", "choose another file, or pass --overwrite")
    result = _documents(args) if args.pairs is None else _pairs(args)
    if args.json is not None:
        write_json(args.json, result)
    echo(f"train on it: {result['train']}")
    echo(verdict(result))
    return 0


def _documents(args: argparse.Namespace) -> dict[str, Any]:
    """Write rows for SFT; return the result."""
    from lockstep.rollout.rows import read_rows
    from lockstep.rollout.select import Choice, select, sft_row

    choice = Choice(
        top_k=1 if args.best_of_n else args.top_k,
        min_reward=args.min_reward,
        finished=args.finished,
        unique=args.unique,
    )
    selection = select(read_rows(args.data), choice, source=str(args.data))
    if not selection.rows:
        raise DataError(
            f"nothing-left: no samples of the {selection.prompts} prompts in {args.data} are left "
            f"({dict(selection.left_out)}); lower --min-reward, or sample more of each prompt"
        )
    rows = [sft_row(row) for row in selection.rows]
    return _written(args, "sft", rows, selection) | {
        "rows": len(rows),
        "mean_reward": sum(row["reward"] for row in rows) / len(rows),
    }


def _pairs(args: argparse.Namespace) -> dict[str, Any]:
    """Write rows for DPO; return the result."""
    from lockstep.rollout.select import PairChoice, select_pairs

    choice = PairChoice(
        per_prompt=args.pairs,
        min_gap=args.min_gap or 0.0,
        min_reward=args.min_reward,
        reward=args.by,
        ends_in_number=args.ends_in_number,
        finished=args.finished,
    )
    selection = select_pairs(_scored(args.data), choice, source=str(args.data))
    if not selection.rows:
        raise DataError(
            f"nothing-left: no two samples of any of the {selection.prompts} prompts in {args.data} form a "
            f"pair ({dict(selection.left_out)}); sample more of each prompt, or relax the criteria"
        )
    rows = list(selection.rows)
    lengths = [(len(_text(row["chosen"])), len(_text(row["rejected"]))) for row in rows]
    return _written(args, "dpo", rows, selection) | {
        "pairs": len(rows),
        "mean_gap": sum(row["reward_chosen"] - row["reward_rejected"] for row in rows) / len(rows),
        "chosen_is_longer": sum((a > b) + (a == b) / 2 for a, b in lengths) / len(rows),
    }


def _written(
    args: argparse.Namespace, kind: str, rows: Sequence[Mapping[str, Any]], selection: Any
) -> dict[str, Any]:
    """Write the rows; return what the result says of both kinds of set."""
    write(args.out, rows)
    return {
        "data": str(args.data),
        "out": str(args.out),
        "prompts": selection.prompts,
        "chosen_prompts": selection.chosen_prompts,
        "left_out": dict(selection.left_out),
        "train": train_command(kind, args.out, rows),
    }


def _scored(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of a file; of a run's directory those of all its training steps."""
    from lockstep.rollout.rows import read_rows

    if not path.is_dir():
        yield from read_rows(path)
        return
    files = sorted((path / "rollouts").glob("step-*.jsonl"))
    if not files:
        raise DataError(
            f"wrong-kind-of-file: --data {str(path)!r} has no rollouts/step-*.jsonl: either it is not the "
            "directory of an RL run, or rollout.save was off; give an RL run, or a file of scored samples"
        )
    for file in files:
        yield from read_rows(file)


def _check_flags(args: argparse.Namespace) -> None:
    """Raises ConfigError for flags that have no effect together."""
    only_pairs = {"--min-gap": args.min_gap, "--by": args.by, "--ends-in-number": args.ends_in_number or None}
    for flag, value in only_pairs.items():
        if args.pairs is None and value is not None:
            raise ConfigError(f"no-effect: {flag} has no effect without --pairs; leave it out")
    if args.pairs is not None and args.unique:
        raise ConfigError(
            "no-effect: --unique has no effect with --pairs, which never uses an answer twice; leave it out"
        )
    if args.pairs is None and args.data.is_dir():
        raise ConfigError(
            f"wrong-kind-of-file: --data {str(args.data)!r} is a directory, which only --pairs can read; "
            "give a file of samples"
        )


def _text(answer: Any) -> str:
    return answer if isinstance(answer, str) else "".join(str(message["content"]) for message in answer)


def parser() -> argparse.ArgumentParser:
    """The command line of `lockstep select`."""
    result = arguments.command_parser(
        "lockstep select",
        "Turn scored samples into data for SFT (best-of-n, rejection sampling) or DPO (pairs).",
    )
    result.add_argument(
        "--data",
        type=arguments.path,
        required=True,
        metavar="FILE",
        help="output of `lockstep score`; with --pairs also the directory of an RL run",
    )
    result.add_argument(
        "--out", type=arguments.path, required=True, metavar="FILE", help="output file, .jsonl or .parquet"
    )
    best = result.add_mutually_exclusive_group()
    best.add_argument("--best-of-n", action="store_true", help="keep the best sample of each prompt")
    best.add_argument("--top-k", type=positive, metavar="K", help="keep the best K samples of each prompt")
    best.add_argument(
        "--pairs",
        type=positive,
        nargs="?",
        const=1,
        metavar="K",
        help="make pairs of a chosen and a rejected answer of similar length, at most K per prompt (1)",
    )
    flags = Flags(result)
    flags.value(
        "--min-reward",
        number,
        "drop samples with a reward below X; with --pairs only chosen answers must reach X",
        metavar="X",
    )
    flags.value("--min-gap", number, "pairs: minimum difference in reward (no minimum)", metavar="X")
    flags.value("--by", "NAME", "pairs: compare by this reward instead of the total")
    flags.switch("--ends-in-number", "pairs: drop answers that do not end in a number")
    flags.switch("--finished", "drop truncated samples")
    flags.switch("--unique", "drop repeated answers to a prompt")
    flags.switch("--overwrite", "replace the file")
    flags.value("--json", arguments.path, "write the result to this file")
    return result


def number(text: str) -> float:
    """A finite number. Raises ArgumentTypeError."""
    import math

    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number")
    return value


def write(path: Path, rows: Sequence[Mapping[str, Any]]) -> None:
    """All rows, or none of them. Raises DataError when the disk is full."""
    from lockstep.rollout.rows import write_parquet

    if path.suffix == ".parquet":
        write_parquet(path, rows)
        return
    try:
        write_atomic(path, json_lines(rows))
    except OSError as error:
        raise cannot_write(DataError, path, error, "free some space, then run the command again") from error


def train_command(kind: str, path: Path, rows: Sequence[Mapping[str, Any]]) -> str:
    """The command that trains on the rows: plain-text prompts must not get a chat template now."""
    plain = any(isinstance(row.get("prompt"), str) for row in rows)
    words = ["lockstep", "train", kind, "--model.name", "MODEL", "--data.source", str(path)]
    return shlex.join([*words, *(["--data.chat-template", "none"] if plain else [])])


def verdict(result: Mapping[str, Any]) -> str:
    """The last line."""
    left_out = ", ".join(f"{count} {name.replace('_', ' ')}" for name, count in result["left_out"].items())
    if "pairs" in result:
        parts = [
            f"{result['pairs']} pairs of {result['chosen_prompts']} of {result['prompts']} prompts",
            f"the chosen one is longer in {result['chosen_is_longer']:.0%}"
            + (f" (left out: {left_out})" if left_out else ""),
            str(result["out"]),
        ]
        return "select: " + ", ".join(parts)
    parts = [
        f"{result['rows']} samples of {result['chosen_prompts']} of {result['prompts']} prompts",
        f"mean reward {result['mean_reward']:.4g}" + (f" (left out: {left_out})" if left_out else ""),
        str(result["out"]),
    ]
    return "select: " + ", ".join(parts)
