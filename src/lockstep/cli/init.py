"""`lockstep init`: write a run file for the user's own data.

lockstep init grpo problems.jsonl
lockstep init sft conversations.parquet --model Qwen/Qwen3-0.6B --out sft.toml
lockstep init dpo pairs.jsonl --column prompt=question
lockstep init grpo reasoning_gym:countdown
lockstep init grpo problems.jsonl --reward my_rewards.py:score
lockstep init tools problems.jsonl --environment my_tools:Calculator
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lockstep.cli import arguments as values
from lockstep.common_errors import already_exists, unknown
from lockstep.config.data import DataConfig
from lockstep.config.load import build, parse_toml, toml_value
from lockstep.data.rows import ReasoningGymRows
from lockstep.data.sources import count_rows, load_rows, missing_column
from lockstep.errors import ConfigError
from lockstep.observe.files import check_writable, write_atomic
from lockstep.observe.text import echo

ROLES: Mapping[str, tuple[str, ...]] = {
    "prompt": ("prompt", "question", "problem", "instruction", "query", "input", "messages"),
    "input": ("input", "context"),
    "answer": ("answer", "solution", "final_answer", "expected_answer", "ground_truth", "target"),
    "messages": ("messages", "conversation", "conversations"),
    "completion": ("completion", "response", "output", "answer", "solution"),
    "text": ("text", "content"),
    "chosen": ("chosen", "preferred", "accepted"),
    "rejected": ("rejected", "dispreferred", "refused"),
}
"""Role of a column -> its usual names; the first one that the data has is taken."""
REWARDS: Mapping[str, str] = {
    "math": "compares with the answer",
    "verifier": "the task's own",
    "length": "how close the completion's length is to the target",
}
"""Built-in reward that needs nothing but the data -> what it is."""
PYTHON_TOOL = "lockstep.environments.python_tool:PythonTool"
_ROWS = 64
"""Rows that are counted, so that a batch is not larger than a small file."""


@dataclass(frozen=True, kw_only=True)
class Found:
    """The user's data, as a template takes it."""

    source: str
    model: str
    file: Path
    """The run file to write."""
    columns: Mapping[str, str]
    """Role -> column, of those that were found."""
    row: Mapping[str, Any]
    """The first row."""
    rows: int
    """Up to _ROWS."""
    generated: bool = False
    """Whether the source makes its rows: they need no columns to be named."""
    environment: str = ""
    """`module:Class` of the tools."""
    reward: str = ""
    """One of REWARDS or `module:function`, if the user chose one."""

    def need(self, *roles: str) -> None:
        """Raise ConfigError unless the data has a column for one of the roles."""
        if self.generated and "prompt" not in roles:
            raise ConfigError(
                f"unsupported-combination: {self.source} makes prompts only; give a file, a folder or a hub "
                f"set with a column for the {' or '.join(roles)}"
            )
        if not any(role in self.columns for role in roles):
            usual = ", ".join(name for role in roles for name in ROLES[role])
            raise ConfigError(
                f"missing-column: {self.source} has the columns {', '.join(self.row)}, but none with a usual "
                f"name for the {' or '.join(roles)} ({usual}); name it: --column {roles[0]}=NAME"
            )

    def lines(self, *roles: str) -> list[tuple[str, str]]:
        """The settings that name the columns of these roles, as far as the data has them."""
        if self.generated:
            return []
        found = {role: self.columns[role] for role in roles if role in self.columns}
        named = [(f"{role}_column = {toml_value(column)}", "") for role, column in found.items()]
        # Alpaca's `input`, which belongs to the prompt. Others may hold documents, or nothing.
        more = self.columns.get("input", "")
        fits = re.fullmatch(r"\w+", more) and isinstance(self.row[more], str | int | float)
        if "prompt" in found and more not in found.values() and fits:
            text = toml_value(f"{{prompt}}\n\n{{{more}}}")
            named.append((f"prompt_template = {text}", "every column can be part of the prompt"))
        return named


Lines = list[tuple[str, str]]
"""Each a line of TOML and its comment, either of which may be empty."""


def _head(kind: str, found: Found, steps: str) -> Lines:
    return [
        ("", f"{start(found.file)}    (--help lists the common settings, --help-all every one)"),
        (f'kind = "{kind}"', ""),
        ("steps = 100", f"{steps}; or epochs = 3 instead"),
    ]


def _model(found: Found) -> Lines:
    return [("", ""), ("[model]", ""), (f"name = {toml_value(found.model)}", "a hub name or a folder")]


def _data(found: Found, columns: Lines) -> Lines:
    return [("", ""), ("[data]", ""), (f"source = {toml_value(found.source)}", ""), *columns]


def _train(lr: str, why: str) -> Lines:
    return [("", ""), ("[train]", ""), (f"lr = {lr}", why)]


