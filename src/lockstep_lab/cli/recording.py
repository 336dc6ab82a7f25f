"""`lockstep recording`: inspect, validate and edit recordings.

lockstep recording info
lockstep recording validate runs/demo
lockstep recording list runs/demo --steps 3:6 --rank 0
lockstep recording show 7 runs/demo --tokens
lockstep recording slice runs/demo --out small --steps 0:10 --every 4
lockstep recording merge rank0 rank1 --out both
lockstep recording import dump.pt --out imported

Without a path, the commands use the corpus that comes with Lockstep.
"""

from __future__ import annotations

import argparse
import os
import sys
import textwrap
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tyro

from lockstep.cli import arguments
from lockstep.errors import ConfigError, LockstepError, RecordingError, unknown_name
from lockstep.observe.files import check_above, check_writable, write_json
from lockstep.observe.text import echo, printable

if TYPE_CHECKING:
    from lockstep.recording.reader import Recording
    from lockstep.schema.recording import RecordingHeader
    from lockstep_lab.recording.edit import Edited
    from lockstep_lab.recording.show import Decoder

RecordingPath = Annotated[Path | None, tyro.conf.Positional, tyro.conf.arg(metavar="[RECORDING]")]
JsonFile = Annotated[Path | None, tyro.conf.arg(metavar="FILE")]
Numbers = Annotated[str | None, tyro.conf.arg(metavar="LIST")]
PERCENTILES = (0, 50, 90, 99, 100)
WIDTH = 100
_HEADER = (
    *("created", "framework", "versions", "model", "vocab_size", "algorithm", "temperature", "max_tokens"),
    *("axes", "capacity", "device_name", "world_size"),
)
"""Fields of the header that `info` prints first."""


@dataclass(frozen=True, kw_only=True)
class Info:
    """Summarize a recording."""

    path: RecordingPath = None
    """A recording or a run directory. By default, the corpus that comes with Lockstep."""
    json: JsonFile = None
    """Write the summary to this file."""


@dataclass(frozen=True, kw_only=True)
class Validate:
    """Read and check every input; exit status 1 if one is damaged."""

    path: RecordingPath = None
    """A recording or a run directory. By default, the corpus that comes with Lockstep."""
    json: JsonFile = None
    """Write the findings to this file."""


@dataclass(frozen=True, kw_only=True)
class List:
    """List the inputs, one per line."""

    path: RecordingPath = None
    """A recording or a run directory. By default, the corpus that comes with Lockstep."""
    steps: Annotated[str | None, tyro.conf.arg(metavar="A:B")] = None
    """Use only inputs of steps A to B - 1."""
    rank: Numbers = None
    """Use only inputs of these ranks, such as 0 or 0,2-3."""
    json: JsonFile = None
    """Write the rows to this file."""


@dataclass(frozen=True, kw_only=True)
class Show:
    """Show one input: its documents as text, with the trained tokens marked."""

    index: Annotated[int, tyro.conf.Positional]
    """Index of the input, as `list` prints it; -1 is the last."""
    path: RecordingPath = None
    """A recording or a run directory. By default, the corpus that comes with Lockstep."""
    tokens: bool = False
    """Print one line per token, with its logprobs, advantage and weight."""
    ids: bool = False
    """Show token ids even if the model's tokenizer is available."""
    json: JsonFile = None
    """Write ids, mask, numbers and metadata to this file."""


@dataclass(frozen=True, kw_only=True)
class Slice:
    """Copy some inputs, with the weights that they need, to a new recording."""

    path: RecordingPath = None
    """A recording or a run directory. By default, the corpus that comes with Lockstep."""
    out: Path
    """A directory that does not exist yet."""
    inputs: Numbers = None
    """Use only the inputs with these indices, such as 0,3,8-11."""
    steps: Annotated[str | None, tyro.conf.arg(metavar="A:B")] = None
    """Use only inputs of steps A to B - 1."""
    rank: Numbers = None
    """Use only inputs of these ranks, such as 0 or 0,2-3."""
    every: int = 1
    """Keep every k-th of the selected inputs, from the first."""
    weights: bool = True
    """Copy the weights that the inputs need."""
    json: JsonFile = None
    """Write the result to this file."""


