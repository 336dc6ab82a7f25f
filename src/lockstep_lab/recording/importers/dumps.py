"""Recordings of what another framework dumped with torch.save or pickle.

Two passes over the files: the first reads and checks everything, the second writes, so that a dump with a
bad file leaves no half a recording behind.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import ValidationError
from torch import Tensor

from lockstep.config.algorithm import GRPOConfig
from lockstep.config.model import ModelConfig
from lockstep.errors import ModelError, RecordingError
from lockstep.models import shapes
from lockstep.models.load import model_folder, read_config
from lockstep.observe.tensor_file import DTYPES
from lockstep.observe.text import printable
from lockstep.packing import pack
from lockstep.recording.program import versions
from lockstep.recording.writer import RecordingWriter
from lockstep.schema.batch import PackedBatch, PolicySample, TrainSample
from lockstep.schema.recording import InputMeta, RecordedInput, RecordingHeader
from lockstep_lab.recording.edit import whole_or_not
from lockstep_lab.recording.importers.columns import IDS, DumpedInput, DumpReader, find_inputs
from lockstep_lab.recording.importers.unpickle import load_dump

SUFFIXES = (".pkl", ".pickle", ".pt", ".pth", ".bin")
"""Files of a folder that are read."""

Kind = Literal["policy", "surrogate", "sft"]

_STEP_NAMES = ("global_step", "step", "iteration", "global_steps")
_RANK_NAMES = ("rank", "global_rank", "dp_rank")
_STEP_IN_NAME = re.compile(r"(?:^|[^a-z])(?:global)?_?(?:step|iter)[_-]?(\d{1,9})(?!\d)", re.IGNORECASE)
_RANK_IN_NAME = re.compile(r"(?:^|[^a-z])rank[_-]?(\d{1,6})(?!\d)", re.IGNORECASE)
_MAX_WORLD = 2**20
_MAX_SCALARS = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class ImportReport:
    """The result of an import."""

    path: Path
    inputs: int
    files: int
    kind: Kind
    """policy: PolicyBatch under the GRPO loss. surrogate: loss_weights hold advantages. sft: neither."""
    vocab_size: int
    mapped: Mapping[str, Mapping[str, int]]
    """Name in the dump -> what it became -> inputs."""
    extras: Mapping[str, int]
    """Tensors kept as they were -> inputs."""
    dropped: Mapping[str, str]
    """Name in the dump -> why nothing is kept of it."""
    said: tuple[str, ...]
    """Assumptions, each with the number of inputs."""

    def lines(self) -> list[str]:
        """Lines for a terminal; control characters escaped."""
        lines = [f"{self.files} files, {self.inputs} inputs, vocabulary of {self.vocab_size:,}"]
        for name, targets in self.mapped.items():
            outcome = ", ".join(f"{target} ({count} inputs)" for target, count in targets.items())
            lines.append(f"  {name} -> {outcome}")
        lines += [f"  {name} -> kept as an extra ({count} inputs)" for name, count in self.extras.items()]
        lines += [f"  {name} -> dropped: {why}" for name, why in self.dropped.items()]
        lines += [f"note: {text}" for text in self.said]
        return [printable(line) for line in lines]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)


@dataclass(kw_only=True, slots=True)
class Pace:
    """Time limit and progress callback of an import."""

    seconds: float | None = None
    """None: as long as it takes."""
    say: Callable[[str], None] = lambda text: None
    """Called with one line every few seconds."""
    started: float = field(default_factory=lambda: time.monotonic())
    _last: float = field(default_factory=lambda: time.monotonic())

    def at(self, what: str) -> None:
        """Called at every input. Raises RecordingError: the time is over."""
        now = time.monotonic()
        if self.seconds is not None and now - self.started > self.seconds:
            raise RecordingError(
                f"deadline: {what}: the import took more than {self.seconds:g} s, and nothing was written; "
                "allow more with --timeout, or import fewer files"
            )
        if now - self._last >= _SAY_EVERY:
            self._last = now
            self.say(f"import: {what}, {now - self.started:.0f} s")


_SAY_EVERY = 5.0
_FREE_INPUTS, _BYTES_PER_INPUT = 4096, 128
"""A file of dumps has at least so many bytes per input, beyond the free ones: of one tensor that many dicts
share, each dict costs the time of an input."""


def import_dump(
    source: Path, out: Path, *, model: str | None = None, pace: Pace | None = None
) -> ImportReport:
    """Import a file, or all dumps of a folder, as a recording. Nothing in them is executed.

    Args:
        out: a directory that does not exist yet.
        model: what model.name takes: the policy that was fed. None: not known.
        pace: None: no time limit, and no progress lines.

    Raises:
        RecordingError: a file is no dump, holds what is not read, or fields that do not fit; names both. Or
            the time is over.
    """
    source, out, pace = Path(source), Path(out), pace or Pace()
    if out.exists():
        raise RecordingError(f"already-exists: {out} already exists; give a new directory")
    files = _files(source)
    survey = _survey(files, pace)
    vocab_size = _vocab_size(model, survey)
    header = _header(source, model, survey, vocab_size=vocab_size)
    with whole_or_not(out) as folder:
        _write(files, survey, header, folder, pace=pace)
    return ImportReport(
        path=out,
        inputs=len(survey.metas),
        files=len(files),
        kind=survey.kind,
        vocab_size=vocab_size,
        **_summary(survey),
    )


def _write(
    files: Sequence[Path], survey: _Survey, header: RecordingHeader, folder: Path, *, pace: Pace
) -> None:
    """The second pass."""
    ranks = sorted({meta.rank for meta in survey.metas})
    with ExitStack() as stack:
        writers = {
            rank: stack.enter_context(RecordingWriter(folder, header, rank=rank, ranks=ranks))
            for rank in ranks
        }
        for meta, (path, dumped, _) in zip(survey.metas, _inputs(files, pace, "writing"), strict=True):
            writers[meta.rank].add([_recorded(dumped, meta, file=path.name, kind=survey.kind)])


# --- what there is ------------------------------------------------------------------------------------------


@dataclass(kw_only=True, slots=True)
class _Survey:
    """The first pass."""

    metas: list[InputMeta] = field(default_factory=list)
    """What is known of each input without its values."""
    kind: Kind = "sft"
    largest: int = 0
    """Token id."""
    where: str = ""
    """The file that has it."""
    sizes: list[tuple[int, int, int]] = field(default_factory=list)
    """(tokens, longest document, documents) of each input."""
    sources: set[str] = field(default_factory=set)
    """torch, pickle."""
    padding: Counter[str] = field(default_factory=Counter)
    layouts: Counter[str] = field(default_factory=Counter)
    mapped: dict[str, Counter[str]] = field(default_factory=dict)
    extras: Counter[str] = field(default_factory=Counter)
    dropped: dict[str, str] = field(default_factory=dict)
    assumptions: Counter[str] = field(default_factory=Counter)


def _files(source: Path) -> list[Path]:
    if source.is_file():
        return [source]
    if not source.is_dir():
        raise RecordingError(f"no-such-file: {source}: there is no such file or folder; give a dump to read")
    dumps = [p for p in source.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file()]
    if not dumps:
        raise RecordingError(
            f"wrong-kind-of-file: {source} contains no dump; files must end in {', '.join(SUFFIXES)}"
        )
    return sorted(dumps, key=lambda p: _natural(str(p.relative_to(source))))


def _natural(text: str) -> list[tuple[int, int, str]]:
    """Numbers by value: input_2 before input_10."""
    parts = re.split(r"(\d{1,18})", text)
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts if part]


def _inputs(files: Sequence[Path], pace: Pace, doing: str) -> Iterator[tuple[Path, DumpedInput, str]]:
    """Every input with its file and the file's kind, one file in memory at a time."""
    for path in files:
        pace.at(f"{doing} {path.name}")
        dump = load_dump(path)
        dicts = find_inputs(dump.value)
        if not dicts:
            names = list(dump.value)[:12] if isinstance(dump.value, dict) else type(dump.value).__name__
            raise RecordingError(
                f"missing-field: {path.name} contains no token ids, only {names}; a dump is a dict, or a "
                f"list of dicts, with one of {', '.join(IDS)} or prompts and responses"
            )
        size = path.stat().st_size
        if len(dicts) > _FREE_INPUTS + size // _BYTES_PER_INPUT:
            raise RecordingError(
                f"too-large: {path.name}: its {len(dicts):,} inputs share tensors, and would be far larger "
                f"than the file's {size:,} bytes if stored separately; dump only each input's part"
            )
        left = 6 * size + 2**26
        for number, named in enumerate(dicts):
            pace.at(f"{doing} {path.name}, input {number:,} of {len(dicts):,}")
            left -= sum(value.nbytes for value in named.values() if isinstance(value, Tensor))
            if left < 0:
                raise RecordingError(
                    f"too-large: {path.name}: its inputs share tensors, and would be far larger if stored "
                    "separately; dump only each input's part"
                )
            where = path.name if len(dicts) == 1 else f"{path.name}, input {number}"
            yield path, DumpReader(named, where).read(), dump.kind


