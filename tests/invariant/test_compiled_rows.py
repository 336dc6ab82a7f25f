"""Compiled decoder layers of converted models: a row's bits by the number of rows, its place, and whether the
graph makes gradients."""

import pytest
import torch
from invariant_models import hidden_of, tiny

from lockstep import invariant
from lockstep.execution import compile_blocks

NUM_ROWS = 203


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch._dynamo.reset()


def inputs(module):
    return torch.arange(NUM_ROWS) * 7 % module.config.vocab_size, torch.arange(NUM_ROWS) * 3


def unequal(module, whole, cases):
    """Those (rows, grad) of the cases whose hidden states are not those of all rows together."""
    ids, positions = inputs(module)
    found = []
    for rows, grad in cases:
        with torch.set_grad_enabled(grad):
            part = hidden_of(module, ids[3 : 3 + rows], positions[3 : 3 + rows])
        if not torch.equal(part, whole[3 : 3 + rows]):
            found.append((rows, grad))
    return found


@pytest.mark.parametrize(
    ("name", "dtype", "cases"),
    [
        ("llama", torch.float32, [(1, False), (8, True)]),
        ("gemma3_text", torch.bfloat16, [(1, False), (3, True)]),
        *(
            pytest.param(
                name,
                dtype,
                [(n, g) for n in (1, 8, 200) for g in (True, False)],
                marks=pytest.mark.exhaustive,
            )
            for name in ("qwen2", "qwen3", "gemma3_text")
            for dtype in (torch.float32, torch.bfloat16)
        ),
    ],
    ids=str,
)
def test_rows_of_compiled_layers(name, dtype, cases):
    one_kind = {"layer_types": ["full_attention"] * 2} if name == "gemma3_text" else {}
    module = tiny(name, dtype, **one_kind)
    invariant.convert(module)
    eager = hidden_of(module, *inputs(module)).detach()
    watch = compile_blocks(module, options=invariant.inductor_options())
    whole = hidden_of(module, *inputs(module)).detach()
    assert unequal(module, whole, cases) == []
    # Nothing is left to the compiler but sums and products of two numbers.
    assert torch.equal(whole, eager)
    # One graph for both layers, per number of rows and kind; one more for all rows together.
    assert watch.report().graphs == 1 + len(cases)
    assert watch.report().graph_breaks == 0


def test_layers_that_are_not_converted_are_caught():
    """The same with stock ops: were this to pass, the test above would show nothing."""
    module = tiny("llama", torch.float32)
    compile_blocks(module, options=invariant.inductor_options())
    whole = hidden_of(module, *inputs(module)).detach()
    assert unequal(module, whole, [(1, False)]) == [(1, False)]


@pytest.mark.slow
def test_default_roundings_of_the_compiler_are_caught():
    """Fused code without `inductor_options` rounds in other places in a graph that makes gradients."""
    module = tiny("llama", torch.bfloat16)
    invariant.convert(module)
    compile_blocks(module)
    whole = hidden_of(module, *inputs(module)).detach()
    assert unequal(module, whole, [(200, False)]) == [(200, False)]
