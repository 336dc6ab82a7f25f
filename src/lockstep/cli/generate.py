"""`lockstep generate`: sample completions of many prompts into a file.

lockstep generate --model MODEL --data prompts.jsonl --n 8 --out samples.jsonl
lockstep generate --engine vllm --engine.python PYTHON --model MODEL --data prompts.jsonl --out s.parquet
lockstep generate settings.toml --out samples.jsonl
"""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from lockstep.cli.batch_common import BatchFlags, Rows, parse_command, run_command
from lockstep.common_errors import unknown
from lockstep.config.batch import GenerateConfig
from lockstep.config.load import to_values
from lockstep.config.model import ModelConfig
from lockstep.engine import ENGINES
from lockstep.errors import ConfigError, underway
from lockstep.loop.interrupt import Interrupt
from lockstep.observe.files import check_writable
from lockstep.observe.text import echo

if TYPE_CHECKING:
    from lockstep.data.prompts import PromptMaker
    from lockstep.rollout.rows import RowFile
    from lockstep.rollout.scoring import SampleWork, Totals
    from lockstep.schema.rollout import Prompt

USAGE = """usage: lockstep generate [FILE.toml] --model MODEL --data DATA --out FILE [OPTIONS]

Sample completions of many prompts into a .jsonl or .parquet file. Run the same command again to continue an
interrupted one.

  --model MODEL       a folder, a hub name, bundled:NAME, or a run directory (--checkpoint export|last|STEP)
  --engine NAME       native, hf, vllm, sglang (--engine.python PATH starts a server, --engine.url uses one)
  --data DATA         a file, a folder, a hub name, reasoning_gym:TASK or ids, as for data.source
  --out FILE          output file
  --n N               samples per prompt
  --temperature T, --max-tokens N, --top-p P, --chat-template TEMPLATE, --system-prompt TEXT

`lockstep generate --help-all` lists every setting."""
SHORT = {
    "--model": "--model.name",
    "--engine": "--engine.name",
    "--data": "--data.source",
    "--temperature": "--sampling.temperature",
    "--max-tokens": "--sampling.max-tokens",
    "--top-p": "--sampling.top-p",
    "--chat-template": "--data.chat-template",
    "--system-prompt": "--data.system-prompt",
}
_SAME_SAMPLES = ("name", "batch_invariant", "max_model_len", "options")
"""Settings of `engine` that decide a sample; the others decide only where and how fast."""


@dataclass(frozen=True, kw_only=True)
class Flags(BatchFlags):
    """Flags that are not settings."""

    checkpoint: Annotated[
        str | None,
        tyro.conf.arg(help="Checkpoint of a run directory: export, last or a step.", metavar="NAME"),
    ]


@dataclass(frozen=True, kw_only=True)
class Command(Flags):
    """A parsed command line."""

    config: GenerateConfig


@dataclass(frozen=True, kw_only=True)
class Weights:
    """The folder of the weights, found before anything is loaded."""

    model: ModelConfig
    checkpoint: Path | None
    """A run's checkpoint, loaded over the model."""


def main(argv: Sequence[str]) -> int:
    """0 when all rows are there, 130 or 143 when a signal came before.

    Raises:
        ConfigError, DataError, ModelError, EngineError: what is in the file stays.
    """
    if not argv or argv[0] in ("-h", "--help"):
        echo(USAGE)
        return 0 if argv else 2
    command = parse(argv)
    return run_command("generate", command, command.config, generate, verdict)


def parse(argv: Sequence[str]) -> Command:
    """Check a command line down to the last setting; loads no torch.

    Raises:
        ConfigError: for everything that cannot be right.
    """
    config, values = parse_command(
        "lockstep generate",
        argv,
        GenerateConfig,
        flags=Flags,
        start={"data": {"source": "", "shuffle": False}},
        short=SHORT,
    )
    if not config.data.source:
        raise ConfigError(
            "missing-setting: there are no prompts; pass --data FILE (or reasoning_gym:TASK, a hub name, ids)"
        )
    if config.engine.name not in (*ENGINES, "auto") and ":" not in config.engine.name:
        raise unknown("inference engine", config.engine.name, [*ENGINES, "auto"], setting="engine.name")
    if values["out"] is None and not values["print_config"]:
        raise ConfigError(
            "missing-setting: there is no output file; pass --out FILE.jsonl or --out FILE.parquet"
        )
    check_writable(values["json"])
    return Command(config=config, **values)


