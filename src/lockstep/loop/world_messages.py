"""What trainer and role world say to each other: records, numbers and tensors as bytes, never pickles.

bytes     4           n       the tensors, one after the other (lockstep.wire.buckets)
content   n, little   JSON    name, dtype, shape and place of each are in the JSON

    {"value": ..., "tensors": [TensorSpec, ...]}

In `value` a tensor is {"tensor": index}, a record {"record": class, "fields": {...}}, a dict {"dict": {...}};
lists come back as tuples. Records are those of RECORDS and no others.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from lockstep.errors import TrainError
from lockstep.protocols.reward import RewardInput
from lockstep.schema.batch import PackedBatch, PolicyBatch, RolloutSample, SharedRows
from lockstep.wire import buckets

MOST_BYTES = 2**30
"""Of one message."""
RECORDS: Mapping[str, type[Any]] = {
    kind.__name__: kind for kind in (PackedBatch, PolicyBatch, RolloutSample, SharedRows, RewardInput)
}
_HEAD = 4
_PLAIN = (str, int, float, bool, type(None))


def packed(value: Any) -> bytes:
    """Return the bytes of plain values, tensors and records, nested in dicts and sequences.

    Raises:
        TrainError: there are more than MOST_BYTES of them.
    """
    tensors: list[Tensor] = []
    said = _said(value, tensors)
    layout = buckets.Layout(MOST_BYTES)
    for index, tensor in enumerate(tensors):
        if layout.place(str(index), tensor) is None or layout.num_bytes > MOST_BYTES:
            raise _too_large()
    data = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    if tensors:
        buckets.pack(data, layout.specs, tensors)
    head = json.dumps({"value": said, "tensors": buckets.specs_to_json(layout.specs)}).encode()
    if _HEAD + len(head) + len(data) > MOST_BYTES:
        raise _too_large()
    return len(head).to_bytes(_HEAD, "little") + head + data.numpy().tobytes()


def unpacked(message: bytes) -> Any:
    """The inverse of `packed`. Raises TrainError: the bytes are no message."""
    try:
        size = int.from_bytes(message[:_HEAD], "little")
        head = json.loads(message[_HEAD : _HEAD + size])
        rest = bytearray(message[_HEAD + size :])
        data = torch.frombuffer(rest, dtype=torch.uint8) if rest else torch.empty(0, dtype=torch.uint8)
        specs = buckets.specs_from_json(head["tensors"])
        # Copies: a kernel may ask for an alignment that a place in a message has not.
        return _meant(head["value"], [tensor.clone() for _, tensor in buckets.unpack(data, specs)])
    except (KeyError, IndexError, TypeError, ValueError, RuntimeError, RecursionError) as error:
        raise TrainError(
            f"bad-reply: what came from another world is no message: {type(error).__name__}: {error}"
        ) from error


def _too_large() -> TrainError:
    return TrainError(
        f"too-large: a message between the worlds of roles has more than {MOST_BYTES} bytes; lower "
        "rollout.prompts_per_step or rollout.group_size",
        setting="rollout.prompts_per_step",
    )


def _said(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, _PLAIN):
        return value
    if isinstance(value, Tensor):
        tensors.append(value.detach().cpu())
        return {"tensor": len(tensors) - 1}
    if isinstance(value, Mapping):
        return {"dict": {str(key): _said(each, tensors) for key, each in value.items()}}
    if isinstance(value, Sequence):
        return [_said(each, tensors) for each in value]
    if RECORDS.get(type(value).__name__) is type(value):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        told = {name: _said(each, tensors) for name, each in fields.items()}
        return {"record": type(value).__name__, "fields": told}
    raise TypeError(f"a {type(value).__name__} cannot be sent to another world")


def _meant(said: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(said, list):
        return tuple(_meant(each, tensors) for each in said)
    if not isinstance(said, dict):
        return said
    if "tensor" in said:
        return tensors[said["tensor"]]
    if "dict" in said:
        return {key: _meant(each, tensors) for key, each in said["dict"].items()}
    fields = {name: _meant(each, tensors) for name, each in said["fields"].items()}
    return RECORDS[said["record"]](**fields)