def _survey(files: Sequence[Path], pace: Pace) -> _Survey:
    survey = _Survey()
    kinds: dict[Kind, str] = {}
    origins: list[tuple[int | None, int, str]] = []
    for path, dumped, source in _inputs(files, pace, "reading"):
        survey.sources.add(source)
        kinds.setdefault(_kind(dumped), path.name)
        origins.append(
            (_number(dumped, path, _STEP_NAMES), _number(dumped, path, _RANK_NAMES) or 0, path.name)
        )
        low, high = (int(x) for x in dumped.token_ids.aminmax())
        if low < 0:
            raise RecordingError(
                f"wrong-field: {path.name}: field 'token_ids': {low} is one of the real tokens; mask pads in "
                "attention_mask"
            )
        if high >= survey.largest:
            survey.largest, survey.where = high, path.name
        lengths = dumped.layout.lengths
        survey.sizes.append((sum(lengths), max(lengths), len(lengths)))
        survey.padding.update(dumped.layout.padding)
        survey.layouts.update([dumped.layout.layout])
        _count(survey, dumped)
    survey.kind = _common_kind(kinds, survey)
    survey.metas = _metas(origins, survey)
    return survey


def _kind(dumped: DumpedInput) -> Kind:
    floats = dumped.floats
    if "advantages" not in floats:
        return "sft"
    return "policy" if "old_logprobs" in floats or "rollout_logprobs" in floats else "surrogate"