def _reward(found: Found) -> tuple[str, str]:
    name = found.reward or (
        "verifier" if found.generated else "math" if "answer" in found.columns else "length"
    )
    kwargs = ", kwargs = {target = 64}" if name == "length" else ""
    own = "" if found.reward else '; put your own here: "module:function"'
    return f"rewards = [{{name = {toml_value(name)}{kwargs}}}]", REWARDS.get(name, "your own") + own


def _rl(kind: str, found: Found) -> Lines:
    found.need("prompt")
    evaluation = ("eval.every = 20", "on held-out rows; also before and after training")
    if found.rows == 1:
        evaluation = ("eval = {before = false, after = false}", "a single row cannot be held out")
    return [
        *_head("grpo" if found.environment else kind, found, "rollout batches"),
        evaluation,
        *([_reward(found)] if found.reward or found.environment in ("", PYTHON_TOOL) else []),
        *([("value.lr = 1e-5", "learning rate of the value model")] if kind == "ppo" else []),
        *_tools(found),
        *_model(found),
        *_data(found, found.lines("prompt", "answer")),
        ("", ""),
        ("[rollout]", ""),
        (f"prompts_per_step = {max(1, min(8, found.rows // 2))}", ""),
        ("group_size = 8", "completions of each prompt"),
        *_turns(found),
        ("sampling.max_tokens = 256", "raise it if rollout/truncated is high"),
        *_train("1e-6", "with LoRA ([model.lora]) about ten times more"),
    ]


def _tools(found: Found) -> Lines:
    if not found.environment:
        return []
    why = "its methods are tools" + (
        "; or a class of yours" if found.environment == PYTHON_TOOL else ", and it rewards"
    )
    return [(f"environment = {toml_value(found.environment)}", why)]


def _turns(found: Found) -> Lines:
    if not found.environment:
        return []
    return [("max_turns = 4", ""), ("max_trajectory_tokens = 1024", "all turns and results of tools")]


def _sft(kind: str, found: Found) -> Lines:
    found.need("messages", "completion", "text")
    roles = next(
        roles for roles in (("messages",), ("prompt", "completion"), ("text",)) if roles[-1] in found.columns
    )
    if "completion" in roles:
        found.need("prompt")
    return [
        *_head(kind, found, "optimizer steps"),
        (f"batch_size = {min(32, found.rows)}", "documents per step"),
        *_model(found),
        *_data(found, found.lines(*roles)),
        ("max_length = 2048", "tokens of a document; longer ones are truncated"),
        *_train("1e-5", "with LoRA ([model.lora]) about ten times more"),
        ('schedule = "cosine"', ""),
    ]


def _dpo(kind: str, found: Found) -> Lines:
    found.need("chosen")
    found.need("rejected")
    return [
        *_head(kind, found, "optimizer steps"),
        (f"batch_size = {min(32, found.rows)}", "pairs per step"),
        *_model(found),
        *_data(found, found.lines("prompt", "chosen", "rejected")),
        ("max_length = 2048", "tokens of prompt and answer"),
        ("", ""),
        ("[algorithm]", ""),
        ('name = "dpo"', "or robust_dpo, ipo, simpo, orpo, kto"),
        ("beta = 0.1", "a larger beta keeps the policy closer to where it began"),
        *_train("1e-6", "with LoRA ([model.lora]) about ten times more"),
    ]


TEMPLATES: Mapping[str, Callable[[str, Found], Lines]] = {
    "grpo": _rl,
    "ppo": _rl,
    "sft": _sft,
    "dpo": _dpo,
    "tools": _rl,
}
"""Kind of run, or a purpose of one -> the lines of its file."""


def main(argv: Sequence[str]) -> int:
    """Write the file; 0.

    Raises:
        ConfigError: the file exists, or the data has no column that the kind of run needs.
        DataError: the data cannot be read.
    """
    args = parser().parse_args(list(argv))
    if args.out.exists():
        raise already_exists(f"--out {args.out}", "choose another file, or delete it")
    check_writable(args.out, flag="--out")
    environment = args.environment or (PYTHON_TOOL if args.kind == "tools" else "")
    if environment and args.kind != "tools":
        raise ConfigError(f"no-effect: --environment {environment} is for lockstep init tools; leave it out")
    found = look(args.data, args.column, model=args.model, file=args.out)
    found = dataclasses.replace(found, environment=environment, reward=_reward_name(args.reward, args.kind))
    text = written(TEMPLATES[args.kind](args.kind, found))
    for word in args.column:
        role, _, column = word.partition("=")
        if f"\n{role}_column = " not in text and not (role == "input" and f"{{{column}}}" in text):
            raise ConfigError(
                f"no-effect: --column {word} would change nothing: a {args.kind} run of this data has no "
                "such column, or it cannot be part of a prompt; leave it out"
            )
    build(parse_toml(text.encode(), origin=str(args.out)), origin=str(args.out))
    write_atomic(args.out, text)
    echo(f"init: {args.out}; start it with: {start(args.out)}")
    return 0


