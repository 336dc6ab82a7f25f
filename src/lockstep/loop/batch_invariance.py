"""train.batch_invariant: kernels and modules of a run whose rows do not depend on their batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from lockstep import invariant
from lockstep.errors import ModelError
from lockstep.loop import determinism
from lockstep.loop.axes import Axes
from lockstep.models.load import LoadedModel
from lockstep.schema.contract import KernelContract


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """What was made batch-invariant, for the manifest."""

    replaced: Mapping[str, int] = field(default_factory=dict)
    """Parts that the converter swapped, by kind."""
    stock: Mapping[str, int] = field(default_factory=dict)
    """Parts that it left to torch, by class."""
    self_test: Mapping[str, Any] = field(default_factory=dict)
    """By op and weight shape: the implementation in which a row alone equals the row among many, and those
    in which it does not."""
    refused: str | None = None
    """Why the mode is off although it would be on by default here; None: it is on."""


def prepare_kernels(axes: Axes) -> Callable[[], None]:
    """Before the model is loaded: what CUDA's libraries are told, for the rest of the process.

    Returns:
        What takes the settings of batch-invariance back, should the mode turn out to be off.

    Raises:
        ConfigError: the environment tells cuBLAS what a deterministic run cannot have.
    """
    if axes.device.startswith("cuda"):
        if axes.deterministic:
            determinism.prepare_cublas()
        if axes.batch_invariant:
            return invariant.configure_cuda()
    return lambda: None


def make_invariant(model: LoadedModel, *, axes: Axes, asked: bool | None) -> Claim:
    """Converts the policy in place and tests its kernels.

    Args:
        asked: train.batch_invariant; None: a model outside of the claim is no error, and the claim says why.

    Raises:
        ModelError: the model has a module that is not known to be batch-invariant, or mixed dtypes; or a
            kernel failed its test, and the model is of no use any more.
    """
    device = torch.device(axes.device)
    try:
        found = invariant.convert(model.module, device=device, dtype=model.dtype)
    except ModelError as error:
        if asked:
            raise
        return Claim(refused=str(error))
    return Claim(
        replaced=found.replaced,
        stock=found.stock,
        self_test={name: dataclasses.asdict(verdict) for name, verdict in found.verdicts.items()},
    )


def converted(model: LoadedModel) -> LoadedModel:
    """The same; its module was converted as the policy's was, which had its kernels tested.

    Raises:
        ModelError: the module cannot be converted.
    """
    invariant.convert(model.module)
    return model


def claim_manifest(claim: Claim | None, contract: KernelContract | None) -> dict[str, Any]:
    """For manifest.json: the contract that trainer and engine keep, or the trainer alone."""
    if claim is None:  # written too: a resumed run may have kept one before
        return {"batch_invariant": None, "contract": None}
    written = None if contract is None else contract.as_json()
    return {"batch_invariant": dataclasses.asdict(claim), "contract": written}


def claim_lines(claim: Claim | None, contract: KernelContract | None) -> list[str]:
    """For the display."""
    if claim is None:
        return []
    if claim.refused is not None:
        return [f"train.batch_invariant is off: {claim.refused}"]
    if contract is None:
        return ["batch-invariant forward, by no contract with an engine: a logprob_gap is only measured"]
    return [f"trainer and engine keep kernel contract {contract.hash[:12]}: logprob_gap must be exactly 0"]


def contract_change(before: Mapping[str, Any] | None, contract: KernelContract | None) -> list[str]:
    """For the display of a resumed run: what its manifest says that is not so any more.

    Args:
        before: "contract" of the manifest; None: a new run, or it kept none.
    """
    if before is None or (contract is not None and before.get("hash") == contract.hash):
        return []
    if contract is None:
        return [
            f"the run was started with kernel contract {str(before.get('hash'))[:12]} and goes on without "
            "one: its logprob_gap was 0 and is only measured from here on"
        ]
    now = contract.as_json()
    other = [
        f"{k} {before.get(k)!r}, now {v!r}" for k, v in now.items() if k != "hash" and before.get(k) != v
    ]
    return [
        f"the run was started with another kernel contract ({'; '.join(other)}): its numbers may differ from "
        "those of a run that was not interrupted"
    ]
