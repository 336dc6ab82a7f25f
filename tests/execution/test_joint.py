"""Joint graphs: the numbers of eager code to the bit, weights bound by name, shapes, and what is refused."""

import gc
import types
import weakref

import pytest
import torch
from joint_tools import BUCKET, assert_same, batches, run, tiny_model, untied
from parity_models import largest_gap, measure, relative_error
from raising import raises
from torch import nn

from lockstep import invariant
from lockstep.errors import ConfigError, ModelError, TrainError
from lockstep.execution import CompileWatch, compile_blocks, install_joint, is_compiled, joint_of


@pytest.fixture(autouse=True)
def _fresh_compiler():
    torch._dynamo.reset()


@pytest.mark.parametrize(
    ("make", "architecture", "kernel"),
    [
        (tiny_model, "llama", "varlen"),
        (untied, "qwen3", "varlen"),
        (tiny_model, "gemma3", "varlen"),
        (untied, "gemma3", "sdpa"),
    ],
)
def test_hidden_states_and_gradients_equal_eager_to_the_bit(make, architecture, kernel):
    module = make(architecture, kernel)
    names, state = [n for n, _ in module.named_parameters()], list(module.state_dict())
    eager = run(module, batches())
    watch = CompileWatch(max_recompiles=0)
    joint = install_joint(module, compiler="aot_eager")
    assert is_compiled(module)
    assert_same(eager, run(module, batches()))
    watch.mark_warm()
    assert_same(eager, run(module, batches()))
    watch.check()
    report = watch.report()
    assert (joint.num_graphs, report.graphs, report.graph_breaks, report.recompiles) == (1, 1, 0, 0)
    assert report.seconds > 0
    assert [n for n, _ in module.named_parameters()] == names and list(module.state_dict()) == state


def test_a_weight_that_two_layers_share_gets_its_gradient_once():
    module = tiny_model("llama", "varlen")
    module.model.layers[1].mlp.up_proj.weight = module.model.layers[0].mlp.up_proj.weight
    eager = run(module, batches())
    install_joint(module, compiler="aot_eager")
    assert_same(eager, run(module, batches()))


def test_weights_that_were_changed_or_replaced_are_the_ones_that_run():
    module, other = tiny_model("llama", "varlen"), tiny_model("llama", "varlen")
    install_joint(module, compiler="aot_eager")
    run(module, batches())
    old = weakref.ref(module.model.layers[1].mlp.up_proj.weight)
    for one in (module, other):
        with torch.no_grad():
            one.model.norm.weight.mul_(1.5)
        for layer in one.model.layers:
            layer.mlp.up_proj.weight = nn.Parameter(layer.mlp.up_proj.weight.detach() * 0.5)
    gc.collect()
    assert old() is None, "the graph keeps a weight"
    assert_same(run(other, batches()), run(module, batches()))


def test_another_model_runs_the_same_graphs_with_its_own_weights():
    module, frozen = tiny_model("llama", "varlen"), tiny_model("llama", "varlen").requires_grad_(False)
    with torch.no_grad():
        frozen.model.norm.weight.mul_(0.5)
    expected, _ = measure(frozen, batches(), grad=False)
    joint = install_joint(module, compiler="aot_eager")
    install_joint(frozen, compiler="aot_eager", graphs_of=joint)
    found, _ = measure(frozen, batches(), grad=False)
    policy, _ = measure(module, batches())
    assert largest_gap(expected, found) == 0.0 and largest_gap(policy, found) > 0.1
    assert joint.num_graphs == 1


def test_graphs_are_taken_over_by_a_module_that_comes_later():
    old, new = tiny_model("llama", "varlen"), tiny_model("llama", "varlen")
    with torch.no_grad():
        new.model.norm.weight.mul_(0.5)
    expected, _ = measure(new, batches())
    before = install_joint(old, compiler="aot_eager")
    measure(old, batches())
    assert joint_of(new) is None
    install_joint(new, compiler="aot_eager").adopt(before)
    watch = CompileWatch()
    found, _ = measure(new, batches())
    assert largest_gap(expected, found) == 0.0
    assert joint_of(new).num_graphs == 1 and watch.report().graphs == 0