def _common_kind(kinds: Mapping[Kind, str], survey: _Survey) -> Kind:
    """One loss for all: a recording has one algorithm. Raises RecordingError: inputs of several kinds."""
    if len(kinds) > 1:
        listed = "; ".join(f"{path} is of kind {kind}" for kind, path in kinds.items())
        raise RecordingError(
            f"contradiction: the dumps need several losses ({listed}): advantages and logprobs make a "
            "policy batch, only advantages a surrogate, neither sft. Import them separately"
        )
    (kind,) = kinds
    every = len(survey.sizes)
    if kind == "policy":
        survey.assumptions[
            "the loss is GRPO's with its published options: a dump does not say which it was"
        ] = every
        if "rollout_logprobs" not in _targets(survey):
            survey.assumptions["no rollout logprobs: the old ones stand in for them"] = every
        if "old_logprobs" not in _targets(survey):
            survey.assumptions["no old logprobs: the importance ratio is 1"] = every
    elif kind == "surrogate":
        survey.assumptions[
            "advantages without logprobs: the loss is -sum(advantage * logprob) / trained tokens"
        ] = every
    else:
        survey.assumptions["no advantages: the loss is the cross-entropy of the trained tokens"] = every
    survey.assumptions["loss_weights make each input's loss a mean of its own"] = every
    return kind


def _targets(survey: _Survey) -> set[str]:
    return {target.partition(",")[0] for targets in survey.mapped.values() for target in targets}


