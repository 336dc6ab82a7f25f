"""`lockstep matrix`: run the same inputs under every combination of kernels, layouts and compile modes.

lockstep matrix --max-inputs 4
lockstep matrix runs/demo --axes attention,compile,packing
lockstep matrix runs/demo --axis attention=sdpa,varlen,hf:flash_attention_2 --axis layers=2,all
lockstep matrix diff runs/matrix-old runs/matrix-new
"""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli import arguments
from lockstep.cli.arguments import Flags, above_zero, path, positive, seconds
from lockstep.errors import ConfigError
from lockstep.observe.files import check_writable, write_json
from lockstep.observe.text import echo
from lockstep_lab.cli.suites import conclude, console, say

if TYPE_CHECKING:
    from lockstep_lab.matrix.run import MatrixOptions

_PASSED_ON = {
    "--max-inputs": ("N", "use at most N inputs"),
    "--inputs": ("LIST", "use only these inputs, such as 3,7,10-20"),
    "--steps": ("A:B", "use only inputs of steps A to B - 1"),
    "--capacity": ("TOKENS", "static capacity of compiled packs"),
    "--loss": ("NAME", "recorded, logprob-sum or cross-entropy (recorded)"),
    "--warmup": ("N", "run N inputs first without measuring them (0)"),
    "--gradient-inputs": ("G", "number of inputs whose gradients are compared (8)"),
    "--gradient-entries": ("N", "number of entries compared per gradient (1048576)"),
}
"""Flags of `lockstep replay` that all cells share."""
_BASE = ("model", "dtype", "num_layers", "padding_side", "activation_checkpointing")
"""Flags of the fields that all cells have in common."""


def parser() -> argparse.ArgumentParser:
    """Every flag of `lockstep matrix`."""
    parser = arguments.command_parser("lockstep matrix", __doc__)
    parser.add_argument("recording", nargs="?", help="a recording or a run directory (the shipped corpus)")
    _cell_flags(Flags(parser, "which cells"))
    shared = Flags(parser, "shared by all cells (as in lockstep replay)")
    for flag, (metavar, text) in _PASSED_ON.items():
        shared.value(flag, metavar, text)
    shared.on_off("--backward", "compute gradients", default=True)
    shared.switch("--trust-remote-code", "run Python code that comes with a hub model")
    _work_flags(Flags(parser, "work and output"))
    return parser


def _cell_flags(cells: Flags) -> None:
    cells.value("--axes", "NAMES", "axes with their usual values, comma-separated (flash,compile,packing)")
    cells.many(
        "--axis",
        "NAME=VALUES",
        "an axis and its values, comma-separated (repeatable); `--axis list` shows all axes",
    )
    cells.value(
        "--reference",
        "WORDS",
        "AXIS=VALUE words of the cell to compare with (padded, sdpa, eager, float32)",
        default="",
    )
    cells.value("--model", "NAME", "replace the recorded model")
    cells.choice("--dtype", ["float32", "bfloat16", "float16"], "dtype of the cells")
    cells.value("--num-layers", positive, "use only the first N layers")
    cells.choice("--padding-side", ["left", "right"], "side on which padded cells pad")
    cells.on_off("--activation-checkpointing", "save memory at the cost of time")
    cells.value("--device", "NAME", "auto, cpu, cuda or cuda:N", "auto")


def _work_flags(work: Flags) -> None:
    work.value("--timeout", seconds, "deadline per cell", 600.0)
    work.value("--jobs", positive, "run N cells at a time; their times are then not comparable", 1)
    work.switch("--resume", "continue in --out without running finished cells again")
    work.switch("--retry", "with --resume: run failed cells again")
    work.switch("--keep-outputs", "keep every cell's logprobs and gradients")
    work.value(
        "--tolerance-logprob",
        above_zero,
        "largest allowed difference of a logprob (1e-4 in float32)",
        metavar="NATS",
    )
    work.value(
        "--tolerance-gradient", above_zero, "largest allowed relative error of a gradient (1e-4 in float32)"
    )
    work.results("matrix")


