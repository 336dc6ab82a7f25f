"""Planted faults are found where they are: that input, that module, that direction."""

import dataclasses
import sys
from pathlib import Path

import pytest
import torch
from raising import raises

sys.path.insert(0, str(Path(__file__).parent))
from bisect_arms import arm_of, batch_of, leak, perturb, scale_gradient, shift_rope

from lockstep_lab.bisect.arms import ArmFailed, OpenCells, gradient_parts, reversed_order, run
from lockstep_lab.bisect.capture import Key
from lockstep_lab.bisect.divergence import Tolerances
from lockstep_lab.bisect.report import as_dict, lines, markdown, verdict
from lockstep_lab.bisect.run import bisect
from lockstep_lab.replay.cell import Cell, ReplayOptions

INPUTS = [(4, batch_of([6])), (5, batch_of([5, 12, 3], seed=1)), (6, batch_of([7, 2, 9, 4], seed=2))]


@pytest.mark.parametrize("model", ["shape:tiny-llama", "shape:tiny-qwen3", "shape:tiny-gemma3"])
@pytest.mark.parametrize(
    "b", [{"attention": "varlen"}, {"layout": "padded", "padding_side": "left"}, {"attention": "hf:eager"}]
)
def test_cells_that_agree_are_said_to(b, model):
    result = bisect(arm_of("a", model=model), arm_of("b", model=model, **b), INPUTS)
    assert result.finding is None and result.inputs == 3 and result.index is None
    assert result.largest.logprob < 1e-5 and result.largest.gradient < 2e-5
    assert verdict(result).startswith("bisect: no difference beyond tolerance in 3 inputs; the largest: ")


def test_a_perturbed_weight_is_found_in_its_module():
    b = arm_of("b", attention="varlen", layout="padded", padding_side="left")
    perturb(b, "model.layers.1.self_attn.q_proj.weight")
    result = bisect(arm_of("a"), b, INPUTS)
    finding = result.finding
    assert (result.index, result.inputs) == (4, 1)
    assert finding.first.key == Key("forward", "model.layers.1.self_attn.q_proj", "output")
    assert finding.first.shape == (6, 64) and not finding.gradual
    assert "its weights differ: weight (largest difference 0.00" in finding.weights
    # what ran before is the same to rounding
    before = finding.around[: finding.around.index(finding.first)]
    assert len(before) == 6 and all(d.relative < 1e-6 and not d.beyond for d in before)
    assert [d.key.path for d in finding.growth] == ["model.layers.0", "model.layers.1"]
    assert finding.growth[1].relative > 100 * finding.growth[0].relative


def test_the_largest_difference_is_the_exact_one():
    a, b = arm_of("a"), arm_of("b")
    perturb(b, "model.layers.0.mlp.up_proj.weight", scale=1e-2)
    finding = bisect(a, b, INPUTS).finding
    name = Key("forward", "model.layers.0.mlp.up_proj", "output")
    both = [run(s, INPUTS[0][1], capture=True, whole=lambda k: True).tensors[name].values for s in (a, b)]
    gap = both[0] - both[1]
    assert finding.first.key == name
    assert finding.first.max_abs == pytest.approx(float(gap.abs().max()), rel=1e-6)
    assert finding.first.relative == pytest.approx(float(gap.norm() / both[1].norm()), rel=1e-3)
    assert finding.first.where == (0, int(gap.abs().amax(1).argmax()))


@pytest.mark.parametrize("b", [{}, {"layout": "padded"}])
def test_a_wrong_rope_position_is_found_between_projection_and_kernel(b):
    wrong = arm_of("b", **b)
    shift_rope(wrong, 1, token=8)
    result = bisect(arm_of("a"), wrong, INPUTS)
    assert result.index == 5  # the first input has 6 tokens
    assert result.finding.first.key == Key("forward", "model.layers.1.self_attn.kernel", "q")
    assert "between the projections and the attention kernel of model.layers.1.self_attn" in verdict(result)
    document = result.finding.first.where[0]
    assert document == 1 and result.finding.first.where[1] == (3 if not b else 8)


@pytest.mark.parametrize("attention", ["sdpa", "varlen"])
def test_a_mask_that_leaks_is_found_in_the_kernel(attention):
    wrong = arm_of("b", attention=attention)
    leak(wrong, 0)
    result = bisect(arm_of("a"), wrong, INPUTS)
    assert result.index == 5  # one document cannot leak
    assert result.finding.first.key == Key("forward", "model.layers.0.self_attn.kernel", "output")
    assert result.finding.first.where[0] == 1  # the second document sees the first
    assert "inside the attention kernel of model.layers.0.self_attn: q, k and v agree" in verdict(result)
    assert "its weights are the same in both" in "\n".join(lines(result))


