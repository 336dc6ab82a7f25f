"""LocalBackend with train.execution = "joint", and with train.accumulate = "sample"."""

import dataclasses
import functools

import pytest
import torch
from parity_models import relative_error
from raising import raises

from lockstep.config.model import LoraConfig, ModelConfig
from lockstep.config.support import cells_tested_by
from lockstep.config.train import TrainConfig
from lockstep.errors import ConfigError, TrainError
from lockstep.execution import install_joint, is_compiled
from lockstep.models.load import load_model
from lockstep.packing import Bucket, RowCapacity, pack, share
from lockstep.protocols.train import LossOutput
from lockstep.schema.batch import PolicySample, PreferenceSample
from lockstep.train import base
from lockstep.train.local import LocalBackend, merge_samples, single_samples

CELLS = [
    (c["attention"], c["layout"])
    for c in cells_tested_by("ci-cpu:tests/execution/test_joint_backend.py")
    if c["dtype"] == "float32"
]
BUCKET = Bucket(tokens=64, documents=8, max_seqlen=16)
LENGTHS = (5, 12, 7, 9)


@pytest.fixture(autouse=True)
def _op_by_op(monkeypatch):
    torch._dynamo.reset()
    monkeypatch.setattr(base, "install_joint", functools.partial(install_joint, compiler="aot_eager"))


class WeightedLogprob:
    """Minus the weighted sum of logprobs; `separable` decides which head runs."""

    entropy_grad = False
    terms = ()

    def __init__(self, *, separable=True):
        self.separable = separable

    def __call__(self, logprobs, entropy, batch, rows):
        return LossOutput(-(logprobs * batch.loss_weights[rows]).sum())


def packs(*, bucket=BUCKET, groups=((0, 1, 2), (3, 1)), layout="packed"):
    """In layout shared, documents that begin with the same three tokens, not trained on."""
    samples = []
    for index, length in enumerate(LENGTHS):
        generator = torch.Generator().manual_seed(index)
        mask = torch.ones(length, dtype=torch.bool)
        mask[-1] = mask[1] = False
        token_ids = torch.randint(3, 200, (length,), generator=generator)
        if layout == "shared":
            token_ids[:3], mask[:2] = torch.tensor([7, 8, 9]), False
        samples.append(
            PolicySample(
                token_ids=token_ids,
                loss_mask=mask,
                sample_id=index,
                rollout_logprobs=torch.where(mask, -2.0 - index, 0.0),
                advantages=torch.where(mask, 1.0 + index, 0.0),
                policy_version=index,
            )
        )
    weights = [0.01 * (1 + s.sample_id) * torch.ones(len(s)) for s in samples]
    made = [pack([samples[i] for i in g], [weights[i] for i in g], bucket=bucket) for g in groups]
    if layout != "shared":
        return made
    capacity = None if bucket is None else RowCapacity(rows=64, keys=128, segments=24, longest=16)
    return [share(batch, capacity) for batch in made]


def make_backend(*, lora=None, ref=False, shape="tiny-llama", **train):
    attention = train.pop("attention", "varlen")
    config = ModelConfig(name=f"shape:{shape}", dtype="float32", lora=lora)
    model = load_model(config, attention=attention, device=torch.device("cpu"))
    settings = TrainConfig(lr=1e-2, attention=attention, **train)
    return LocalBackend(settings, model=model, total_steps=10, temperature=0.7, ref=ref)


def assert_close(found, expected):
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(("attention", "layout"), CELLS)
def test_a_joint_step_is_the_eager_step(attention, layout):
    joint = make_backend(attention=attention, layout=layout, execution="joint", max_recompiles=0)
    eager = make_backend(attention=attention, layout=layout)
    assert is_compiled(joint.module)
    for backend in (eager, joint):
        backend.stats = backend.forward_backward(packs(layout=layout), WeightedLogprob())
    assert_close(joint.stats.losses, eager.stats.losses)
    assert_close(joint.stats.logprobs, eager.stats.logprobs)
    assert_close(joint.stats.entropy, eager.stats.entropy)
    assert relative_error(eager.gradients(), joint.gradients()) <= 1e-5
    assert joint.optimizer_step() == pytest.approx(eager.optimizer_step(), rel=1e-4)
    again = joint.logprobs(packs(groups=((3, 0), (2, 1)), layout=layout))
    assert_close(again, eager.logprobs(packs(groups=((3, 0), (2, 1)), layout=layout)))
    joint.forward_backward(packs(groups=((3, 0), (2, 1)), layout=layout), WeightedLogprob())
    joint.optimizer_step()
    report = joint.compile_report()
    assert (report.graph_breaks, report.recompiles) == (0, 0) and report.graphs >= 1


def test_old_and_new_logprobs_are_the_same_numbers_and_the_reference_keeps_its_weights():
    backend = make_backend(execution="joint", ref=True)
    before = backend.ref.logprobs(packs())
    assert all(map(torch.equal, before, backend.logprobs(packs())))
    stats = backend.forward_backward(packs(), WeightedLogprob(separable=False))
    assert all(map(torch.equal, before, stats.logprobs))
    backend.optimizer_step()
    assert all(map(torch.equal, before, backend.ref.logprobs(packs())))
    assert not torch.equal(before[0], backend.logprobs(packs())[0])