def generate(command: Command, interrupt: Interrupt) -> dict[str, Any]:
    """Sample what is missing; the result."""
    from lockstep.data.prompts import PromptMaker, load_prompts
    from lockstep.data.sources import check_source
    from lockstep.models.export import model_facts
    from lockstep.rollout.rows import RowFile, check_out
    from lockstep.rollout.scoring import check_prompts, prompt_batches

    out = command.out
    assert out is not None
    check_out(out)
    check_source(command.config.data)
    weights = find(command.config, command.checkpoint)
    command = with_engine(command, weights)
    config = command.config
    facts = model_facts(weights.model)
    prompts = load_prompts(config.data, tokenizer=facts.tokenizer, vocab_size=facts.vocab_size)
    prompts.make_all()
    for note in prompts.notes:
        echo(note)
    batches = prompt_batches(prompts, config)
    longest = check_prompts(
        batches,
        vocab_size=facts.vocab_size,
        context=min(facts.max_positions, config.engine.max_model_len or facts.max_positions),
        max_tokens=config.sampling.max_tokens,
    )
    maker = PromptMaker(config.data, facts.tokenizer, ())
    count = sum(map(len, batches))
    rows = RowFile(
        out,
        command="generate",
        identity=identity(config, weights, batches),
        expected=count * config.n,
        overwrite=command.overwrite,
        may_differ=may_differ(config),
    )
    result: dict[str, Any] = {"out": str(out), "prompts": count, "n": config.n, "data": prompts.report}
    with rows:
        if rows.complete:
            return result | {"outcome": "complete", "rows": len(rows.done), "new_rows": 0}
        work = sample_work(config, maker)
        return result | _sampled(command, weights, interrupt, run=_Run(batches, work, rows, longest))


def with_engine(command: Command, weights: Weights) -> Command:
    """The same with the engine that "auto" is here."""
    from lockstep.loop.engines import standalone_config

    engine = standalone_config(command.config.engine, weights.model)
    return replace(command, config=command.config.model_copy(update={"engine": engine}))


@dataclass(frozen=True)
class _Run:
    batches: list[list[Prompt]]
    work: SampleWork
    rows: RowFile
    longest: int


def _sampled(command: Command, weights: Weights, interrupt: Interrupt, *, run: _Run) -> dict[str, Any]:
    """Start the engine and sample."""
    from lockstep.rollout.scoring import Hooks, Totals, generate_rows

    rows, before = run.rows, len(run.rows.done)
    there = f", of which {before} are there" if before else ""
    if not command.quiet:
        echo(f"generate: {rows.expected} rows{there}, model {weights.model.name}", flush=True)
    totals, stats, seconds = Totals(), None, 0.0
    if before < rows.expected:  # else only the end of an earlier command is missing
        engine = _open(command, weights, run)
        try:
            started = time.perf_counter()
            with (
                underway(lambda: len(rows.done) > before),
                Rows("generate", quiet=command.quiet) as progress,
                interrupt.deferred(engine.abort),
            ):
                hooks = Hooks(on_row=progress, cancelled=lambda: interrupt.requested)
                totals = generate_rows(engine, run.batches, run.work, sink=rows, hooks=hooks)
            seconds, stats = time.perf_counter() - started, asdict(engine.stats())
        finally:
            engine.close()
    result = _result(rows, totals, before=before, seconds=seconds) | {"engine": command.config.engine.name}
    if len(rows.done) == rows.expected:
        rows.finish(result)
        result["outcome"] = "finished"
    return result | {"stats": stats, "settings": to_values(command.config)}


def _result(rows: RowFile, totals: Totals, *, before: int, seconds: float) -> dict[str, Any]:
    return {
        "outcome": "interrupted",
        "rows": len(rows.done),
        "expected": rows.expected,
        "resumed_rows": before,
        "new_rows": totals.rows,
        "tokens": totals.tokens,
        "finish_reasons": dict(totals.finish_reasons),
        "seconds": seconds,
        "tokens_per_second": totals.tokens / seconds if seconds else 0.0,
    }


