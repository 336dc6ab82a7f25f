"""`lockstep replay` on several ranks: it starts them, is one of them, or simulates them in this process."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lockstep.cli import arguments
from lockstep.ranks.environment import in_launcher
from lockstep.ranks.launch import launch_ranks
from lockstep_lab.cli.replay_output import Progress, conclude

if TYPE_CHECKING:
    from lockstep.ranks.context import RankContext
    from lockstep.recording import Recording
    from lockstep_lab.replay.cell import ReplayOptions


def main(
    args: argparse.Namespace, argv: Sequence[str], recording: Recording, options: ReplayOptions, out: Path
) -> int:
    """Replay on several ranks; return the exit status. argv: the arguments after `lockstep replay`."""
    if in_launcher():
        return _as_rank(args, recording, options, out)
    if options.cell.ranks > 1 and not options.simulate:
        command = ["replay", *argv, "--out", str(out)]
        return launch_ranks(command, ranks=options.cell.ranks, timeout=None, log_dir=out / "logs")
    from lockstep.models.architectures import silence_transformers
    from lockstep_lab.replay.ranks import replay_simulated
    from lockstep_lab.replay.results import ReplayFiles

    files = ReplayFiles(out, echo=arguments.nothing if args.quiet else print)
    try:
        with Progress(files, quiet=args.quiet) as progress, silence_transformers():
            result = replay_simulated(
                recording, options, files=files, on_ready=progress.ready, on_row=progress.row
            )
        return conclude(result, files, copy=args.json, quiet=args.quiet)
    finally:
        files.close()


def _as_rank(args: argparse.Namespace, recording: Recording, options: ReplayOptions, out: Path) -> int:
    from lockstep.models.architectures import silence_transformers
    from lockstep.ranks.context import init_ranks
    from lockstep_lab.replay.ranks import RankSetup, agree_on_directory, replay_ranks, waiting_seconds

    checked, device = not args.no_guard, options.cell.device.partition(":")[0]
    seconds = waiting_seconds(args.rank_timeout, checked=checked)
    with init_ranks(device=device, seconds=seconds) as ranks, silence_transformers():
        out = agree_on_directory(ranks, out)
        if ranks.rank == 0:
            return _as_first(args, recording, options, ranks, out)
        replay_ranks(recording, options, setup=RankSetup(ranks, out, checked=checked))
        return 0


def _as_first(
    args: argparse.Namespace, recording: Recording, options: ReplayOptions, ranks: RankContext, out: Path
) -> int:
    """Run rank 0, which shows progress and prints the result of all ranks."""
    from lockstep_lab.replay.ranks import RankSetup, replay_ranks
    from lockstep_lab.replay.results import ReplayFiles

    files = ReplayFiles(out, echo=arguments.nothing if args.quiet else print)
    try:
        with Progress(files, quiet=args.quiet) as progress:
            setup = RankSetup(ranks, out, files=files, checked=not args.no_guard)
            result = replay_ranks(
                recording, options, setup=setup, on_ready=progress.ready, on_row=progress.row
            )
        return conclude(result, files, copy=args.json, quiet=args.quiet)
    finally:
        files.close()