def test_without_gradients_the_same_numbers_and_nothing_to_go_back_through():
    module = tiny_model("llama", "varlen")
    install_joint(module, compiler="aot_eager")
    with torch.no_grad():
        first = module.model(**_arguments(module))
    second = module.model(**_arguments(module))
    assert not first.last_hidden_state.requires_grad and second.last_hidden_state.requires_grad
    assert torch.equal(first.last_hidden_state, second.last_hidden_state)


def _arguments(module, **changes):
    pack = batches()[0]
    arguments = {"input_ids": pack.token_ids[None], "position_ids": pack.positions[None]}
    return arguments | {"cu_seqlens": pack.cu_seqlens, "max_seqlen": pack.max_seqlen} | changes


def test_every_shape_has_a_static_graph_and_a_new_one_counts_as_recompile():
    module = tiny_model("llama", "varlen")
    watch = CompileWatch(max_recompiles=0)
    joint = install_joint(module, compiler="aot_eager")
    run(module, batches())
    watch.mark_warm()
    other = batches(bucket=type(BUCKET)(tokens=48, documents=8, max_seqlen=16))
    found = run(module, other)
    assert joint.num_graphs == 2
    with raises(TrainError, "too-many-recompiles: train.max_recompiles", recompiles=1):
        watch.check()
    eager = tiny_model("llama", "varlen")
    assert_same(run(eager, other), found)


def test_checkpointed_layers_give_the_same_gradients():
    module = tiny_model("llama", "varlen")
    eager = run(module, batches())
    module.gradient_checkpointing_enable({"use_reentrant": False})
    install_joint(module, compiler="aot_eager")
    module.train()
    assert_same(eager, run(module, batches()))
    assert module.training and module.model.layers[0].training


def test_a_graph_break_names_module_line_and_reason():
    module = tiny_model("llama", "varlen")
    mlp = module.model.layers[1].mlp

    def forward(self, x):
        if x.sum() > 0:
            x = x + 1
        return x

    mlp.forward = types.MethodType(forward, mlp)
    install_joint(module, compiler="aot_eager")
    line = forward.__code__.co_firstlineno + 1
    expected = {"module": "layers.1.mlp (LlamaMLP)", "path": __file__, "line": line}
    with raises(ModelError, "unsupported-model: train.execution", **expected) as caught:
        run(module, batches())
    assert "data-dependent" in str(caught.value).lower()  # torch's own words
    with raises(
        ModelError,
        "unsupported-model: train.execution, test_joint.py",
        module="layers.1.mlp (LlamaMLP)",
        line=147,
    ):  # nothing half-made is left
        run(module, batches())


def test_what_cannot_be_in_the_graph_is_refused_by_name():
    module = tiny_model("llama", "varlen")
    install_joint(module, compiler="aot_eager")
    with raises(ConfigError, "unsupported-model: train.execution"):
        module.model(**_arguments(module, masks={0: object()}))
    with raises(ConfigError, "unsupported-combination"):
        module.model(**_arguments(module, use_cache=True))
    compiled = tiny_model("llama", "varlen")
    compile_blocks(compiled, backend="aot_eager")
    with raises(ConfigError, "wrong-state: train.execution"):
        install_joint(compiled)
    with raises(ConfigError, "unknown-name"):
        install_joint(tiny_model("llama", "varlen"), compiler="inductr")


@pytest.mark.slow
def test_inductor_gives_the_eager_numbers_within_rounding():
    module = tiny_model("llama", "varlen")
    eager, eager_grads = measure(module, batches(bucket=None))
    joint = install_joint(module)
    found, grads = measure(module, batches())
    assert joint.num_graphs == 1
    assert largest_gap(eager, found) <= 2e-6 and relative_error(eager_grads, grads) <= 1e-5


@pytest.mark.exhaustive
def test_batch_invariant_modules_give_the_bits_of_compiled_blocks():
    """Eager, blocks by inductor and joint by inductor: trainer and engine may each be any of them."""
    found = []
    for install in (lambda *_, **__: None, compile_blocks, install_joint):
        module = tiny_model("llama", "varlen")
        invariant.convert(module)
        install(module, options=invariant.inductor_options())
        found.append(measure(module, batches(), grad=False)[0])
    assert largest_gap(found[0], found[1]) == largest_gap(found[0], found[2]) == 0.0
