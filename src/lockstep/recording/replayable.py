"""The parts of a recording that `lockstep replay` believes, each checked before it is used.

`lockstep recording validate` asks the same functions, so it refuses what a replay without other flags would.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from pydantic import ValidationError

from lockstep.config.algorithm import PREFERENCES, PUBLISHED, DPOConfig, GRPOConfig, RewardModelLossConfig
from lockstep.config.model import ModelConfig
from lockstep.config.ppo import PPOConfig, ValueConfig
from lockstep.config.support import TABLE
from lockstep.errors import RecordingError, unknown_name
from lockstep.observe.text import printable
from lockstep.recording.storage.weights import find_weights, verified
from lockstep.schema.recording import REWARD, VALUE, InputMeta, RecordingHeader

if TYPE_CHECKING:
    from lockstep.recording.reader import Recording

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
                f"{choices}{flag}",
                name=f"axes.{name}",
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
            problem = f"must be at most {_NAME_CHARACTERS:,} characters, none of them a control character"
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
                f"algorithm.{field}", f"{str(value)[:80]!r} is not one of Lockstep's own", _LOSS_FLAG
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
    return RecordingError(f"wrong-field: recording.json: field {field!r}: {problem}; {instead}", name=field)


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
