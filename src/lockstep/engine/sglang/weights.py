"""Weights in the forms that SGLang's server accepts, and the checks that it supports."""

from __future__ import annotations

import base64
import math
import pickle
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch.multiprocessing import reductions

from lockstep.common_errors import other_shape, other_tensors
from lockstep.errors import EngineError
from lockstep.schema.weights import TensorSpec, WeightBucket

LOAD_FORMAT = "flattened_bucket"
"""Load format of both tensor endpoints: one flat uint8 tensor, and the offset of each weight in it."""
READ_VALUES = 64
"""Number of values of each weight that is read back."""
_LARGEST_READ = 20_000_000
_READ_BUDGET = 60_000_000
"""SGLang makes a Python list of a whole weight, and only then cuts it: about 30 ns and 32 bytes a value."""
_SMALL_READ = 100_000


def tensor_payload(bucket: WeightBucket) -> str:
    """One rank's entry of `serialized_named_tensors`: base64 of a pickle.

    The pickle is SGLang's format, and SGLang reads it: /update_weights_from_tensor knows no other, so this
    is the exception to the rule that nothing of ours is pickled. Nothing is unpickled here; the pickle is
    made from our own handle. SGLang's unpickler lets few classes in (0.5.23 names each one), and these are
    all that is used:

        {"flattened_tensor": torch.multiprocessing.reductions.rebuild_cuda_tensor(...),
         "metadata": [types.SimpleNamespace(name, shape, dtype, start_idx, end_idx, numel), ...]}

    rebuild_cuda_tensor is what torch's own ForkingPickler would call. SGLang replaces it, before it reads, by
    one that takes the GPU's UUID where torch has a number, since two processes number GPUs differently. The
    metadata is of a class of SGLang's, of which it reads six attributes: a SimpleNamespace has them too, and
    needs no sglang here.

    Raises:
        EngineError: the bucket is not in CUDA memory that can be shared.
    """
    memory = bucket.handle["memory"] if bucket.handle is not None else None
    if memory is None:
        raise EngineError(
            f"unsupported-combination: bucket {bucket.index} has no CUDA memory handle; use engine.transfer "
            "= 'disk'"
        )
    metadata = [
        SimpleNamespace(
            name=spec.name,
            shape=spec.shape,
            dtype=getattr(torch, spec.dtype),
            start_idx=spec.offset,
            end_idx=spec.offset + spec.num_bytes,
            numel=spec.num_bytes,
        )
        for spec in bucket.specs
    ]
    value = {"flattened_tensor": _CudaTensor(memory), "metadata": metadata}
    return base64.b64encode(pickle.dumps(value, protocol=4)).decode("ascii")


class _CudaTensor:
    """Pickled as the call that rebuilds a CUDA tensor in another process."""

    def __init__(self, memory: Mapping[str, Any]) -> None:
        """memory: what lockstep.wire.receive.export_handle gives of a flat uint8 tensor."""
        self._memory = memory

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        m = {name: _from_json(value) for name, value in self._memory.items()}
        return reductions.rebuild_cuda_tensor, (
            torch.Tensor,
            tuple(m["shape"]),
            (1,),
            m["storage_offset"],
            torch.storage.TypedStorage,
            getattr(torch, m["dtype"]),
            m["device"],  # the UUID
            m["handle"],
            m["size"],
            m["offset"],
            False,  # requires_grad
            m["counter"],
            m["counter_offset"],
            m["event"],
            m["event_sync"],
        )


def _from_json(value: Any) -> Any:
    return base64.b64decode(value["base64"]) if isinstance(value, Mapping) else value


def check_no_padding(bucket: WeightBucket) -> None:
    """Raises EngineError for a bucket that SGLang would receive with other offsets.

    Its receiving buffer of a broadcast holds the tensors one right after the other.
    """
    at = 0
    for spec in bucket.specs:
        if spec.offset != at:
            raise EngineError(
                f"unsupported-combination: {spec.name} is at byte {spec.offset} of its bucket, but SGLang "
                f"would look for it at {at}, because the size of an earlier tensor is not a multiple of 16 "
                "bytes; set engine.transfer = 'disk'"
            )
        at += spec.num_bytes


class Expected:
    """The weights of a model, by name: SGLang answers "success" to a name that it does not know, and stops
    at an assertion, with the whole server, for a wrong shape."""

    def __init__(self, folder: Path) -> None:
        """Raises EngineError when the folder's config cannot be read."""
        from transformers import AutoConfig, AutoModelForCausalLM

        try:
            config = AutoConfig.from_pretrained(folder, local_files_only=True)
            with torch.device("meta"):
                module = AutoModelForCausalLM.from_config(config)
        except (OSError, ValueError) as error:
            raise EngineError(f"damaged-file: the weights in {folder} cannot be listed: {error}") from error
        self.shapes = {
            name: tuple(weight.shape) for name, weight in module.named_parameters(remove_duplicate=False)
        }
        distinct = {name for name, _ in module.named_parameters()}
        self._tied = set(self.shapes) - distinct
        """Other names of weights that are also known by their first."""
        heads = getattr(config, "num_attention_heads", None)
        plain = heads and getattr(config, "head_dim", None) in (None, config.hidden_size // heads)
        self._unreadable = () if plain else (".k_proj.", ".v_proj.")
        self._loaded: set[str] = set()

    def begin(self) -> None:
        self._loaded.clear()

    def check(self, specs: Iterable[TensorSpec]) -> None:
        """Raises EngineError for a tensor that the model does not have like this, or that came before."""
        for spec in specs:
            shape = self.shapes.get(spec.name)
            if shape is None:
                raise EngineError(
                    f"wrong-weights: the model has no weight {spec.name!r}; SGLang would skip it and report "
                    "success. Send Hugging Face names, such as " + ", ".join(list(self.shapes)[:3])
                )
            if spec.shape != shape:
                raise other_shape(EngineError, spec.name, spec.shape, shape)
            if spec.name in self._loaded:
                raise EngineError(f"duplicate: {spec.name} was sent twice in one update")
            self._loaded.add(spec.name)

    def check_complete(self) -> None:
        """Raises EngineError when weights have not come."""
        missing = sorted(set(self.shapes) - self._tied - self._loaded)
        if missing:
            raise other_tensors(EngineError, "the update ended", missing)

    def smallest(self) -> str:
        """The weight that is cheapest to read."""
        name: str = min(self.shapes, key=lambda name: (math.prod(self.shapes[name]), name))
        return name

    def readable(self, names: Sequence[str]) -> list[str]:
        """Those of `names` that the server can return within seconds.

        SGLang cuts k and v out of their fused weight at hidden_size / heads, which is wrong for models that
        have another head_dim: they are left out then.
        """
        size = {n: torch.Size(self.shapes[n]).numel() for n in names if n in self.shapes}
        able = [n for n in size if size[n] <= _LARGEST_READ and not any(u in n for u in self._unreadable)]
        chosen = {name for name in able if size[name] <= _SMALL_READ}
        large = [name for name in able if name not in chosen]
        left, stride = _READ_BUDGET, 7
        for start in range(stride):  # spread over the layers, whatever their number
            for name in large[start::stride]:
                if size[name] <= left:
                    left -= size[name]
                    chosen.add(name)
        return [name for name in names if name in chosen]

    def rows_to_read(self, name: str) -> int:
        """The value of `truncate_size`, which counts rows."""
        row = torch.Size(self.shapes[name][1:]).numel()
        return -(-READ_VALUES // max(row, 1))
