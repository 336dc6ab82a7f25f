"""Weights of vLLM in this process: what a session must refuse, and what would be silently wrong."""

import threading
import time

import inprocess
import pytest
import torch
from conformance import LONG, conformance_model, gaps, prompt, request, sharpen
from raising import raises
from safetensors.torch import save_file
from selected import exhaustive

from lockstep.errors import EngineError
from lockstep.schema.weights import WeightBucket
from lockstep.wire.buckets import Layout

TOLERANCE = 1e-4
WRONG = 0.05
"""Nats: weights or caches that are not the trainer's are off by more."""


class Served:
    def __init__(self, folder, *, tied):
        self.model = conformance_model(tied=tied)
        self.engine = inprocess.start(self.model, folder)
        self.version = 0

    def new_weights(self):
        self.version += 1
        sharpen(self.model.module, seed=100 + self.version)
        return inprocess.weights_of(self.model)

    def heal(self):
        """A whole session, whatever was before."""
        self.version += 1
        inprocess.push(self.engine, self.model, self.version)

    def gap(self, length=LONG, **sampling):
        (row,) = self.engine.generate([request(prompt(length), range(2), **sampling)])
        assert all(c.policy_version == self.engine.stats().policy_version for c in row)
        return max(float(gaps(self.model, c, 1.0).max()) for c in row)


@pytest.fixture(scope="module", params=exhaustive(["untied", "tied"], quick=["tied"]))
def served(request, tmp_path_factory):
    served = Served(tmp_path_factory.mktemp("weights"), tied=request.param == "tied")
    yield served
    served.engine.close()


@pytest.fixture(autouse=True)
def healed(served):
    """Each test starts with an engine that holds the model's weights, whatever the last one left."""
    served.heal()


def refused(served, tensors, message):
    """The session with these tensors fails with `message`, nothing is sampled from it, and the next whole
    session is right: nothing of the failed one is left over."""
    opened = inprocess.session(99)
    served.engine.begin_update(opened)
    with pytest.raises(EngineError, match=message):
        inprocess.send(served.engine, tensors)
        served.engine.finish_update(opened)
    served.engine.fail_update("refused")
    assert served.engine.dirty
    with raises(EngineError, "wrong-state: dirty"):
        served.engine.generate([request(prompt(4))])
    served.new_weights()
    served.heal()
    assert served.gap() <= TOLERANCE


def test_an_engine_without_weights_refuses_to_sample(tmp_path, served):
    served.engine.dirty = True  # as it is when it starts; another engine would need this one closed
    with raises(EngineError, "wrong-state: dirty"):
        served.engine.generate([request(prompt(4))])


@pytest.mark.parametrize("capacity", [1, 1 << 14, 1 << 30])
@pytest.mark.parametrize("order", ["as it is", "backwards", "shuffled"])
def test_fused_groups_may_be_split_over_buckets_of_one_session(served, capacity, order):
    """q, k and v in buckets of their own, in any order, and each bucket's memory used again at once."""
    names = list(served.new_weights())
    if order == "backwards":
        names.reverse()
    if order == "shuffled":
        names = [names[i] for i in torch.randperm(len(names), generator=torch.Generator().manual_seed(1))]
    tensors = inprocess.weights_of(served.model)
    opened = inprocess.session(served.version)
    served.engine.begin_update(opened)
    count = inprocess.send(served.engine, [(n, tensors[n]) for n in names], capacity=capacity)
    served.engine.finish_update(opened)
    assert count == {1: len(names), 1 << 30: 1}.get(capacity, count)
    assert served.gap() <= TOLERANCE and served.gap(temperature=0.0) <= TOLERANCE


def test_old_weights_would_be_seen(served):
    """The comparison of this file has teeth: an engine that kept its weights is off by more than WRONG."""
    served.new_weights()
    assert served.gap() > WRONG


@pytest.mark.parametrize(
    "left_out",
    [
        "model.layers.0.self_attn.v_proj.weight",
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.1.mlp.up_proj.weight",
        "model.layers.0.mlp.down_proj.weight",
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    ],
)
def test_a_session_that_lacks_one_weight_is_refused(served, left_out):
    """vLLM itself would go on: with half a fused group neither old nor new, or with the old output layer of a
    tied model."""
    tensors = {name: t for name, t in served.new_weights().items() if name != left_out}
    part = left_out.split(".")[-2].split("_")[0]
    group = {"v": "qkv_proj", "q": "qkv_proj", "up": "gate_up_proj"}.get(part, left_out)
    refused(served, tensors.items(), f"lacks weights: .*{group}")


def test_a_weight_that_comes_twice_is_refused(served):
    tensors = list(served.new_weights().items())
    refused(served, [*tensors[:4], tensors[1]], f"{tensors[1][0]} was sent twice")


@pytest.mark.parametrize(
    "name",
    [
        "base_model.model.model.norm.weight",
        "model.layers.0.mlp.down_proj.bias",
        "model.layers.7.mlp.up_proj.weight",
        "model.nothing.weight",
    ],
)
def test_an_unknown_weight_is_refused(served, name):
    refused(served, [*served.new_weights().items(), (name, torch.zeros(64))], "lockstep_receive")


@pytest.mark.parametrize("name", ["model.norm.weight", "model.layers.0.self_attn.k_proj.weight"])
def test_a_wrong_shape_is_refused(served, name):
    tensors = served.new_weights()
    tensors[name] = torch.zeros(3, *tensors[name].shape[1:])
    refused(served, tensors.items(), "lockstep_receive|lockstep_finish")