@dataclass(frozen=True, kw_only=True)
class Merge:
    """Merge recordings of one run that were made by different ranks or in different steps."""

    paths: Annotated[tuple[Path, ...], tyro.conf.Positional, tyro.conf.arg(metavar="RECORDING ...")]
    """Recordings or run directories."""
    out: Path
    """A directory that does not exist yet."""
    weights: bool = True
    """Copy the weights that the inputs need."""
    json: JsonFile = None
    """Write the result to this file."""


@dataclass(frozen=True, kw_only=True)
class Import:
    """Import inputs that another framework dumped with torch.save or pickle. No code in it is executed."""

    source: Annotated[Path, tyro.conf.Positional]
    """A dump, or a folder of dumps."""
    out: Path
    """A directory that does not exist yet."""
    model: Annotated[str | None, tyro.conf.arg(metavar="NAME")] = None
    """The policy to which the inputs were fed, as for model.name. By default unknown."""
    timeout: float = 3600.0
    """Seconds after which the import gives up and writes nothing."""
    json: JsonFile = None
    """Write the result to this file."""


def main(argv: Sequence[str]) -> int:
    """Run one of COMMANDS; 0, or 1 when what was checked does not hold.

    Raises:
        RecordingError: the recording is missing or damaged.
        ConfigError: a wrong argument.
    """
    if not argv or argv[0] in ("-h", "--help"):
        echo((__doc__ or "").strip())
        return 0 if argv else 2
    name, *rest = argv
    if name not in COMMANDS:
        raise ConfigError(unknown_name("recording command", name, COMMANDS), code="unknown-name")
    kind, run = COMMANDS[name]
    args = tyro.cli(kind, args=rest, prog=f"lockstep recording {name}")
    check_writable(args.json)
    if getattr(args, "out", None) is not None:
        _check_new(args.out)
    result, status, verdict = run(args)
    if args.json is not None:
        write_json(args.json, result)
    echo(verdict)
    return status


def _check_new(out: Path) -> None:
    """Raises ConfigError: a recording cannot be made there."""
    _as_argument("--out", arguments.path, str(out))
    if os.path.lexists(out):
        raise ConfigError(f"already-exists: --out {str(out)!r} already exists; give a new directory")
    check_above(out)


Result = tuple[dict[str, Any], int, str]
"""A command's result: JSON, exit status, verdict."""


# --- info ---------------------------------------------------------------------------------------------------


def info(args: Info) -> Result:
    """Header, counts, lengths, what is stored."""
    from lockstep.recording import Recording

    recording = Recording.open(args.path)
    facts = describe(recording)
    for name, value in facts.items():
        text = f"{value[0]} to {value[1]}" if name == "steps" else _plain(value)
        head = f"{name.replace('_', ' '):>21}  "
        echo(textwrap.fill(text, WIDTH, initial_indent=head, subsequent_indent=" " * len(head)))
    end = "" if recording.closed else "; its run still records, or ended in the middle"
    return facts, 0, f"recording: {len(recording)} inputs, {facts['tokens']:,} tokens, {recording.path}{end}"