def test_another_head_is_found_behind_the_last_norm():
    wrong = arm_of("b")
    perturb(wrong, "lm_head.weight", scale=1e-2)
    result = bisect(arm_of("a"), wrong, INPUTS)
    assert result.finding.first.key.path == "lm_head (logprobs)"
    assert "it begins in the head" in verdict(result) and "its weights differ" in result.finding.weights


def test_a_gradient_that_is_wrong_is_found_though_the_forward_agrees():
    wrong = arm_of("b", attention="varlen")
    scale_gradient(wrong, "model.layers.0.mlp.up_proj")
    result = bisect(arm_of("a"), wrong, INPUTS)
    assert result.difference.logprob < 1e-5
    assert result.finding.first.key == Key("backward", "model.layers.0.mlp.up_proj", "output")
    assert result.finding.first.relative == pytest.approx(0.01 / 1.01, rel=1e-3)
    assert [d.key.path for d in result.finding.growth][:1] == ["model.layers.1"]  # backward order


def test_a_kernels_backward_is_named(monkeypatch):
    from transformers import AttentionInterface

    mapping = AttentionInterface._global_mapping
    wrong = arm_of("b", attention="varlen")
    inner = mapping["lockstep_varlen"]

    def kernel(module, query, key, value, mask, **kwargs):
        if module.layer_idx == 1:
            value = value.clone()
            value.register_hook(lambda g: g * 1.01)
        return inner(module, query, key, value, mask, **kwargs)

    monkeypatch.setitem(mapping, "lockstep_varlen", kernel)
    result = bisect(arm_of("a"), wrong, INPUTS)
    assert result.finding.first.key == Key("backward", "model.layers.1.self_attn.kernel", "v")
    assert "inside the backward of the attention kernel of model.layers.1.self_attn" in verdict(result)


def test_a_weight_gradient_is_named_with_its_module():
    wrong = arm_of("b")
    wrong.module.model.layers[1].mlp.down_proj.weight.register_hook(lambda g: g * 1.01)
    result = bisect(arm_of("a"), wrong, INPUTS)
    assert result.finding.first.key == Key("backward", "model.layers.1.mlp.down_proj", "parameter weight")


def test_without_backward_gradients_are_not_looked_at():
    wrong = arm_of("b")
    scale_gradient(wrong, "model.layers.0.mlp.up_proj")
    result = bisect(arm_of("a"), dataclasses.replace(wrong, backward=False), INPUTS)
    assert result.finding is None and result.largest.gradient == 0.0


def test_a_tolerance_overrides_what_is_measured():
    small = bisect(arm_of("a"), arm_of("b", attention="varlen"), INPUTS, tolerance=1e-9)
    assert small.index == 4 and small.finding.first.allowed == 1e-9
    wrong = arm_of("b")
    perturb(wrong, "model.layers.1.self_attn.q_proj.weight")
    assert bisect(arm_of("a"), wrong, INPUTS, tolerance=1.0).finding is None


def test_bfloat16_differs_by_what_rounding_explains():
    a, b = arm_of("a", dtype="bfloat16"), arm_of("b", dtype="bfloat16", attention="varlen")
    result = bisect(a, b, INPUTS)
    assert result.finding is None and result.largest.gradient > 1e-3
    perturb(b, "model.layers.1.mlp.up_proj.weight", scale=0.1)
    assert bisect(a, b, INPUTS).finding.first.key.path == "model.layers.1.mlp.up_proj"


def test_tolerances_are_four_times_the_noise_of_reordering_and_a_floor_that_grows():
    a = arm_of("a")
    tolerances = Tolerances(a, a, INPUTS[1][1], tolerance=None)
    key = Key("forward", "model.layers.0", "output")
    assert tolerances.tensor(key, depth=0) == 1e-5 and tolerances.tensor(key, depth=3) == 2e-5
    tolerances.noise[key] = 1e-3
    assert tolerances.tensor(key, depth=0) == 4e-3
    assert (
        tolerances.tensor(Key("forward", "model.layers.1", "output"), depth=0) == 4e-3
    )  # it does not get less
    tolerances.head = 0.5
    assert tolerances.logprobs() == 2.0


def test_documents_in_the_opposite_order_come_out_in_the_first():
    a, batch = arm_of("a", layout="padded", padding_side="left"), INPUTS[1][1]
    one = run(a, batch, capture=True)
    turned = run(a, reversed_order(batch), capture=True, backwards=True)
    assert torch.allclose(one.logprobs, turned.logprobs, atol=2e-6)
    assert list(one.tensors) == list(turned.tensors)
    assert all(
        torch.allclose(one.tensors[k].values, turned.tensors[k].values, atol=1e-4) for k in one.tensors
    )


