from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from raising import raises
from torch import Tensor
from transformers import AutoModelForCausalLM

from lockstep.config.model import LoraConfig, ModelConfig
from lockstep.config.train import TrainConfig
from lockstep.errors import ConfigError, ModelError, TrainError
from lockstep.models.load import load_model
from lockstep.observe.metrics import Spans
from lockstep.protocols.train import LossOutput
from lockstep.schema.batch import IGNORE_LABEL, PackedBatch
from lockstep.train.local import LocalBackend

LORA = LoraConfig(rank=4, alpha=8.0, target_modules=("q_proj", "v_proj", "down_proj"))


def gradients(backend: LocalBackend) -> list[Tensor]:
    found = backend._gradients.collect()
    assert all(g is not None for g in found)
    return [g.clone().float() for g in found if g is not None]


def distance(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """Relative, Frobenius over everything."""
    a, b = torch.cat([t.flatten() for t in ours]), torch.cat([t.flatten() for t in theirs])
    return float((a - b).norm() / b.norm())


def plain_loss(module: torch.nn.Module, batch: PackedBatch, temperature: float = 1.0) -> Tensor:
    """The slow reference: each document alone through transformers' own forward and log_softmax."""
    total = torch.zeros(())
    start = 0
    for length in batch.lengths:
        part = slice(start, start + length)
        start += length
        logits = module(input_ids=batch.token_ids[part][None]).logits[0].float() / temperature
        logp = torch.log_softmax(logits, -1)
        labels = batch.labels[part]
        chosen = logp.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        total = total - (torch.where(labels == IGNORE_LABEL, 0.0, chosen) * batch.loss_weights[part]).sum()
    return total


@pytest.fixture
def batch(documents: Any, batch_of: Any) -> PackedBatch:
    result: PackedBatch = batch_of(documents(4, seed=1), weight=1 / 50)
    return result


@pytest.mark.parametrize("separable", [True, False])
@pytest.mark.parametrize("static", [True, False])
@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_loss_and_gradients_are_those_of_a_plain_loop(
    make_backend, tiny_model, batch, request, separable, static, layout
):
    loss = request.getfixturevalue("loss" if separable else "whole_loss")
    backend = make_backend(static_capacity=static, layout=layout, temperature=0.7)
    stats = backend.forward_backward([batch], loss)
    reference = tiny_model(attention="hf:sdpa").module
    expected = plain_loss(reference, batch, 0.7)
    expected.backward()
    expected = expected.detach()
    assert float(stats.losses[0]) == pytest.approx(float(expected), rel=1e-5)
    assert distance(gradients(backend), [p.grad for p in reference.parameters()]) < 1e-5
    mask = batch.loss_mask
    assert float(-(stats.logprobs[0] * batch.loss_weights).sum()) == pytest.approx(float(expected), rel=1e-5)
    assert torch.equal(stats.logprobs[0] == 0, ~mask) and torch.equal(stats.entropy[0] == 0, ~mask)
    [logprobs] = backend.logprobs([batch])
    torch.testing.assert_close(logprobs, stats.logprobs[0], rtol=1e-5, atol=1e-5)


def test_training_is_a_plain_adamw_loop(make_backend, tiny_model, documents, batch_of, loss):
    """Five steps, clipped, with decay: weights as torch.optim.AdamW and clip_grad_norm_ leave them."""
    backend = make_backend(weight_decay=0.01, max_grad_norm=0.5, warmup_steps=2, schedule="linear")
    reference = tiny_model(attention="hf:sdpa").module
    embedding = reference.get_input_embeddings().weight
    matrices = [p for p in reference.parameters() if p.ndim >= 2 and p is not embedding]
    rest = [p for p in reference.parameters() if p.ndim < 2 or p is embedding]
    groups = [{"params": matrices, "weight_decay": 0.01}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.999), foreach=False)
    for step in range(5):
        batch = batch_of(documents(3, seed=step), weight=1 / 30)
        backend.forward_backward([batch], loss)
        update = backend.optimizer_step()
        optimizer.zero_grad()
        plain_loss(reference, batch).backward()
        norm = torch.nn.utils.clip_grad_norm_(reference.parameters(), 0.5)
        for group in optimizer.param_groups:
            group["lr"] = update["lr"]
        optimizer.step()
        assert update["grad_norm"] == pytest.approx(float(norm), rel=1e-5)
        assert float(norm) > 0.5
    ours = [p.detach() for p in backend.module.parameters()]
    theirs = [p.detach() for p in reference.parameters()]
    assert distance(ours, theirs) < 1e-6
    # single entries whose gradient is all rounding error move by a share of lr that depends on it
    assert max(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)) < 1e-5


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_micro_batches_add_up(make_backend, documents, batch_of, loss, dtype):
    docs = documents(8, seed=5)
    whole, parts = make_backend(dtype=dtype), make_backend(dtype=dtype)
    one = whole.forward_backward([batch_of(docs, weight=1 / 80)], loss)
    four = parts.forward_backward([batch_of(docs[i : i + 2], weight=1 / 80) for i in range(0, 8, 2)], loss)
    close = 1e-6 if dtype == "float32" else 2e-2  # bfloat16: its own rounding in every layer
    assert float(sum(four.losses)) == pytest.approx(float(one.losses[0]), rel=close)
    assert distance(gradients(parts), gradients(whole)) < close
    assert {g.dtype for g in parts._gradients.collect() if g is not None} == {torch.float32}


