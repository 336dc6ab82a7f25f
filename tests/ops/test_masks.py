from __future__ import annotations

import torch

from lockstep.ops.masks import document_ids, document_means, document_sums, masked_mean

CU = torch.tensor([0, 2, 5, 5, 6, 6], dtype=torch.int32)
NAN = float("nan")


def test_masked_figures_ignore_nan() -> None:
    x = torch.tensor([1.0, NAN, 4.0, 9.0])
    mask = torch.tensor([True, False, True, False])
    assert masked_mean(x, mask).item() == 2.5
    assert masked_mean(x, torch.zeros(4, dtype=torch.bool)).item() == 0.0


def test_documents_with_empty_ones_between() -> None:
    assert document_ids(CU, 6).tolist() == [0, 0, 1, 1, 1, 3]
    x = torch.tensor([1.0, 2.0, 4.0, 8.0, 16.0, 32.0])
    assert document_sums(x, CU).tolist() == [3.0, 28.0, 0.0, 32.0, 0.0]
    mask = torch.tensor([True, False, True, False, True, False])
    poisoned = torch.where(mask, x, NAN)
    assert document_means(poisoned, mask, CU).tolist() == [1.0, 10.0, 0.0, 0.0, 0.0]


def test_document_sums_gradient() -> None:
    x = torch.randn(6, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: document_sums(x, CU).square(), x)
