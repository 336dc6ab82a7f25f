"""A train backend's state as files: everything that decides how training goes on, to the bit.

model.safetensors       weights in the compute dtype, Hugging Face names (with LoRA: the adapters only)
optimizer.safetensors   "master/NAME" where the master is not the Parameter itself, "exp_avg/NAME", ...
rng.safetensors         torch, CUDA, Python and numpy generators
state.json              step, schedule, optimizer, versions, and size and sha256 of the three above
"""

from __future__ import annotations

import importlib.metadata
import platform
import shutil
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy
import torch
from safetensors import safe_open
from torch import Tensor, nn

from lockstep.errors import CheckpointError
from lockstep.train.files import (
    FileRecord,
    check_record,
    check_tensors,
    is_out_of_space,
    out_of_space,
    read_json,
    read_tensors,
    require_free_space,
    tensor_bytes,
    write_json,
    write_tensors,
)
from lockstep.train.rng import restore_rng_state, rng_state

FORMAT = "lockstep-train-state"
VERSION = 1
_MARGIN = 1 << 20  # headers, JSON, rng


def model_tensors(module: nn.Module, *, trained_only: bool) -> dict[str, Tensor]:
    """The live weights by name, each storage once: tied weights under their first name."""
    named = dict(module.named_parameters())
    if trained_only:
        return {name: p.detach() for name, p in named.items() if p.requires_grad}
    persistent = module.state_dict().keys()
    buffers = {name: b for name, b in module.named_buffers() if name in persistent}
    return {name: t.detach() for name, t in (named | buffers).items()}


def save_state(
    directory: Path,
    *,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    progress: Mapping[str, Any],
) -> dict[str, FileRecord]:
    """Write the four files into an existing directory.

    Args:
        model, optimizer: live tensors by name.
        progress: JSON values, kept under "progress" in state.json.

    Returns:
        What was written, by file name.

    Raises:
        CheckpointError: the disk is full.
        OSError: the disk failed in another way.
    """
    needed = tensor_bytes(model) + tensor_bytes(optimizer) + _MARGIN
    require_free_space(directory, needed)
    parts = {"model.safetensors": model, "optimizer.safetensors": optimizer, "rng.safetensors": rng_state()}
    try:
        records = {name: write_tensors(directory / name, tensors) for name, tensors in parts.items()}
    except OSError as error:
        if not is_out_of_space(error):
            raise
        free = shutil.disk_usage(directory).free
        raise CheckpointError(f"{error}: {out_of_space(directory, needed=needed, free=free)}") from error
    state = {
        "format": FORMAT,
        "version": VERSION,
        "progress": dict(progress),
        "versions": _versions(),
        "files": {name: asdict(record) for name, record in records.items()},
    }
    records["state.json"] = write_json(directory / "state.json", state)
    return records


def load_state(
    directory: Path, *, model: Mapping[str, Tensor], optimizer: Mapping[str, Tensor], verified: bool = False
) -> dict[str, Any]:
    """Check everything, then copy the files into the live tensors and restore the generators.

    Args:
        verified: the caller has compared the files' hashes already.

    Returns:
        The `progress` that was saved.

    Raises:
        CheckpointError: a file is missing, damaged or belongs to something else; nothing was changed.
    """
    state = _read_state(directory)
    for name, record in state["files"].items():
        check_record(directory / name, FileRecord(**record), contents=not verified)
    check_tensors(directory / "model.safetensors", model)
    check_tensors(directory / "optimizer.safetensors", optimizer)
    rng = _read_rng(directory / "rng.safetensors")
    read_tensors(directory / "model.safetensors", model)
    read_tensors(directory / "optimizer.safetensors", optimizer)
    restore_rng_state(rng)
    progress: dict[str, Any] = state["progress"]
    return progress


def read_progress(directory: Path) -> dict[str, Any]:
    """The `progress` of a saved state. Raises CheckpointError."""
    progress: dict[str, Any] = _read_state(directory)["progress"]
    return progress


def _read_state(directory: Path) -> dict[str, Any]:
    path = directory / "state.json"
    state = read_json(path)
    if not isinstance(state, dict) or state.get("format") != FORMAT:
        raise CheckpointError(f"{path}: field 'format' is not {FORMAT!r}; this is no train state")
    if state.get("version") != VERSION:
        raise CheckpointError(
            f"{path}: field 'version' is {state.get('version')!r}, this Lockstep reads {VERSION}; use the "
            f"version of Lockstep that wrote it ({state.get('versions')})"
        )
    files = state.get("files")
    wanted = {"model.safetensors", "optimizer.safetensors", "rng.safetensors"}
    if not isinstance(files, dict) or set(files) != wanted:
        raise CheckpointError(f"{path}: field 'files' must list exactly {sorted(wanted)}")
    for name, record in files.items():
        if not isinstance(record, dict) or set(record) != {"bytes", "sha256"}:
            raise CheckpointError(f"{path}: field 'files.{name}' must have bytes and sha256")
    if not isinstance(state.get("progress"), dict):
        raise CheckpointError(f"{path}: field 'progress' is missing")
    return state


def _read_rng(path: Path) -> dict[str, Tensor]:
    """The generators' states; names, shapes and dtypes must be those of this build of torch and numpy."""
    own = {name: t for name, t in rng_state().items() if not name.startswith("torch_cuda")}
    with safe_open(path, "pt") as file:
        found: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
    for name, tensor in own.items():
        variable = name.endswith("_gauss")
        if name not in found or found[name].dtype != tensor.dtype:
            raise CheckpointError(f"{path}: the state of generator {name!r} is missing or of another type")
        if not variable and found[name].shape != tensor.shape:
            raise CheckpointError(
                f"{path}: generator {name!r} has a state of {list(found[name].shape)}, here it is "
                f"{list(tensor.shape)}; the checkpoint was made with another version of torch or numpy"
            )
    return found


def _versions() -> dict[str, str]:
    from lockstep import __version__

    return {
        "lockstep": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": importlib.metadata.version("transformers"),
        "numpy": numpy.__version__,
    }
