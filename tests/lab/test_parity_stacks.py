import pytest
from raising import raises

from lockstep.errors import ConfigError
from lockstep_lab.train_parity.stacks import (
    DEFAULT_STACKS,
    parse_skip,
    parse_stack,
    parse_stacks,
    skipped,
)


@pytest.mark.parametrize(
    ("text", "name", "stem", "settings"),
    [
        ("local", "local", "local", {"backend": "local", "tp": 1, "ring": 1}),
        ("fsdp2", "fsdp2", "fsdp2", {"backend": "fsdp2", "tp": 1, "ring": 1}),
        (
            "fsdp2:ring2+tp3",
            "fsdp2:tp3+ring2",
            "fsdp2_tp3_ring2",
            {"backend": "fsdp2", "tp": 3, "ring": 2},
        ),
        (
            "deepspeed:zero2",
            "deepspeed:zero2",
            "deepspeed",
            {"backend": "deepspeed", "tp": 1, "ring": 1, "zero_stage": 2},
        ),
        (
            "deepspeed:offload+zero3",
            "deepspeed:zero3+offload",
            "deepspeed_zero3_offload",
            {"backend": "deepspeed", "tp": 1, "ring": 1, "zero_stage": 3, "optimizer_device": "cpu"},
        ),
        (
            "fsdp2:compile+ranks4",
            "fsdp2:compile+ranks4",
            "fsdp2_compile_ranks4",
            {"backend": "fsdp2", "tp": 1, "ring": 1, "execution": "compile"},
        ),
        (
            "fsdp2:joint",
            "fsdp2:joint",
            "fsdp2_joint",
            {"backend": "fsdp2", "tp": 1, "ring": 1, "execution": "joint"},
        ),
        (
            "deepspeed:deepcompile",
            "deepspeed:deepcompile",
            "deepspeed_deepcompile",
            {"backend": "deepspeed", "tp": 1, "ring": 1, "execution": "deepcompile"},
        ),
    ],
)
def test_a_stack_by_name(text: str, name: str, stem: str, settings: dict[str, object]) -> None:
    stack = parse_stack(text)
    assert (stack.name, stack.log_stem) == (name, stem)
    assert stack.train_settings() == settings
    assert parse_stack(stack.name) == stack


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("fsdp", "unknown train backend 'fsdp'; did you mean 'fsdp2'?"),
        ("", "unknown train backend ''"),
        ("fsdp2:", "unknown option ''"),
        ("fsdp2:tp", "unknown option 'tp'"),
        ("fsdp2:zero4", "zeroN is available only with deepspeed"),
        ("deepspeed:zero4", "there is no ZeRO stage 4"),
        ("fsdp2:offlaod", "did you mean 'offload'? Known: compile, deepcompile, joint, offload"),
        ("fsdp2:tp2+tp4", "tp is given twice"),
        ("fsdp2:tp0", "tp0 must be from 1 to 4096"),
        ("fsdp2:ring99999999999", "must be from 1 to 4096"),
        ("local:tp2", "local runs in one process"),
        ("deepspeed:ring2", "ring attention is available only with fsdp2"),
        ("fsdp2:deepcompile", "deepcompile is available only with deepspeed"),
        ("deepspeed:compile+deepcompile", "exclude each other"),
        ("fsdp2:joint+compile", "compile and joint exclude each other"),
        ("deepspeed:joint+zero3", "joint needs whole weights; use zero2"),
        ("fsdp2:tp-2", "unknown option 'tp-2'"),
    ],
)
def test_what_is_no_stack(text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as found:
        parse_stack(text)
    assert problem in str(found.value)


def test_lists_of_stacks() -> None:
    assert [s.name for s in parse_stacks(" fsdp2 ,local,")] == ["fsdp2", "local"]
    assert [s.name for s in parse_stacks(",".join(DEFAULT_STACKS))] == list(DEFAULT_STACKS)
    with raises(ConfigError, "duplicate: --stacks", names=["fsdp2:tp2+ring2"]):
        parse_stacks("fsdp2:tp2+ring2,fsdp2:ring2+tp2")
    with raises(ConfigError, "empty: --stacks"):
        parse_stacks(" , ")


def test_ranks_of_a_stack() -> None:
    both, plain = parse_stack("fsdp2:tp2+ring2"), parse_stack("fsdp2")
    assert both.ranks_for(8, default=2) == 8 and plain.ranks_for(3, default=2) == 3
    # nothing was asked for: the largest number below the default that works, else what the axes need
    assert both.ranks_for(None, default=2) == 4 and both.ranks_for(None, default=7) == 4
    assert parse_stack("fsdp2:tp3").ranks_for(None, default=2) == 3
    assert parse_stack("fsdp2:tp3").ranks_for(None, default=8) == 6
    assert parse_stack("local").ranks_for(8, default=2) == 1
    assert parse_stack("fsdp2:ranks4").ranks_for(2, default=2) == 4
    with raises(ConfigError, "not-divisible: tp 2 * ring 2", ranks=6):
        both.ranks_for(6, default=2)
    with raises(ConfigError, "not-divisible: tp 3", ranks=2):
        parse_stack("fsdp2:tp3").ranks_for(2, default=2)


def test_what_skip_leaves_out() -> None:
    every = parse_stacks("local,deepspeed:zero2,deepspeed:zero3,fsdp2,fsdp2:tp2,fsdp2:ring2,fsdp2:tp2+ring2")

    def out(text: str) -> set[str]:
        return {s.name for s in every if skipped(s, parse_skip(text)) is not None}

    assert out("deepspeed") == {"deepspeed:zero2", "deepspeed:zero3"}
    assert out("fsdp2") == {"fsdp2"}
    assert out("tp") == {"fsdp2:tp2", "fsdp2:tp2+ring2"}
    assert out("TP-RING,local") == {"fsdp2:tp2+ring2", "local"}
    assert out("fsdp2:ring2, deepspeed:zero3") == {"fsdp2:ring2", "deepspeed:zero3"}
    assert out("") == set()
    with raises(ConfigError, "wrong-format: SKIP_X, rings"):
        parse_skip("rings", source="SKIP_X")