def test_adapters_and_the_model_without_them():
    lora = LoraConfig(rank=4, alpha=8.0, target_modules=("q_proj", "down_proj"))
    joint, eager = make_backend(execution="joint", lora=lora, ref=True), make_backend(lora=lora, ref=True)
    for backend in (eager, joint):
        for name, parameter in backend.module.named_parameters():
            if "lora_B" in name:
                torch.nn.init.normal_(parameter, std=0.1, generator=torch.Generator().manual_seed(3))
        backend.forward_backward(packs(), WeightedLogprob())
    assert relative_error(eager.gradients(), joint.gradients()) <= 1e-5
    assert_close(joint.logprobs(packs()), eager.logprobs(packs()))
    assert_close(joint.ref.logprobs(packs()), eager.ref.logprobs(packs()))
    apart = joint.logprobs(packs())[0] - joint.ref.logprobs(packs())[0]
    assert apart.abs().max() > 1e-3


@pytest.mark.parametrize("separable", [True, False])
@pytest.mark.parametrize("train", [{}, {"layout": "padded"}, {"execution": "joint"}])
def test_one_sample_at_a_time_gives_the_gradients_of_the_pack(train, separable):
    pack_of, one = make_backend(**train), make_backend(accumulate="sample", **train)
    bucket = BUCKET if train.get("execution") == "joint" else None
    for backend in (pack_of, one):
        backend.stats = backend.forward_backward(packs(bucket=bucket), WeightedLogprob(separable=separable))
    assert_close(one.stats.losses, pack_of.stats.losses)
    assert_close(one.stats.logprobs, pack_of.stats.logprobs)
    assert_close(one.stats.entropy, pack_of.stats.entropy)
    assert relative_error(pack_of.gradients(), one.gradients()) <= 1e-5
    logprobs = [b.logprobs(packs(bucket=bucket)) for b in (pack_of, one)]
    assert_close(*logprobs)


def test_bfloat16_samples_are_added_up_in_float32():
    config = ModelConfig(name="shape:tiny-llama", dtype="bfloat16")
    model = load_model(config, attention="sdpa", device=torch.device("cpu"))
    settings = TrainConfig(lr=1e-2, attention="sdpa", accumulate="sample")
    backend = LocalBackend(settings, model=model, total_steps=1)
    backend.forward_backward(packs(bucket=None)[:1], WeightedLogprob())
    assert all(g.dtype == torch.float32 for g in backend.live_gradients().values())


def test_parts_of_a_pack_keep_every_field_of_their_samples():
    whole = packs(groups=((2, 0, 3),))[0]
    exact = single_samples(whole, static=False)
    assert [b.sample_ids for b in exact] == [(2,), (0,), (3,)]
    assert [b.lengths for b in exact] == [(7,), (5,), (9,)]
    assert [b.policy_versions for b in exact] == [(2,), (0,), (3,)]
    assert exact[1].cu_seqlens.tolist() == [0, 5] and exact[1].cu_seqlens.dtype == torch.int32
    start = 7
    for name in ("token_ids", "labels", "loss_mask", "loss_weights", "advantages", "rollout_logprobs"):
        assert torch.equal(getattr(exact[1], name), getattr(whole, name)[start : start + 5]), name
    assert torch.equal(merge_samples([b.advantages for b in exact], whole), whole.advantages)
    static = single_samples(whole, static=True)
    # a quarter of 16 tokens, rounded up to 64 slots, and the pad documents that fill them
    assert [b.num_slots for b in static] == [64, 64, 64] and static[0].lengths == (7, 16, 16, 16, 9)
    assert torch.equal(merge_samples([b.advantages for b in static], whole), whole.advantages)


def test_parts_of_a_trajectory_stay_together_where_the_loss_is_of_whole_sequences():
    batch = packs(groups=((2, 0, 3),), bucket=None)[0]
    numbers = torch.tensor([4, 4, 0]).repeat_interleave(torch.tensor(batch.lengths))
    batch = dataclasses.replace(batch, trajectories=numbers)
    parts = single_samples(batch, static=False, whole=True)
    assert [b.sample_ids for b in parts] == [(2, 0), (3,)]
    assert torch.equal(merge_samples([b.advantages for b in parts], batch, whole=True), batch.advantages)
    assert [b.sample_ids for b in single_samples(batch, static=False)] == [(2,), (0,), (3,)]


def test_preference_pairs_stay_together():
    samples = [
        PreferenceSample(
            token_ids=torch.arange(n), loss_mask=torch.tensor([True] * (n - 1) + [False]), sample_id=i
        )
        for i, n in enumerate((4, 6, 3, 8))
    ]
    whole = pack(samples, [torch.ones(len(s)) for s in samples])
    assert [b.sample_ids for b in single_samples(whole, static=False)] == [(0, 1), (2, 3)]
    static = single_samples(pack(samples, [torch.ones(len(s)) for s in samples], bucket=BUCKET), static=True)
    assert [b.sample_ids for b in static] == [(0, 1), (2, 3)]
    assert static[1].lengths[:2] == (3, 8) and static[1].num_slots == 64


def test_settings_that_do_not_go_with_it_are_refused():
    with raises(ConfigError, "unsupported-combination: train.static_capacity"):
        make_backend(execution="joint", static_capacity=False)
    with raises(ConfigError, "missing-device: train.cuda_graph"):
        make_backend(execution="joint", cuda_graph=True)


def test_a_run_that_needs_another_shape_after_its_first_step_stops():
    backend = make_backend(execution="joint", max_recompiles=0)
    backend.forward_backward(packs(), WeightedLogprob())
    backend.optimizer_step()
    larger = packs(bucket=Bucket(tokens=96, documents=8, max_seqlen=16))
    backend.forward_backward(larger, WeightedLogprob())
    with raises(
        TrainError, "too-many-recompiles: train.max_recompiles", recompiles=3
    ):  # the head's kernels count too
        backend.optimizer_step()
    reasons = backend.compile_report().reasons
    assert "a joint graph for 1 x 96 token slots, beside 1 of other shapes" in reasons
