"""`lockstep COMMAND ...`: run the command's module, and turn errors into one message and an exit status.

Exit status: 0 for success; 1 if the work failed after it had begun, or a check did not hold; 2 if an input
(argument, setting, data set, model, checkpoint or recording) is wrong and nothing had begun; 130 for Ctrl-C,
143 for SIGTERM.

Errors in files, settings and machines become one message. Any other exception is a bug and keeps its
traceback. All of it is escaped before it reaches the terminal.
"""

from __future__ import annotations

import errno
import importlib
import os
import re
import sys
import threading
import warnings
from collections.abc import Callable, Sequence
from types import TracebackType

from lockstep.common_errors import wrong_variable
from lockstep.config.old_names import SettingWarning
from lockstep.errors import ConfigError, LockstepError, unknown_name
from lockstep.observe.text import echo, printable
from lockstep.processes.child import relax_gc
from lockstep.ranks.environment import in_launcher, without_local_rank
from lockstep.ranks.launch import leave
from lockstep.version import version_line

COMMANDS = {
    "train": ("lockstep.cli.train", "train a policy: lockstep train grpo --recipe demo"),
    "init": ("lockstep.cli.init", "write a short run file for your data: lockstep init grpo problems.jsonl"),
    "sample": ("lockstep.cli.sample:sample", "print completions of a run's checkpoint"),
    "chat": ("lockstep.cli.sample:chat", "chat with a run's checkpoint"),
    "generate": ("lockstep.cli.generate", "sample completions of many prompts into a file"),
    "score": ("lockstep.cli.score", "score the samples in a file with reward functions or a reward model"),
    "select": (
        "lockstep.cli.select",
        "turn scored samples into data for SFT (best-of-n, rejection sampling) or DPO (pairs)",
    ),
    "data": ("lockstep.cli.data", "check every row of a run's data before the run: data check"),
    "plan": ("lockstep.cli.plan", "show a run's parameters, memory and micro-batches before it starts"),
    "doctor": (
        "lockstep.cli.doctor",
        "check what this machine can run, and look for settings that often cause trouble",
    ),
    "prove": (
        "lockstep.cli.prove",
        "check every way to run a model against transformers, on a small random copy",
    ),
    "support": (
        "lockstep.cli.doctor:support",
        "list which combinations are supported, and the tests that cover them",
    ),
    "view": ("lockstep.cli.view", "view runs in a browser: curves, rollouts, steps and settings"),
    "serve": ("lockstep.cli.serve", "serve the Tinker API: train and sample through the tinker client"),
    "submit": ("lockstep.cli.submit", "submit a run to a Ray cluster, where it outlives this shell"),
    "runs": ("lockstep.cli.run_table", "list the runs in a folder: state, steps, reward, accuracy, speed"),
    "status": ("lockstep.cli.runs:status", "show whether a run is alive and what it is doing"),
    "stop": ("lockstep.cli.runs:stop", "ask a run to save a checkpoint and exit, and wait until it has"),
    "logs": ("lockstep.cli.runs:logs", "show the end of a rank's log; --follow also shows new lines"),
    "hang": (
        "lockstep.cli.runs:hang",
        "explain why a run makes no progress: which rank waits for which, in which collective, at which line",
    ),
    "recording": (
        "lockstep_lab.cli.recording",
        "inspect and edit recordings: info, validate, list, show, slice, merge, import",
    ),
    "replay": (
        "lockstep_lab.cli.replay",
        "run recorded inputs through the policy again, under any kernel, layout and backend",
    ),
    "matrix": (
        "lockstep_lab.cli.matrix",
        "compare every combination of kernel, layout and compile mode on the same inputs; matrix diff",
    ),
    "bisect": (
        "lockstep_lab.cli.bisect",
        "find the first input and module where two cells differ, or the smallest input that crashes one",
    ),
    "parity": (
        "lockstep_lab.cli.parity",
        "compare train stacks and engines that must agree; compare two runs; check your own stack",
    ),
    "bench": (
        "lockstep_lab.cli.bench",
        "measure the cost of an RL step in several configurations: bench step",
    ),
}
"""Command -> the module, imported on use, and its function (`main` if none is named), which takes the
arguments and returns the exit status; and one line of help."""
_ELSEWHERE = {
    "export": "a run writes its model to RUN_DIR/export when it ends",
    "resume": "use lockstep train --resume RUN_DIR",
    **{kind: f"use lockstep train {kind}" for kind in ("grpo", "ppo", "sft", "dpo", "rm")},
}
"""What users of other tools take for a command -> where it is here."""
_LABORATORY = "lockstep_lab."

