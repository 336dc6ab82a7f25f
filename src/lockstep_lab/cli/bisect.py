"""`lockstep bisect`: find the first input and module where two cells differ, or the smallest crashing input.

lockstep bisect runs/demo --a "--no-flash-attn --no-packing" --b "--flash-attn --packing --compile"
lockstep bisect --b "--compile" --crash --max-inputs 20

A and B are flags of `lockstep replay`; flags outside them (--max-inputs, --inputs, --num-layers, --model,
--dtype, --device, --capacity, --loss, --no-backward, ...) apply to both cells.
"""

from __future__ import annotations

import argparse
import dataclasses
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.cli import arguments
from lockstep.cli.arguments import Flags, above_zero, positive, seconds
from lockstep.errors import ConfigError
from lockstep.observe.files import check_writable
from lockstep.observe.text import echo
from lockstep_lab.cli import replay as replay_cli
from lockstep_lab.cli.suites import say

if TYPE_CHECKING:
    from lockstep.recording import Recording
    from lockstep_lab.replay.cell import ReplayOptions

_TEXTS = ("--a", "--b")


def main(argv: Sequence[str]) -> int:
    """Run the command; 0: no difference beyond tolerance (no crash), 1: there is one.

    Raises:
        ConfigError, RecordingError, ModelError: before the first forward.
    """
    where, rest = arguments.leading_word(argv)
    args, shared = _parser().parse_known_args(_joined(rest))
    shared = [word for word in shared if word != "--"]
    parsed = {name: _replay_args(name, text, shared) for name, text in (("a", args.a), ("b", args.b))}
    check_writable(args.json)
    out = _fresh(args.out)
    from lockstep.models.architectures import silence_transformers
    from lockstep.recording import Recording
    from lockstep_lab.suite.run import make_folder

    recording = Recording.open(where)
    options = {
        name: replay_cli.make_options(cell_args, recording, replay_cli.cell_fields(cell_args))
        for name, cell_args in parsed.items()
    }
    if not args.crash:
        options = {
            name: one if parsed[name].layout == "shared" else _without_shared_rows(one)
            for name, one in options.items()
        }
    if options["a"].cell == options["b"].cell and not args.crash:
        raise ConfigError("nothing-to-do: --a and --b are the same cell; give a flag in which they differ")
    make_folder(out)  # last: what is refused leaves none
    with silence_transformers():
        if args.crash:
            return _crash(recording, options["b"], out, args)
        return _bisect(recording, options, out, args)


def _without_shared_rows(options: ReplayOptions) -> ReplayOptions:
    """The cell with a row for each token: a shared row's gradients are those of several documents."""
    if options.cell.layout != "shared":
        return options
    note = "layout: 'shared' -> 'packed' (a row for each token, whose gradients can be compared)"
    return dataclasses.replace(
        options, cell=dataclasses.replace(options.cell, layout="packed"), notes=(*options.notes, note)
    )


def _joined(words: Sequence[str]) -> list[str]:
    """Rewrite `--a TEXT` as `--a=TEXT`: argparse takes a TEXT such as "--packing" for a flag."""
    joined: list[str] = []
    waiting = False
    for word in words:
        if waiting:
            joined[-1] += f"={word}"
        else:
            joined.append(word)
        waiting = not waiting and word in _TEXTS
    return joined


def _parser() -> argparse.ArgumentParser:
    parser = arguments.command_parser(
        "lockstep bisect",
        __doc__,
        usage='lockstep bisect [RECORDING] --a "FLAGS" --b "FLAGS" [OPTIONS] [FLAGS OF BOTH]',
    )
    flags = Flags(parser)
    flags.value("--a", "FLAGS", "flags of cell a (as recorded)", default="")
    flags.value("--b", "FLAGS", "flags of cell b (as recorded)", default="")
    flags.value(
        "--tolerance",
        above_zero,
        "largest allowed difference of a logprob, in nats, and largest allowed relative difference of a "
        "tensor (measured: 4 times the difference from reordering the documents in cell a, with a floor for "
        "the dtype)",
    )
    flags.switch("--crash", "find the smallest input on which b crashes")
    flags.value("--max-trials", positive, "with --crash: maximum number of trials", 200)
    flags.value(
        "--trial-timeout",
        seconds,
        "with --crash: a trial that takes longer counts as a hang, and so as a crash",
        300.0,
    )
    flags.results("bisect")
    return parser


