from __future__ import annotations

import importlib.util
from typing import Any

import pytest
import torch
from raising import raises
from torch import nn

from lockstep.config.train import TrainConfig
from lockstep.errors import ConfigError
from lockstep.train import optimizer as module_under_test
from lockstep.train.optimizer import MasterOptimizer, make_optimizer, trained_parameters


def small_net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Embedding(5, 8), nn.LayerNorm(8), nn.Linear(8, 6), nn.Linear(6, 4, bias=False)
    ).to(dtype)


def optimizer_of(net: nn.Module, **options: Any) -> MasterOptimizer:
    return make_optimizer(trained_parameters(net), config=TrainConfig(**options))


def gradients_of(net: nn.Module, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(p.shape, generator=generator).to(p.dtype) for p in net.parameters()]


def test_only_matrices_decay() -> None:
    decay = {p.name: p.decay for p in trained_parameters(small_net())}
    assert decay == {
        "0.weight": False,
        "1.weight": False,
        "1.bias": False,
        "2.weight": True,
        "2.bias": False,
        "3.weight": True,
    }


def test_a_tied_head_counts_as_embedding() -> None:
    net = nn.ModuleDict({"head": nn.Linear(8, 5, bias=False), "embed": nn.Embedding(5, 8)})
    net["embed"].weight = net["head"].weight
    assert [(p.name, p.decay) for p in trained_parameters(net)] == [("head.weight", False)]


def test_nothing_to_train_is_an_error() -> None:
    with raises(ConfigError, "nothing-to-do"):
        trained_parameters(small_net().requires_grad_(False))


@pytest.mark.parametrize("bucket", [7, 1 << 22])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_adamw_is_torchs(monkeypatch: pytest.MonkeyPatch, bucket: int, scale: float) -> None:
    """Whatever the buckets cut; bucket 7 splits every tensor of the net."""
    monkeypatch.setitem(module_under_test.BUCKET_ELEMENTS, "cpu", bucket)
    ours, theirs = small_net(), small_net()
    mine = optimizer_of(ours, lr=1e-2, weight_decay=0.1, betas=(0.8, 0.95))
    named = trained_parameters(theirs)
    groups = [
        {"params": [p.parameter for p in named if p.decay], "weight_decay": 0.1},
        {"params": [p.parameter for p in named if not p.decay], "weight_decay": 0.0},
    ]
    reference = torch.optim.AdamW(groups, lr=1e-2, betas=(0.8, 0.95), foreach=False)
    for step in range(5):
        gradients = gradients_of(ours, step)
        for parameter, gradient in zip(theirs.parameters(), gradients, strict=True):
            parameter.grad = gradient * scale
        reference.param_groups[0]["lr"] = reference.param_groups[1]["lr"] = 1e-2 / (step + 1)
        reference.step()
        mine.step([g.clone() for g in gradients], lr=1e-2 / (step + 1), scale=scale)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_updates_of_a_parameter_without_a_row_are_counted() -> None:
    """That of a rank which has none of a Parameter's rows; any rank may save the count of all of them."""
    net = nn.ParameterDict({"mine": nn.Parameter(torch.ones(2)), "others": nn.Parameter(torch.ones(0, 2))})
    optimizer = make_optimizer(trained_parameters(net), config=TrainConfig())
    for _ in range(3):
        optimizer.step([torch.ones(2), torch.ones(0, 2)], lr=1e-3)
    state = optimizer.state()
    assert state["updates/mine"] == state["updates/others"] == 3
    optimizer.step([torch.ones(2), None], lr=1e-3)
    assert optimizer.state()["updates/others"] == 3


def test_a_parameter_without_gradient_is_left_alone() -> None:
    net = small_net()
    before = [p.detach().clone() for p in net.parameters()]
    gradients: list[torch.Tensor | None] = list(gradients_of(net, 0))
    gradients[2] = None
    optimizer_of(net, lr=1e-2, weight_decay=0.1).step(gradients, lr=1e-2)
    changed = [not torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True)]
    assert changed == [True, True, False, True, True, True]


