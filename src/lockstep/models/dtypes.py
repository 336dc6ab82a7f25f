"""The compute dtype that a device is fast in."""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping
from pathlib import Path

import torch

from lockstep.errors import ModelError

log = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the torch dtype of a config value; "auto" depends on the device and is logged.

    auto: bfloat16 where the hardware multiplies it (CUDA compute capability 8.0 and up, CPUs with AMX,
    AVX512-BF16 or Arm's BF16, unless the environment keeps torch from using them), else float32, because
    emulated bfloat16 is slower than float32 and less exact.

    Raises:
        ModelError: an unknown name.
    """
    if name == "auto":
        fast, reason = fast_bfloat16(device)
        dtype = torch.bfloat16 if fast else torch.float32
        log.info("model.dtype auto -> %s (%s)", str(dtype).removeprefix("torch."), reason)
        return dtype
    if name not in DTYPES:
        raise ModelError(
            f"unknown-name: unknown dtype {name!r}; set model.dtype to auto or to one of {', '.join(DTYPES)}"
        )
    return DTYPES[name]


def fast_bfloat16(device: torch.device) -> tuple[bool, str]:
    """Return whether `device` has bfloat16 matrix units, and the evidence."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return major >= 8, f"CUDA compute capability {major}.{minor}"
    if device.type != "cpu":
        return False, f"no known bfloat16 units on device type {device.type}"
    # From the system: torch's own capability names (AVX512, AVX2) do not say whether there are bfloat16
    # units.
    flags = cpu_flags() & {"amx_bf16", "avx512_bf16", "bf16"}
    if not flags:
        return False, "CPU without amx_bf16, avx512_bf16 or bf16"
    hidden = {flag: why for flag in flags if (why := hidden_by(flag, os.environ))}
    if hidden and hidden.keys() == flags:
        return False, f"CPU with {', '.join(sorted(flags))}, but {next(iter(hidden.values()))}"
    flags -= hidden.keys()
    if not torch.backends.mkldnn.is_available():
        return False, f"CPU has {', '.join(sorted(flags))} but this torch has no oneDNN to use it"
    return True, f"CPU with {', '.join(sorted(flags))}"


_BELOW_AVX512 = frozenset({"SSE41", "AVX", "AVX2", "AVX2_VNNI", "AVX2_VNNI_2"})
_ONEDNN_BELOW = {
    "avx512_bf16": _BELOW_AVX512 | {"AVX512_CORE", "AVX512_CORE_VNNI"},
    "amx_bf16": _BELOW_AVX512
    | {"AVX512_CORE", "AVX512_CORE_VNNI", "AVX512_CORE_BF16", "AVX512_CORE_FP16", "AVX10_1_512"},
}
"""By CPU flag: the values of ONEDNN_MAX_CPU_ISA under which oneDNN leaves these units alone."""


def hidden_by(flag: str, environ: Mapping[str, str]) -> str:
    """Return the variable and value that keep torch from the units of a CPU flag; empty: none does.

    ATEN_CPU_CAPABILITY limits torch's own kernels, ONEDNN_MAX_CPU_ISA (or DNNL_MAX_CPU_ISA) the matrix
    products in bfloat16 and MKL_ENABLE_INSTRUCTIONS those in float32: whoever sets one below AVX-512 asks for
    a CPU without. They matter to x86 flags only.

    Example:
        >>> hidden_by("amx_bf16", {"ONEDNN_MAX_CPU_ISA": "AVX2"})
        'ONEDNN_MAX_CPU_ISA = AVX2'
    """
    if flag not in _ONEDNN_BELOW:
        return ""
    limits = {
        "ATEN_CPU_CAPABILITY": frozenset({"DEFAULT", "AVX2"}),
        "ONEDNN_MAX_CPU_ISA": _ONEDNN_BELOW[flag],
        "DNNL_MAX_CPU_ISA": _ONEDNN_BELOW[flag],
        "MKL_ENABLE_INSTRUCTIONS": frozenset({"SSE4_2", "AVX", "AVX2"}),
    }
    for name, below in limits.items():
        value = environ.get(name, "")
        if value.upper() in below:
            return f"{name} = {value}"
    return ""


def cpu_flags() -> frozenset[str]:
    """Feature flags of the first CPU of /proc/cpuinfo (x86 "flags", Arm "Features"); empty without that
    file."""
    path = Path("/proc/cpuinfo")
    if not path.exists():
        return frozenset()
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        key, _, value = line.partition(":")
        if key.strip() in ("flags", "Features"):
            return frozenset(value.split())
    return frozenset()
