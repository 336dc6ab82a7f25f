"""`lockstep COMMAND ...`: picks the command's module, and turns errors into one message and an exit status.

Exit status: 0 when what was asked for holds, 1 when it does not or the run failed, 2 for a wrong setting or
argument, 130 for Ctrl-C, 143 for SIGTERM.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from lockstep import __version__
from lockstep.errors import ConfigError, LockstepError, unknown_name
from lockstep.ranks.launch import leave, without_local_rank

COMMANDS = {
    "train": "train a policy: lockstep train grpo --recipe demo",
    "sample": "print completions of a run's checkpoint",
    "chat": "talk to a run's checkpoint",
    "recording": "what a recording holds: info, validate, list, show, slice, merge, import",
    "replay": "feed recorded inputs to the policy again, under any kernel, layout and backend",
    "plan": "parameters, memory and micro-batches of a run, before anything starts",
    "matrix": "inputs under every combination of kernels, layouts, compile modes: a table; matrix diff",
    "bisect": "the first input and module at which two cells differ, or the smallest input that crashes one",
    "parity": "train stacks and engines that must agree, side by side; compare two runs; check",
    "doctor": "what this machine can run, and the settings that usually bite",
    "bench": "what one RL step costs in several ways of taking it, side by side: bench step",
    "generate": "samples of many prompts, into a file that a later command goes on with",
    "score": "rewards of samples in a file, by a reward function or a reward model",
    "select": "best-of-n and rejection sampling: scored samples to a set for SFT",
    "support": "the table of what may be combined, and where it is tested",
}
"""Command -> one line of help; the module is lockstep.cli.COMMAND, with main(argv) -> exit status."""

INTERRUPTED = 130


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    arguments = without_local_rank(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(usage())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        print(f"lockstep {__version__}")
        return 0
    status = _run(*arguments)
    leave(status)
    return status


def _run(command: str, *rest: str) -> int:
    """The exit status of one command, whose errors are shown."""
    try:
        if command not in COMMANDS:
            raise ConfigError(unknown_name("command", command, COMMANDS))
        module = importlib.import_module(f"lockstep.cli.{command}")
        return int(module.main(list(rest)))
    except LockstepError as error:
        sys.stdout.flush()
        if not _left_to_launcher(error):
            print(f"lockstep {command}: {error}", file=sys.stderr)
        return 2 if isinstance(error, ConfigError) else 1
    except KeyboardInterrupt:
        sys.stdout.flush()
        print(f"lockstep {command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) has gone: nothing more can be said, and Python must not try at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _left_to_launcher(error: LockstepError) -> bool:
    """See lockstep.ranks.context, which loads torch: whoever did not import it is no rank."""
    context = sys.modules.get("lockstep.ranks.context")
    return context is not None and bool(context.left_to_launcher(error))


def usage() -> str:
    """The text of `lockstep --help`."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {line}" for name, line in COMMANDS.items())
    return (
        "usage: lockstep COMMAND [OPTIONS]\n\n"
        "RL post-training whose parts are interchangeable and proven to agree.\n\n"
        f"commands:\n{commands}\n\n"
        "lockstep COMMAND --help lists a command's options."
    )


if __name__ == "__main__":
    sys.exit(main())
