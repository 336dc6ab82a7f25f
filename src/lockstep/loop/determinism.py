"""train.deterministic: the settings of torch, CUDA and NCCL that make a run bitwise repeatable.

It holds for the same run on the same machine: the same device, number of ranks, CPU threads and versions.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
import torch._inductor.config as inductor

from lockstep import invariant
from lockstep.errors import ConfigError, ModelError
from lockstep.models.load import LoadedModel
from lockstep.protocols import TrainBackend
from lockstep.recording.files import fingerprint, module_tensors
from lockstep.schema.contract import KernelContract

CUBLAS = "CUBLAS_WORKSPACE_CONFIG"
_CUBLAS_VALUES = (":16:8", ":4096:8")
_NCCL = {"NCCL_ALGO": "Ring", "NCCL_NVLS_ENABLE": "0"}
"""Sums over ranks in one order, whatever NCCL measured when it started, and none inside a switch. A variable
that is already set stays."""


@contextlib.contextmanager
def deterministic(on: bool) -> Iterator[None]:
    """Make the run inside deterministic, from before its ranks connect and its model is loaded, and restore
    the settings afterwards.

    Args:
        on: train.deterministic; without it nothing is changed.
    """
    if not on:
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
            f"wrong-environment: {CUBLAS} = {value!r}: with train.deterministic = true torch only accepts "
            f"{' or '.join(_CUBLAS_VALUES)}; set one of them, or unset the variable",
            name=CUBLAS,
            value=value,
        )


def weights_hash(backend: TrainBackend) -> str:
    """Hash the policy's weights in the compute dtype with lockstep.recording.files. Collective
    where ranks have parts of them."""
    update = backend.weights(policy_version=0)
    if update.shared_module is not None:
        return fingerprint(module_tensors(update.shared_module).items())
    return fingerprint(update.tensors())


# train.batch_invariant: kernels and modules of a run whose rows do not depend on their batch.


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchInvariance:
    """The parts that were made batch-invariant, for the manifest."""

    replaced: Mapping[str, int] = field(default_factory=dict)
    """Parts that the converter swapped, by kind."""
    stock: Mapping[str, int] = field(default_factory=dict)
    """Parts that it left to torch, by class."""
    self_test: Mapping[str, Any] = field(default_factory=dict)
    """By op and weight shape: the implementation whose rows do not depend on their batch, and the rejected
    ones."""
    refused: str | None = None
    """Why the mode is off although it would be on by default here; None: it is on."""


def prepare_kernels(device: str, *, deterministic: bool, batch_invariant: bool) -> Callable[[], None]:
    """Configure CUDA's libraries for the rest of the process, before the model is loaded.

    Args:
        device, deterministic, batch_invariant: of [train], resolved.

    Returns:
        A function that undoes the settings of batch-invariance, should the mode turn out to be off.

    Raises:
        ConfigError: the environment sets cuBLAS to what a deterministic run cannot use.
    """
    if device.startswith("cuda"):
        if deterministic:
            prepare_cublas()
        if batch_invariant:
            return invariant.configure_cuda()
    return lambda: None


def make_invariant(model: LoadedModel, *, device: torch.device, required: bool | None) -> BatchInvariance:
    """Convert the policy in place and test its kernels.

    Args:
        device: of the model.
        required: train.batch_invariant; None: a model that cannot be batch-invariant is no error, and the
            result's `refused` says why.

    Raises:
        ModelError: the model has a module that is not known to be batch-invariant, or mixed dtypes; or a
            kernel failed its test, and the model is of no use any more.
    """
    try:
        conversion = invariant.convert(model.module, device=device, dtype=model.dtype)
    except ModelError as error:
        if required:
            raise
        return BatchInvariance(refused=str(error))
    return BatchInvariance(
        replaced=conversion.replaced,
        stock=conversion.stock,
        self_test={name: dataclasses.asdict(verdict) for name, verdict in conversion.verdicts.items()},
    )


def convert_copy(model: LoadedModel) -> LoadedModel:
    """Convert a second copy of the policy in place, without testing its kernels again, and return it.

    Raises:
        ModelError: the module cannot be converted.
    """
    invariant.convert(model.module)
    return model


def batch_invariance_manifest(
    result: BatchInvariance | None, contract: KernelContract | None
) -> dict[str, Any]:
    """The fields of manifest.json: the contract that trainer and engine keep, or the trainer alone."""
    if result is None:  # written too: a resumed run may have kept one before
        return {"batch_invariant": None, "contract": None}
    written = None if contract is None else contract.as_json()
    return {"batch_invariant": dataclasses.asdict(result), "contract": written}


def batch_invariance_lines(result: BatchInvariance | None, contract: KernelContract | None) -> list[str]:
    """The lines for the display."""
    if result is None:
        return []
    if result.refused is not None:
        return [f"train.batch_invariant is off: {result.refused}"]
    if contract is None:
        return [
            "the forward is batch-invariant, but the engine shares no kernel contract, so logprob_gap is "
            "measured and need not be 0"
        ]
    return [
        f"trainer and engine share kernel contract {contract.hash[:12]}, so logprob_gap must be exactly 0"
    ]


def contract_change(before: Mapping[str, Any] | None, contract: KernelContract | None) -> list[str]:
    """The lines for the display of a resumed run: what has changed since its manifest was written.

    Args:
        before: "contract" of the manifest; None: a new run, or it kept none.
    """
    if before is None or (contract is not None and before.get("hash") == contract.hash):
        return []
    if contract is None:
        return [
            f"the run was started with kernel contract {str(before.get('hash'))[:12]} and continues without "
            "one; its logprob_gap was 0 and from now on is only measured"
        ]
    now = contract.as_json()
    other = [
        f"{k} {before.get(k)!r}, now {v!r}" for k, v in now.items() if k != "hash" and before.get(k) != v
    ]
    return [
        f"the run was started with a different kernel contract ({'; '.join(other)}), so its numbers may "
        "differ from those of an uninterrupted run"
    ]
