import dataclasses
import hashlib
import json

import pytest

from lockstep.schema.contract import KernelContract

ONE = KernelContract(
    gemm="g",
    attention="a",
    attention_splits=1,
    norm="n",
    activation="s",
    logprob="l",
    lm_head_dtype="bfloat16",
    logits_dtype="bfloat16",
    collectives="none",
    compile="inductor",
    dtype="bfloat16",
    weights_dtype="bfloat16",
    device="NVIDIA H200",
    torch="2.11.0",
    threads=0,
)


def test_the_hash_is_of_canonical_json():
    text = (
        '{"activation":"s","attention":"a","attention_splits":1,"collectives":"none","compile":"inductor",'
        '"device":"NVIDIA H200","dtype":"bfloat16","gemm":"g","lm_head_dtype":"bfloat16",'
        '"logits_dtype":"bfloat16","logprob":"l","norm":"n","threads":0,"torch":"2.11.0","version":1,'
        '"weights_dtype":"bfloat16"}'
    )
    assert ONE.hash == hashlib.sha256(text.encode()).hexdigest()


def test_every_field_counts():
    for field in dataclasses.fields(ONE):
        value = getattr(ONE, field.name)
        other = dataclasses.replace(ONE, **{field.name: value + 1 if isinstance(value, int) else "x"})
        assert other.hash != ONE.hash
        there = getattr(other, field.name)
        assert ONE.difference(other) == [f"{field.name}: {value!r} here, {there!r} there"]
    assert ONE.difference(ONE) == []


def test_it_goes_through_json():
    written = json.loads(json.dumps(ONE.as_json()))
    assert KernelContract.from_json(written) == ONE
    for change, message in (
        ({"hash": "0" * 64}, "its hash is"),
        ({"threads": "0"}, "threads = '0' is not of type int"),
        ({"threads": True}, "threads = True is not of type int"),
        (
            {"colour": "red"},
            r"lacks the fields \[\] and has the unknown fields \['colour'\]; another version",
        ),
    ):
        with pytest.raises(ValueError, match=message):
            KernelContract.from_json(written | change)
    with pytest.raises(ValueError, match="norm"):
        KernelContract.from_json({name: value for name, value in written.items() if name != "norm"})