def test_accumulation_in_float32_is_closer_to_the_exact_sum(make_backend, documents, batch_of, loss):
    batches = [batch_of(documents(1, seed=s), weight=1 / 500) for s in range(24)]
    alone = []
    for batch in batches:
        backend = make_backend(dtype="bfloat16")
        backend.forward_backward([batch], loss)
        alone.append(gradients(backend))
    exact = [torch.stack(column).sum(0) for column in zip(*alone, strict=True)]
    errors = {}
    for dtype in ("float32", "model"):
        backend = make_backend(dtype="bfloat16", grad_accum_dtype=dtype)
        backend.forward_backward(batches, loss)
        errors[dtype] = distance(gradients(backend), exact)
    assert errors["float32"] < 1e-6 < 1e-3 < errors["model"], errors


def test_activation_checkpointing_gives_the_same_gradients(make_backend, batch, loss):
    plain, checkpointed = make_backend(), make_backend(activation_checkpointing=True)
    calls = 0
    layer = checkpointed.module.model.layers[0]

    def count(*_: object) -> None:
        nonlocal calls
        calls += 1

    layer.self_attn.register_forward_hook(count)
    for backend in (plain, checkpointed):
        backend.forward_backward([batch], loss)
    assert calls == 2  # forward, and once more in backward
    assert distance(gradients(checkpointed), gradients(plain)) == 0.0
    checkpointed.logprobs([batch])
    assert calls == 3


@pytest.mark.slow
@pytest.mark.exhaustive
def test_compiled_is_eager_within_tolerance(make_backend, batch, loss):
    eager, compiled = make_backend(), make_backend(execution="compile", activation_checkpointing=True)
    a, b = eager.forward_backward([batch], loss), compiled.forward_backward([batch], loss)
    torch.testing.assert_close(a.logprobs[0], b.logprobs[0], rtol=1e-5, atol=1e-5)
    assert distance(gradients(compiled), gradients(eager)) < 1e-5


def test_reference_stays_where_it_was(make_backend, batch, loss):
    backend = make_backend(ref=True, lr=1e-2)
    [before] = backend.logprobs([batch])
    backend.forward_backward([batch], loss)
    backend.optimizer_step()
    [ref], [policy] = backend.ref.logprobs([batch]), backend.logprobs([batch])
    assert torch.equal(ref, before)
    assert float((policy - before).abs().max()) > 1e-2


def test_a_backend_without_reference_says_so(make_backend):
    assert make_backend().ref is None


