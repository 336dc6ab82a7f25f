"""Everything before DeepSpeed starts: checks of what cannot work, its config, its compiler."""

from __future__ import annotations

import contextlib
import fcntl
import glob
import logging
import os
import re
import shutil
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch

from lockstep.config.rules import refuse
from lockstep.config.train import TrainConfig
from lockstep.errors import ConfigError
from lockstep.train.optimizer import NamedParameter

log = logging.getLogger(__name__)

LOCK_SECONDS = 1200.0
"""No build of a DeepSpeed extension takes longer."""
LEFT_SECONDS = 60.0
"""Age up to which a lock that no process here holds may belong to another machine, in a shared folder."""


def refuse_impossible(
    config: TrainConfig, *, device: torch.device, dtype: torch.dtype, with_optimizer: bool
) -> None:
    """Raises ConfigError for what DeepSpeed cannot do here, before it is imported."""
    if config.execution == "deepcompile":
        if device.type != "cuda":
            raise ConfigError(
                "missing-device: train.execution = 'deepcompile' (--deepcompile) needs a CUDA device, not "
                f"{device.type}: DeepCompile builds a CUDA extension, and DeepSpeed enables it for no other "
                "accelerator. Set 'compile' (--compile), which works here"
            )
        check_cuda_architectures(os.environ.get("TORCH_CUDA_ARCH_LIST", ""))
    refuse(config, "train (deepspeed)")
    if dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(
            f"unsupported-combination: the DeepSpeed backend computes in float32 or bfloat16, not {dtype}; "
            "set model.dtype"
        )
    if with_optimizer:
        refuse(config, "train (deepspeed's optimizers)")


def check_cuda_architectures(listed: str) -> None:
    """DeepSpeed's extension builder reads "9.0" and "9.0+PTX" in TORCH_CUDA_ARCH_LIST, and fails on "9.0a".

    Raises:
        ConfigError: an entry of the list has a letter.
    """
    odd = [entry for entry in re.split(r"[ ;]+", listed.strip()) if re.search(r"\d[a-z]", entry)]
    if odd:
        plain = re.sub(r"(?<=\d)[a-z]", "", listed)
        raise ConfigError(
            f"wrong-environment: TORCH_CUDA_ARCH_LIST = {listed!r}: DeepSpeed cannot build its DeepCompile "
            f"extension for {', '.join(odd)}; set TORCH_CUDA_ARCH_LIST='{plain}'"
        )


def basic_optimizer(
    ds: Any, config: TrainConfig, named: Sequence[NamedParameter], *, with_states: bool
) -> torch.optim.Optimizer:
    """The optimizer that DeepSpeed wraps: AdamW or SGD with the config's settings, decay on the same matrices
    as in LocalBackend. Without states it is SGD, which is there only because DeepSpeed runs no backward
    without an optimizer. Masters in host memory are updated by DeepSpeed's own AdamW for CPUs."""
    groups: list[dict[str, Any]] = [
        {
            "params": [p.parameter for p in named if p.decay == decay],
            "weight_decay": config.weight_decay if decay else 0.0,
        }
        for decay in (True, False)
    ]
    groups = [group for group in groups if group["params"]]
    if not with_states or config.optimizer != "adamw":
        return torch.optim.SGD(groups, lr=config.lr)
    settings: dict[str, Any] = {"lr": config.lr, "betas": config.betas, "eps": config.eps}
    if config.optimizer_device == "cpu":
        optimizer: torch.optim.Optimizer = ds.ops.adam.DeepSpeedCPUAdam(groups, adamw_mode=True, **settings)
        return optimizer
    # LocalBackend's kernel
    return torch.optim.AdamW(groups, fused=config.execution != "deepcompile", **settings)