def describe(recording: Recording) -> dict[str, Any]:
    """The values that `info` prints, for JSON."""
    header, metas = recording.header, recording.metas
    stored = Counter(name for i in range(len(recording)) for name in recording.stored(i))
    outputs = [recording.outputs_of(i) for i in range(len(recording))]
    tokens = [sum(lengths) for lengths in recording.lengths]
    steps = [meta.step for meta in metas]
    return {
        "path": recording.path,
        "closed": recording.closed,
        **{name: getattr(header, name) for name in _HEADER},
        "ranks": recording.ranks,
        "mesh": header.mesh,
        "notes": header.notes,
        "inputs": len(recording),
        "outcomes": dict(Counter(meta.outcome for meta in metas)),
        "steps": [min(steps), max(steps)],
        "updates": len({meta.update for meta in metas}),
        "documents": sum(map(len, recording.lengths)),
        "tokens": sum(tokens),
        "tokens_of_an_input": percentiles(tokens),
        "documents_of_an_input": percentiles([len(lengths) for lengths in recording.lengths]),
        "tokens_of_a_document": percentiles([n for lengths in recording.lengths for n in lengths]),
        "with_outputs": sum(one is not None for one in outputs),
        "stored": dict(sorted(stored.items())),
        "bytes": recording.size_bytes(),
        "weights": weights_of(recording),
    }


