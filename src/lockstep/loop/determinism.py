"""train.deterministic: the settings of torch, CUDA and NCCL that make a run bitwise repeatable.

It holds for the same run on the same machine: the same device, number of ranks, CPU threads and versions.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import torch
import torch._inductor.config as inductor

from lockstep.config.train import TrainConfig
from lockstep.errors import ConfigError
from lockstep.protocols import TrainBackend
from lockstep.recording.storage.fingerprint import fingerprint, module_tensors

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_CUBLAS_VALUES = (":16:8", ":4096:8")
_NCCL = {"NCCL_ALGO": "Ring", "NCCL_NVLS_ENABLE": "0"}
"""Sums over ranks in one order, whatever NCCL measured when it started, and none inside a switch. A variable
that is already set stays."""


@contextlib.contextmanager
def deterministic(train: TrainConfig) -> Iterator[None]:
    """Make the run inside deterministic, from before its ranks connect and its model is loaded, and restore
    the settings afterwards. Without train.deterministic nothing is changed.
    """
    if not train.deterministic:
        yield
        return
    added = {name: value for name, value in _NCCL.items() if name not in os.environ}
    os.environ.update(added)
    fill: Any = torch.utils.deterministic
    cudnn = torch.backends.cudnn
    before = torch.get_deterministic_debug_mode(), fill.fill_uninitialized_memory
    cudnn_before = cudnn.deterministic, cudnn.benchmark
    with inductor.patch(deterministic=True):  # no kernel is chosen by a measurement; torch sets it too
        try:
            torch.use_deterministic_algorithms(True)
            # Memory that nobody has written is read by nobody (tests fill it with NaN): filling it is a pass
            # over every new tensor for nothing.
            fill.fill_uninitialized_memory = False
            cudnn.deterministic, cudnn.benchmark = True, False
            yield
        finally:
            for name in added:
                os.environ.pop(name, None)
            torch.set_deterministic_debug_mode(before[0])
            fill.fill_uninitialized_memory = before[1]
            cudnn.deterministic, cudnn.benchmark = cudnn_before


def prepare_cublas() -> None:
    """Give cuBLAS workspaces of a fixed size, which torch requires under deterministic algorithms; to be
    called before the first matrix product on CUDA. The variable stays set: cuBLAS reads it when it makes a
    workspace.

    Raises:
        ConfigError: it has a value that torch does not accept.
    """
    value = os.environ.setdefault(CUBLAS, _CUBLAS_VALUES[1])
    if value not in _CUBLAS_VALUES:
        raise ConfigError(
            f"wrong-environment: {CUBLAS} = {value!r}: under train.deterministic = true torch accepts "
            f"{' or '.join(_CUBLAS_VALUES)}; set one of them, or unset the variable",
            name=CUBLAS,
            value=value,
        )


def weights_hash(backend: TrainBackend) -> str:
    """Hash the policy's weights in the compute dtype with lockstep.recording.storage.fingerprint. Collective
    where ranks have parts of them."""
    update = backend.weights(policy_version=0)
    if update.shared_module is not None:
        return fingerprint(module_tensors(update.shared_module).items())
    return fingerprint(update.tensors())
