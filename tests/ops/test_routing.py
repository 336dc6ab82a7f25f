"""Losses of routers, against transformers' and by hand."""

import math

import pytest
import torch
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from lockstep.ops.routing import expert_counts, load_balancing_loss, load_metrics, router_z_loss


def test_load_balancing_is_transformers_own():
    """Logits, mask and gradient; without a mask, too."""
    generator = torch.Generator().manual_seed(0)
    mask = torch.rand(3, 10, generator=generator) < 0.7
    for times in (mask.flatten().float(), torch.ones(30)):
        ours = [torch.randn(30, 8, generator=generator).mul_(2).requires_grad_(True) for _ in range(3)]
        theirs = [each.detach().clone().requires_grad_(True) for each in ours]
        chosen = [each.detach().topk(2).indices for each in ours]
        loss = load_balancing_loss(ours, chosen, times)
        wanted = load_balancing_loss_func(
            tuple(theirs), num_experts=8, top_k=2, attention_mask=times.view(3, 10)
        )
        assert float(loss) == pytest.approx(float(wanted), rel=1e-6) and float(loss) > 2
        loss.backward()
        wanted.backward()
        for own, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(own.grad, other.grad, rtol=1e-5, atol=1e-8)


def test_rows_of_several_documents_count_several_times():
    """As a prompt that a group shares."""
    logits, chosen = torch.tensor([[1.0, 0.0], [0.0, 3.0]]), torch.tensor([[0], [1]])
    twice = torch.tensor([0, 1, 1])
    for loss in (
        lambda rows, times: load_balancing_loss([logits[rows]], [chosen[rows]], times),
        lambda rows, times: router_z_loss([logits[rows]], times),
    ):
        one = loss(torch.tensor([0, 1]), torch.tensor([1.0, 2.0]))
        assert float(one) == pytest.approx(float(loss(twice, torch.ones(3))), rel=1e-6)


def test_balancing_by_hand():
    """Two experts, three tokens with logits log 3 and 0, one of padding: p is 3/4 and 1/4, all go to the
    first: 2 (1 * 3/4 + 0 * 1/4)."""
    logits = torch.tensor([[math.log(3.0), 0.0]]).repeat(4, 1)
    logits[3] = torch.tensor([0.0, 9.0])
    times = torch.tensor([1.0, 1.0, 1.0, 0.0])
    chosen = logits.topk(1).indices
    assert float(load_balancing_loss([logits], [chosen], times)) == pytest.approx(1.5, abs=1e-6)
    assert expert_counts(chosen, times, 2).tolist() == [3.0, 0.0]
    assert float(router_z_loss([logits], times)) == pytest.approx(math.log(4.0) ** 2, rel=1e-6)


def test_gradients_by_hand():
    """d/dlogit_j of E sum_e f_e p_e is E p_j (f_j - sum_e f_e p_e), that of z^2 is 2 z p_j."""
    logits = torch.tensor([[math.log(3.0), 0.0]], requires_grad=True)
    load_balancing_loss([logits], [torch.tensor([[0]])], torch.ones(1)).backward()
    assert logits.grad.tolist()[0] == pytest.approx([2 * 0.75 * 0.25, -2 * 0.25 * 0.75], abs=1e-6)
    logits.grad = None
    router_z_loss([logits], torch.ones(1)).backward()
    z = math.log(4.0)
    assert logits.grad.tolist()[0] == pytest.approx([2 * z * 0.75, 2 * z * 0.25], abs=1e-6)


def test_loads_by_hand():
    """Layers with 4, 2, 1, 1 of 8 choices, and with 2 each."""
    found = load_metrics(torch.tensor([[4.0, 2.0, 1.0, 1.0], [2.0, 2.0, 2.0, 2.0]]))
    assert found == pytest.approx({"load_max": 2.0, "entropy": (1.75 / 2 + 1) / 2})
