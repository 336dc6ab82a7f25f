"""The JSON of a recording, checked: the description of each input, and the header."""

from __future__ import annotations

import math
import re
from collections.abc import Sized
from enum import StrEnum
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
)

from lockstep.errors import RecordingError
from lockstep.schema.contract import KernelContract
from lockstep.schema.recording import InputKey, InputMeta, RecordingHeader

_POLICY_FLOATS = ("loss_weights", "rollout_logprobs", "advantages", "old_logprobs", "ref_logprobs")
_VALUE_FLOATS = ("loss_weights", "returns", "old_values")
_UNPAIRED_FLOATS = ("loss_weights", "ref_logprobs", "desirability", "kl_baseline")
_SCORED_FLOATS = ("loss_weights", "margins")
BATCH_FLOATS = (*_POLICY_FLOATS, *_VALUE_FLOATS[1:], *_UNPAIRED_FLOATS[2:], *_SCORED_FLOATS[1:])
OUTPUT_FLOATS = ("logprobs", "entropy")
FLOATS = BATCH_FLOATS + OUTPUT_FLOATS

_CHECKPOINT = re.compile(r"(weights|\.\./checkpoints)/[A-Za-z0-9_-][A-Za-z0-9._-]*(/value)?", re.ASCII)
_SPECIAL = {"NaN": math.nan, "Infinity": math.inf, "-Infinity": -math.inf}


class Spread(StrEnum):
    """Which entries of a [T] float field are kept; the others are 0."""

    SLOT = "slot"
    """One per slot, the padded tail included."""
    TOKEN = "token"
    """One per real token."""
    TRAINED = "trained"
    """One per token where loss_mask is True."""
    DOCUMENT = "document"
    """One per document, which all its trained tokens have."""


def _checkpoint(value: str | None) -> str | None:
    if value is not None and not _CHECKPOINT.fullmatch(value):
        raise ValueError("must be weights/NAME or ../checkpoints/NAME")
    return value


def _number(value: Any) -> Any:
    return _SPECIAL.get(value, value) if isinstance(value, str) else value


def _plain_extra(name: str) -> str:
    if name != "rng" and (not name.startswith("extras/") or len(name) > 200):
        raise ValueError("must be rng or extras/NAME")
    return name


Count = Annotated[int, Field(ge=0, lt=2**31)]
Positive = Annotated[int, Field(ge=1, lt=2**31)]
Int64 = Annotated[int, Field(ge=-(2**63), lt=2**63)]
AnyFloat = Annotated[float, BeforeValidator(_number)]
Finite = Annotated[float, Field(allow_inf_nan=False)]


class _Checked(BaseModel):
    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)


class MetaEntry(_Checked):
    """InputMeta."""

    step: Count
    update: Count
    micro_batch: Count
    num_micro_batches: Positive
    rank: Count
    world_size: Positive
    mesh: dict[str, Count]
    time: Finite
    weights: str | None
    checkpoint: Annotated[str | None, AfterValidator(_checkpoint)]
    outcome: Literal["finished", "pending", "failed"]
    error: str | None
    documents: list[dict[str, Any]]


class OutputsEntry(_Checked):
    """The scalars of RecordedOutputs."""

    loss: AnyFloat | None
    grad_norm: AnyFloat | None
    fingerprints: dict[str, str]


