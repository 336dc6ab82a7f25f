"""CUDA IPC and NCCL to a worker in another process, on machines that have GPUs."""

import pytest
import torch
from holder import Holder, Source, digests, some_weights

from lockstep.config.engine import EngineConfig
from lockstep.transfer import make_transfer
from lockstep.transfer.buckets import BucketTransfer
from lockstep.transfer.senders import Packer

GPUS = torch.cuda.device_count() if torch.cuda.is_available() else 0


@pytest.mark.parametrize(
    ("transport", "device", "gpus"),
    [("ipc", "cuda:0", 1), ("disk", "cuda:0", 1), ("collective", "cuda:1", 2)],
)
def test_weights_on_a_gpu_reach_a_worker_to_the_bit(transport, device, gpus, tmp_path):
    if gpus > GPUS:
        pytest.skip(f"needs {gpus} GPUs")
    engine = Holder(transport, device=device)
    try:
        config = EngineConfig(name="holder:Holder", transfer=transport, update_seconds=120.0)
        transfer = make_transfer(config, engine, device="cuda:0", work_dir=tmp_path)
        assert isinstance(transfer, BucketTransfer)
        on = torch.device("cpu" if transport == "disk" else "cuda:0")
        transfer._packer = Packer(bucket_bytes=300, device=on)
        for version in (1, 2, 3):
            weights = some_weights(seed=version)
            source = Source({name: tensor.cuda(0) for name, tensor in weights.items()})
            transfer.push(source, engine, policy_version=version)
            assert engine.held == digests(weights)
        large = {"a": torch.arange(10**6).float().cuda(0)}  # the buffer is made anew, and opened anew
        transfer.push(Source(large), engine, policy_version=4)
        assert engine.held == digests(large)
        transfer.close()
    finally:
        engine.close()
