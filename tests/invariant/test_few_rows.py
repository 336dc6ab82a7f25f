"""Products of few rows: which are one launch in the compiled graphs of layers, and what that leaves alone."""

import pytest
import torch
import torch.nn.functional as F
from invariant_models import hidden_of, normal, tiny

from lockstep import invariant
from lockstep.engine.native.runner import invariant_sizes
from lockstep.execution import compile_blocks
from lockstep.invariant import few_rows, modules
from lockstep.invariant.modules import linears


class Recorded(few_rows.MergeProducts):
    """Keeps what the pass leaves: weights, biases and whether a residual is added, of each launch."""

    def __init__(self):
        self.launches = []

    def __call__(self, graph):
        super().__call__(graph)
        self.launches = [
            (len(node.args[1]), len(node.args[2]), node.args[3] is not None)
            for node in few_rows._products(graph)
        ]

    def uuid(self):
        return None  # a cached graph would not be passed through it


@pytest.fixture(autouse=True)
def fresh(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("name", "launches"),
    [
        # q, k and v; o and the residual; gate and up; down and the residual
        ("llama", [(3, 3, False), (1, 1, True), (2, 2, False), (1, 1, True)]),
        pytest.param(
            "qwen2", [(3, 3, False), (1, 0, True), (2, 0, False), (1, 0, True)], marks=pytest.mark.exhaustive
        ),
        # Its residual is added to a norm of the product.
        pytest.param(
            "gemma3_text",
            [(3, 0, False), (1, 0, False), (2, 0, False), (1, 0, False)],
            marks=pytest.mark.exhaustive,
        ),
    ],
)
@torch.no_grad()
def test_a_layer_has_four_products_and_the_same_bits(name, launches):
    one_kind = {"layer_types": ["full_attention"] * 2} if name == "gemma3_text" else {}
    module, recorded = tiny(name, torch.bfloat16, **one_kind), Recorded()
    invariant.convert(module)
    for _, part in linears(module):
        part.few_rows = modules.FEW_ROWS
    ids, positions = torch.arange(5) * 7, torch.arange(5) * 3
    eager = hidden_of(module, ids, positions)
    compile_blocks(module, options=invariant.inductor_options() | {"post_grad_custom_pre_pass": recorded})
    assert torch.equal(hidden_of(module, ids, positions), eager)
    assert recorded.launches == launches


def test_products_of_other_rows_and_of_results_stay_apart():
    x, y, w = normal(3, 8), normal(3, 8), normal(8, 8)

    def products(x, y, w):
        first = few_rows.few_rows(x, [w], [], None)[0]
        second = few_rows.few_rows(y, [w], [], None)[0]
        computed = few_rows.few_rows(x, [w + 1], [], None)[0]  # its weight is not there when the first begins
        both = second + first  # the first can take the other as its residual
        return both, computed + computed, second  # and not the second, which is read again

    recorded = Recorded()
    options = {"post_grad_custom_pre_pass": recorded}
    both, computed, second = torch.compile(products, fullgraph=True, options=options)(x, y, w)
    assert recorded.launches == [(1, 0, False), (1, 0, False), (1, 0, True)]
    expected = F.linear(x, w) + F.linear(y, w), 2 * F.linear(x, w + 1), F.linear(y, w)
    for out, right in zip((both, computed, second), expected, strict=True):
        torch.testing.assert_close(out, right)


def test_more_rows_run_as_in_training_and_padded_ones_as_many(monkeypatch):
    part = torch.nn.Linear(16, 12)
    modules.swap_linear(part, exact_backward=False)
    part.stock, seen = True, []
    monkeypatch.setattr(
        modules, "few_rows", lambda x, *rest: seen.append(x.shape) or few_rows.few_rows(x, *rest)
    )
    x = normal(2, 40, 16)
    for choice in (None, modules.PADDED, modules.FEW_ROWS):
        part.few_rows = choice
        for rows in (x[:1, :1], x[:, :32], x):  # 1, 64 and 80
            torch.testing.assert_close(part(rows), F.linear(rows, part.weight, part.bias))
    assert seen == [(1, 1, 16), (2, 32, 16)]
    head = modules.head_kernels(part)  # as it is with few rows by the op
    part.few_rows = modules.PADDED
    out = torch.empty(4, 12)
    kept = modules.head_kernels(part).logits(x[0, :4], part.weight, part.bias, out)
    assert kept is out and head is not None
    torch.testing.assert_close(out, F.linear(x[0, :4], part.weight, part.bias))


def test_nothing_is_tested_without_a_gpu():
    module = tiny("llama", torch.bfloat16)
    invariant.convert(module)
    assert invariant.few_rows_test(module) == {}
    assert all(part.few_rows is None for _, part in linears(module))


def test_numbers_of_rows_of_a_step():
    assert invariant_sizes((1,)) == (16,)
    assert invariant_sizes((1, 4, 16, 32, 64)) == (16, 64)
    assert invariant_sizes((4, 16, 64, 128, 256)) == (16, 64, 128, 256)
    assert invariant_sizes((2, 7, 25, 50, 100)) == (16, 64, 128)