def _reward_name(given: str | None, kind: str) -> str:
    """The name of `--reward` in a run file: a file becomes a module that is imported from the working folder.

    Raises:
        ConfigError: the kind of run has no rewards, or there is no such reward or file.
    """
    if given is None:
        return ""
    if kind in ("sft", "dpo"):
        raise ConfigError(f"no-effect: --reward {given}: a {kind} run has no rewards; leave it out")
    name, colon, function = given.rpartition(":")
    if not colon and given not in REWARDS:
        raise unknown("reward", given, [*REWARDS, "module:function"])
    if not name.endswith(".py"):
        return given
    file = Path(name).resolve()
    if not file.is_file():
        raise ConfigError(f"no-such-file: --reward {given}: {file} does not exist; correct the path")
    text = file.read_text(errors="replace")
    if function.isidentifier() and not re.search(rf"\b{function}\b", text) and "import *" not in text:
        raise ConfigError(f"wrong-part: --reward {given}: {file} has no {function!r}; correct the name")
    if not file.is_relative_to(Path.cwd()):
        raise ConfigError(
            f"leads-out-of-folder: --reward {given}: rewards are imported from {Path.cwd()}, and "
            f"{file} is not in it; copy it here, or run this command there"
        )
    return ".".join(file.relative_to(Path.cwd()).with_suffix("").parts) + f":{function}"


def parser() -> argparse.ArgumentParser:
    """Every flag."""
    parser = values.command_parser(
        "lockstep init",
        "Write a short, commented run file for your data. Columns are recognised by their usual names.",
    )
    parser.add_argument("kind", choices=list(TEMPLATES), help="what to train")
    source = (
        "a .jsonl, .json or .parquet file, a folder saved by `datasets`, a hub name, or reasoning_gym:TASK"
    )
    parser.add_argument("data", metavar="DATA", help=source)
    flags = values.Flags(parser)
    flags.value("--out", values.path, "the file to write", Path("run.toml"))
    flags.value("--model", "NAME", "hub name or folder of the model", "bundled:smollm2-135m")
    names = ", ".join(REWARDS)
    flags.value("--reward", "NAME", f"{names}, or your own: FILE.py:FUNCTION or MODULE:FUNCTION", None)
    flags.value("--environment", "MODULE:CLASS", "tools: your own class", None)
    flags.many("--column", "ROLE=NAME", f"a column with an unusual name; roles: {', '.join(ROLES)}")
    return parser


def look(source: str, named: Sequence[str], *, model: str, file: Path) -> Found:
    """Read the first row of the data, and find the columns.

    Args:
        named: ROLE=NAME, each a column that need not be guessed.

    Raises:
        DataError: the data cannot be read.
        ConfigError: there is no such role or column.
    """
    data = DataConfig(source=source)
    if data.generated:
        return _generated(data, named, model=model, file=file)
    row = load_rows(data.model_copy(update={"size": 1}))[0]
    columns = {
        role: found for role, usual in ROLES.items() if (found := next((n for n in usual if n in row), ""))
    }
    for word in named:
        role, column = values.pair("--column", word, example="prompt=question")
        if role not in ROLES:
            raise unknown("role", role, ROLES)
        if column not in row:
            raise missing_column(column, row, setting=f"--column {role}", source=source)
        columns[role] = column
    return Found(
        source=source, model=model, file=file, columns=columns, row=row, rows=count_rows(data, _ROWS)
    )


def _generated(data: DataConfig, named: Sequence[str], *, model: str, file: Path) -> Found:
    """The rows of a task. Raises ConfigError: there is no such task, or a column was named."""
    if data.source == "ids":
        raise ConfigError(
            "unsupported-combination: DATA = 'ids' is for models without a tokenizer; see lockstep train "
            "grpo --recipe tiny"
        )
    if named:
        raise ConfigError(
            f"no-effect: --column {named[0]}: {data.source} names its columns itself; leave it out"
        )
    row = ReasoningGymRows(data).row("train", 0, 0)
    columns = {"prompt": "question", "answer": "answer"}
    return Found(
        source=data.source, model=model, file=file, columns=columns, row=row, rows=_ROWS, generated=True
    )


def start(file: Path) -> str:
    """The command that starts a run of the file."""
    return shlex.join(["lockstep", "train", str(file)])


def written(lines: Lines) -> str:
    """The text of a file: comments stand below each other within a table."""
    blocks: list[Lines] = [[]]
    for line in lines:
        blocks[-1].append(line)
        if line == ("", ""):
            blocks.append([])
    text = []
    for block in blocks:
        width = max((len(toml) for toml, comment in block if toml and comment), default=0)
        for toml, comment in block:
            text.append(
                f"{toml:<{width}}  # {comment}" if toml and comment else f"# {comment}" if comment else toml
            )
    return "\n".join(text) + "\n"