def test_small_gradients_are_measured_against_all_of_them():
    one = {"big": torch.tensor([3.0, 4.0]), "small": torch.tensor([1e-9])}
    other = {"big": torch.tensor([3.0, 4.0]), "small": torch.tensor([-1e-9])}
    parts = gradient_parts(one, other)
    assert parts["big"] == 0.0 and parts["small"] == pytest.approx(2e-9 / (1e-4 * 5))


def test_the_first_nan_is_found_where_it_is_made():
    wrong = arm_of("b")

    def hook(module, args, output):
        if output.shape[1] > 10:
            output[:, 8, 3] = torch.nan

    wrong.module.model.layers[1].mlp.act_fn.register_forward_hook(hook)
    result = bisect(arm_of("a"), wrong, INPUTS)
    assert result.index == 5 and result.difference.logprob == float("inf")
    assert result.finding.first.key == Key("forward", "model.layers.1.mlp.act_fn", "output")
    assert result.finding.first.where == (1, 3) and result.finding.first.max_abs == float("inf")
    assert as_dict(result)["first"]["relative"] == float("inf")


def test_a_cell_that_raises_is_named_with_the_input():
    wrong = arm_of("b")

    def hook(module, args, output):
        if output.shape[1] > 10:
            raise ValueError("too long")

    wrong.module.model.embed_tokens.register_forward_hook(hook)
    with raises(ArmFailed, "cell-failed: b", input=5) as caught:
        bisect(arm_of("a"), wrong, INPUTS)
    assert (caught.value.arm, caught.value.index) == ("b", 5)
    assert isinstance(caught.value.__cause__, ValueError)


def test_reports_say_what_was_found():
    wrong = arm_of("b")
    perturb(wrong, "model.layers.1.self_attn.q_proj.weight")
    result = bisect(arm_of("a"), wrong, INPUTS)
    found = as_dict(result)
    assert found["differs"] and found["index"] == 4 and found["first"]["kind"] == "Linear"
    assert found["first"]["where"]["document"] == 0 and found["verdict"] == verdict(result)
    text = markdown(result, repro="repro.py")
    assert "| > | model.layers.1.self_attn.q_proj | Linear | [6, 64] |" in text and "python repro.py" in text


def cells(recording, a, b):
    base = {
        "attention": "sdpa",
        "execution": "eager",
        "layout": "packed",
        "dtype": "float32",
        "device": "cpu",
    }
    options = (ReplayOptions(cell=Cell(**(base | one)), max_inputs=2) for one in (a, b))
    return OpenCells(recording, *options)


def test_cells_of_a_recording_run_with_their_weights(recording):
    opened = cells(recording, {}, {"layout": "padded", "attention": "varlen"})
    result = bisect(opened.a, opened.b, opened.inputs())
    assert result.finding is None and result.inputs == 2 and result.largest.logprob < 1e-5
    assert all("the recorded one" in statement for statement in opened.weights_descriptions())


@pytest.mark.exhaustive
def test_the_compiler_is_told_from_the_kernel(recording, monkeypatch):
    from transformers.models.llama.modeling_llama import LlamaMLP

    torch._dynamo.reset()
    inner = LlamaMLP.forward

    def forward(self, x):
        return inner(self, x) * (1.01 if torch.compiler.is_compiling() else 1.0)

    monkeypatch.setattr(LlamaMLP, "forward", forward)
    opened = cells(recording, {"layout": "padded"}, {"attention": "varlen", "execution": "compile"})
    result = bisect(opened.a, opened.b, opened.inputs())
    assert result.cause == "the compiler"
    assert result.finding.first.key == Key("forward", "model.layers.0", "output")
    assert [arm.name for arm in result.finding.arms] == ["b-eager", "b"]
    gaps = {(x, y): gap.logprob for x, y, gap in result.three_way}
    assert gaps["a", "b-eager"] < 1e-5 < gaps["b-eager", "b"]


@pytest.mark.exhaustive
def test_a_fault_of_the_kernel_is_not_blamed_on_the_compiler(recording, monkeypatch):
    from lockstep.attention import adapters

    torch._dynamo.reset()
    opened = cells(recording, {}, {"attention": "varlen", "execution": "compile"})
    inner = adapters.KERNELS["varlen"]

    def attention(q, k, v, **kwargs):
        return inner(q, k, v * 1.01, **kwargs)

    from transformers import AttentionInterface

    monkeypatch.setitem(adapters.KERNELS, "varlen", attention)
    monkeypatch.setitem(AttentionInterface._global_mapping, "lockstep_varlen", adapters._adapter("varlen"))
    result = bisect(opened.a, opened.b, opened.inputs())
    assert result.cause == "the kernel or layout, not the compiler"
    assert result.finding.first.key == Key("forward", "model.layers.0.self_attn.kernel", "output")
    assert [arm.name for arm in result.finding.arms] == ["a", "b-eager"]
