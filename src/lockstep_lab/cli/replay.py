"""`lockstep replay`: run recorded inputs through the policy again, under any kernel, layout and backend.

lockstep replay --max-inputs 5
lockstep replay runs/demo --compile --flash-attn
lockstep replay runs/demo --preset all-off --num-layers 2 --no-backward
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lockstep.cli import arguments
from lockstep.cli.arguments import Flags, count, positive, seconds
from lockstep.errors import ConfigError
from lockstep.observe.files import check_writable
from lockstep.observe.text import echo
from lockstep.ranks.environment import in_launcher
from lockstep.ranks.launch import launch_ranks

if TYPE_CHECKING:
    from lockstep.recording import Recording
    from lockstep_lab.replay.cell import ReplayOptions
    from lockstep_lab.replay.replayer import Replayer
    from lockstep_lab.replay.results import ReplayFiles, ReplayRow
    from lockstep_lab.replay.run import ReplayResult

INTERRUPTED = 130
"""Exit status after Ctrl-C."""

_CELL_FIELDS = (
    *("attention", "layout", "padding_side", "dtype", "activation_checkpointing", "batch_invariant"),
    *("zero_stage", "num_layers", "model", "ranks"),
)
"""Fields of Cell with a flag of the same name."""


def parser() -> argparse.ArgumentParser:
    """Every flag."""
    parser = arguments.command_parser("lockstep replay", __doc__)
    parser.add_argument("recording", nargs="?", help="a recording or a run directory (the shipped corpus)")
    # torch's launchers give it; nobody else does
    parser.add_argument("--local-rank", "--local_rank", type=int, help=argparse.SUPPRESS)
    _input_flags(Flags(parser, "which inputs"))
    _cell_flags(Flags(parser, "configuration (default: as recorded, resolved for this device)"))
    _work_flags(Flags(parser, "work"))
    _output_flags(Flags(parser, "output"))
    return parser


def _input_flags(inputs: Flags) -> None:
    inputs.value("--max-inputs", positive, "use at most N inputs")
    inputs.value("--inputs", arguments.numbers, "use only these inputs, such as 3,7,10-20")
    inputs.value("--steps", arguments.steps, "use only inputs of steps A to B - 1")
    inputs.switch(
        "--shuffle-inputs",
        "use a random order, so that ranks get inputs of different lengths in one step (2 simulated ranks "
        "unless --ranks is given)",
    )
    inputs.value("--random-seed", arguments.seed, "seed for the random order", 0)


def _cell_flags(cell: Flags) -> None:
    cell.choice("--preset", ["all-off"], "all-off: padded, sdpa, eager; other flags still apply")
    cell.on_off("--flash-attn", "the same as --attention varlen, or --attention sdpa")
    cell.value("--attention", "KERNEL", "sdpa, varlen, flex or hf:NAME")
    cell.on_off("--compile", "compile each decoder layer with torch.compile")
    cell.switch("--joint", "compile the whole decoder as one graph")
    cell.switch("--deepcompile", "use DeepSpeed's compiler")
    cell.on_off("--packing", "put documents end to end, or one per row with padding")
    cell.choice(
        "--layout",
        ["packed", "padded", "shared"],
        "packed and padded as --packing and --no-packing; shared: packed, with common prefixes computed once",
    )
    cell.choice("--padding-side", ["left", "right"], "side on which --no-packing pads")
    cell.value("--capacity", positive, "static capacity of compiled packs", metavar="TOKENS")
    cell.choice("--dtype", ["float32", "bfloat16", "float16"], "dtype of the model")
    cell.value("--device", "NAME", "auto, cpu, cuda or cuda:N", "auto")
    cell.choice("--zero-stage", [0, 1, 2, 3], "use DeepSpeed at this ZeRO stage")
    cell.value("--num-layers", positive, "use only the first N layers")
    cell.on_off("--activation-checkpointing", "save memory at the cost of time")
    cell.on_off("--batch-invariant", "the same as train.batch_invariant")
    cell.value("--model", "NAME", "replace the recorded model by a folder, hub name or shape:NAME")
    cell.switch("--trust-remote-code", "run Python code that comes with a hub model")
    cell.value("--ranks", arguments.ranks, "start this many processes on this machine (1)")
    cell.switch("--simulate", "simulate the ranks of --ranks in this process")
    cell.switch(
        "--no-guard", "do not synchronize ranks before a step; ranks without an input then skip the step"
    )
    cell.value("--rank-timeout", seconds, "how long a rank waits for another (300; 20 with --no-guard)")


def _work_flags(work: Flags) -> None:
    work.choice("--loss", ["recorded", "logprob-sum", "cross-entropy"], default="recorded")
    work.on_off("--backward", "compute gradients", default=True)
    work.switch(
        "--versions",
        "check the logprobs that the engine reported, each under the version of the policy that sampled it",
    )
    work.switch("--optimizer-step", "take a real optimizer step after each input, which changes the weights")
    work.value("--warmup", count, "run N inputs first without measuring them", 0)
    work.value("--timeout", seconds, "end the replay if an input takes longer, even during warm-up")
    work.value(
        "--max-memory",
        arguments.above_zero,
        "refuse an input whose estimated memory is larger (all memory of the device)",
        metavar="GIB",
    )


def _output_flags(output: Flags) -> None:
    output.results("replay", json="also write the summary to this file")
    output.switch("--keep-outputs", "write logprobs and gradients to DIR/outputs.safetensors")
    output.value("--gradient-inputs", count, "number of inputs whose gradients are kept", 8)
    output.value("--gradient-entries", positive, "number of entries kept per gradient", 2**20)


def main(argv: Sequence[str]) -> int:
    """Replay; 0 when every input ran, 1 when one failed, 130 after Ctrl-C.

    Raises:
        ConfigError, RecordingError, ModelError: before the first forward.
    """
    args = parser().parse_args(list(argv))
    from lockstep_lab.replay.results import check_fresh

    check_writable(args.json)
    out = args.out if args.out is not None else arguments.default_out("replay")
    if os.environ.get("RANK", "0") == "0":  # other ranks come when rank 0 has begun to write there
        check_fresh(out)
    recording, options = open_options(args)
    if args.versions:
        return _versions(args, recording, options, out)
    several = on_ranks(args, os.environ)
    if several and in_launcher():
        return _as_rank(args, recording, options, out)
    if several and options.cell.ranks > 1 and not options.simulate:
        command = ["replay", *argv, "--out", str(out)]
        return launch_ranks(command, ranks=options.cell.ranks, timeout=None, log_dir=out / "logs")
    from lockstep_lab.replay.ranks import replay_simulated
    from lockstep_lab.replay.run import replay

    return _shown(args, out, partial(replay_simulated if several else replay, recording, options))


def _versions(args: argparse.Namespace, recording: Recording, options: ReplayOptions, out: Path) -> int:
    """Check the logprobs of every version; 1 where some differ that must not."""
    from lockstep.models.architectures import silence_transformers
    from lockstep_lab.replay.results import ReplayFiles
    from lockstep_lab.replay.versions import check_versions

    files = ReplayFiles(out, echo=arguments.nothing if args.quiet else print)
    try:
        with silence_transformers():
            result = check_versions(recording, options, say=files.line)
        files.summary(result.summary(), copy=args.json)
        files.line(f"results: {out}")
        files.line(result.verdict, show=False)
        echo(result.verdict)
        return 0 if result.ok else 1
    finally:
        files.close()


def _as_rank(args: argparse.Namespace, recording: Recording, options: ReplayOptions, out: Path) -> int:
    """Be one rank of a launcher; rank 0 shows progress and prints the result of all ranks."""
    from lockstep.models.architectures import silence_transformers
    from lockstep.ranks.context import init_ranks
    from lockstep_lab.replay.ranks import RankSetup, agree_on_directory, replay_ranks, waiting_seconds

    checked, device = not args.no_guard, options.cell.device.partition(":")[0]
    with init_ranks(device=device, seconds=waiting_seconds(args.rank_timeout, checked=checked)) as ranks:
        out = agree_on_directory(ranks, out)

        def run(*, files: ReplayFiles | None = None, **display: Any) -> ReplayResult:
            setup = RankSetup(ranks, out, files=files, checked=checked)
            return replay_ranks(recording, options, setup=setup, **display)

        if ranks.rank == 0:
            return _shown(args, out, run)
        with silence_transformers():
            run()
        return 0


def _shown(args: argparse.Namespace, out: Path, run: Callable[..., ReplayResult]) -> int:
    """Run a replay, show its progress and its summary; return the exit status."""
    from lockstep.models.architectures import silence_transformers
    from lockstep_lab.replay.results import ReplayFiles

    files = ReplayFiles(out, echo=arguments.nothing if args.quiet else print)
    try:
        with Progress(quiet=args.quiet) as progress, silence_transformers():
            result = run(files=files, on_ready=progress.ready, on_row=progress.row)
        return conclude(result, files, copy=args.json, quiet=args.quiet)
    finally:
        files.close()


def parse(argv: Sequence[str]) -> tuple[Recording, ReplayOptions]:
    """Open the recording and resolve the options of the arguments of `lockstep replay`.

    Raises:
        SystemExit: 0 after --help; 2 after telling about an unknown flag or a value of the wrong type.
        ConfigError, RecordingError: for everything else that cannot be right.
    """
    return open_options(parser().parse_args(list(argv)))


def open_options(args: argparse.Namespace) -> tuple[Recording, ReplayOptions]:
    """Open the recording, and resolve the cell for this device."""
    overrides = cell_fields(args)
    from lockstep.recording import Recording

    recording = Recording.open(args.recording)
    return recording, make_options(args, recording, overrides)


def cell_fields(args: argparse.Namespace) -> dict[str, Any]:
    """Fields of Cell that the flags set.

    Raises:
        ConfigError: flags that contradict each other.
    """
    if args.flash_attn is not None and args.attention is not None:
        raise ConfigError(
            "contradiction: --flash-attn and --attention both choose the kernel; give one of them"
        )
    modes = {"--compile": args.compile is not None, "--joint": args.joint, "--deepcompile": args.deepcompile}
    if sum(modes.values()) > 1:
        both = " and ".join(name for name, fields in modes.items() if fields)
        raise ConfigError(f"contradiction: {both} both choose the execution mode; give one of them")
    if args.optimizer_step and not args.backward:
        raise ConfigError("contradiction: --optimizer-step needs gradients; leave --no-backward out")
    fields: dict[str, Any] = {}
    if args.preset == "all-off":
        from lockstep_lab.replay.cell import ALL_OFF

        fields |= ALL_OFF
    fields |= {name: value for name in _CELL_FIELDS if (value := getattr(args, name)) is not None}
    if args.flash_attn is not None:
        fields["attention"] = "varlen" if args.flash_attn else "sdpa"
    if args.compile is not None:
        fields["execution"] = "compile" if args.compile else "eager"
    if args.joint or args.deepcompile:
        fields["execution"] = "joint" if args.joint else "deepcompile"
    if args.packing is not None and args.layout is not None:
        raise ConfigError("contradiction: --packing and --layout both choose the layout; give one of them")
    if args.packing is not None:
        fields["layout"] = "packed" if args.packing else "padded"
    return fields


def make_options(
    args: argparse.Namespace, recording: Recording, overrides: Mapping[str, Any]
) -> ReplayOptions:
    """The options of the flags, for this recording. Raises ConfigError, RecordingError."""
    from lockstep_lab.replay.cell import ReplayOptions, resolve_cell

    cell, notes = resolve_cell(recording.header, device=args.device, overrides=overrides)
    if args.capacity is not None and (cell.execution == "eager" or cell.layout == "padded"):
        notes += (f"--capacity {args.capacity} changes nothing here: it is for packs of a compiled cell",)
    return arguments.options(
        ReplayOptions,
        args,
        cell=cell,
        notes=notes,
        shuffle=args.shuffle_inputs,
        seed=args.random_seed,
        max_memory=None if args.max_memory is None else int(args.max_memory * 2**30),
    )


def on_ranks(args: argparse.Namespace, environ: Mapping[str, str]) -> bool:
    """Whether several ranks are requested, or a launcher started this process as one of them."""
    launched = "RANK" in environ and "WORLD_SIZE" in environ
    several = (args.ranks or 1) > 1
    return launched or several or args.simulate or args.shuffle_inputs or args.local_rank is not None


# --- the display --------------------------------------------------------------------------------------------


class Progress:
    """A bar in a terminal, a plain line per input elsewhere (at most one a second), nothing with --quiet."""

    def __init__(self, *, quiet: bool) -> None:
        self._quiet = quiet
        self._live = sys.stdout.isatty() and not quiet
        self._bar: Any = None
        self._task: Any = None
        self._last = 0.0

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def ready(self, replayer: Replayer) -> None:
        """Start the display: the first input comes next."""
        if not self._live:
            return
        from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
        from rich.progress import Progress as Bar

        from lockstep.observe.console import PlainConsole

        self._bar = Bar(
            TextColumn("replay"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[last]}", markup=False),
            console=PlainConsole(),
        )
        self._bar.start()
        self._task = self._bar.add_task("replay", total=len(replayer.order), last="")

    def row(self, row: ReplayRow, done: int, total: int) -> None:
        """Show that an input is done."""
        from lockstep_lab.replay.results import row_text

        if self._quiet:
            return
        if self._bar is not None:
            text = "" if row.forward_ms is None else f"forward {row.forward_ms:.0f} ms"
            self._bar.update(self._task, completed=done, last=text if row.status == "ok" else row.status)
            if row.error is not None:
                self._bar.console.print(row_text(row))
            return
        now = time.monotonic()
        if row.error is not None or done == total or now - self._last >= 1.0:
            self._last = now
            echo(f"[{done}/{total}] {row_text(row)}", flush=True)


def conclude(result: ReplayResult, files: ReplayFiles, *, copy: Path | None, quiet: bool) -> int:
    """Print the summary; return the exit status."""
    from lockstep_lab.replay.summary import closing

    if copy is not None:
        files.summary(result.summary, copy=copy)
    for line in closing(result.summary):
        files.line(line, show=not quiet)
    for row in result.rows:
        if row.error is not None:
            log = files.out / row.error["log"]
            files.line(
                f"input {row.index} {row.status}: {row.error['type']}: {row.error['line']} ({log})",
                show=not quiet,
            )
    files.line(f"results: {files.out}", show=not quiet)
    files.line(result.summary["verdict"], show=False)
    echo(result.summary["verdict"])
    if result.interrupted:
        return INTERRUPTED
    return 0 if result.ok else 1
