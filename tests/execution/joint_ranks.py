"""What the ranks of test_joint_ranks.py run."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn

SIZE = 2


def launch(folder: Path) -> None:
    """All of WORK on two gloo ranks; an error of one is raised here."""
    mp.spawn(_rank, args=(str(folder),), nprocs=SIZE)


def _rank(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "parity")]
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=SIZE)
    try:
        for work in WORK:
            work(rank)
            if rank == 0:
                (Path(folder) / work.__name__).touch()
    finally:
        dist.destroy_process_group()


class Loss(nn.Module):
    """The root that is wrapped: pack in, loss out."""

    def __init__(self, policy: nn.Module) -> None:
        super().__init__()
        self.policy = policy

    def forward(self, pack) -> Tensor:
        from joint_tools import upstream

        from lockstep.models.forward import decoder_inputs, run_decoder

        hidden = run_decoder(self.policy, decoder_inputs(self.policy, pack, compiled=True))
        logits = hidden @ self.policy.lm_head.weight.T
        return (hidden * upstream(hidden)).sum() + logits.sin().sum()


def eager_gradients(packs) -> dict[str, Tensor]:
    """Of the sum over packs, on one process."""
    from joint_tools import tiny_model

    root = Loss(tiny_model("llama", "varlen"))
    for pack in packs:
        root(pack).backward()
    return {name: p.grad for name, p in root.named_parameters()}


def assert_gradients(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(
            found[name], gradient, rtol=1e-5, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}"
        )


def ddp(rank: int) -> None:
    from joint_tools import batches, tiny_model
    from torch.nn.parallel import DistributedDataParallel

    from lockstep.execution import install_joint

    found = []
    for joint in (False, True):
        root = Loss(tiny_model("llama", "varlen"))
        names = list(root.state_dict())
        if joint:
            install_joint(root.policy, compiler="aot_eager")
        wrapped = DistributedDataParallel(root)
        for _ in range(2):  # a second step, with buckets as DDP has rebuilt them
            wrapped.zero_grad()
            wrapped(batches()[rank]).backward()
        found.append({name: p.grad.clone() for name, p in root.named_parameters()})
        assert list(root.state_dict()) == names
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])
    mean = {name: g / SIZE for name, g in eager_gradients(batches()).items()}
    assert_gradients(found[1], mean)


def fsdp2_whole(rank: int) -> None:
    from joint_tools import batches, tiny_model
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor

    from lockstep.execution import install_joint

    root = Loss(tiny_model("llama", "varlen"))
    names = [name for name, _ in root.named_parameters()]
    joint = install_joint(root.policy, compiler="aot_eager")
    fully_shard(root)
    root.set_gradient_divide_factor(1.0)
    root.set_force_sum_reduction_for_comms(True)  # gloo has no PREMUL_SUM
    for _ in range(2):
        root.zero_grad()
        root(batches()[rank]).backward()
    assert joint.num_graphs == 1 and [name for name, _ in root.named_parameters()] == names
    assert all(isinstance(p, DTensor) for p in root.parameters())
    found = {name: p.grad.full_tensor() for name, p in root.named_parameters()}
    assert_gradients(found, eager_gradients(batches()))
    with torch.no_grad():  # an update of the shards is seen by the graph
        for p in root.parameters():
            p.mul_(0.5)
    half = Loss(tiny_model("llama", "varlen"))
    with torch.no_grad():
        for p in half.parameters():
            p.mul_(0.5)
        torch.testing.assert_close(root(batches()[rank]), half(batches()[rank]))


def fsdp2_by_layer(rank: int) -> None:
    import pytest
    from joint_tools import batches, tiny_model
    from torch.distributed.fsdp import fully_shard

    from lockstep.errors import ConfigError
    from lockstep.execution import install_joint

    root = Loss(tiny_model("llama", "varlen"))
    install_joint(root.policy, compiler="aot_eager")
    for layer in root.policy.model.layers:
        fully_shard(layer)
    fully_shard(root)
    with pytest.raises(ConfigError) as caught:
        root(batches()[rank])
    assert caught.value.data == {"code": "unsupported-combination"} and "layers.0" in str(caught.value)


def dtensors(rank: int) -> None:
    """Weights that are DTensors without FSDP's hooks: rows sharded, one of them replicated."""
    from joint_tools import batches, tiny_model
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

    from lockstep.execution import install_joint

    mesh = init_device_mesh("cpu", (SIZE,))
    root = Loss(tiny_model("llama", "varlen"))
    base = root.policy.model
    for module in base.modules():
        for name, p in module._parameters.items():
            if (
                p is not None and module is not base.embed_tokens
            ):  # its weight is the head's, which is outside
                placement = Replicate() if p is base.norm.weight else Shard(0)
                module._parameters[name] = nn.Parameter(distribute_tensor(p.detach(), mesh, [placement]))
    install_joint(root.policy, compiler="aot_eager")
    for _ in range(2):
        root.zero_grad()
        root(batches()[rank]).backward()
    expected = eager_gradients(batches())
    found = {}
    for name, p in root.named_parameters():
        if isinstance(p, DTensor):
            found[name] = p.grad.full_tensor()
        else:
            dist.all_reduce(p.grad)
            found[name] = p.grad
    assert_gradients(found, expected)


WORK = (ddp, fsdp2_whole, fsdp2_by_layer, dtensors)