def test_lora_trains_the_adapters_only(make_backend, batch, loss):
    backend = make_backend(lora=LORA, ref=True, lr=1e-2)
    before = copy.deepcopy(backend.module.state_dict())
    [start] = backend.logprobs([batch])
    for _ in range(3):
        backend.forward_backward([batch], loss)
        backend.optimizer_step()
    changed = {name for name, t in backend.module.state_dict().items() if not torch.equal(t, before[name])}
    assert changed == {name for name in before if "lora_" in name}
    assert changed
    assert torch.equal(backend.ref.logprobs([batch])[0], start)  # B starts at zero
    assert float((backend.logprobs([batch])[0] - start).abs().max()) > 1e-2


def test_lora_weights_are_merged_under_hugging_face_names(make_backend, tiny_model, batch, loss):
    backend = make_backend(lora=LORA, lr=1e-2)
    backend.forward_backward([batch], loss)
    backend.optimizer_step()
    bare = tiny_model(attention="hf:sdpa").module
    bare.load_state_dict(dict(backend.weights(policy_version=1).tensors()))
    [ours] = backend.logprobs([batch])
    expected = plain_loss(bare, batch).detach()
    assert float(-(ours * batch.loss_weights).sum()) == pytest.approx(float(expected), rel=1e-5)


def test_export_is_a_model_folder(make_backend, batch, loss, tmp_path):
    backend = make_backend(lr=1e-2)
    backend.forward_backward([batch], loss)
    backend.optimizer_step()
    backend.export(tmp_path / "hf")
    read = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    for (name, a), b in zip(backend.module.named_parameters(), read.parameters(), strict=True):
        assert torch.equal(a, b), name


def test_eval_mode_outside_of_forward_backward(make_backend, batch, loss):
    backend = make_backend(lora=LoraConfig(rank=4, dropout=0.5, target_modules=("q_proj",)))
    seen = []
    backend.module.model.layers[0].register_forward_pre_hook(lambda m, _: seen.append(m.training))
    backend.forward_backward([batch], loss)
    backend.logprobs([batch])
    assert seen == [True, False]
    assert not backend.module.training


def bad_weight(batch: PackedBatch, value: float, slot: int = 2) -> PackedBatch:
    weights = batch.loss_weights.clone()
    weights[slot] = value
    return dataclasses.replace(batch, loss_weights=weights)


def snapshot(backend: LocalBackend) -> list[Tensor]:
    return [t.clone() for t in backend._live_state().values()]


def unchanged(backend: LocalBackend, before: Sequence[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(snapshot(backend), before, strict=True))


def test_a_loss_that_is_not_finite_names_its_samples(make_backend, documents, batch_of, loss):
    backend = make_backend()
    before = snapshot(backend)
    good = batch_of(documents(2, seed=1), weight=0.1, first_id=0)
    bad = bad_weight(batch_of(documents(2, seed=2), weight=0.1, first_id=40), float("nan"))
    with raises(TrainError, "not-finite", step=0, micro_batch=1, samples=[40, 41]):
        backend.forward_backward([good, bad], loss)
    assert unchanged(backend, before)
    with raises(TrainError, "no-gradients", step=0):
        backend.optimizer_step()
    backend.forward_backward([good], loss)
    assert backend.optimizer_step()["grad_norm"] > 0


class SquareRoot:
    """sqrt at 0: a finite loss, an infinite gradient."""

    separable = True
    entropy_grad = False
    terms = ()

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, batch: PackedBatch, rows: Tensor | slice
    ) -> LossOutput:
        weights = batch.loss_weights[rows]
        return LossOutput((logprobs * weights).abs().sqrt().sum())


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_norm_that_is_not_finite_names_the_micro_batch(make_backend, documents, batch_of, dtype):
    backend = make_backend(dtype=dtype)
    before = snapshot(backend)
    batches = [batch_of(documents(2, seed=s), weight=0.1, first_id=10 * s) for s in range(3)]
    batches[2] = bad_weight(batches[2], 0.0)
    backend.forward_backward(batches, SquareRoot())
    with raises(TrainError, "not-finite", step=0, micro_batch=2, samples=[20, 21]):
        backend.optimizer_step()
    assert unchanged(backend, before)
    assert backend.steps_done == 0