def ds_config(
    config: TrainConfig, named: Sequence[NamedParameter], *, dtype: torch.dtype, with_optimizer: bool
) -> dict[str, Any]:
    """DeepSpeed's own config."""
    stage = config.zero_stage
    zero: dict[str, Any] = {
        "stage": stage,
        # DeepSpeed allocates a bucket whole, whatever the size of the model.
        "reduce_bucket_size": min(2**28, max(sum(p.parameter.numel() for p in named), 2)),
    }
    pinned = torch.cuda.is_available()
    if config.optimizer_device == "cpu":
        zero["offload_optimizer"] = {"device": "cpu", "pin_memory": pinned}
    if config.parameter_device == "cpu":
        zero["offload_param"] = {"device": "cpu", "pin_memory": pinned}
    if stage == 3:
        # Vectors (norms, biases) stay whole, in a model of any size. DeepSpeed's default of 100,000 elements
        # would keep whole matrices of a small one.
        vectors = [p.parameter.numel() for p in named if p.parameter.ndim < 2]
        zero["stage3_param_persistence_threshold"] = max(vectors, default=0)
    return {
        # DeepSpeed 0.19.8 asserts that a batch size is given. Nothing here reads it: a micro-batch is a pack,
        # of any number of documents.
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": 1,  # boundaries are set by hand, so nothing is divided by it
        "gradient_clipping": config.max_grad_norm,
        "zero_optimization": zero,
        # Otherwise DeepSpeed 0.19.8 asserts that the optimizer is in its own list, and torch's SGD is not.
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # SGD in host memory is torch's
        # Without an optimizer stage 0 needs no masters.
        "bf16": {"enabled": dtype == torch.bfloat16 and (stage > 0 or with_optimizer)},
        "compile": {"deepcompile": config.execution == "deepcompile"},
    }


def find_ninja() -> None:
    """Let torch compile extensions with the `ninja` beside the interpreter, if there is one: a virtual
    environment need not be activated. And always with the same one: ninja 1.11 and 1.13 hash commands
    differently, so that each compiles anew what the other has built, while every other process waits."""
    # torch calls ninja by its bare name, so PATH is all that can be set.
    own = Path(sys.executable).parent
    if (own / "ninja").exists() and shutil.which("ninja") != str(own / "ninja"):
        os.environ["PATH"] = os.pathsep.join([str(own), os.environ.get("PATH", "")])


@contextlib.contextmanager
def announced_build(extensions: Sequence[str]) -> Iterator[None]:
    """Announce what DeepSpeed compiles at first use: `cpu_adam`, its AdamW for optimizer states on the host.

    Raises:
        ConfigError: the tools for it are missing, or another process builds them for too long.
    """
    # Before the builder is asked: its own wait (torch.utils.file_baton) has no deadline.
    for name in extensions:
        _wait_for_lock(_build_folder(name) / "lock")
    names = [name for name in extensions if not (_build_folder(name) / f"{name}.so").exists()]
    if not names:
        yield
        return
    missing = [
        tool for tool in (os.environ.get("CXX", "g++").split()[0], "ninja") if shutil.which(tool) is None
    ]
    what = " and ".join(names)
    if missing:
        raise ConfigError(
            f"missing-package: DeepSpeed compiles {what} at first use, and {' and '.join(missing)} is not on "
            "PATH; install it (Debian: apt install g++ ninja-build)"
        )
    log.warning("DeepSpeed compiles %s, once (about a minute; kept in ~/.cache/torch_extensions)", what)
    yield


def _build_folder(name: str) -> Path:
    # Private, in torch 2.11 to 2.13: no public function says where an extension is built, which depends on
    # TORCH_EXTENSIONS_DIR, Python and CUDA.
    from torch.utils.cpp_extension import _get_build_directory

    return Path(_get_build_directory(name, verbose=False))


def _wait_for_lock(lock: Path) -> None:
    """Wait for a lock with a deadline: torch waits for ever, and a killed process leaves its lock behind."""
    while True:
        try:
            age = time.time() - lock.stat().st_mtime
        except FileNotFoundError:
            return
        if age > LEFT_SECONDS and _removed(lock):
            log.warning("removed %s: the build of DeepSpeed's extension that made it has been killed", lock)
            return
        if age > LOCK_SECONDS:
            raise ConfigError(
                f"locked: {lock} is {age / 60:.0f} minutes old: a build of DeepSpeed's extension is hanging, "
                "and torch would wait for it forever; end that process (`fuser` finds it) and delete that "
                "file"
            )
        time.sleep(0.2)


def _removed(lock: Path) -> bool:
    """Delete the lock if no process has it open (the one that builds does); True if it was deleted. An flock
    of the folder is held meanwhile, so that nobody deletes the lock of a new build."""
    if not os.path.isdir("/proc/self/fd"):
        return False
    folder = os.open(lock.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)  # held for milliseconds
        info = lock.stat()
        if time.time() - info.st_mtime < LEFT_SECONDS or _is_open(info):
            return False
        lock.unlink()
        return True
    except FileNotFoundError:
        return True
    finally:
        os.close(folder)


def _is_open(info: os.stat_result) -> bool:
    """Return whether any process has this file open, as far as this user may look."""
    for descriptor in glob.iglob("/proc/[0-9]*/fd/*"):
        with contextlib.suppress(OSError):
            # Suppressed: the process may have ended by now, or be another user's.
            if os.path.samestat(os.stat(descriptor), info):
                return True
    return False
