"""An open recording: the description of its inputs is read at once, the inputs themselves on demand."""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from lockstep.config.algorithm import PREFERENCES, PUBLISHED, DPOConfig, GRPOConfig, RewardModelLossConfig
from lockstep.config.model import ModelConfig
from lockstep.config.ppo import PPOConfig, ValueConfig
from lockstep.config.support import TABLE
from lockstep.errors import RecordingError, unknown_name
from lockstep.observe.files import cache_root
from lockstep.observe.text import printable
from lockstep.recording.entries import Count, HeaderEntry, checked
from lockstep.recording.files import read_signed_json
from lockstep.recording.shards import RankFiles, Shard, check_version, read_rank
from lockstep.recording.weights import find_weights, verified
from lockstep.schema.recording import REWARD, VALUE, InputMeta, RecordedInput, RecordingHeader

HEADER = "recording.json"


class RootEntry(HeaderEntry):
    """recording.json."""

    ranks: list[Count]
    """Ranks that recorded; each has a folder."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Checked:
    """One input, read and checked by Recording.validate."""

    index: int
    meta: InputMeta
    problem: str | None
    """The problem with the input; None: none."""
    notes: tuple[str, ...] = ()
    """Unusual, but no damage: values that are not finite."""


class Recording:
    """A recorded run's inputs, in the order of their keys (update, micro-batch, rank).

    Nothing in it is ever executed or unpickled, and the cost of reading is bounded by the size of the files.
    `Recording.open` opens one.
    """

    def __init__(self, path: Path, root: RootEntry, ranks: dict[int, RankFiles]) -> None:
        self.path = path
        self.ranks = tuple(ranks)
        self.closed = all(files.index.closed for files in ranks.values())
        """False: the run still records, or ended in the middle."""
        self.header: RecordingHeader = root.header()
        inputs = [pair for files in ranks.values() for pair in files.inputs()]
        inputs.sort(key=lambda pair: pair[0].entries[pair[1]].key())
        self._inputs: tuple[tuple[Shard, int], ...] = tuple(inputs)
        entries = [shard.entries[number] for shard, number in inputs]
        self.metas: tuple[InputMeta, ...] = tuple(entry.input_meta() for entry in entries)
        self.lengths: tuple[tuple[int, ...], ...] = tuple(tuple(entry.lengths) for entry in entries)

    @classmethod
    def open(cls, path: Path | str | None = None) -> Recording:
        """Open a recording, a run directory that has one in its recordings/, or the shipped corpus (None).

        Raises:
            RecordingError: there is none, it holds no input, or it is damaged; names file and field.
        """
        root = find_recording(path)
        entry = read_root(root)
        recording = cls(root, entry, {rank: read_rank(root, rank) for rank in entry.ranks})
        if not recording.metas:
            raise RecordingError(
                f"nothing-left: {root} contains no inputs; the run ended before its first step was fed to "
                "the policy"
            )
        return recording

    def __len__(self) -> int:
        return len(self.metas)

    def __getitem__(self, index: int) -> RecordedInput:
        """One input, bitwise; the tensors of its file are compared with their sha256 at first touch.

        Raises:
            IndexError: there are not so many.
            RecordingError: the file is damaged; names file and field.
        """
        shard, number = self._inputs[index]
        return shard.read(number, vocab_size=self.header.vocab_size)

    def __iter__(self) -> Iterator[RecordedInput]:
        return (self[index] for index in range(len(self)))

    def source(self, index: int) -> tuple[Path, int]:
        """The file of an input, and its position there."""
        shard, number = self._inputs[index]
        return shard.path, number

    def stored(self, index: int) -> frozenset[str]:
        """The stored parts of an input besides ids and mask: names of float fields, "rng", "extras/NAME"."""
        shard, number = self._inputs[index]
        entry = shard.entries[number]
        return frozenset(entry.floats) | frozenset(entry.others)

    def outputs_of(self, index: int) -> tuple[float | None, float | None] | None:
        """(loss, grad_norm), without touching tensors; None: no outputs."""
        shard, number = self._inputs[index]
        outputs = shard.entries[number].outputs
        return None if outputs is None else (outputs.loss, outputs.grad_norm)

    def size_bytes(self) -> int:
        """Size in bytes of all files of inputs."""
        return sum(path.stat().st_size for path in {shard.path for shard, _ in self._inputs})

    def validate(self) -> Iterator[Checked]:
        """Read and check every input; damage is reported in the yielded value, and the check goes on."""
        for index, meta in enumerate(self.metas):
            try:
                recorded = self[index]
            except RecordingError as error:
                yield Checked(index=index, meta=meta, problem=str(error))
            else:
                yield Checked(index=index, meta=meta, problem=None, notes=_notes(recorded))


def find_recording(path: Path | str | None) -> Path:
    """Find the folder with the recording.json for `path`, see Recording.open."""
    if path is None:
        return corpus_path()
    start = Path(path)
    for candidate in (start, start / "recordings"):
        if os.path.lexists(candidate / HEADER):
            return candidate
    if not start.exists():
        raise RecordingError(f"no-such-file: {start} does not exist; give a recording or a run with one")
    raise RecordingError(
        f"wrong-kind-of-file: neither {start} nor its folder recordings has a {HEADER}; give a recording, or "
        "record one with lockstep train --record"
    )


def read_root(root: Path) -> RootEntry:
    """Read recording.json.

    Raises:
        RecordingError: names file and field.
    """
    path = root / HEADER
    value: dict[str, Any] = read_signed_json(path, root)
    check_version(value.pop("format", None), value.pop("version", None), str(path))
    entry = checked(RootEntry, value, where=str(path))
    if entry.ranks != sorted(set(entry.ranks)) or not entry.ranks:
        raise RecordingError(
            f"wrong-field: {path}: field ranks must list at least one rank, in ascending order; got "
            f"{entry.ranks[:20]}"
        )
    return entry


def _notes(recorded: RecordedInput) -> tuple[str, ...]:
    batch, outputs = recorded.batch, recorded.outputs
    named = {name: getattr(batch, name, None) for name in ("loss_weights", "rollout_logprobs", "advantages")}
    named |= {name: getattr(batch, name, None) for name in ("old_logprobs", "ref_logprobs")}
    named |= {name: getattr(outputs, name, None) for name in ("logprobs", "entropy")}
    return tuple(
        f"{name} is not finite at {int((~values.isfinite()).sum())} tokens"
        for name, values in named.items()
        if values is not None and not bool(values.isfinite().all())
    )


# Where the recording lies that comes with Lockstep.


ARCHIVE = Path(__file__).with_name("corpus.tar.xz")
"""One folder, corpus/, packed as `benchmarks/record_corpus.py` says: half the size of its files."""


def corpus_path() -> Path:
    """The shipped corpus: inputs of a GRPO run of the bundled model on two data-parallel ranks.

    It is unpacked into the cache at its first use; a reader checks its hashes like those of any recording.
    Safe to call from several processes at once.

    Raises:
        RecordingError: this installation comes without it, or the cache cannot be written.
    """
    try:
        digest = hashlib.sha256(ARCHIVE.read_bytes()).hexdigest()
    except OSError as error:
        raise RecordingError(
            f"cannot-read: {ARCHIVE}: this installation lacks the shipped corpus ({error.strerror}); install "
            "lockstep-rl from a wheel or a complete checkout, or give a recording"
        ) from error
    # The hash in the name: another version of the package never reads this one's files.
    folder = cache_root() / f"corpus-{digest[:16]}"
    if not folder.is_dir():
        try:
            _unpack(folder)
        except OSError as error:
            raise RecordingError(
                f"cannot-write: the shipped corpus cannot be unpacked into {folder} ({error}); set "
                "LOCKSTEP_CACHE to a folder that you can write to"
            ) from error
    return folder


def _extract(archive: tarfile.TarFile, folder: Path) -> None:
    """Write the regular files of `archive` below `folder`: TarFile.extractall has no `filter` before Python
    3.11.4, and without one it follows any name.

    Raises:
        RecordingError: the archive holds something else, or a name that leads out of `folder`.
    """
    for member in archive:
        path = folder / member.name
        if member.isdir():
            continue
        if not member.isfile() or not path.resolve().is_relative_to(folder.resolve()):
            raise RecordingError(
                f"damaged-file: {ARCHIVE}: {member.name!r} is not a file below the archive's folder; "
                "install lockstep-rl again"
            )
        path.parent.mkdir(parents=True, exist_ok=True)
        data = archive.extractfile(member)
        assert data is not None  # isfile() says so
        with data, path.open("wb") as file:
            shutil.copyfileobj(data, file)


def _unpack(folder: Path) -> None:
    """Make `folder`: readers see all of it or nothing."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory(prefix=".corpus-", dir=folder.parent) as temporary,
        tarfile.open(ARCHIVE) as archive,
    ):
        _extract(archive, Path(temporary))
        try:
            (Path(temporary) / "corpus").rename(folder)
        except OSError:  # another process was faster; its files are the same
            if not folder.is_dir():
                raise