def test_sgd_is_torchs() -> None:
    ours, theirs = small_net(), small_net()
    mine = optimizer_of(ours, lr=0.1, optimizer="sgd")
    reference = torch.optim.SGD(theirs.parameters(), lr=0.1)
    for step in range(3):
        gradients = gradients_of(ours, step)
        for parameter, gradient in zip(theirs.parameters(), gradients, strict=True):
            parameter.grad = gradient * 0.5
        reference.step()
        mine.step(gradients, lr=0.1, scale=0.5)
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-7)


def test_updates_too_small_for_bfloat16_add_up_in_the_master() -> None:
    """SGD, gradient 1, lr 1e-6, weight 1: bfloat16's neighbours of 1 are 2^-8 below and 2^-7 above."""
    net = nn.Linear(1, 1, bias=False).to(torch.bfloat16)
    with torch.no_grad():
        net.weight.fill_(1.0)
    optimizer = optimizer_of(net, lr=1e-6, optimizer="sgd")
    for _ in range(1000):
        optimizer.step([torch.ones_like(net.weight)], lr=1e-6)
    assert net.weight.item() == 1.0
    assert optimizer.masters[0].item() == pytest.approx(
        1 - 1e-3, abs=2e-5
    )  # 1e-6 is 17 steps of float32 here
    for _ in range(1000):
        optimizer.step([torch.ones_like(net.weight)], lr=1e-6)
    assert net.weight.item() == 1 - 2**-8  # 1 - 2e-3 rounds to the neighbour


def test_float32_parameters_are_their_own_masters() -> None:
    net = small_net()
    optimizer = optimizer_of(net)
    assert optimizer.separate_masters() == {}
    assert [m.data_ptr() for m in optimizer.masters] == [p.data_ptr() for p in net.parameters()]


def test_weights_are_the_rounded_masters_after_a_step() -> None:
    net = small_net(torch.bfloat16)
    optimizer = optimizer_of(net, lr=1e-2)
    optimizer.step(gradients_of(net, 3), lr=1e-2, scale=0.5)
    masters = optimizer.separate_masters()
    assert set(masters) == {name for name, _ in net.named_parameters()}
    for name, parameter in net.named_parameters():
        assert torch.equal(parameter, masters[name].bfloat16()), name
        assert not torch.equal(masters[name].bfloat16().float(), masters[name]), name


def test_adamw8bit_without_torchao_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "torchao.optim", None)
    with raises(ConfigError, "missing-package: train.optimizer"):
        optimizer_of(small_net(), optimizer="adamw8bit")


@pytest.mark.slow
@pytest.mark.skipif(importlib.util.find_spec("torchao") is None, reason="torchao is not installed")
def test_adamw8bit_stays_close_to_adamw_and_keeps_its_state() -> None:
    def net() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 32))

    eight, full = net(), net()
    a, b = (
        optimizer_of(eight, lr=1e-3, optimizer="adamw8bit", weight_decay=0.1),
        optimizer_of(full, lr=1e-3, weight_decay=0.1),
    )
    for step in range(4):
        a.step(gradients_of(full, step), lr=1e-3, scale=0.5)
        b.step(gradients_of(full, step), lr=1e-3, scale=0.5)
    moved = [p.detach() - q.detach() for p, q in zip(full.parameters(), net().parameters(), strict=True)]
    for p, q, m in zip(eight.parameters(), full.parameters(), moved, strict=True):
        assert float((p - q).norm() / m.norm()) < 0.05
    state = a.state()
    assert state["exp_avg.codes/0.weight"].dtype == torch.uint8
    assert state["exp_avg.codes/0.weight"].float().std() > 0
    assert float(state["step/0.weight"]) == 4.0