def _count(survey: _Survey, dumped: DumpedInput) -> None:
    for name, target in dumped.mapped.items():
        survey.mapped.setdefault(name, Counter())[target] += 1
    for name, tensor in dumped.extras.items():
        if tensor.dtype in DTYPES.values():
            survey.extras[name] += 1
        else:
            survey.dropped[name] = f"a tensor of {tensor.dtype}"
    survey.dropped |= dumped.dropped
    survey.assumptions.update(dumped.assumptions)


def _number(dumped: DumpedInput, path: Path, names: Sequence[str]) -> int | None:
    """A step or rank: of the dict, else of the file's name."""
    for name in names:
        value = dumped.scalars.get(name)
        if type(value) is int and 0 <= value < 2**31:
            return value
    match = (_STEP_IN_NAME if names is _STEP_NAMES else _RANK_IN_NAME).search(path.stem)
    return int(match[1]) if match else None


def _metas(origins: Sequence[tuple[int | None, int, str]], survey: _Survey) -> list[InputMeta]:
    """Steps as dumped if every input has one; otherwise each input is a step of its rank, in order."""
    numbered = all(step is not None for step, _, _ in origins)
    counted: Counter[int] = Counter()
    keys = []
    for step, rank, file in origins:
        if rank >= _MAX_WORLD:
            raise RecordingError(f"wrong-field: {file}: field 'rank' is {rank}, more than {_MAX_WORLD - 1}")
        keys.append((step if numbered and step is not None else counted[rank], rank))
        counted[rank] += 1
    if not numbered:
        survey.assumptions["not every input names its step: each is a step of its own, in order"] = len(
            origins
        )
    totals, counts = Counter(keys), Counter[tuple[int, int]]()
    world_size = max(rank for _, rank in keys) + 1
    metas = []
    for step, rank in keys:
        metas.append(
            InputMeta(
                step=step,
                update=step,
                micro_batch=counts[step, rank],
                num_micro_batches=totals[step, rank],
                rank=rank,
                world_size=world_size,
                mesh={"dp": rank},
            )
        )
        counts[step, rank] += 1
    return metas


# --- header -------------------------------------------------------------------------------------------------


def _vocab_size(model: str | None, survey: _Survey) -> int:
    size, why = None, "the model is not known"
    if model is not None:
        try:
            size = _vocab_of(ModelConfig(name=model))
        except (ModelError, ValidationError) as error:
            why = f"the config of {model} is not at hand ({str(error).splitlines()[0]})"
    if size is None:
        survey.assumptions[f"vocab_size is the largest token id + 1: {why}"] = len(survey.sizes)
        size = survey.largest + 1
    if survey.largest >= size:
        raise RecordingError(
            f"outside-vocabulary: {survey.where}: field 'token_ids': it contains {survey.largest}, but "
            f"{model} has a vocabulary of {size}; name the trained model with --model"
        )
    if size >= 2**31:
        raise RecordingError(
            f"outside-vocabulary: {survey.where}: field 'token_ids': {survey.largest} is not a token id"
        )
    return size


def _vocab_of(config: ModelConfig) -> int:
    """Vocabulary size of the model's config; the network is not used."""
    if config.name.startswith(shapes.PREFIX):
        model_config = shapes.shape_config(config.name.removeprefix(shapes.PREFIX))
    else:
        model_config = read_config(model_folder(config, local_only=True), config)
    return int(model_config.get_text_config().vocab_size)


def _header(source: Path, model: str | None, survey: _Survey, *, vocab_size: int) -> RecordingHeader:
    algorithm: dict[str, Any] = {"name": survey.kind}
    if survey.kind == "policy":
        algorithm = GRPOConfig().resolved().model_dump(mode="json")
    world_size = survey.metas[0].world_size
    tokens, longest, documents = (max(column) for column in zip(*survey.sizes, strict=True))
    config = ModelConfig(name=model or "unknown:import").model_dump(mode="json")
    summary = _summary(survey)
    return RecordingHeader(
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        framework="import:torch" if survey.sources == {"torch"} else "import:pickle",
        versions=versions(),
        model=config,
        vocab_size=vocab_size,
        algorithm=algorithm,
        temperature=1.0,
        max_tokens=None,
        axes={
            "layout": "packed" if survey.layouts["packed"] else "padded",
            "padding_side": "left" if survey.padding["left"] else "right",
        },
        capacity={"token_budget": tokens, "max_seqlen": longest, "max_documents": documents},
        world_size=world_size,
        mesh={"dp": world_size},
        notes={"source": source.name, "kind": survey.kind, **summary, "said": list(summary["said"])},
    )


