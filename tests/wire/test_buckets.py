"""Where tensors lie in a bucket, worked by hand, and that they come out as they went in."""

from __future__ import annotations

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lockstep.wire.buckets import (
    Layout,
    TensorSpec,
    WireError,
    heads,
    named_dtype,
    pack,
    specs_from_json,
    specs_to_json,
    split_heads,
    unpack,
    view,
)


def spec(name: str, dtype: str, shape: tuple[int, ...], offset: int, num_bytes: int) -> TensorSpec:
    return TensorSpec(name=name, dtype=dtype, shape=shape, offset=offset, num_bytes=num_bytes)


def test_tensors_lie_one_after_the_other_at_multiples_of_16() -> None:
    layout = Layout(1000)
    layout.place("q", torch.zeros(2, 3, dtype=torch.bfloat16))  # 12 bytes
    layout.place("k", torch.zeros(1, 3, dtype=torch.bfloat16))  # 6
    layout.place("norm", torch.zeros(3))  # 12
    layout.place("scalar", torch.zeros((), dtype=torch.float64))  # 8
    layout.place("empty", torch.zeros(0, 4))
    assert layout.specs == [
        spec("q", "bfloat16", (2, 3), 0, 12),
        spec("k", "bfloat16", (1, 3), 16, 6),
        spec("norm", "float32", (3,), 32, 12),
        spec("scalar", "float64", (), 48, 8),
        spec("empty", "float32", (0, 4), 64, 0),
    ]
    assert layout.num_bytes == 64


def test_a_bucket_is_full_at_its_capacity_and_a_larger_tensor_has_one_for_itself() -> None:
    layout = Layout(32)
    assert layout.place("a", torch.zeros(4)) is not None  # 0..16
    assert layout.place("b", torch.zeros(5)) is None  # 16..36
    assert layout.place("c", torch.zeros(4)) is not None  # 16..32, just full
    assert layout.place("d", torch.zeros(0)) is not None
    assert layout.place("e", torch.zeros(1)) is None
    alone = Layout(32)
    assert alone.place("large", torch.zeros(100)) == spec("large", "float32", (100,), 0, 400)
    assert alone.place("next", torch.zeros(1)) is None


def test_bytes_of_a_packed_bucket() -> None:
    buffer = torch.full((48,), 255, dtype=torch.uint8)
    tensors = [torch.tensor([1, 2, 3], dtype=torch.uint8), torch.tensor([[1.0], [-2.0]])]
    layout = Layout(48)
    for index, tensor in enumerate(tensors):
        layout.place(str(index), tensor)
    pack(buffer, layout.specs, tensors)
    # float32 1.0 = 0x3f800000, -2.0 = 0xc0000000, little endian
    assert buffer[:3].tolist() == [1, 2, 3]
    assert buffer[16:24].tolist() == [0, 0, 0x80, 0x3F, 0, 0, 0, 0xC0]
    assert buffer[3:16].eq(255).all() and buffer[24:].eq(255).all()


DTYPES = st.sampled_from(
    [torch.float32, torch.bfloat16, torch.float16, torch.float64, torch.int8, torch.int64]
)
SHAPES = st.lists(st.integers(0, 5), max_size=3).map(tuple)


@settings(max_examples=60)
@given(st.lists(st.tuples(DTYPES, SHAPES, st.booleans()), min_size=1, max_size=12), st.integers(1, 200))
def test_what_is_packed_is_unpacked_to_the_bit(items: list, capacity: int) -> None:
    generator = torch.Generator().manual_seed(len(items) * 1000 + capacity)
    tensors = []
    for dtype, shape, transposed in items:
        tensor = torch.randn(shape, generator=generator).mul(100).to(dtype)
        tensors.append(tensor.mT if transposed and tensor.dim() >= 2 else tensor)  # not contiguous
    out: list[tuple[str, torch.Tensor]] = []
    rest = list(enumerate(tensors))
    while rest:
        layout, taken = Layout(capacity), []
        while rest and layout.place(str(rest[0][0]), rest[0][1]) is not None:
            taken.append(rest.pop(0)[1])
        assert layout.num_bytes <= capacity or len(taken) == 1
        buffer = torch.empty(layout.num_bytes, dtype=torch.uint8)
        pack(buffer, layout.specs, taken)
        again = specs_from_json(json.loads(json.dumps(specs_to_json(layout.specs))))
        assert list(again) == layout.specs
        out += [(name, tensor.clone()) for name, tensor in unpack(buffer, again)]
        found = split_heads(heads(buffer, again), again)
        for name, tensor in unpack(buffer, again):
            assert torch.equal(found[name], tensor.flatten()[:64])
    assert [name for name, _ in out] == [str(i) for i in range(len(tensors))]
    for (_, tensor), source in zip(out, tensors, strict=True):
        assert tensor.dtype == source.dtype and tensor.shape == source.shape and torch.equal(tensor, source)


def test_heads_are_the_first_64_values() -> None:
    layout, tensors = Layout(10_000), [torch.arange(200).float(), torch.arange(3).to(torch.float16)]
    for name, tensor in zip("ab", tensors, strict=True):
        layout.place(name, tensor)
    buffer = torch.zeros(layout.num_bytes, dtype=torch.uint8)
    pack(buffer, layout.specs, tensors)
    packed = heads(buffer, layout.specs)
    assert packed.numel() == 64 * 4 + 3 * 2
    found = split_heads(packed, layout.specs)
    assert found["a"].tolist() == list(range(64)) and found["b"].tolist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        (spec("w", "float32", (3,), 96, 12), "ends at byte 108 of a bucket of 100"),
        (spec("w", "float32", (3,), 0, 16), "does not fit 16 bytes"),
        (spec("w", "float32", (1,), 4, 4), "at offset 4"),
        (spec("w", "float33", (1,), 0, 4), "'float33' is not a dtype"),
        (spec("w", "nn", (1,), 0, 4), "'nn' is not a dtype"),
    ],
)
def test_a_place_that_cannot_be_is_refused(wrong: TensorSpec, says: str) -> None:
    with pytest.raises(WireError, match=says):
        view(torch.zeros(100, dtype=torch.uint8), wrong)


def test_specs_that_cannot_be_read_are_refused() -> None:
    with pytest.raises(WireError, match="'offset'"):
        specs_from_json([{"name": "w", "dtype": "float32", "shape": [1]}])


def test_names_of_dtypes() -> None:
    assert named_dtype("bfloat16") is torch.bfloat16
