"""What is captured: real tokens in the documents' order, forward and backward, whatever the layout."""

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

sys.path.insert(0, str(Path(__file__).parent))
from bisect_arms import arm_of, batch_of

from lockstep.packing import Bucket, repack
from lockstep_lab.bisect.arms import exact, reversed_order, run, take
from lockstep_lab.bisect.capture import Capture, Key, reverse_documents, sketch, token_rows

BATCH = batch_of([5, 12, 1, 3])


def everything(arm, batch=BATCH, **options):
    return run(arm, batch, capture=True, whole=lambda key: True, **options)


def test_rows_of_the_worked_example():
    """Documents of 2 and 3 tokens: packed 0..4; padded to 3 columns, pads behind or before."""
    batch = batch_of([2, 3])
    assert token_rows(batch, layout="packed")[0].tolist() == [0, 1, 2, 3, 4]
    rows, shape = token_rows(batch, layout="padded")
    assert rows.tolist() == [0, 1, 3, 4, 5] and shape == (2, 3)
    assert token_rows(batch, layout="padded", padding_side="left")[0].tolist() == [1, 2, 3, 4, 5]
    assert reverse_documents(torch.arange(5), [2, 3]).tolist() == [2, 3, 4, 0, 1]


@pytest.mark.parametrize(
    "train", [{}, {"layout": "padded"}, {"layout": "padded", "padding_side": "left"}, {"attention": "varlen"}]
)
def test_tokens_are_those_of_the_documents_in_order(train):
    arm = arm_of("a", **train)
    seen = everything(arm).tensors
    expected = F.embedding(BATCH.token_ids, arm.module.model.embed_tokens.weight)
    assert torch.equal(seen[Key("forward", "model.embed_tokens", "output")].values, expected)
    plain = everything(arm_of("b")).tensors
    assert {k for k in seen if k.direction == "forward"} == {k for k in plain if k.direction == "forward"}
    for key, one in plain.items():
        assert torch.allclose(seen[key].values, one.values, atol=1e-5), key
        assert seen[key].shape == one.shape and one.shape[0] == 21


def test_a_padded_tail_is_left_out():
    arm = arm_of("a")
    tail = Bucket(tokens=64, documents=12, max_seqlen=16)
    shape = token_rows(repack(BATCH, tail), layout="packed")[1]
    assert shape == (1, 64)
    rows, _ = token_rows(repack(BATCH, tail), layout="packed")
    with Capture(arm.module, rows=rows, shape=shape, whole=lambda key: True) as capture:
        arm.backend.logprobs([repack(BATCH, tail)])
    found = capture.tensors[Key("forward", "model.layers.1", "output")]
    expected = everything(arm).tensors[Key("forward", "model.layers.1", "output")]
    assert found.shape == (21, 64) and torch.allclose(found.values, expected.values, atol=1e-5)


def test_the_order_is_that_of_execution():
    seen = list(everything(arm_of("a")).tensors)
    inside = "model.layers.0.self_attn."
    expected = [f"{inside}{n}_proj" for n in "qkv"] + [f"{inside}kernel"] * 4 + [f"{inside}o_proj"]
    found = [k.path for k in seen if k.direction == "forward" and k.path.startswith(inside)]
    assert found == expected
    assert [k.tensor for k in seen if k.path == f"{inside}kernel"][:4] == ["q", "k", "v", "output"]
    backward = [k.path for k in seen if k.direction == "backward"]
    assert backward[0] == "model.norm" and backward[-1] == "model.embed_tokens"
    assert backward.index("model.layers.1") < backward.index("model.layers.0")


def test_gradients_are_those_of_autograd():
    """dW = dY' X of a linear, from the captured call."""
    arm = arm_of("a")
    path = "model.layers.1.mlp.down_proj"
    outcome = everything(arm, calls=frozenset({path}))
    call = outcome.capture.calls[path]
    x, dy = call.arguments["arg0"][0], call.grad_output[0]
    assert torch.allclose(dy.T @ x, outcome.gradients[f"{path}.weight"], atol=1e-6)
    assert torch.equal(outcome.tensors[Key("backward", path, "output")].values, dy)


def test_a_block_that_is_computed_again_in_backward_is_seen_once():
    plain, again = everything(arm_of("a")), everything(arm_of("b", activation_checkpointing=True))
    assert list(plain.tensors) == list(again.tensors)
    assert all(torch.equal(plain.tensors[k].values, again.tensors[k].values) for k in plain.tensors)


def test_nothing_is_left_behind():
    from transformers import AttentionInterface

    arm = arm_of("a")
    before = dict(AttentionInterface._global_mapping)
    everything(arm)
    assert AttentionInterface._global_mapping == before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in arm.module.modules())
    eager = arm_of("b", attention="hf:eager")
    assert any(k.path.endswith("kernel") for k in everything(eager).tensors)
    assert "eager" not in AttentionInterface._global_mapping


def test_a_sketch_keeps_the_norm_of_a_difference():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(300, 512, generator=generator)
    y = x + 1e-3 * torch.randn(300, 512, generator=generator)
    estimate = (sketch(x) - sketch(y)).norm() / (x - y).norm()
    assert sketch(x).shape == (300, 16) and 0.9 < estimate < 1.1
    assert torch.equal(sketch(x[:, :16]), x[:, :16])
    seen = run(arm_of("a"), BATCH, capture=True).tensors
    assert seen[Key("forward", "model.layers.0", "output")].values.shape == (21, 16)


def test_the_compiled_block_is_wrapped_from_outside():
    from lockstep.execution import compile_blocks

    torch._dynamo.reset()
    arm = arm_of("a", static_capacity=True)
    eager = everything(arm)
    watch = compile_blocks(arm.module, backend="aot_eager")
    plain = run(arm, BATCH)
    graphs = watch.report().graphs
    seen = everything(arm).tensors
    assert watch.report().graphs == graphs == 1  # looking does not make a graph
    assert "model.layers.0.mlp" not in {k.path for k in seen}
    for key in (Key("forward", "model.layers.1", "output"), Key("backward", "model.layers.0", "output")):
        assert torch.allclose(seen[key].values, eager.tensors[key].values, atol=1e-5)
    assert torch.allclose(plain.logprobs, eager.logprobs, atol=1e-5)


def test_documents_can_be_taken_cut_and_reordered():
    batch = batch_of([3, 4])
    part = take(batch, [(1, 2), (0, 3)])
    assert part.token_ids.tolist() == [*batch.token_ids[5:7].tolist(), *batch.token_ids[:3].tolist()]
    assert part.positions.tolist() == [0, 1, 0, 1, 2] and part.cu_seqlens.tolist() == [0, 2, 5]
    assert part.labels.tolist() == [batch.token_ids[6], -100, batch.token_ids[1], batch.token_ids[2], -100]
    assert part.loss_mask.tolist() == [True, False, True, True, False]
    assert part.loss_weights.tolist() == pytest.approx([0.2, 0, 0.1, 0.1, 0])
    assert (part.lengths, part.sample_ids, part.max_seqlen) == ((2, 3), (1, 0), 3)
    assert reversed_order(batch).sample_ids == (1, 0)
    tailed = exact(repack(batch, Bucket(tokens=64, documents=6, max_seqlen=32)))
    assert torch.equal(tailed.token_ids, batch.token_ids) and tailed.lengths == (3, 4)
    with pytest.raises(ValueError, match="cannot select"):
        take(batch, [(0, 4)])
