"""The states of every random number generator a train step may draw from, as tensors (never pickle)."""

from __future__ import annotations

import contextlib
import hashlib
import random
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from pathlib import Path

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from lockstep.common_errors import damaged
from lockstep.errors import CheckpointError

_CUDA = "torch_cuda"
_HELD: ContextVar[Mapping[str, Tensor] | None] = ContextVar("held", default=None)
"""Set inside `generators_at`."""


def rng_state(*, all_devices: bool = True) -> dict[str, Tensor]:
    """torch CPU and CUDA, Python's `random`, numpy's global generator. Python's and numpy's are [625] int64:
    624 words of the Mersenne twister and the position; a cached second Gaussian is kept as float64 bits.

    Args:
        all_devices: "torch_cuda_INDEX" of every CUDA device; False: "torch_cuda" of the current one.
    """
    version, words, gauss = random.getstate()
    assert version == 3, f"Python's random state has version {version}; only 3 is supported"
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert name == "MT19937" and isinstance(keys, np.ndarray)
    state = {
        "torch_cpu": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached] if has_gauss else [], dtype=torch.float64),
    }
    # Asking a CUDA that nobody has used for its state would create a context, and take GPU memory.
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        if all_devices:
            for index, cuda in enumerate(torch.cuda.get_rng_state_all()):
                state[f"{_CUDA}_{index}"] = cuda
        else:
            state[_CUDA] = torch.cuda.get_rng_state()
    return state


def restore_rng_state(state: Mapping[str, Tensor]) -> None:
    """The inverse of `rng_state`. States of CUDA devices that this machine does not have are left out."""
    torch.set_rng_state(state["torch_cpu"])
    random.setstate(_python_state(state))
    np.random.set_state(_numpy_state(state))
    if torch.cuda.is_available():
        if _CUDA in state:
            torch.cuda.set_rng_state(state[_CUDA])
        for index in range(torch.cuda.device_count()):
            if f"{_CUDA}_{index}" in state:
                torch.cuda.set_rng_state(state[f"{_CUDA}_{index}"], index)


@contextlib.contextmanager
def generators_at(state: Mapping[str, Tensor]) -> Iterator[None]:
    """Put the generators back into an earlier state. A save inside writes that state (`saved_rng_state`),
    whatever other threads draw meanwhile."""
    restore_rng_state(state)
    token = _HELD.set(state)
    try:
        yield
    finally:
        _HELD.reset(token)


def saved_rng_state(*, all_devices: bool = True) -> dict[str, Tensor]:
    """Return the states that a save has to write: those of `generators_at`, else as `rng_state`."""
    held = _HELD.get()
    return rng_state(all_devices=all_devices) if held is None else dict(held)


def derived_rng_state(state: Mapping[str, Tensor], *, stream: int) -> dict[str, Tensor]:
    """Derive the state of a rank that has none in a checkpoint from that of the checkpoint's first rank.

    Python's and numpy's generators are taken as they are (every rank draws the same from them). torch's are
    too if `stream` is 0; otherwise they are seeded with 63 bits of sha256(first rank's CPU state, stream), so
    that ranks of different streams draw different numbers, and the same ones at every load.
    """
    derived = {name: tensor for name, tensor in state.items() if not name.startswith(_CUDA)}
    cuda = next((state[name] for name in (_CUDA, f"{_CUDA}_0") if name in state), None)
    if stream != 0:
        seed = hashlib.sha256(bytes(state["torch_cpu"].tolist()) + stream.to_bytes(8, "little")).digest()
        # Without its last bit it is positive as an int64, which is what a generator's seed is kept in.
        number = int.from_bytes(seed[:8], "little") >> 1
        derived["torch_cpu"] = torch.Generator().manual_seed(number).get_state()
        if cuda is not None and torch.cuda.is_available():
            cuda = torch.Generator("cuda").manual_seed(number).get_state()
    if cuda is not None:
        derived[_CUDA] = cuda
    return derived


def read_rng(path: Path) -> dict[str, Tensor]:
    """Read the states in a file. Raises CheckpointError: it cannot be read."""
    try:
        with safe_open(path, "pt") as file:
            return {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 (no mapping)
    except (SafetensorError, OSError) as error:
        raise CheckpointError(f"damaged-file: {path} is not a readable safetensors file ({error})") from error


def check_rng_state(path: Path, state: Mapping[str, Tensor]) -> None:
    """Check that `restore_rng_state` will take the states, on generators of its own.

    Raises:
        CheckpointError: one is missing, of another version of torch or numpy, or no state at all.
    """
    own = rng_state(all_devices=False)
    for name, tensor in own.items():
        if name.startswith(_CUDA):
            continue
        if name not in state or state[name].dtype != tensor.dtype:
            raise CheckpointError(f"wrong-type: {path}: generator {name!r} has no valid state")
        if not name.endswith("_gauss") and state[name].shape != tensor.shape:
            raise CheckpointError(
                f"wrong-shape: {path}: generator {name!r} has a state of shape {list(state[name].shape)}, "
                f"not {list(tensor.shape)}; the checkpoint was made with another version of torch or numpy"
            )
    for name, tensor in state.items():
        # Seed and offset of Philox, 8 bytes each.
        if name.startswith(_CUDA) and (tensor.dtype, tensor.shape) != (torch.uint8, (16,)):
            raise CheckpointError(
                f"wrong-shape: {path}: generator {name!r} has a state of shape {list(tensor.shape)}, not 16 "
                "bytes"
            )
    tries: dict[str, Callable[[], object]] = {
        "torch_cpu": lambda: torch.Generator().set_state(state["torch_cpu"]),
        "python": lambda: random.Random().setstate(_python_state(state)),
        "numpy": lambda: np.random.RandomState().set_state(_numpy_state(state)),
    }
    for name, attempt in tries.items():
        try:
            attempt()
        except (RuntimeError, ValueError, OverflowError, TypeError) as error:
            raise damaged(CheckpointError, path, f"generator {name!r} has no valid state: {error}") from error


def _python_state(state: Mapping[str, Tensor]) -> tuple[int, tuple[int, ...], float | None]:
    gauss = state["python_gauss"].reshape(-1).tolist()
    return 3, tuple(state["python"].tolist()), gauss[0] if gauss else None


def _numpy_state(state: Mapping[str, Tensor]) -> tuple[str, np.ndarray, int, int, float]:
    cached = state["numpy_gauss"].reshape(-1).tolist()
    keys = np.array(state["numpy"][:-1].tolist(), dtype=np.uint32)
    return "MT19937", keys, int(state["numpy"][-1]), int(bool(cached)), cached[0] if cached else 0.0