class InputEntry(_Checked):
    """One input without its tensors."""

    meta: MetaEntry
    kind: Literal["policy", "packed", "preference", "value", "unpaired", "scored"]
    lengths: Annotated[list[Positive], Field(min_length=1)]
    tail: list[Positive]
    max_seqlen: Positive
    document_slots: Positive
    sample_ids: list[Int64]
    policy_versions: list[Int64]
    trained: Count
    floats: dict[str, Literal["slot", "token", "trained", "document"]]
    outputs: OutputsEntry | None
    others: list[Annotated[str, AfterValidator(_plain_extra)]]
    trajectories: list[Count] = []  # recordings of earlier versions have none of the last three
    current: bool = False
    step_tokens: Positive | None = None

    def key(self) -> InputKey:
        return InputKey(self.meta.update, self.meta.micro_batch, self.meta.rank)

    def sizes(self) -> dict[str, int]:
        """Column -> entries that this input has in it."""
        tokens = sum(self.lengths)
        counts = {"token": tokens, "trained": self.trained, "document": len(self.lengths)}
        counts["slot"] = tokens + sum(self.tail)
        columns = {"token_ids": tokens, "loss_mask": -(-tokens // 8)}
        columns |= {"current": -(-tokens // 8)} if self.current else {}
        return columns | {name: counts[spread] for name, spread in self.floats.items()}

    def input_meta(self) -> InputMeta:
        fields = {name: getattr(self.meta, name) for name in MetaEntry.model_fields}
        return InputMeta(**fields | {"documents": tuple(self.meta.documents)})

    def problem(self) -> str | None:
        """The first contradiction in the entry, or None."""
        meta, floats = self.meta, set(self.floats)
        if meta.micro_batch >= meta.num_micro_batches:
            return (
                f"meta.micro_batch {meta.micro_batch} is not below num_micro_batches {meta.num_micro_batches}"
            )
        if meta.rank >= meta.world_size:
            return f"meta.rank {meta.rank} is not below world_size {meta.world_size}"
        if len(self.sample_ids) != len(self.lengths):
            return f"{len(self.sample_ids)} sample_ids for {len(self.lengths)} lengths"
        by_document: dict[str, Sized] = {
            "meta.documents": meta.documents,
            "policy_versions": self.policy_versions,
            "trajectories": self.trajectories,
        }
        for name, values in by_document.items():
            if values and len(values) != len(self.lengths):
                return f"{len(values)} {name} for {len(self.lengths)} lengths"
        if self.step_tokens is not None and self.step_tokens < sum(self.lengths):
            return f"step_tokens {self.step_tokens} is less than the input's {sum(self.lengths)} tokens"
        more = {"policy": {"rollout_logprobs", "advantages"}, "value": {"returns", "old_values"}}
        more |= {"unpaired": {"desirability"}, "scored": {"margins"}}
        needed = {"loss_weights"} | more.get(self.kind, set())
        allowed = {
            "policy": set(_POLICY_FLOATS),
            "value": set(_VALUE_FLOATS),
            "packed": {"loss_weights"},
            "preference": {"loss_weights", "ref_logprobs"},
            "unpaired": set(_UNPAIRED_FLOATS),
            "scored": set(_SCORED_FLOATS),
        }[self.kind]
        if self.outputs is not None:
            allowed |= set(OUTPUT_FLOATS)
        if not needed <= floats <= allowed:
            return (
                f"floats has {sorted(floats)}; an input of kind {self.kind} has {sorted(needed)} to "
                f"{sorted(allowed)}"
            )
        if len(set(self.others)) != len(self.others):
            return "others names a tensor twice"
        if self.kind == "packed" and self.policy_versions:
            return "policy_versions are given for an input of kind packed"
        if self.kind != "policy" and (self.trajectories or self.current):
            return f"trajectories or current are given for an input of kind {self.kind}"
        return None


class HeaderEntry(_Checked):
    """RecordingHeader."""

    created: str
    framework: str
    versions: dict[str, str]
    model: dict[str, Any]
    vocab_size: Positive
    algorithm: dict[str, Any]
    temperature: Annotated[float, Field(allow_inf_nan=False, ge=0)]
    max_tokens: Positive | None
    axes: dict[str, Any]
    capacity: dict[str, Count]
    world_size: Annotated[int, Field(ge=1, le=2**20)]
    mesh: dict[str, Count]
    device_name: str
    contract: dict[str, Any] | None = None  # recordings of earlier versions have none
    router_losses: dict[
        Literal["router_aux_loss", "router_z_loss"], Annotated[float, Field(gt=0, allow_inf_nan=False)]
    ] = {}  # nor this
    notes: dict[str, Any]

    @field_validator("contract")
    @classmethod
    def _check_contract(cls, contract: dict[str, Any] | None) -> dict[str, Any] | None:
        if contract is not None:
            KernelContract.from_json(contract)
        return contract

    def header(self) -> RecordingHeader:
        return RecordingHeader(**{name: getattr(self, name) for name in HeaderEntry.model_fields})


Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]


class ShardEntry(_Checked):
    """One shard, as index.json lists it."""

    number: Count
    inputs: Positive
    sha256: Sha256
    """Of the shard's metadata, which holds those of its tensors."""


class IndexEntry(_Checked):
    """rank-NNNN/index.json: which shards are whole, and where open inputs begin."""

    rank: Count
    closed: bool
    """The writer was closed; otherwise the run ended in the middle, or still runs."""
    next_shard: Count
    """Shards from this number on are not listed yet; unlisted ones below it were replaced and are ignored."""
    next_open: Count
    """Open files below this number are in shards and are ignored."""
    shards: list[ShardEntry]


Entry = TypeVar("Entry", bound=BaseModel)


def checked(kind: type[Entry], value: Any, *, where: str) -> Entry:
    """Check parsed JSON `value` as a `kind`.

    Raises:
        RecordingError: names `where` and the field.
    """
    try:
        return kind.model_validate(value)
    except ValidationError as error:
        raise _explained(error, where) from error


def _explained(error: ValidationError, where: str) -> RecordingError:
    """The first problem, with the path of its field."""
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(str(part)[:60] for part in first["loc"])
    more = "" if error.error_count() == 1 else f" (and {error.error_count() - 1} more)"
    return RecordingError(f"wrong-field: {where}: field {field or 'of the object'}: {first['msg']}{more}")