# The parts of a recording that `lockstep replay` believes, each checked before it is used.
#
# `lockstep recording validate` asks the same functions, so it refuses what a replay without other flags
# would.


if TYPE_CHECKING:
    pass

KERNELS = tuple(
    sorted({name for entry in TABLE for name in entry.attention} - {"hf:NAME", "module:function"})
)
"""Attention kernels that a recording may name. A user's own flag may name any other: transformers loads
native code from a hub repository by its name, so a file must not choose it."""

RecordedAlgorithm = GRPOConfig | DPOConfig | ValueConfig | RewardModelLossConfig

VALUE_LOSS = ("loss", "huber_delta", "clip", "aggregation")
"""The options of ValueConfig in the header of a value model's inputs: its loss is made of them."""

_NAME_CHARACTERS = 1024
_LORA_RANK = 2**16
_SEEDS = range(-(2**63), 2**64)
"""The range of torch.manual_seed."""

_DEFAULTS: dict[str, Any] = {
    "attention": "sdpa",
    "execution": "eager",
    "layout": "packed",
    "padding_side": "right",
    "dtype": "float32",
    "device": "cpu",
    "static_capacity": False,
    "activation_checkpointing": False,
    "batch_invariant": False,
}
"""What a header without these axes means: a foreign module need not know all of them."""