def _summary(survey: _Survey) -> dict[str, Any]:
    return {
        "mapped": {name: dict(targets) for name, targets in survey.mapped.items()},
        "extras": dict(survey.extras),
        "dropped": dict(survey.dropped),
        "said": tuple(f"{text} ({count} inputs)" for text, count in survey.assumptions.items()),
    }


# --- inputs -------------------------------------------------------------------------------------------------


def _recorded(dumped: DumpedInput, meta: InputMeta, *, file: str, kind: Kind) -> RecordedInput:
    meta = replace(meta, time=_time(dumped.scalars), documents=_documents(dumped, file))
    extras = {name: tensor for name, tensor in dumped.extras.items() if tensor.dtype in DTYPES.values()}
    return RecordedInput(meta=meta, batch=_batch(dumped, kind), outputs=None, extras=extras)


def _time(scalars: Mapping[str, Any]) -> float:
    for name in ("timestamp", "time"):
        value = scalars.get(name)
        if isinstance(value, int | float) and 0 <= value < 2**40:
            return float(value)
    return 0.0


def _documents(dumped: DumpedInput, file: str) -> tuple[dict[str, Any], ...]:
    """Where each document stood; the first one also has what is known of the call."""
    documents: list[dict[str, Any]] = [{"row": row, "column": column} for row, column in dumped.layout.starts]
    for document, reward in zip(documents, dumped.rewards or (), strict=False):
        document["reward"] = reward
    call: dict[str, Any] = {
        "file": file,
        "shape": list(dumped.shape),
        "padding": list(dumped.layout.padding),
    }
    if dumped.scalars:
        call["arguments"] = dict(list(dumped.scalars.items())[:_MAX_SCALARS])
    documents[0]["call"] = call
    return tuple(documents)


def _batch(dumped: DumpedInput, kind: Kind) -> PackedBatch:
    """The documents without a tail; see ImportReport.kind."""
    lengths, floats = dumped.layout.lengths, dumped.floats
    weights = _loss_weights(dumped, kind)
    columns: dict[str, Tensor] = {}
    if kind == "policy":
        rollout = floats.get("rollout_logprobs", floats.get("old_logprobs"))
        assert rollout is not None
        columns = {"rollout_logprobs": rollout, "advantages": floats["advantages"]}
    samples: list[TrainSample] = []
    start = 0
    for number, length in enumerate(lengths):
        part = slice(start, start + length)
        plain: dict[str, Any] = {
            "token_ids": dumped.token_ids[part],
            "loss_mask": dumped.trained[part],
            "sample_id": number,
        }
        more: dict[str, Any] = {name: column[part] for name, column in columns.items()}
        samples.append(PolicySample(**plain, **more) if kind == "policy" else TrainSample(**plain))
        start += length
    batch = pack(samples, weights.split(list(lengths)))
    others = {n: floats[n] for n in ("old_logprobs", "ref_logprobs") if kind == "policy" and n in floats}
    return replace(batch, **others)  # type: ignore[arg-type]


def _loss_weights(dumped: DumpedInput, kind: Kind) -> Tensor:
    """[N] float32. policy: GRPO's sequence_mean over the input; otherwise a mean over its trained tokens."""
    mask = dumped.trained.float()
    if kind == "policy":
        each = [part.sum().clamp(min=1) for part in mask.split(list(dumped.layout.lengths))]
        counts = torch.repeat_interleave(torch.stack(each), torch.tensor(dumped.layout.lengths))
        return mask / (counts * len(each))
    weights = mask / mask.sum().clamp(min=1)
    if kind == "surrogate":
        weights = weights * dumped.floats["advantages"]
    return weights
