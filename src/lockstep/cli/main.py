"""`lockstep COMMAND ...`: picks the command's module, and turns errors into one message and an exit status.

Exit status: 0 when what was asked for holds; 1 when it does not, or something failed that had begun; 2 when
something given is wrong (an argument, setting, data set, model, checkpoint or recording) and nothing had
begun; 130 for Ctrl-C, 143 for SIGTERM.

Errors in files, settings and machines become one message. Any other exception is a mistake of
ours, and keeps its traceback. Nothing of either reaches the terminal unescaped.
"""

from __future__ import annotations

import errno
import importlib
import os
import re
import sys
import threading
import warnings
from collections.abc import Sequence
from types import ModuleType, TracebackType

from lockstep.config.old_names import SettingWarning
from lockstep.errors import ConfigError, LockstepError, unknown_name
from lockstep.observe.text import echo, printable
from lockstep.processes.garbage import search_rarely
from lockstep.ranks.environment import in_launcher, without_local_rank
from lockstep.ranks.launch import leave
from lockstep.version import __version__

COMMANDS = {
    "train": ("lockstep.cli.train", "train a policy: lockstep train grpo --recipe demo"),
    "sample": ("lockstep.cli.sample", "print completions of a run's checkpoint"),
    "chat": ("lockstep.cli.chat", "talk to a run's checkpoint"),
    "recording": (
        "lockstep_lab.cli.recording",
        "what a recording holds: info, validate, list, show, slice, merge, import",
    ),
    "replay": (
        "lockstep_lab.cli.replay",
        "feed recorded inputs to the policy again, under any kernel, layout and backend",
    ),
    "plan": ("lockstep.cli.plan", "parameters, memory and micro-batches of a run, before anything starts"),
    "matrix": (
        "lockstep_lab.cli.matrix",
        "a table of inputs under every combination of kernels, layouts, compile modes; matrix diff",
    ),
    "bisect": (
        "lockstep_lab.cli.bisect",
        "the first input and module at which two cells differ, or the smallest input that crashes one",
    ),
    "parity": (
        "lockstep_lab.cli.parity",
        "train stacks and engines that must agree, side by side; compare two runs; check",
    ),
    "doctor": ("lockstep.cli.doctor", "what this machine can run, and the settings that usually bite"),
    "bench": (
        "lockstep_lab.cli.bench",
        "what one RL step costs in several configurations, side by side: bench step",
    ),
    "generate": ("lockstep.cli.generate", "samples of many prompts, into a file for the next two commands"),
    "score": ("lockstep.cli.score", "rewards of samples in a file, by a reward function or a reward model"),
    "select": (
        "lockstep.cli.select",
        "turn scored samples into a set for SFT (best-of-n, rejection sampling) or DPO (pairs)",
    ),
    "submit": (
        "lockstep.cli.submit",
        "hand a run to a Ray cluster, where it continues when this shell is gone",
    ),
    "status": ("lockstep.cli.status", "whether a run is still running, and what it is doing"),
    "stop": ("lockstep.cli.stop", "ask a run to save and end, from another shell, and wait for it"),
    "logs": ("lockstep.cli.logs", "the end of a rank's log; with --follow also what comes"),
    "hang": (
        "lockstep.cli.hang",
        "why a run makes no progress: which rank waits for which, in which collective, at which line",
    ),
    "support": ("lockstep.cli.support", "the table of what may be combined, and where it is tested"),
}
"""Command -> the module, imported at use, whose main(argv) returns the exit status; and one line of help."""

INTERRUPTED = 130
_FORMAT_WARNING = warnings.formatwarning
_MACHINE = frozenset(
    {
        *(errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO, errno.EMFILE, errno.ENFILE),
        *(errno.EACCES, errno.EPERM, errno.ENAMETOOLONG, errno.ELOOP),
    }
)
"""Errors of the system that say something about the machine or a name, and nothing about our code."""
_CONTROL = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f-\x9f]|\r(?!\n|\Z)")
"""Control characters except line ends and tabs, which a prompt may have."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; the exit status."""
    arguments = without_local_rank(sys.argv[1:] if argv is None else argv)
    _escape_tracebacks()
    warnings.formatwarning = _warning
    search_rarely()
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        echo(usage())
        return 0 if arguments else 2
    if arguments[0] in ("-V", "--version"):
        echo(f"lockstep {__version__}")
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
            raise ConfigError(unknown_name("command", command, COMMANDS), code="unknown-name")
        return int(_load(command).main(list(rest)))
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
        # The reader (head, less) has gone: nothing more can be said, and Python must not try at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno not in _MACHINE:
            raise
        sys.stdout.flush()
        echo(f"lockstep {command}: {error.strerror}: {error.filename or 'no file is named'}", file=sys.stderr)
        return 1