_CHOICES: dict[str, tuple[Any, ...]] = {
    "attention": KERNELS,
    "execution": ("eager", "compile", "joint", "deepcompile"),
    "layout": ("packed", "padded", "shared"),
    "padding_side": ("left", "right"),
    "dtype": ("float32", "bfloat16", "float16"),
    "static_capacity": (True, False),
    "activation_checkpointing": (True, False),
    "batch_invariant": (True, False),
}


def recorded_axes(header: RecordingHeader, *, given: Collection[str] = ()) -> dict[str, Any]:
    """header.axes with missing axes filled in and every value checked.

    Args:
        given: axes that the user sets; what the header says of them is not used, and the default is returned.

    Raises:
        RecordingError: an unknown value, or a kernel that a recording may not choose.
    """
    stated = {k: v for k, v in header.axes.items() if k in _DEFAULTS and k not in given and v is not None}
    axes = _DEFAULTS | stated
    for name, value in axes.items():
        allowed = _CHOICES.get(name)
        if not isinstance(value, type(_DEFAULTS[name])) or (allowed and value not in allowed):
            choices = f"one of {', '.join(map(str, allowed))}" if allowed else "text"
            flag = "; choose the kernel with --attention" if name == "attention" else ""
            raise RecordingError(
                f"wrong-field: recording.json: field 'axes.{name}' is {str(value)[:80]!r}; it must be "
                f"{choices}{flag}"
            )
    return axes


