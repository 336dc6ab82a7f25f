from __future__ import annotations

import pytest
import torch
from torch import nn

from lockstep.train.optimizer import GradientStore, global_norm


def test_small_terms_survive_accumulation_in_float32_only() -> None:
    """256 + 100 x 0.5: bfloat16 has steps of 2 at 256, so every single 0.5 is lost there."""
    for float32, expected in ((True, 306.0), (False, 256.0)):
        parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
        store = GradientStore([parameter], float32=float32)
        store.expect(101)
        for value in [256.0] + [0.5] * 100:
            (parameter * value).sum().backward()
        [gradient] = store.collect()
        assert gradient is not None
        assert gradient.tolist() == [expected] * 3
        assert gradient.dtype == (torch.float32 if float32 else torch.bfloat16)


def test_one_micro_batch_makes_no_copy() -> None:
    parameter = nn.Parameter(torch.zeros(3, dtype=torch.bfloat16))
    store = GradientStore([parameter], float32=True)
    store.expect(1)
    (parameter * 2.0).sum().backward()
    assert store.collect()[0] is parameter.grad


def test_a_second_call_goes_on_from_the_first() -> None:
    parameter = nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))
    store = GradientStore([parameter], float32=True)
    for value in (256.0, 0.5, 0.5):
        store.expect(1)
        (parameter * value).sum().backward()
    [gradient] = store.collect()
    assert gradient is not None and gradient.tolist() == [257.0, 257.0]
    store.clear()
    assert store.collect() == [None]
    store.expect(2)
    for value in (1.0, 2.0):
        (parameter * value).sum().backward()
    [gradient] = store.collect()
    assert gradient is not None and gradient.tolist() == [3.0, 3.0]


def test_float32_parameters_use_their_own_grad() -> None:
    parameter = nn.Parameter(torch.zeros(2))
    store = GradientStore([parameter], float32=True)
    store.expect(2)
    for value in (1.0, 2.0):
        (parameter * value).sum().backward()
    assert store.collect()[0] is parameter.grad
    assert parameter.grad is not None and parameter.grad.tolist() == [3.0, 3.0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_is_that_of_torch_in_float64(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    shapes = [(3,), (1 << 21,), (700, 301), ()]
    gradients = [torch.randn(s).to(dtype) * 10**i for i, s in enumerate(shapes)]
    wide = torch.nn.utils.get_total_norm([g.double() for g in gradients])
    assert float(global_norm(gradients)) == pytest.approx(float(wide), rel=1e-5)


def test_norm_shows_what_is_not_finite() -> None:
    assert not torch.isfinite(global_norm([torch.ones(3), torch.tensor([1.0, float("nan")])]))
    assert not torch.isfinite(global_norm([torch.tensor([float("inf")], dtype=torch.bfloat16)]))