def _open(command: Command, weights: Weights, run: _Run) -> Any:
    from lockstep.cli.common_model import read_checkpoint
    from lockstep.loop.engines import EngineRequest, open_engine

    assert command.out is not None
    checkpoint = weights.checkpoint
    return open_engine(
        command.config.engine,
        EngineRequest(
            model=weights.model,
            adjust=None if checkpoint is None else partial(read_checkpoint, directory=checkpoint),
            longest=run.longest,
            temperatures=frozenset({command.config.sampling.temperature}),
            work_dir=command.out.with_name(command.out.name + ".engine"),
            seed=command.config.seed,
        ),
    )


def find(config: GenerateConfig, checkpoint: str | None) -> Weights:
    """The model of a run directory, or any that model.name takes.

    Raises:
        ConfigError: --checkpoint for something that is no run.
        CheckpointError: the run has no such checkpoint.
    """
    from lockstep.cli.common_model import find_run, model_of_run

    found = find_run(config.model.name, checkpoint)
    if found is None:
        return Weights(model=config.model, checkpoint=None)
    run, weights = found
    dtype = run.model.dtype if config.model.dtype == "auto" else config.model.dtype
    model, saved = model_of_run(run, weights, dtype=dtype)
    return Weights(model=model, checkpoint=saved)


def sample_work(config: GenerateConfig, maker: PromptMaker) -> SampleWork:
    """The sampling settings of each prompt."""
    from lockstep.rollout.sampler import sampling_params
    from lockstep.rollout.scoring import ALL_PROMPTS_STEP, SampleWork

    def conversation(prompt: Prompt) -> Any:
        if maker.chat is None:
            return prompt.text
        return maker.conversation(prompt.row, prompt.where)[1]

    return SampleWork(
        sampling=sampling_params(config.sampling),
        n=config.n,
        seed=config.seed,
        step=ALL_PROMPTS_STEP - (0 if config.iteration is None else config.iteration + 1),
        columns=config.columns,
        conversation=conversation,
        whole_batches=not config.engine.batch_invariant,
    )


def identity(config: GenerateConfig, weights: Weights, batches: list[list[Prompt]]) -> dict[str, Any]:
    """The settings that decide every row: an earlier file's must be the same."""
    import torch

    from lockstep.models.dtypes import resolve_dtype
    from lockstep.models.export import weights_fingerprint
    from lockstep.rollout.reward_functions import encoded

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    prompts = hashlib.blake2b(digest_size=16)
    for prompt in (prompt for batch in batches for prompt in batch):
        row = encoded(dict(prompt.row), prompt.where)
        prompts.update(json.dumps([prompt.index, prompt.token_ids, row]).encode())
    return {
        "settings": to_values(config),
        "checkpoint": None if weights.checkpoint is None else weights.checkpoint.name,
        "weights": weights_fingerprint(weights.model, more=weights.checkpoint),
        "prompts": prompts.hexdigest(),
        "dtype": None if config.engine.url else str(resolve_dtype(weights.model.dtype, device)),
    }


def may_differ(config: GenerateConfig) -> list[str]:
    """Settings that a later command may change: where and how fast samples are made."""
    names = [f"settings.engine.{n}" for n in type(config.engine).model_fields if n not in _SAME_SAMPLES]
    return names if config.iteration is not None else [*names, "settings.rollout_batch_size"]


def verdict(result: Mapping[str, Any]) -> str:
    """The last line."""
    out, rows = result["out"], result["rows"]
    if result["outcome"] == "complete":
        return f"generate: nothing to do: {out} is complete, {rows} rows of {result['prompts']} prompts"
    left_out = {name: count for name, count in result["data"].items() if count and name != "prompts"}
    parts = [
        str(result["outcome"]),
        f"{rows} rows of {result['prompts']} prompts"
        if result["outcome"] == "finished"
        else f"{rows} of {result['expected']} rows; the same command goes on",
        f"{result['tokens']} tokens",
        f"{result['tokens_per_second']:.0f} tok/s",
        *(f"{count} prompts {name.replace('_', ' ')}" for name, count in left_out.items()),
        str(out),
    ]
    return "generate: " + ", ".join(parts)