def test_out_of_memory_names_the_size_and_a_setting(make_backend, batch, loss, monkeypatch):
    backend = make_backend()

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    monkeypatch.setattr("lockstep.train.loss_module.run_decoder", full)
    slots = batch.num_slots
    with raises(TrainError, "out-of-memory: train.token_budget", micro_batch=0, tokens=slots):
        backend.forward_backward([batch], loss)
    with raises(TrainError, "out-of-memory: train.token_budget", tokens=slots):
        backend.logprobs([batch])


def test_another_runtime_error_is_not_dressed_up(make_backend, batch, loss, monkeypatch):
    backend = make_backend()

    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("shapes do not match")

    monkeypatch.setattr("lockstep.train.loss_module.run_decoder", broken)
    with pytest.raises(RuntimeError, check=lambda error: error.args == ("shapes do not match",)):
        backend.forward_backward([batch], loss)


def test_a_batch_with_nothing_to_train_is_zero(make_backend, batch, loss):
    empty = dataclasses.replace(batch, loss_mask=torch.zeros_like(batch.loss_mask))
    backend, other = make_backend(), make_backend()
    stats = backend.forward_backward([empty, batch], loss)
    other.forward_backward([batch], loss)
    assert float(stats.losses[0]) == 0.0
    assert distance(gradients(backend), gradients(other)) == 0.0


def test_an_execution_mode_of_another_backend_is_refused(make_backend):
    with raises(ConfigError, "unsupported-combination: train.execution"):
        make_backend(execution="deepcompile")


def test_a_model_with_experts_is_no_joint_graph() -> None:
    """Neither a value model of them, which the checks of a run do not see."""
    cpu, experts = torch.device("cpu"), ModelConfig(name="shape:tiny-qwen3-moe", dtype="float32")
    model = load_model(experts, attention="sdpa", device=cpu, head="scalar")
    config = TrainConfig(backend="local", device="cpu", attention="sdpa", execution="joint")
    with raises(ModelError, "unsupported-model: train.execution, 'joint', experts"):
        LocalBackend(config, model=model, total_steps=1)


def test_gradients_by_name_are_copies_on_the_host(make_backend, batch, loss):
    backend = make_backend()
    assert backend.gradients() == {} and backend.gradient_norm() == 0.0
    backend.forward_backward([batch, batch], loss)
    found, live = backend.gradients(), backend.live_gradients()
    parameters = dict(backend.module.named_parameters())
    assert found.keys() == live.keys() == parameters.keys()
    for name, gradient in found.items():
        assert gradient.dtype == torch.float32 and torch.equal(gradient, parameters[name].grad)
        assert live[name] is parameters[name].grad
    norm = float(torch.cat([g.double().flatten() for g in found.values()]).norm())
    assert backend.gradient_norm() == pytest.approx(norm, rel=1e-5)
    assert backend.optimizer_step()["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert backend.gradients() == {} and norm > 0
    assert float(torch.cat([g.double().flatten() for g in found.values()]).norm()) == norm


def test_the_halves_of_a_step_are_timed(make_backend, batch, loss):
    ticks = iter(range(1000))
    spans = Spans(clock=lambda: float(next(ticks)))
    backend = make_backend()
    backend.spans = spans
    backend.forward_backward([batch] * 3, loss)
    times = spans.flush()
    assert times["time/forward"] == times["time/backward"] == 3.0  # one tick of the clock in each of three


def test_a_backend_of_no_steps_has_no_optimizer(make_backend, batch, loss):
    backend = make_backend(dtype="bfloat16", total_steps=0)
    backend.forward_backward([batch], loss)
    assert backend.gradient_norm() > 0
    with raises(ConfigError, "missing-setting: total_steps"):
        backend.optimizer_step()
