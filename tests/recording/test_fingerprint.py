from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from lockstep.recording.files import fingerprint, module_tensors

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int64, torch.uint8]
ROW = 256 * 8
"""Bytes of a row of words."""
SIZES = [1, 3, 8, ROW // 4 - 1, ROW // 4, 64 * ROW + 5, 3 * 256 * ROW // 4 + 7 * ROW // 4 + 3]
"""Elements: less than a word, odd, a row, several blocks with a block, a row and bytes left over."""


@pytest.fixture
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def random_bits(size: int, dtype: torch.dtype, *, seed: int = 0) -> Tensor:
    width = torch.empty(0, dtype=dtype).element_size()
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (size * width,), dtype=torch.uint8, generator=generator).view(dtype)


def of(tensor: Tensor, name: str = "weight") -> str:
    return fingerprint([(name, tensor)])


def test_it_has_its_form_and_stays_what_it_is() -> None:
    # recordings hold fingerprints: these may only change together with the prefix
    assert of(torch.arange(1000, dtype=torch.float32)) == "lsw1-af7ffeea98a4f1edb37ec24f5f07f1d6"
    assert fingerprint([]) == "lsw1-cae66941d9efbd404e4d88758ea67670"


@given(st.sampled_from(DTYPES), st.sampled_from(SIZES), st.integers(0, 2**40), st.integers(0, 2**40))
@settings(max_examples=150)
def test_any_bit_that_flips_changes_it(dtype: torch.dtype, size: int, place: int, bit: int) -> None:
    tensor = random_bits(size, dtype)
    before = of(tensor)
    flat = tensor.view(torch.uint8)
    flat[place % flat.numel()] ^= 1 << bit % 8
    assert of(tensor) != before
    flat[place % flat.numel()] ^= 1 << bit % 8
    assert of(tensor) == before


@given(st.sampled_from(DTYPES), st.sampled_from(SIZES[1:]), st.integers(0, 2**40), st.integers(0, 2**40))
@settings(max_examples=150)
def test_any_two_elements_that_swap_change_it(dtype: torch.dtype, size: int, a: int, b: int) -> None:
    tensor = random_bits(size, dtype)
    a, b = a % size, b % size
    width = tensor.element_size()
    rows = tensor.view(torch.uint8).view(size, width)
    if torch.equal(rows[a], rows[b]):
        return
    before = of(tensor)
    rows[[a, b]] = rows[[b, a]]
    assert of(tensor) != before


def test_plus_and_minus_swapped() -> None:
    """Only the top bit of two words differs: what a sum of products modulo 2**64 may not see."""
    tensor = torch.ones(256 * 512)
    for a, b in [(1, 3), (1, 1 + 512), (1, 1 + 256 * 256), (1, 2)]:
        one, two = tensor.clone(), tensor.clone()
        one[a], two[b] = -1.0, -1.0
        assert of(one) != of(two)


def test_name_dtype_and_shape_count_and_order_does_not() -> None:
    tensor = torch.zeros(4, 6)
    others = [of(tensor.view(6, 4)), of(tensor.view(torch.int32)), of(tensor, "bias"), of(torch.zeros(4, 7))]
    assert len({of(tensor), *others}) == 5
    pair = [("a", torch.ones(3)), ("b", torch.zeros(3))]
    assert fingerprint(pair) == fingerprint(reversed(pair))
    assert fingerprint(pair) != fingerprint([("b", torch.ones(3)), ("a", torch.zeros(3))])


def test_negative_zero_and_nan_are_bits_as_well() -> None:
    assert of(torch.tensor([0.0])) != of(torch.tensor([-0.0]))
    assert of(torch.tensor([float("nan")])) == of(torch.tensor([float("nan")]))


def test_layout_in_memory_does_not_count() -> None:
    tensor = random_bits(6 * 1001, torch.bfloat16).view(6, 1001)
    held = torch.empty(1001, 6, dtype=torch.bfloat16).t()
    held.copy_(tensor.view(torch.int16).view(torch.bfloat16))
    held.view(torch.int16).copy_(tensor.view(torch.int16))
    assert not held.is_contiguous() and of(held) == of(tensor)
    base = random_bits(1001 + 3, torch.bfloat16)
    assert of(base[3:]) == of(base[3:].clone())
    assert of(torch.tensor(2.0)) != of(torch.tensor([2.0]))
    assert of(torch.empty(0, 3)) != of(torch.empty(3, 0))


@pytest.mark.usefixtures("one_thread")
def test_threads_do_not_count() -> None:
    tensor = random_bits(SIZES[-1], torch.float32)
    found = set()
    for threads in (1, 2, 5):
        torch.set_num_threads(threads)
        found.add(of(tensor))
    assert len(found) == 1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_devices_agree() -> None:
    for dtype in DTYPES:
        for size in SIZES:
            tensor = random_bits(size, dtype)
            assert of(tensor.cuda()) == of(tensor)


def test_what_has_no_bits_or_no_name_of_its_own_is_refused() -> None:
    with pytest.raises(ValueError, match="'w' is on the meta device"):
        fingerprint([("w", torch.empty(3, device="meta"))])
    with pytest.raises(ValueError, match="two tensors are called 'w'"):
        fingerprint([("w", torch.ones(3)), ("w", torch.ones(3))])


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.norm = nn.BatchNorm1d(3)
        self.register_buffer("cache", torch.zeros(2), persistent=False)


def test_a_modules_tensors_each_once() -> None:
    module = Tied()
    tensors = module_tensors(module)
    assert list(tensors) == [
        *("embed.weight", "norm.weight", "norm.bias"),
        *("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"),
    ]
    before = fingerprint(tensors.items())
    with torch.no_grad():
        module.head.weight[4, 2] += 1e-6
    assert fingerprint(module_tensors(module).items()) != before
    assert not any(tensor.requires_grad for tensor in tensors.values())
