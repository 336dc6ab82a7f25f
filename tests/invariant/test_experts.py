"""A mixture of experts: transformers' numbers and gradients, rows that do not depend on others, ties."""

import copy

import pytest
import torch
from invariant_models import normal, tiny
from raising import raises

from lockstep.errors import ModelError
from lockstep.invariant import convert, dependence, expert_ops, experts, self_test

FAMILIES = ("qwen3_moe", "qwen2_moe", "mixtral")


@pytest.fixture(autouse=True)
def no_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))


def block_of(module):
    return module.model.layers[0].mlp


def run(block, x):
    """Output, and the gradients of a weighted sum: of the input, and of each Parameter by name."""
    x = x.clone().requires_grad_(True)
    out = block(x[None])[0]
    (out * normal(*out.shape, dtype=out.dtype)).sum().backward()
    grads = {name: parameter.grad for name, parameter in block.named_parameters()}
    block.zero_grad(set_to_none=True)
    return out.detach(), {"x": x.grad, **grads}


def worst(left, right):
    """The largest difference, relative to the largest value of the tensor."""
    return max(float((left[n] - right[n]).abs().max() / right[n].abs().max()) for n in right)


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("rows", [1, 3, 57])
def test_a_block_is_transformers_own(family, rows):
    """In one to three rows most of the 8 experts have none."""
    theirs = tiny(family, torch.float32)
    theirs.config._experts_implementation = "eager"  # a loop over the experts
    ours = copy.deepcopy(theirs)
    assert experts.install(ours) == 2 and experts.install(ours) == 2
    converted = copy.deepcopy(theirs)
    convert(converted)
    x = normal(rows, 64)
    out, grads = run(block_of(theirs), x)
    for module in (ours, converted):
        own_out, own_grads = run(block_of(module), x)
        assert own_grads.keys() == grads.keys()
        assert (own_out - out).abs().max() <= 2e-6 * out.abs().max()
        assert worst(own_grads, grads) <= 2e-5
    up = next(grad for name, grad in own_grads.items() if name.endswith("gate_up_proj"))
    assert (up.flatten(1).abs().amax(1) == 0).any() == (rows < 57), "experts without rows have no gradient"
    router = next(grad for name, grad in own_grads.items() if name.endswith("gate.weight"))
    assert router.abs().max() > 0


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_row_does_not_depend_on_others(family, dtype):
    module = tiny(family, dtype)
    convert(module)
    block, x = block_of(module), normal(131, 64, dtype=dtype)
    assert dependence(lambda rows: block(rows[None])[0], x, counts=(1, 2, 3, 8, 17, 64)) is None


def test_rows_of_transformers_experts_do_depend_on_others():
    """So the test above can fail."""
    block = block_of(tiny("qwen3_moe", torch.float32))
    x = normal(131, 64)
    assert dependence(lambda rows: block(rows[None])[0], x, counts=(1, 2, 17)) is not None


def test_the_self_test_catches_products_of_all_rows_at_once(monkeypatch):
    real = expert_ops.grouped_linear
    monkeypatch.setattr(
        expert_ops,
        "grouped_linear",
        lambda x, weight, bias, ends, first, tiles: real(x, weight, bias, ends, first, ()),
    )
    with raises(ModelError, "not-batch-invariant: experts 8x128x64"):
        convert(tiny("qwen3_moe", torch.float32))


def test_the_self_test_chooses_tiles_of_both_products():
    module = tiny("mixtral", torch.float32)
    convert(module, device=torch.device("meta"))
    verdicts = self_test(module, cache=False)
    assert {"experts 8x128x64", "experts 8x64x64", "combine 64", "silu of experts 64"} <= verdicts.keys()
    assert all(len(tiles) >= 1 for tiles in block_of(module).experts.tiles.values())


def test_ties_go_to_the_lower_index():
    logits = torch.tensor([[0.0, 3.0, 1.0, 3.0, 3.0], [2.0, 2.0, 2.0, 2.0, 2.0]])
    weights, chosen = experts.choose_experts(logits, 2, softmax="all", normalise=True)
    assert chosen.tolist() == [[1, 3], [0, 1]]
    assert weights.tolist() == [[0.5, 0.5], [0.5, 0.5]]


def test_weights_by_hand():
    """exp of the logits is 1, 2, 4, 1: shares 1/8, 2/8, 4/8, 1/8."""
    logits = torch.tensor([[0.0, 2.0, 4.0, 0.0]]).clamp(min=1).log()
    expected = {
        ("all", False): [4 / 8, 2 / 8],
        ("all", True): [4 / 6, 2 / 6],
        ("chosen", False): [4 / 6, 2 / 6],
    }
    for (softmax, normalise), values in expected.items():
        weights, chosen = experts.choose_experts(logits, 2, softmax=softmax, normalise=normalise)
        assert chosen.tolist() == [[2, 1]]
        assert weights[0].tolist() == pytest.approx(values, abs=1e-7)