INTERRUPTED = 130
_FORMAT_WARNING = warnings.formatwarning
_MACHINE = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE),
        *(errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP),
    }
)
"""System errors that concern the machine or a file name, not a bug in Lockstep."""
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n|\Z)")
"""Control characters except line ends and tabs, which a prompt may have."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    arguments = without_local_rank(sys.argv[1:] if argv is None else argv)
    _escape_tracebacks()
    warnings.formatwarning = _warning
    relax_gc()
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        echo(usage())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        echo(version_line())
        return 0
    status = _run(*arguments)
    leave(status)
    return status


def _run(command: str, *rest: str) -> int:
    """Run one command, show its errors, and return the exit status."""
    try:
        _check_arguments((command, *rest))
        _check_launcher()
        if command not in COMMANDS:
            told = unknown_name("command", command, COMMANDS)
            if command in _ELSEWHERE:
                told = f"unknown command {command!r}; {_ELSEWHERE[command]}"
            raise ConfigError(told, code="unknown-name")
        return int(_load(command)(list(rest)))
    except LockstepError as error:
        sys.stdout.flush()
        if not _reported_by_launcher(error):
            echo(f"lockstep {command}: error[{error.code}]: {error}", file=sys.stderr)
        return error.status
    except KeyboardInterrupt:
        sys.stdout.flush()
        echo(f"lockstep {command}: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # The reader (head, less) is gone: nothing more can be printed, and Python must not try at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno not in _MACHINE:
            raise
        sys.stdout.flush()
        echo(f"lockstep {command}: {error.strerror}: {error.filename or 'no file is named'}", file=sys.stderr)
        return 1


def _load(command: str) -> Callable[[Sequence[str]], int]:
    """Import a command's module and return the command's function.

    Raises:
        ConfigError: the command's package, such as the laboratory's, cannot be imported.
    """
    name, _, function = COMMANDS[command][0].partition(":")
    package = name.partition(".")[0]
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        # A module that the command itself imports and does not find is a bug, or a missing dependency.
        if package == "lockstep" or error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"missing-package: this command needs the package {package}, which cannot be imported (no "
            f"module {error.name!r}); reinstall lockstep-rl, which contains it: pip install "
            "--force-reinstall --no-deps lockstep-rl, or put all of src on PYTHONPATH"
        ) from error
    run: Callable[[Sequence[str]], int] = getattr(module, function or "main")
    return run


def _check_arguments(words: Sequence[str]) -> None:
    """Refuse arguments that would not be safe to print: argument parsers print them unescaped, and a file may
    have been named by somebody else.

    Raises:
        ConfigError: an argument holds a control character, or is not UTF-8.
    """
    for number, word in enumerate(words, start=1):
        try:
            word.encode()
        except UnicodeEncodeError as error:  # it would fail where it is written to a file or a report
            raise ConfigError(
                f"not-text: argument {number}, {word[:80]!a}, is not UTF-8; rename the file, or use UTF-8 "
                "text"
            ) from error
        if _CONTROL.search(word):
            raise ConfigError(
                f"wrong-format: argument {number}, {word[:80]!r}, contains a control character; rename the "
                "file, or write the text in a TOML file, where \\u001b stands for ESC"
            )


def _check_launcher() -> None:
    """Raise ConfigError if torchrun's environment variables are malformed."""
    if not in_launcher():
        return
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        value = os.environ.get(name, "0")
        if not re.fullmatch(r"[0-9]{1,6}", value):
            raise wrong_variable(
                name,
                value,
                "is not a number; torchrun sets it; without torchrun, unset RANK and WORLD_SIZE",
            )
    if int(os.environ["RANK"]) >= int(os.environ["WORLD_SIZE"]):
        raise ConfigError(
            f"wrong-environment: the environment variable RANK = {os.environ['RANK']} is not below "
            f"WORLD_SIZE = {os.environ['WORLD_SIZE']}; torchrun sets both; without torchrun, unset them"
        )


def _escape_tracebacks() -> None:
    """Escape tracebacks, whose text may hold anything, and characters that the terminal's encoding lacks."""

    import traceback

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        echo("".join(traceback.format_exception(kind, error, trace)), end="", file=sys.stderr)

    def show_in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            show(args.exc_type, args.exc_value, args.exc_traceback)

    # Another hook, such as a debugger's, stays in place.
    if sys.excepthook is sys.__excepthook__:
        sys.excepthook = show
    if threading.excepthook is threading.__excepthook__:
        threading.excepthook = show_in_thread
    reconfigure = getattr(sys.stdout, "reconfigure", None)
    if reconfigure is not None:
        reconfigure(errors="backslashreplace")


def _warning(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, line: str | None = None
) -> str:
    """The text of a warning; a warning about settings is for users and does not show a line of code."""
    if issubclass(category, SettingWarning):
        return f"lockstep: warning: {printable(str(message))}\n"
    return _FORMAT_WARNING(message, category, filename, lineno, line)


def _reported_by_launcher(error: LockstepError) -> bool:
    """Return whether the launcher reports this error of a rank. lockstep.ranks.context loads torch; a process
    that has not imported it is not a rank."""
    context = sys.modules.get("lockstep.ranks.context")
    return context is not None and bool(context.reported_by_launcher(error))


def usage() -> str:
    """The text of `lockstep --help`."""
    width = max(map(len, COMMANDS))
    lines = {name: f"  {name:<{width}}  {line}" for name, (_, line) in COMMANDS.items()}
    laboratory = [name for name, (module, _) in COMMANDS.items() if module.startswith(_LABORATORY)]
    training = [name for name in COMMANDS if name not in laboratory]
    return "\n".join(
        [
            "usage: lockstep COMMAND [OPTIONS]\n",
            "RL post-training whose parts are interchangeable and proven to agree.\n",
            "train and use models:",
            *(lines[name] for name in training),
            "\nlaboratory:",
            *(lines[name] for name in laboratory),
            "\nlockstep COMMAND --help lists a command's options.",
        ]
    )


if __name__ == "__main__":
    sys.exit(main())