def test_the_prefix_cache_is_flushed(served):
    """A prompt of more than two blocks is cached, and computed anew after an update."""
    asked = [request(prompt(LONG), temperature=0.0, max_tokens=2)]
    served.engine.generate(asked)
    assert served.engine.generate(asked)[0][0].cached_tokens >= 256
    served.heal()
    assert served.engine.generate(asked)[0][0].cached_tokens == 0


def test_without_the_flush_logprobs_would_be_wrong(served, monkeypatch):
    """vLLM leaves the flush to its caller: this shows that ours is what makes the others pass."""
    assert served.gap() <= TOLERANCE
    monkeypatch.setattr(served.engine._core, "reset_prefix_cache", lambda: True)
    served.new_weights()
    served.heal()
    assert served.gap() > WRONG
    assert served.gap(length=20) <= TOLERANCE, "prompts below one block cannot show it"


def test_a_flush_that_fails_leaves_the_engine_dirty(served, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setattr(served.engine._core, "reset_prefix_cache", lambda: False)
        with raises(EngineError, "refused: prefix cache"):
            served.heal()
    assert served.engine.dirty
    with raises(EngineError, "wrong-state: dirty"):
        served.engine.generate([request(prompt(4))])


def test_weights_by_file(served, tmp_path):
    tensors = served.new_weights()
    opened = inprocess.session(served.version)
    served.engine.begin_update(opened)
    for index, half in enumerate((list(tensors)[::2], list(tensors)[1::2])):
        layout = Layout(1 << 30)
        for name in half:
            layout.place(name, tensors[name])
        path = tmp_path / f"{index}.safetensors"
        save_file({name: tensors[name].clone() for name in half}, path)
        served.engine.receive(
            WeightBucket(
                index=index,
                specs=tuple(layout.specs),
                num_bytes=layout.num_bytes,
                transport="disk",
                handle={"path": str(path)},
            )
        )
    served.engine.finish_update(opened)
    assert served.gap() <= TOLERANCE


@pytest.mark.parametrize("transport", ["ipc", "collective"])
def test_other_transports_are_refused(served, transport):
    served.engine.begin_update(inprocess.session())
    with raises(EngineError, "unsupported-combination: engine.transfer", transport=transport):
        served.engine.receive(
            WeightBucket(index=0, specs=(), num_bytes=0, transport=transport, handle={"group": "g"})
        )
    served.engine.fail_update("test")


def test_weights_are_read_back_by_their_own_names(served):
    """Slices of fused parameters too; matrices are packed on a CPU and left out."""
    tensors = served.new_weights()
    served.heal()
    found = served.engine.read_back([*tensors, "model.nothing.weight"])
    assert {
        "model.layers.1.self_attn.q_proj.bias",
        "model.layers.1.self_attn.k_proj.bias",
        "model.layers.1.self_attn.v_proj.bias",
        "model.embed_tokens.weight",
        "model.norm.weight",
    } <= set(found)
    assert "model.nothing.weight" not in found
    for name, head in found.items():
        assert torch.equal(head, tensors[name].flatten()[:64]), name


def test_no_session_is_open_or_two_are(served):
    opened = inprocess.session()
    with raises(EngineError, "wrong-state: no update is open"):
        inprocess.send(served.engine, served.new_weights().items())
    with raises(EngineError, "wrong-state: no update is open"):
        served.engine.finish_update(opened)
    served.engine.begin_update(opened)
    with raises(EngineError, "wrong-state: is being updated"):
        served.engine.begin_update(opened)
    with raises(EngineError, "wrong-state: is being updated"):
        served.engine.generate([request(prompt(4))])
    with raises(EngineError, "wrong-state: is being updated"):
        served.engine.sleep()
    served.engine.fail_update("test")


def test_an_update_waits_for_running_samples(served):
    """Samples of one request never come from two versions."""
    asked = [request(prompt(5), range(8), max_tokens=400)]
    before = served.engine.stats().policy_version
    running, results = threading.Event(), []

    def sample():
        first = request(prompt(3), max_tokens=2)
        results.append(served.engine.generate([first, *asked], on_completion=lambda *_: running.set()))

    thread = threading.Thread(target=sample)
    thread.start()
    assert running.wait(60)
    with raises(EngineError, "deadline", samples=8):
        served.engine.begin_update(inprocess.session(50, seconds=0.01))
    assert not served.engine.dirty
    served.new_weights()
    inprocess.push(served.engine, served.model, 51)
    assert results, "the update did not wait"
    thread.join()
    assert {c.policy_version for c in results[0][1]} == {before}
    assert {len(c.token_ids) for c in results[0][1]} == {400}
    assert served.gap() <= TOLERANCE


def test_a_bucket_after_the_deadline_is_refused(served):
    """The worker is told to be slow; the session's deadline ends the wait, not the worker."""
    core = served.engine._core
    slow, original = threading.Event(), core.rpc
    core.rpc = lambda *arguments: (slow.wait(2.0), original(*arguments))[1]
    try:
        started = time.monotonic()
        opened = inprocess.session(seconds=0.3)
        with raises(EngineError, "deadline: lockstep_begin"):
            served.engine.begin_update(opened)
        assert time.monotonic() - started < 1.5
    finally:
        slow.set()
        core.rpc = original
    with raises(EngineError, "wrong-state: failed"):
        served.engine.generate([request(prompt(4))])
    # The next test of this module needs an engine: what was slow has ended by now.
    served.engine._thread._stuck, served.engine._state = None, "awake"