def _replay_args(name: str, text: str, shared: Sequence[str]) -> argparse.Namespace:
    parser = replay_cli.parser()
    parser.prog = f"lockstep bisect --{name}"
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"wrong-format: --{name} {text!r}: {error}") from error
    args = parser.parse_args([*words, *shared])
    if args.recording is not None:
        raise ConfigError(
            f"unknown-setting: {args.recording!r} is not a flag; the recording must come first: lockstep "
            "bisect RECORDING"
        )
    return args


def _fresh(out: Path | None) -> Path:
    from lockstep_lab.suite.run import check_empty

    out = out or arguments.default_out("bisect")
    check_empty(out)
    return out


def _bisect(
    recording: Recording, options: dict[str, ReplayOptions], out: Path, args: argparse.Namespace
) -> int:
    from lockstep_lab.bisect import report
    from lockstep_lab.bisect.arms import ArmFailed, InputDifference, OpenCells, exact
    from lockstep_lab.bisect.repro import write_repro
    from lockstep_lab.bisect.run import bisect

    tell = arguments.nothing if args.quiet else say
    cells = OpenCells(recording, options["a"], options["b"])
    for name, description in zip("ab", cells.weights_descriptions(), strict=True):
        for note in options[name].notes:
            tell(f"{name}: {note}")
        tell(f"{name}: {description}")

    def progress(index: int, difference: InputDifference) -> None:
        tell(
            f"input {index}: logprobs {difference.logprob:.3g} nats, "
            f"gradients {difference.gradient:.3g} relative"
        )

    try:
        result = bisect(cells.a, cells.b, cells.inputs(), tolerance=args.tolerance, progress=progress)
    except ArmFailed as failure:
        tell(f"input {failure.index}: cell {failure.arm} fails ({failure.__cause__}); looking for its crash")
        del cells
        return _crash(recording, options[failure.arm], out, args, index=failure.index)
    repro = ""
    if result.finding is not None and result.index is not None:
        repro = str(write_repro(result.finding, exact(recording[result.index].batch), out))
    for line in report.lines(result):
        tell(line)
    if repro:
        tell(f"reproduction: python {repro}")
    values = report.as_dict(result) | {"repro": repro or None}
    return _conclude(report.markdown(result, repro=Path(repro).name), values, out, args)


def _crash(
    recording: Recording,
    options: ReplayOptions,
    out: Path,
    args: argparse.Namespace,
    *,
    index: int | None = None,
) -> int:
    from lockstep_lab.bisect import report
    from lockstep_lab.bisect.crash import CrashSearch, find_crash

    if index is not None:
        options = dataclasses.replace(options, inputs=(index,), steps=None, max_inputs=None, shuffle=False)
    search = CrashSearch(max_trials=args.max_trials, seconds=args.trial_timeout)
    tell = arguments.nothing if args.quiet else say
    finding = find_crash(recording, options, out, search=search, progress=tell)
    for line in [] if finding is None else report.crash_lines(finding):
        tell(line)
    return _conclude(report.crash_markdown(finding), report.crash_dict(finding), out, args)


def _conclude(markdown: str, values: dict[str, Any], out: Path, args: argparse.Namespace) -> int:
    from lockstep.observe.files import write_atomic, write_json

    write_atomic(out / "bisect.md", markdown)
    write_json(out / "bisect.json", values)
    if args.json is not None:
        write_json(args.json, values)
    (arguments.nothing if args.quiet else say)(f"results: {out}")
    echo(values["verdict"])
    return int(bool(values.get("differs") or values.get("crashes")))
