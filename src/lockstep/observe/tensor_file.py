"""The safetensors format as checkpoints and recordings write it: dtypes, the header, a tensor's bytes.

safetensors.torch.save_file takes a copy of all tensors of a file at once; both write them one after the
other, and hash what they write. `save_tensors` is save_file for small files, with the system's errors.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file
from torch import Tensor

from lockstep.observe.files import naming

DTYPES: dict[str, torch.dtype] = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "F32": torch.float32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F64": torch.float64,
    "C64": torch.complex64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
}
"""Name in a safetensors header -> torch's dtype."""
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def file_head(tensors: Mapping[str, tuple[str, tuple[int, ...]]], metadata: Mapping[str, str]) -> bytes:
    """Return what a file begins with: the header's length and the header.

    Args:
        tensors: name -> (name of the dtype, shape), in the order in which their bytes follow.
    """
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    offset = 0
    for name, (dtype, shape) in tensors.items():
        end = offset + math.prod(shape) * DTYPES[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [offset, end]}
        offset = end
    text = json.dumps(header, separators=(",", ":"), allow_nan=False).encode()
    # So that the data begin at a multiple of 8 bytes, as safetensors itself writes them, and can be mapped.
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def tensor_bytes(tensor: Tensor | np.ndarray[Any, Any]) -> memoryview:
    """Return its bytes in row-major order, without a copy where that is possible."""
    if isinstance(tensor, Tensor):
        tensor = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    flat: Any = np.ascontiguousarray(tensor).reshape(-1).view(np.uint8)
    return memoryview(flat)


def save_tensors(
    tensors: Mapping[str, Tensor], path: Path, *, metadata: Mapping[str, str] | None = None
) -> None:
    """Write tensors into a safetensors file.

    Raises:
        OSError: it cannot be written; names `path`.
    """
    with naming(path):
        save_file(dict(tensors), path, metadata=None if metadata is None else dict(metadata))
