"""`lockstep parity compare`: compare the losses of two runs, or another figure."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from lockstep.cli import arguments
from lockstep.cli.arguments import Flags, above_zero, path
from lockstep.observe.files import check_writable, write_json
from lockstep.observe.text import echo
from lockstep_lab.cli.suites import console


def parser() -> argparse.ArgumentParser:
    """Every flag."""
    parser = arguments.command_parser(
        "lockstep parity compare",
        "Compare the losses of two runs step by step, or another metric (--key reward/mean). A run may be a "
        "run directory, a metrics.jsonl, a TensorBoard event file or folder, a trainer_state.json or a text "
        "log. Exit status 1: a value differs by more than the threshold, or is not finite.",
    )
    parser.add_argument("a", type=path, metavar="A", help="the baseline run")
    parser.add_argument("b", type=path, metavar="B", help="the other run")
    flags = Flags(parser)
    flags.value("--threshold", above_zero, "largest allowed relative difference", 0.05)
    flags.value("--key", "NAME", "key or tag to read from both runs (the loss, found by its usual names)")
    flags.value("--key-b", "NAME", "key of B, if it differs")
    flags.switch("--common", "compare only the steps that both runs have")
    flags.value("--plot", path, "plot both curves to this PNG file")
    flags.value("--json", path, "write the result to this file")
    flags.switch("--quiet", "print only the verdict")
    return parser


def main(argv: Sequence[str]) -> int:
    """0: every value agrees, 1: not.

    Raises:
        ConfigError: a run cannot be read, lacks the key, or has another number of values.
    """
    args = parser().parse_args(list(argv))
    for flag, file in (("--json", args.json), ("--plot", args.plot)):
        check_writable(file, flag=flag)
    from lockstep_lab.loss_curves.compare import compare_losses, plot, show
    from lockstep_lab.loss_curves.read import read_losses

    a = read_losses(args.a, key=args.key)
    b = read_losses(args.b, key=args.key_b or args.key)
    comparison = compare_losses(a, b, threshold=args.threshold, common=args.common)
    if not args.quiet:
        show(comparison, console())
    if args.plot is not None:
        plot(comparison, args.plot)
        if not args.quiet:
            echo(f"{args.plot}, drawn by matplotlib")
    if args.json is not None:
        write_json(args.json, comparison.as_dict())
    echo(comparison.verdict)
    return 0 if comparison.ok else 1
