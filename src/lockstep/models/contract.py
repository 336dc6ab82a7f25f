"""The kernel contract of a causal LM as it runs here: see lockstep.schema.contract."""

from __future__ import annotations

import torch
from torch import nn

from lockstep import invariant
from lockstep.schema.contract import KernelContract

_COMPILED = {"eager": "eager", "compile": "inductor", "joint": "inductor"}
"""Execution mode -> the compiler that decides the bits of a forward."""


def kernel_contract(
    module: nn.Module, *, attention: str, execution: str, dtype: torch.dtype, device: torch.device
) -> KernelContract | None:
    """Return the kernel contract of `module`'s forward; None: it is not batch-invariant, or runs in a mode
    for which this is not known.

    Args:
        attention: the kernel that it attends with, such as varlen; of the native engine also varlen.
        execution: eager, compile or joint.
        dtype: compute dtype, of weights and activations.
        device: where it runs.
    """
    if attention != "varlen" or execution not in _COMPILED or not invariant.is_converted(module):
        return None
    kernels = invariant.kernels_of(module, device=device)
    name = str(dtype).removeprefix("torch.")
    on_gpu = device.type == "cuda"
    return KernelContract(
        gemm=kernels["gemm"],
        attention="aten flash" if on_gpu else "aten flash (cpu reference)",
        attention_splits=1,
        norm=kernels["norm"],
        activation=kernels["activation"],
        logprob=kernels["logprob"],
        lm_head_dtype=name,
        logits_dtype=name,
        collectives="none",
        compile=_COMPILED[execution],
        dtype=name,
        weights_dtype=name,
        device=device_name(device),
        torch=str(torch.__version__),
        # ATen splits sums over a CPU's threads.
        threads=0 if on_gpu else torch.get_num_threads(),
    )


def device_name(device: torch.device) -> str:
    """Return the device's name, such as "NVIDIA H200" or "cpu AVX512": kernels of another one may add up in
    another order."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {torch.backends.cpu.get_cpu_capability()}"