def main(argv: Sequence[str]) -> int:
    """Run the matrix; 0 when nothing fails or disagrees, 1 when something does, 130 after Ctrl-C.

    Raises:
        ConfigError, RecordingError: before the first cell.
    """
    if argv and argv[0] == "diff":
        return _diff(argv[1:])
    args = parser().parse_args(list(argv))
    _check(args, argv)
    if "list" in args.axis:
        return _list_axes()
    from lockstep.loop.interrupt import Interrupted
    from lockstep_lab.matrix.report import progress_line, report
    from lockstep_lab.matrix.run import run_matrix

    options = make_options(args, argv)
    tell = arguments.nothing if args.quiet else say
    tell(f"matrix: {options.out}")
    try:
        result = run_matrix(args.recording, options, progress=lambda *event: tell(progress_line(*event)))
    except Interrupted as stop:
        tell(f"interrupted after {stop.summary['cells']} of {stop.summary['total']} cells")
        echo(stop.summary["verdict"])
        echo(f"resume with: {_go_on(argv, options.out)}")
        return 143 if stop.summary["signal"] == 15 else 130
    return conclude(result, report(result), args, f"{options.out}/matrix.html, matrix.md, matrix.json")


def make_options(args: argparse.Namespace, argv: Sequence[str]) -> MatrixOptions:
    """The options of the flags. Raises ConfigError."""
    from lockstep_lab.matrix.cells import parse_axes
    from lockstep_lab.matrix.run import MatrixOptions

    names = [name.strip() for name in args.axes.split(",")] if args.axes else []
    return arguments.options(
        MatrixOptions,
        args,
        out=args.out if args.out is not None else arguments.default_out("matrix"),
        axes=parse_axes(names, axis_flags=args.axis),
        base=tuple((name, value) for name in _BASE if (value := getattr(args, name)) is not None),
        replay_flags=tuple(_shared(args)),
        logprob_limit=args.tolerance_logprob,
        gradient_limit=args.tolerance_gradient,
        command=shlex.join(["lockstep", "matrix", *argv]),
    )


def _shared(args: argparse.Namespace) -> list[str]:
    flags: list[str] = []
    for flag in _PASSED_ON:
        value = getattr(args, flag.removeprefix("--").replace("-", "_"))
        flags += [] if value is None else [flag, value]
    flags += [] if args.backward else ["--no-backward"]
    return flags + (["--trust-remote-code"] if args.trust_remote_code else [])


def _check(args: argparse.Namespace, argv: Sequence[str]) -> None:
    if args.resume and args.out is None:
        raise ConfigError("missing-setting: --resume continues a matrix; give its folder with --out")
    if args.retry and not args.resume:
        raise ConfigError("missing-setting: --retry reruns cells that did not work before; it needs --resume")
    check_writable(args.json)
    from lockstep_lab.cli.replay import parser as replay_parser

    # The flags that cells share are replay's: it says what is wrong with them, before any cell is run.
    replay = replay_parser()
    replay.prog = "lockstep matrix"
    replay.parse_args(_shared(args))


def _list_axes() -> int:
    from lockstep_lab.matrix.cells import KINDS

    width = max(map(len, KINDS))
    for name, kind in KINDS.items():
        usual = ",".join(kind.usual) or "no usual values"
        echo(f"{name:<{width}}  {usual:<18}  {kind.help}")
    return 0


def diff_parser() -> argparse.ArgumentParser:
    """Every flag of `lockstep matrix diff`."""
    parser = arguments.command_parser(
        "lockstep matrix diff",
        "Show what changed from matrix A to matrix B. Exit status 1: a cell no longer works, or no longer "
        "agrees with its reference.",
    )
    parser.add_argument("a", type=path, metavar="A", help="the older matrix: a folder or matrix.json")
    parser.add_argument("b", type=path, metavar="B", help="the newer matrix")
    flags = Flags(parser)
    flags.value("--threshold", above_zero, "report changes in speed above this share", 0.1)
    flags.value("--grew", above_zero, "report differences that grew by more than this factor", 2.0)
    flags.switch("--all", "also show unchanged cells")
    flags.value("--json", path, "write the changes to this file")
    return parser


def _diff(argv: Sequence[str]) -> int:
    """`lockstep matrix diff A B`: exit status 1 when a cell of B is worse."""
    args = diff_parser().parse_args(list(argv))
    check_writable(args.json)
    from lockstep_lab.matrix.diff import diff_matrices, show_diff
    from lockstep_lab.matrix.result import read_matrix

    diff = diff_matrices(
        read_matrix(args.a), read_matrix(args.b), speed_threshold=args.threshold, grew=args.grew
    )
    show_diff(diff, console(), everything=args.all)
    if args.json is not None:
        write_json(args.json, diff.as_dict())
    echo(diff.verdict)
    return int(bool(diff.regressions))


def _go_on(argv: Sequence[str], out: Path) -> str:
    words = list(argv) + ([] if "--resume" in argv else ["--resume"])
    has_out = any(word == "--out" or word.startswith("--out=") for word in argv)
    return shlex.join(["lockstep", "matrix", *words, *([] if has_out else ["--out", str(out)])])
