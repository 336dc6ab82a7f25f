"""Whether settings and options of an earlier commit are still taken.

    python scripts/check_kept_options.py c808f96

Read from that commit: every setting in the tables of docs/reference/config.md, and every option that
docs/reference/cli.md names in the section of a command. A setting is taken when a run of its kind has a field
of that name, or of its current name; an option, when the command's help has it. Exit status 0 when all are.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any, get_args

from pydantic import BaseModel

from lockstep.config.load import RUN_KINDS
from lockstep.config.old_names import RENAMED

SUBCOMMANDS = {
    "train": ["train grpo"],
    "parity": ["parity train", "parity compare", "parity check", "parity engines"],
    "recording": [
        f"recording {name}" for name in ("info", "validate", "list", "show", "slice", "merge", "import")
    ],
    "bench step": ["bench step"],
    "plan": ["plan grpo"],
    "matrix": ["matrix", "matrix diff"],
}
EVERYWHERE = {"--help", "--json"}
ELSEWHERE = {"--a", "--b", "--help-all"}
"""Read as flags of a cell, or of --help itself."""


def main(argv: list[str]) -> int:
    """Print what is missing; 0 when nothing is."""
    commit = argv[0]
    missing = [f"setting {key} of {', '.join(kinds)}" for key, kinds in missing_settings(commit)]
    missing += [f"option {option} of lockstep {command}" for command, option in missing_options(commit)]
    print("\n".join(missing) if missing else f"every setting and option of {commit} is taken")
    return 1 if missing else 0


def page(commit: str, path: str) -> str:
    """A page of docs/reference as it was."""
    command = ["git", "show", f"{commit}:docs/reference/{path}"]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout


def missing_settings(commit: str) -> Iterator[tuple[str, list[str]]]:
    """Settings that no run of their kind has."""
    kinds = list(RUN_KINDS)
    for line in page(commit, "config.md").splitlines():
        if line.startswith("## "):
            kinds = re.findall(r'kind = "(\w+)"', line) or list(RUN_KINDS)
            continue
        row = re.match(r"\| `([a-z0-9_.]+)` \|", line)
        if row and not any(has(RUN_KINDS[kind], now(row.group(1)).split(".")) for kind in kinds):
            yield row.group(1), kinds


def now(setting: str) -> str:
    """The current name of a setting."""
    return {each.old: each.new for each in RENAMED}.get(setting, setting)


def has(model: type[BaseModel], path: list[str]) -> bool:
    """Whether a config has the field at `path`; fields of a list of tables count as those of a table."""
    field = model.model_fields.get(path[0])
    if field is None:
        return False
    return len(path) == 1 or any(has(inner, path[1:]) for inner in models_in(field.annotation))


def models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    """The models that a type is made of."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for inner in get_args(annotation):
        yield from models_in(inner)


def missing_options(commit: str) -> Iterator[tuple[str, str]]:
    """(command, option) that no help of the command has."""
    sections = re.split(r"^## lockstep ", page(commit, "cli.md"), flags=re.MULTILINE)[1:]
    for section in sections:
        heading, _, text = section.partition("\n")
        command = re.match(r"bench step|\w+", heading)
        assert command is not None, heading
        name = command.group()
        options = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9.-]*", text)) - EVERYWHERE - ELSEWHERE
        helps = "".join(help_of(words) for words in SUBCOMMANDS.get(name, [name])) if options else ""
        for option in sorted(options):
            if not re.search(re.escape(option) + r"(?![\w-])", helps) and not is_setting(option):
                yield name, option


def help_of(words: str) -> str:
    """What `lockstep WORDS` prints with --help and with --help-all, which some commands have."""
    command = [sys.executable, "-m", "lockstep", *words.split()]
    wishes = ["--help", "--help-all"] if words in ("generate", "score", "select") else ["--help"]
    return "".join(
        subprocess.run([*command, wish], capture_output=True, text=True, timeout=120, check=False).stdout
        for wish in wishes
    )


def is_setting(option: str) -> bool:
    """Whether it is a setting of a run, written as a flag."""
    path = now(option.removeprefix("--").replace("-", "_").replace(".no_", ".")).split(".")
    return any(has(model, path) for model in RUN_KINDS.values())


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
