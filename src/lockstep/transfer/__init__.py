"""From trainer to engine: how weights travel."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Literal, cast

import torch

from lockstep.config.engine import EngineConfig
from lockstep.errors import EngineError
from lockstep.protocols.engine import (
    InferenceEngine,
    ReceivesWeights,
    SharesWeights,
    WeightTransfer,
    receives_weights,
)
from lockstep.protocols.train import TrainBackend
from lockstep.schema.weights import MemoryReport, Transport
from lockstep.transfer.buckets import BucketTransfer
from lockstep.transfer.senders import (
    BucketSender,
    CollectiveSender,
    DiskSender,
    IpcSender,
    MemorySender,
    own_address,
)

# Choose the transport of weights to an engine.


def make_transfer(
    config: EngineConfig,
    engine: InferenceEngine,
    *,
    device: str | torch.device,
    work_dir: Path | None = None,
) -> WeightTransfer:
    """Make the transfer for `engine`, which shares the trainer's weights or receives them.

    Args:
        device: of the trainer.
        work_dir: for files of weights that do not fit in shared memory; None: the system's folder for
            temporary files.

    Raises:
        EngineError: config.transfer cannot reach the engine.
    """
    if not receives_weights(engine):
        return InProcessTransfer()
    device = torch.device(device)
    transport = choose(config, engine, device=device)
    sender: BucketSender
    if transport == "memory":
        sender = MemorySender()
    elif transport == "ipc":
        sender = IpcSender()
    elif transport == "disk":
        sender = DiskSender(work_dir or Path(tempfile.gettempdir()))
    else:
        sender = CollectiveSender(
            backend="nccl" if device.type == "cuda" else "gloo",
            address=own_address(config.url),
        )
    return BucketTransfer(config, sender, device=device)


def choose(config: EngineConfig, engine: ReceivesWeights, *, device: torch.device) -> Transport:
    """Choose the best transport that trainer and engine support, or the configured one. Raises
    EngineError."""
    offered: tuple[Transport, ...] = engine.transports
    possible = [way for way in offered if way != "ipc" or device.type == "cuda"]
    if config.transfer == "auto":
        if not possible:
            raise EngineError(
                f"unsupported-combination: engine {config.name} receives weights only via "
                f"{', '.join(offered) or 'no transport'}, which the trainer on {device} does not support; "
                "put both on GPUs, or both on the CPU",
                setting="engine.transfer",
            )
        # Engines list the fastest first.
        return possible[0]
    if config.transfer not in possible:
        raise EngineError(
            f"unsupported-combination: engine.transfer = {config.transfer!r} cannot send weights from the "
            f"trainer on {device} to engine {config.name}, which can receive them by {', '.join(offered)}; "
            f"set 'auto', or one of {', '.join(possible) or 'none'}"
        )
    return config.transfer


# Trainer and engine in one process: the engine reads the trainer's Parameters, so nothing is copied; where
# no rank has them whole, it takes the gathered weights.


class InProcessTransfer:
    """Implements lockstep.protocols.WeightTransfer by handing over `source.weights(...)`.

    On several ranks each pushes to its own engine, all together: gathering weights is collective.
    """

    transport: Literal["shared"] = "shared"
    before: MemoryReport | None = None
    after: MemoryReport | None = None

    def push(self, source: TrainBackend, target: InferenceEngine, *, policy_version: int) -> None:
        """Afterwards `target` samples from `source`'s weights and stamps `policy_version` on completions.

        Raises:
            EngineError: the engine refused the weights; it kept its own.
        """
        cast(SharesWeights, target).update_weights(source.weights(policy_version=policy_version))

    def check(self, target: InferenceEngine) -> bool:
        """False: the engine has no weights of its own."""
        return False

    def close(self) -> None:
        """Nothing is held."""