def _load(command: str) -> ModuleType:
    """Import a command's module.

    Raises:
        ConfigError: it is in a package that is not here, such as the laboratory's.
    """
    name = COMMANDS[command][0]
    package = name.partition(".")[0]
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        # What the command itself imports and does not find is another matter.
        if package == "lockstep" or error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise
        raise ConfigError(
            f"missing-package: this command is in the package {package}, which cannot be imported (no "
            f"module {error.name!r}); it comes with lockstep-rl: pip install --force-reinstall --no-deps "
            "lockstep-rl, or put all of src on PYTHONPATH",
            name=package,
        ) from error


def _check_arguments(words: Sequence[str]) -> None:
    """Parsers of arguments print them as they are, and a file's name may be somebody else's.

    Raises:
        ConfigError: an argument holds a control character, or bytes that are no text.
    """
    for number, word in enumerate(words, start=1):
        try:
            word.encode()
        except UnicodeEncodeError as error:  # it would fail where it is written to a file or a report
            raise ConfigError(
                f"not-text: argument {number}, {word[:80]!a}, is not UTF-8; rename the file, or write the "
                "text in UTF-8"
            ) from error
        if _CONTROL.search(word):
            raise ConfigError(
                f"wrong-format: argument {number}, {word[:80]!r}, holds a control character; rename the "
                "file, or write the text in a TOML file, where \\u001b stands for one"
            )


def _check_launcher() -> None:
    """Raises ConfigError when torchrun's variables are not what torchrun sets."""
    if not in_launcher():
        return
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT"):
        value = os.environ.get(name, "0")
        if not re.fullmatch(r"[0-9]{1,6}", value):
            raise ConfigError(
                f"wrong-environment: the environment variable {name} = {value[:80]!r} is not a number; "
                "torchrun sets it, elsewhere unset RANK and WORLD_SIZE"
            )
    if int(os.environ["RANK"]) >= int(os.environ["WORLD_SIZE"]):
        raise ConfigError(
            f"wrong-environment: the environment variable RANK = {os.environ['RANK']} is not below "
            f"WORLD_SIZE = {os.environ['WORLD_SIZE']}; torchrun sets both, elsewhere unset them"
        )


def _escape_tracebacks() -> None:
    """An exception's text may hold anything; and a character that the terminal has not is no exception."""

    import traceback

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        echo("".join(traceback.format_exception(kind, error, trace)), end="", file=sys.stderr)

    def show_in_thread(args: threading.ExceptHookArgs) -> None:
        if args.exc_value is not None and not isinstance(args.exc_value, SystemExit):
            show(args.exc_type, args.exc_value, args.exc_traceback)

    # A hook of somebody else, such as a debugger's, is left in place.
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
    """The text of a warning: one about settings is for users, who need no line of ours."""
    if issubclass(category, SettingWarning):
        return f"lockstep: warning: {printable(str(message))}\n"
    return _FORMAT_WARNING(message, category, filename, lineno, line)


def _reported_by_launcher(error: LockstepError) -> bool:
    """See lockstep.ranks.context, which loads torch: whoever did not import it is no rank."""
    context = sys.modules.get("lockstep.ranks.context")
    return context is not None and bool(context.reported_by_launcher(error))


def usage() -> str:
    """The text of `lockstep --help`."""
    width = max(map(len, COMMANDS))
    commands = "\n".join(f"  {name:<{width}}  {line}" for name, (_, line) in COMMANDS.items())
    return (
        "usage: lockstep COMMAND [OPTIONS]\n\n"
        "RL post-training whose parts are interchangeable and proven to agree.\n\n"
        f"commands:\n{commands}\n\n"
        "lockstep COMMAND --help lists a command's options."
    )


if __name__ == "__main__":
    sys.exit(main())