def test_slots_are_sorted_by_expert_and_added_in_their_order():
    chosen = torch.tensor([[2, 0], [0, 2], [2, 3]])
    order, inverse, ends = expert_ops.by_expert(chosen, 5)
    assert order.tolist() == [1, 2, 0, 3, 4, 5]  # expert 0: tokens 0, 1; expert 2: tokens 0, 1, 2
    assert inverse.tolist() == [2, 0, 1, 3, 4, 5]
    assert ends.tolist() == [2, 2, 5, 6, 6] and ends.dtype == torch.int32
    x = torch.tensor([[1.0], [10.0], [100.0]])
    rows = expert_ops.gather_slots(x, order, inverse, 2)
    assert rows[:, 0].tolist() == [1.0, 10.0, 1.0, 10.0, 100.0, 100.0]
    weights = torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    assert expert_ops.combine_slots(rows, weights, order, inverse)[:, 0].tolist() == [3.0, 70.0, 1100.0]
    # 1 and 2^24: float32 keeps the 1 only where it is added last to what cancels.
    big = torch.tensor([[2.0**24], [-(2.0**24)], [1.0]])
    order, inverse, _ = expert_ops.by_expert(torch.tensor([[0, 1, 2]]), 3)
    assert expert_ops.combine_slots(big, torch.ones(1, 3), order, inverse).item() == 1.0


@pytest.mark.parametrize("inputs_first", [False, True])
def test_gradients_of_the_ops_are_those_of_differences(inputs_first):
    """float64, biases and both layouts, an expert without rows."""
    chosen = torch.tensor([[3, 0], [0, 1], [3, 1], [1, 0]])
    order, inverse, ends = expert_ops.by_expert(chosen, 4)
    size = (4, 3, 5) if inputs_first else (4, 5, 3)
    inputs = [normal(4, 3), normal(*size), normal(4, 5), normal(4, 2)]
    inputs = [value.double().requires_grad_(True) for value in inputs]

    def mixture(x, weight, bias, weights):
        rows = expert_ops.gather_slots(x, order, inverse, 2)
        rows = expert_ops.grouped_linear(rows, weight, bias, ends, inputs_first, (8,))
        return expert_ops.combine_slots(rows, expert_ops.router_softmax(weights), order, inverse)

    assert torch.autograd.gradcheck(mixture, inputs)
    gate = normal(3, 8).double().mul_(4).requires_grad_(True)
    assert torch.autograd.gradcheck(lambda x: expert_ops.clamped_swiglu(x, 1.702, 3.0), [gate])
    pair = [normal(3, 1).double().requires_grad_(True), normal(3, 5).double().requires_grad_(True)]
    assert torch.autograd.gradcheck(expert_ops.sigmoid_product, pair)


def test_swiglu_is_torchs_own():
    """With the gradient of its columns: gate first, then up."""
    gate_up = normal(5, 14).requires_grad_(True)
    gate, up = gate_up.detach().chunk(2, -1)
    gate.requires_grad_(True), up.requires_grad_(True)
    ours, theirs = expert_ops.swiglu(gate_up), torch.nn.functional.silu(gate) * up
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)
    weights = normal(5, 7)
    (ours * weights).sum().backward()
    (theirs * weights).sum().backward()
    torch.testing.assert_close(gate_up.grad, torch.cat((gate.grad, up.grad), -1), rtol=1e-5, atol=1e-6)


def test_ops_agree_with_their_fakes():
    chosen = torch.tensor([[3, 0], [0, 1], [3, 1]])
    order, inverse, ends = expert_ops.by_expert(chosen, 4)
    x, weight = normal(3, 6).requires_grad_(True), normal(4, 5, 6).requires_grad_(True)
    rows = expert_ops.gather_slots(x, order, inverse, 2).detach().requires_grad_(True)
    weights = normal(3, 2).requires_grad_(True)
    for op, arguments in (
        (expert_ops.gather_slots, (x, order, inverse, 2)),
        (expert_ops.combine_slots, (rows, weights, order, inverse)),
        (expert_ops.grouped_linear, (rows, weight, None, ends, False, (8,))),
        (expert_ops.router_softmax, (weights,)),
        (expert_ops.swiglu, (rows,)),
        (expert_ops.clamped_swiglu, (rows, 1.702, 7.0)),
        (expert_ops.sigmoid_product, (normal(3, 1).requires_grad_(True), x)),
    ):
        torch.library.opcheck(op, arguments)


def test_a_router_that_is_not_finite_is_named():
    module = tiny("qwen3_moe", torch.float32)
    experts.install(module)
    experts.check_routers(module)
    with torch.no_grad():
        module.model.layers[1].mlp.gate.weight[3, 5] = float("nan")
    with raises(ModelError, "not-finite: model.layers.1.mlp.gate.weight, 1 of 512"):
        experts.check_routers(module)
