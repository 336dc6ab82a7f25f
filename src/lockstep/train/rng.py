"""The states of every random number generator a train step may draw from, as tensors (never pickle)."""

from __future__ import annotations

import random

import numpy as np
import torch
from torch import Tensor


def rng_state() -> dict[str, Tensor]:
    """torch CPU and CUDA, Python's `random`, numpy's global generator. Python's and numpy's are [625] int64:
    624 words of the Mersenne twister and the position; a cached second Gaussian is kept as float64 bits."""
    version, words, gauss = random.getstate()
    assert version == 3, f"Python's random state has version {version}; 3 is known"
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    assert name == "MT19937" and isinstance(keys, np.ndarray)
    state = {
        "torch_cpu": torch.get_rng_state(),
        "python": torch.tensor(words, dtype=torch.int64),
        "python_gauss": torch.tensor([] if gauss is None else [gauss], dtype=torch.float64),
        "numpy": torch.tensor([*keys.tolist(), position], dtype=torch.int64),
        "numpy_gauss": torch.tensor([cached] if has_gauss else [], dtype=torch.float64),
    }
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        for index, cuda in enumerate(torch.cuda.get_rng_state_all()):
            state[f"torch_cuda_{index}"] = cuda
    return state


def restore_rng_state(state: dict[str, Tensor]) -> None:
    """The inverse of `rng_state`. States of CUDA devices that this machine does not have are left out."""
    torch.set_rng_state(state["torch_cpu"])
    gauss = state["python_gauss"].tolist()
    random.setstate((3, tuple(state["python"].tolist()), gauss[0] if gauss else None))
    cached = state["numpy_gauss"].tolist()
    keys = np.array(state["numpy"][:-1].tolist(), dtype=np.uint32)
    np.random.set_state(
        ("MT19937", keys, int(state["numpy"][-1]), int(bool(cached)), cached[0] if cached else 0.0)
    )
    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            if f"torch_cuda_{index}" in state:
                torch.cuda.set_rng_state(state[f"torch_cuda_{index}"], index)