def recorded_model(header: RecordingHeader) -> ModelConfig:
    """header.model, without the permission to run code that comes with a model.

    Raises:
        RecordingError: it is no model; names the field.
    """
    try:
        config = ModelConfig.model_validate(dict(header.model))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _refused(".".join(("model", *map(str, first["loc"]))), first["msg"], _MODEL_FLAG) from error
    for field, text in (("model.name", config.name), ("model.revision", config.revision or "")):
        if len(text) > _NAME_CHARACTERS or printable(text) != text:
            problem = f"must be at most {_NAME_CHARACTERS:,} characters, without control characters"
            raise _refused(field, f"is {text[:40]!r}; it {problem}", _MODEL_FLAG)
    if config.lora is not None and config.lora.rank > _LORA_RANK:
        raise _refused(
            "model.lora.rank", f"is {config.lora.rank:,}; it must be at most {_LORA_RANK:,}", _MODEL_FLAG
        )
    if config.seed not in _SEEDS:
        raise _refused("model.seed", f"is {str(config.seed)[:40]}, not a seed that torch takes", _MODEL_FLAG)
    return config.model_copy(update={"trust_remote_code": False})


def recorded_algorithm(header: RecordingHeader) -> RecordedAlgorithm | None:
    """The options of the recorded loss; None: SFT's, or a surrogate, which have none.

    Raises:
        RecordingError: the algorithm is unknown, or its options are not what it has.
    """
    name: Any = header.algorithm.get("name")
    if name in ("sft", "surrogate"):
        return None
    if not isinstance(name, str) or name not in (*PUBLISHED, *PREFERENCES, "ppo", VALUE, REWARD):
        known = (*PUBLISHED, *PREFERENCES, "ppo", VALUE, REWARD, "sft", "surrogate")
        raise _refused("algorithm.name", unknown_name("algorithm", str(name)[:80], known), _LOSS_FLAG)
    for field in ("advantage", "objective"):  # a recording may not name code to import
        if ":" in str(value := header.algorithm.get(field)):
            raise _refused(
                f"algorithm.{field}", f"{str(value)[:80]!r} is not built into Lockstep", _LOSS_FLAG
            )
    try:
        if name in PREFERENCES:
            return DPOConfig.model_validate(dict(header.algorithm))
        if name == REWARD:
            return RewardModelLossConfig.model_validate(dict(header.algorithm))
        if name == VALUE:
            return ValueConfig.model_validate(
                {key: value for key, value in header.algorithm.items() if key in VALUE_LOSS}
            )
        return (PPOConfig if name == "ppo" else GRPOConfig).model_validate(dict(header.algorithm))
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        raise _refused(".".join(("algorithm", *map(str, first["loc"]))), first["msg"], _LOSS_FLAG) from error


_MODEL_FLAG = "name a model with --model"
_LOSS_FLAG = "or choose --loss logprob-sum|cross-entropy"


def _refused(field: str, problem: str, instead: str) -> RecordingError:
    return RecordingError(f"wrong-field: recording.json: field {field!r}: {problem}; {instead}")


def header_problems(header: RecordingHeader) -> Iterator[str]:
    """The reasons for which a replay would refuse the header."""
    for check in (recorded_axes, recorded_model, recorded_algorithm):
        try:
            cast(Any, check)(header)
        except RecordingError as error:
            yield str(error)


def weights_problems(recording: Recording) -> Iterator[tuple[str, int]]:
    """(What is wrong with weights that inputs need, how many inputs need them); reads each file once."""
    needed: dict[tuple[str | None, str | None, int], list[InputMeta]] = {}
    for meta in recording.metas:
        needed.setdefault((meta.checkpoint, meta.weights, meta.step), []).append(meta)
    known: dict[Path, str] = {}
    for metas in needed.values():
        try:
            folder = find_weights(recording.path, metas[0], known=known)
            if folder is not None:
                verified(folder, weights=metas[0].weights, known=known)
        except RecordingError as error:
            yield str(error), len(metas)
