"""Decode attention in both forms: the fused one of the CPU, and the matrix products that a GPU takes."""

import pytest
import torch

from lockstep.engine.hf.kv_cache import attend, attend_plainly


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("form", [attend, attend_plainly])
def test_output_and_log_sum_exp_equal_the_definition_in_float64(form, masked):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, 3, n, 16, generator=generator) for n in (4, 7, 7))
    mask = None
    if masked:  # the last two keys of the second prompt are not there
        mask = torch.zeros(2, 1, 1, 7)
        mask[1, ..., 5:] = -1e30
    scores = q.double() @ k.double().transpose(-1, -2) * 0.3
    scores = scores if mask is None else scores + mask.double()
    out, lse = form(q, k, v, mask, 0.3)
    assert (out - scores.softmax(-1) @ v.double()).abs().max() < 2e-6
    assert (lse - scores.logsumexp(-1)).abs().max() < 2e-6


def test_without_a_scale_it_is_one_over_the_root_of_the_head_dim():
    q, k, v = (torch.randn(1, 1, 2, 16, generator=torch.Generator().manual_seed(i)) for i in range(3))
    for a, b in zip(attend_plainly(q, k, v, None, None), attend_plainly(q, k, v, None, 0.25), strict=True):
        assert torch.equal(a, b)
