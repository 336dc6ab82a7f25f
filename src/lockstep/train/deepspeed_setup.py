"""What train/deepspeed.py settles before DeepSpeed starts: what cannot work, its config, its compiler."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import shutil
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from lockstep.config.train import TrainConfig
from lockstep.errors import ConfigError
from lockstep.train.optimizer import NamedParameter

log = logging.getLogger(__name__)


def refuse_impossible(
    config: TrainConfig,
    *,
    zero_stage: int,
    device: torch.device,
    dtype: torch.dtype,
    deepcompile: bool,
    with_optimizer: bool,
) -> None:
    """Raises ConfigError for what DeepSpeed cannot do here, before it is imported."""
    if zero_stage not in (0, 1, 2, 3):
        raise ConfigError(f"--zero-stage {zero_stage} does not exist; give 0, 1, 2 or 3")
    if deepcompile:
        if device.type != "cuda":
            raise ConfigError(
                f"--deepcompile needs a CUDA device, this is {device.type}: DeepCompile builds a "
                "CUDA extension, and DeepSpeed switches it on for no other accelerator. Leave out "
                "--deepcompile; --compile works here"
            )
        if zero_stage == 0:
            raise ConfigError(
                "--deepcompile works with ZeRO 1, 2 and 3 only; add --zero-stage 1, or leave out "
                "--deepcompile"
            )
        check_cuda_architectures(os.environ.get("TORCH_CUDA_ARCH_LIST", ""))
    if config.execution not in ("eager", "compile", "deepcompile"):
        raise ConfigError(
            f"train.execution = {config.execution!r} is not available with DeepSpeed; set 'eager', "
            "'compile' or 'deepcompile'"
        )
    if dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(
            f"the DeepSpeed backend computes in float32 or bfloat16, not {dtype}; set model.dtype"
        )
    if with_optimizer:
        if config.optimizer == "adamw8bit" or config.optimizer_device == "cpu":
            raise ConfigError(
                "the DeepSpeed backend has neither train.optimizer = 'adamw8bit' nor "
                "train.optimizer_device = 'cpu'; set 'adamw' and 'model'"
            )
        if zero_stage == 0 and dtype == torch.bfloat16:
            raise ConfigError(
                "at ZeRO 0 DeepSpeed steps bfloat16 weights differently than at 1 to 3; set "
                "--zero-stage 1, or --dtype float32"
            )


def check_cuda_architectures(listed: str) -> None:
    """DeepSpeed's extension builder reads "9.0" and "9.0+PTX" in TORCH_CUDA_ARCH_LIST, and fails on "9.0a".

    Raises:
        ConfigError: an entry of the list has a letter.
    """
    odd = [entry for entry in re.split(r"[ ;]+", listed.strip()) if re.search(r"\d[a-z]", entry)]
    if odd:
        plain = re.sub(r"(?<=\d)[a-z]", "", listed)
        raise ConfigError(
            f"TORCH_CUDA_ARCH_LIST = {listed!r}: DeepSpeed cannot build its DeepCompile extension for "
            f"{', '.join(odd)}; set TORCH_CUDA_ARCH_LIST='{plain}'"
        )


def torch_optimizer(
    config: TrainConfig, named: Sequence[NamedParameter], *, with_states: bool
) -> torch.optim.Optimizer:
    """What DeepSpeed wraps: AdamW or SGD with the config's settings, decay on the same matrices as in
    LocalBackend. Without states it is SGD, and only there because DeepSpeed runs no backward without an
    optimizer."""
    groups: list[dict[str, Any]] = [
        {
            "params": [p.parameter for p in named if p.decay == decay],
            "weight_decay": config.weight_decay if decay else 0.0,
        }
        for decay in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    if with_states and config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
    return torch.optim.SGD(groups, lr=config.lr)


def ds_config(
    config: TrainConfig,
    named: Sequence[NamedParameter],
    *,
    zero_stage: int,
    dtype: torch.dtype,
    deepcompile: bool,
) -> dict[str, Any]:
    """DeepSpeed's own config."""
    sizes = [p.parameter.numel() for p in named]
    vectors = [p.parameter.numel() for p in named if p.parameter.ndim < 2]
    zero: dict[str, Any] = {
        "stage": zero_stage,
        # DeepSpeed allocates a bucket whole, whatever the size of the model.
        "reduce_bucket_size": min(2**28, max(sum(sizes), 2)),
    }
    if zero_stage == 3:
        zero["stage3_param_persistence_threshold"] = max(vectors, default=0)
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # boundaries are set by hand, so nothing is divided by it
        "gradient_clipping": config.max_grad_norm,
        "zero_optimization": zero,
        "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": dtype == torch.bfloat16 and zero_stage > 0},
        "compile": {"deepcompile": deepcompile},
    }


def find_ninja() -> None:
    """torch compiles extensions with the `ninja` on PATH; a virtual environment that is not activated has its
    own beside the interpreter."""
    own = Path(sys.executable).parent
    if shutil.which("ninja") is None and (own / "ninja").exists():
        os.environ["PATH"] = os.pathsep.join([str(own), os.environ.get("PATH", "")])


@contextlib.contextmanager
def announced_build(device: torch.device) -> Iterator[None]:
    """On a CPU DeepSpeed compiles its shared-memory collectives when the first engine is made.

    Raises:
        ConfigError: the tools for it are missing, or it failed.
    """
    if device.type != "cpu" or _is_built("deepspeed_shm_comm"):
        yield
        return
    missing = [
        tool for tool in (os.environ.get("CXX", "g++").split()[0], "ninja") if shutil.which(tool) is None
    ]
    if missing:
        raise ConfigError(
            f"DeepSpeed compiles deepspeed_shm_comm at first use on a CPU, and {' and '.join(missing)} "
            "is not on PATH; install it (Debian: apt install g++ ninja-build)"
        )
    log.warning(
        "DeepSpeed compiles deepspeed_shm_comm, once (about a minute; kept in ~/.cache/torch_extensions)"
    )
    yield


def _is_built(name: str) -> bool:
    from torch.utils.cpp_extension import _get_build_directory

    return (Path(_get_build_directory(name, verbose=False)) / f"{name}.so").exists()