def percentiles(values: Sequence[int]) -> dict[str, int]:
    """Percentile -> the smallest value that so many percent do not exceed."""
    ordered = sorted(values)
    return {f"p{p}": ordered[max(0, -(-p * len(ordered) // 100) - 1)] for p in PERCENTILES}


def weights_of(recording: Recording) -> dict[str, Any]:
    """Count the inputs whose weights are stored, by folder; no file of weights is read."""
    counts = Counter(meta.checkpoint for meta in recording.metas if meta.checkpoint is not None)
    stored = {name for name in counts if (recording.path / name / "model.safetensors").is_file()}
    return {
        "fingerprints": len({meta.weights for meta in recording.metas} - {None}),
        "inputs_with_stored_weights": sum(count for name, count in counts.items() if name in stored),
        "folders": sorted(stored),
        "missing": sorted(set(counts) - stored),
    }


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{printable(str(k))} {_plain(v)}" for k, v in value.items()) or "none"
    if isinstance(value, (list, tuple)):
        return ", ".join(map(_plain, value)) or "none"
    return f"{value:,}" if type(value) is int else printable(str(value))


# --- validate, list, show -----------------------------------------------------------------------------------


def validate(args: Validate) -> Result:
    """Every check on every input, and on what a replay takes of the header and the weights."""
    from lockstep.recording import Recording
    from lockstep.recording.reader import header_problems, weights_problems

    try:
        recording = Recording.open(args.path)
    except RecordingError as error:
        echo(error)
        return {"valid": False, "problems": [str(error)], "inputs": 0}, 1, "validate: damaged"
    in_header = list(header_problems(recording.header))
    in_weights: Counter[str] = Counter()
    for text, count in weights_problems(recording):
        in_weights[text] += count
    problems: Counter[str] = Counter()
    notes: Counter[str] = Counter()
    for row in recording.validate():
        problems.update([row.problem] if row.problem is not None else [])
        notes.update(row.notes)
    bad, good = sum(problems.values()), not problems and not in_header and not in_weights
    missing = weights_of(recording)["missing"]
    lines = in_header + [f"{text} ({count} inputs)" for text, count in (in_weights + problems).items()]
    lines += [f"note: {text} ({count} inputs)" for text, count in notes.items()]
    if missing:
        lines.append(f"note: weights are named that are not there: {', '.join(missing)}")
    if not recording.closed:
        lines.append("note: the recording was not closed: its run still records, or ended in the middle")
    for line in lines:
        echo(line)
    result = {
        "valid": good,
        "inputs": len(recording),
        "damaged_inputs": bad,
        "problems": [*in_header, *in_weights, *problems],
        "notes": list(notes),
        "missing_weights": missing,
        "closed": recording.closed,
    }
    return result, int(not good), f"validate: {_verdict(len(recording), bad, in_header, in_weights)}"


def _verdict(inputs: int, bad: int, in_header: Sequence[str], in_weights: Mapping[str, int]) -> str:
    parts = [f"{bad} of {inputs} inputs are damaged"] if bad else []
    parts += (
        [f"the weights of {sum(in_weights.values())} of {inputs} inputs are damaged"] if in_weights else []
    )
    parts += ["a replay refuses recording.json"] if in_header else []
    return "; ".join(parts) or f"{inputs} inputs are valid"


def list_inputs(args: List) -> Result:
    """List the inputs, one per line."""
    from lockstep.recording import Recording

    recording = Recording.open(args.path)
    chosen = _selection(args.steps, args.rank).of(recording)
    rows = [list_row(recording, index) for index in chosen]
    echo(
        f"{'index':>6} {'step':>6} {'update':>6} {'micro':>7} {'rank':>4} {'docs':>5} {'tokens':>7} "
        f"{'longest':>7} {'reward':>8} {'loss':>11}  outcome"
    )
    for row in rows:
        reward = "" if row["reward_mean"] is None else f"{row['reward_mean']:.3f}"
        loss = "" if row["loss"] is None else f"{row['loss']:.4g}"
        echo(
            f"{row['index']:>6} {row['step']:>6} {row['update']:>6} {row['micro_batch']:>7} {row['rank']:>4} "
            f"{row['documents']:>5} {row['tokens']:>7} {row['longest']:>7} {reward:>8} {loss:>11}  "
            f"{row['outcome']}{', no documents' if recording.metas[row['index']].unusable else ''}"
        )
    tokens = sum(row["tokens"] for row in rows)
    return {"inputs": rows}, 0, f"list: {len(rows)} of {len(recording)} inputs, {tokens:,} tokens"


def list_row(recording: Recording, index: int) -> dict[str, Any]:
    """One input without its tensors; JSON values."""
    meta, lengths = recording.metas[index], recording.lengths[index]
    outputs = recording.outputs_of(index)
    rewards = [float(d["reward"]) for d in meta.documents if isinstance(d.get("reward"), (int, float))]
    return {
        "index": index,
        "step": meta.step,
        "update": meta.update,
        "micro_batch": meta.micro_batch,
        "rank": meta.rank,
        "documents": len(lengths),
        "tokens": sum(lengths),
        "longest": max(lengths),
        "reward_mean": sum(rewards) / len(rewards) if rewards else None,
        "loss": None if outputs is None else outputs[0],
        "outcome": meta.outcome,
    }


def show(args: Show) -> Result:
    """One input as text."""
    from lockstep.recording import Recording
    from lockstep_lab.recording.show import Style, show_input

    recording = Recording.open(args.path)
    if not -len(recording) <= args.index < len(recording):
        raise ConfigError(
            f"out-of-range: input {args.index} does not exist; the recording has inputs 0 to "
            f"{len(recording) - 1}"
        )
    recorded = recording[args.index]
    decoder, why = (None, "--ids") if args.ids else find_decoder(recording.header)
    style = Style(decoder=decoder, tokens=args.tokens, color=sys.stdout.isatty())
    for line in show_input(recorded, style):
        print(line)  # noqa: T201 its text is escaped, and its colours are ours
    batch, outputs = recorded.batch, recorded.outputs
    result = {
        **list_row(recording, args.index % len(recording)),
        "meta": asdict(recorded.meta),
        "lengths": batch.lengths[: len(batch.sample_ids)],
        "sample_ids": batch.sample_ids,
        "token_ids": batch.token_ids[: batch.num_tokens].tolist(),
        "loss_mask": batch.loss_mask[: batch.num_tokens].tolist(),
        "logprobs": None
        if outputs is None or outputs.logprobs is None
        else outputs.logprobs[: batch.num_tokens].tolist(),
    }
    note = "" if decoder is not None else f"; ids only ({why})"
    return result, 0, f"show: input {args.index} of {len(recording)}, {batch.num_tokens} tokens{note}"


def find_decoder(header: RecordingHeader) -> tuple[Decoder | None, str]:
    """The tokenizer of the recorded model, or why there is none. No code that a model
    brings is run, and nothing is downloaded.
    """
    from lockstep.models.load import load_tokenizer
    from lockstep.recording.reader import recorded_model

    try:
        config = recorded_model(header)
        tokenizer = load_tokenizer(config, local_only=True)
    except LockstepError as error:
        return None, f"its tokenizer cannot be loaded: {printable(str(error).splitlines()[0])}"
    if tokenizer is None:
        return None, f"{config.name} has no tokenizer"
    return lambda ids: str(tokenizer.decode(list(ids), skip_special_tokens=False)), ""


# --- slice, merge, import -----------------------------------------------------------------------------------


def slice_inputs(args: Slice) -> Result:
    """Some inputs as a recording of its own."""
    from lockstep.recording import Recording
    from lockstep_lab.recording.edit import slice_recording

    _as_argument("--every", arguments.positive, str(args.every))
    indices = _as_argument("--inputs", arguments.numbers, args.inputs)
    selection = _selection(args.steps, args.rank, indices=indices, every=args.every)
    recording = Recording.open(args.path)
    edited = slice_recording(recording, args.out, selection, weights=args.weights)
    return _edited("slice", edited, f" of {len(recording)}")


def merge(args: Merge) -> Result:
    """Several recordings of one run as one."""
    from lockstep.recording import Recording
    from lockstep_lab.recording.edit import merge_recordings

    recordings = [Recording.open(path) for path in args.paths]
    edited = merge_recordings(recordings, args.out, weights=args.weights)
    return _edited("merge", edited, f" of {len(recordings)} recordings")


def _edited(name: str, edited: Edited, of: str) -> Result:
    if edited.without_weights:
        echo(
            f"{edited.without_weights} inputs name no stored weights: a replay takes the model's own, and "
            "says so "
            "if their fingerprint differs"
        )
    weights = f", weights {', '.join(edited.weights)}" if edited.weights else ", no weights"
    verdict = f"{name}: {edited.inputs} inputs{of}{weights}, written to {edited.path}"
    return asdict(edited), 0, verdict


def _as_argument(flag: str, parse: Callable[[str], Any], text: str | None) -> Any:
    """Parse a flag's text, if it is given, with `parse`, a type of argparse's. Raises ConfigError."""
    if text is None:
        return None
    try:
        return parse(text)
    except (argparse.ArgumentTypeError, ValueError) as error:  # the latter: thousands of digits
        raise ConfigError(f"wrong-format: {flag} {error}") from None


def _selection(steps: str | None, rank: str | None, **more: Any) -> Any:
    from lockstep_lab.recording.edit import Selection

    first, end = _as_argument("--steps", arguments.steps, steps) or (None, None)
    last = None if end is None else end - 1
    ranks = _as_argument("--rank", arguments.numbers, rank)
    return Selection(first_step=first, last_step=last, ranks=ranks, **more)


def import_inputs(args: Import) -> Result:
    """A dump of another framework as a recording."""
    from lockstep.recording import Recording
    from lockstep_lab.recording.importers.dumps import Pace, import_dump

    _as_argument("--timeout", arguments.seconds, str(args.timeout))
    if args.model is not None:
        from lockstep.config.load import check
        from lockstep.config.model import ModelConfig

        check({"name": args.model}, ModelConfig, origin="--model")
    pace = Pace(seconds=args.timeout, say=lambda line: echo(printable(line), file=sys.stderr, flush=True))
    report = import_dump(args.source, args.out, model=args.model, pace=pace)
    echo("\n".join(report.lines()))
    recording = Recording.open(args.out)
    tokens = sum(map(sum, recording.lengths))
    verdict = f"import: {len(recording)} inputs, {tokens:,} tokens, written to {args.out}"
    return {**report.as_dict(), "tokens": tokens}, 0, verdict


COMMANDS: dict[str, tuple[Any, Callable[[Any], Result]]] = {
    "info": (Info, info),
    "validate": (Validate, validate),
    "list": (List, list_inputs),
    "show": (Show, show),
    "slice": (Slice, slice_inputs),
    "merge": (Merge, merge),
    "import": (Import, import_inputs),
}
"""Command -> its arguments, and what runs it."""
