"""The compute dtype that a device is fast in."""

from __future__ import annotations

import logging
from pathlib import Path

import torch

from lockstep.errors import ModelError

log = logging.getLogger(__name__)

DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """Return the torch dtype of a config value; "auto" depends on the device and is logged.

    auto: bfloat16 where the hardware multiplies it (CUDA compute capability 8.0 and up, CPUs with AMX,
    AVX512-BF16 or Arm's BF16), else float32, because emulated bfloat16 is slower than float32 and less exact.

    Raises:
        ModelError: an unknown name.
    """
    if name == "auto":
        fast, reason = fast_bfloat16(device)
        dtype = torch.bfloat16 if fast else torch.float32
        log.info("model.dtype auto -> %s (%s)", str(dtype).removeprefix("torch."), reason)
        return dtype
    if name not in DTYPES:
        raise ModelError(f"unknown dtype {name!r}; set model.dtype to auto or one of {', '.join(DTYPES)}")
    return DTYPES[name]


def fast_bfloat16(device: torch.device) -> tuple[bool, str]:
    """Return whether `device` has bfloat16 matrix units, and the evidence."""
    if device.type == "cuda":
        major, minor = torch.cuda.get_device_capability(device)
        return major >= 8, f"CUDA compute capability {major}.{minor}"
    if device.type != "cpu":
        return False, f"no known bfloat16 units on device type {device.type}"
    flags = cpu_flags() & {"amx_bf16", "avx512_bf16", "bf16"}
    if not flags:
        return False, "CPU without amx_bf16, avx512_bf16 or bf16"
    if not torch.backends.mkldnn.is_available():
        return False, f"CPU has {', '.join(sorted(flags))} but this torch has no oneDNN to use it"
    return True, f"CPU with {', '.join(sorted(flags))}"


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
