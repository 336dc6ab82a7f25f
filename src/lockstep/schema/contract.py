"""The kernel contract: the numerical choices that decide the bits of a logprob, as one hashed record.

A trainer and an engine with equal contracts compute bitwise equal logprobs; `difference` names the fields in
which two contracts differ.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

VERSION = 1
"""Increased when the kernels behind a name change their bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class KernelContract:
    """The kernels and dtypes of a forward pass. Two forwards are bitwise equal when all fields are.

    Example:
        >>> ours = KernelContract(gemm="cpu-tiles", attention="varlen", attention_splits=1, norm="row",
        ...     activation="row", logprob="serial", lm_head_dtype="float32", logits_dtype="float32",
        ...     collectives="none", compile="inductor", dtype="float32", weights_dtype="float32",
        ...     device="cpu", torch="2.13.0", threads=2)
        >>> ours.difference(dataclasses.replace(ours, compile="eager"))
        ["compile: 'inductor' here, 'eager' there"]
    """

    gemm: str
    """Implementation of matrix products, such as cpu-tiles-32 or cublaslt-without-split-k."""
    attention: str
    """Attention kernel."""
    attention_splits: int
    """Number of splits over the keys of one query; 1: no split."""
    norm: str
    activation: str
    logprob: str
    """Implementation of the logprob of a label."""
    lm_head_dtype: str
    """Dtype of the head's matrix product."""
    logits_dtype: str
    """Dtype that logits are rounded to before the logprob is computed in float32."""
    collectives: str
    """Sums over ranks within a forward; none if ranks only gather weights."""
    compile: str
    """How the decoder layers run: eager, or inductor with the settings of the mode."""
    dtype: str
    """Dtype of activations."""
    weights_dtype: str
    device: str
    """Name of the GPU, or cpu with its instruction set."""
    torch: str
    threads: int
    """CPU threads of torch; 0 on a GPU, where they have no effect."""
    version: int = VERSION

    @property
    def hash(self) -> str:
        """sha256 over the fields as canonical JSON: 64 hexadecimal digits."""
        text = json.dumps(dataclasses.asdict(self), sort_keys=True, separators=(",", ":"))
        return hashlib.sha256(text.encode()).hexdigest()

    def difference(self, other: KernelContract) -> list[str]:
        """Return "FIELD: OURS here, THEIRS there" for every field that differs; empty if all are equal."""
        ours, theirs = dataclasses.asdict(self), dataclasses.asdict(other)
        return [f"{k}: {v!r} here, {theirs[k]!r} there" for k, v in ours.items() if v != theirs[k]]

    def as_json(self) -> dict[str, Any]:
        """Return the fields and `hash`, for manifests and recordings."""
        return dataclasses.asdict(self) | {"hash": self.hash}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> KernelContract:
        """Read what `as_json` wrote.

        Raises:
            ValueError: a field is missing, unknown or of another type, or the hash does not match.
        """
        types = {field.name: field.type for field in dataclasses.fields(cls)}
        fields = {name: value for name, value in values.items() if name != "hash"}
        if fields.keys() != types.keys():
            raise ValueError(
                f"kernel contract: it lacks the fields {sorted(types.keys() - fields.keys())} and has the "
                f"unknown fields {sorted(fields.keys() - types.keys())}; another version of Lockstep wrote "
                "it"
            )
        for name, kind in types.items():
            if type(fields[name]).__name__ != kind:
                raise ValueError(f"kernel contract: {name} = {fields[name]!r} is not of type {kind}")
        contract = cls(**fields)
        if values.get("hash", contract.hash) != contract.hash:
            raise ValueError(
                f"kernel contract: its hash is {values['hash']!r}, but its fields hash to {contract.hash}"
            )
        return contract


# Counts of compiler work.


@dataclass(frozen=True, kw_only=True, slots=True)
class CompileReport:
    """The work of torch.compile and joint graphs since a CompileWatch was made."""

    graphs: int
    """Compiled graphs (forward; each has its backward)."""
    graph_breaks: int
    recompiles: int
    """Graphs made after `mark_warm`; before it every graph counts as warm-up."""
    seconds: float
    """Wall time spent compiling."""
    reasons: tuple[str, ...]
    """Reasons for recompiles, newest last, of at most the last 64 compilations."""
