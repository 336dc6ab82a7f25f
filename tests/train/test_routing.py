"""Router losses in a step: their gradients are those of transformers' auxiliary loss, in every layout."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from raising import raises
from torch import Tensor
from transformers import AutoModelForCausalLM

from lockstep.config.model import ModelConfig
from lockstep.config.train import TrainConfig
from lockstep.errors import TrainError
from lockstep.execution import compile_blocks, decoder_layers
from lockstep.invariant.experts import routers
from lockstep.models.forward import hidden_states
from lockstep.models.load import LoadedModel, load_model
from lockstep.packing import empty_batch, share
from lockstep.schema.batch import PackedBatch
from lockstep.train.local import LocalBackend

AUX, Z = 0.3, 0.05


def model(attention: str = "sdpa") -> LoadedModel:
    config = ModelConfig(name="shape:tiny-qwen3-moe", dtype="float32")
    return load_model(config, attention=attention, device=torch.device("cpu"))


def step(batches: list[PackedBatch], loss: Any, **train: Any) -> tuple[dict[str, Tensor], Any, LocalBackend]:
    backend = LocalBackend(TrainConfig(**train), model=model(), total_steps=1)
    stats = backend.forward_backward(batches, loss)
    return backend.gradients(), stats, backend


def transformers_gradients(batch: PackedBatch) -> tuple[dict[str, Tensor], float, float]:
    """Of AUX times the auxiliary loss plus Z times the mean of logsumexp^2, on padded documents; and the two
    losses. transformers' own routers and experts."""
    source = model("hf:sdpa").module
    own = AutoModelForCausalLM.from_config(source.config, dtype=torch.float32)
    own.load_state_dict(source.state_dict())
    documents = batch.split(batch.token_ids)
    ids = torch.nn.utils.rnn.pad_sequence(documents, batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(d) for d in documents], batch_first=True)
    out = own(input_ids=ids, attention_mask=mask, output_router_logits=True)
    logits = torch.stack([each.reshape(*mask.shape, -1)[mask.bool()] for each in out.router_logits])
    z = logits.logsumexp(-1).square().mean()
    (AUX * out.aux_loss + Z * z).backward()
    found = {name: p.grad for name, p in own.named_parameters() if p.grad is not None}
    return found, float(out.aux_loss.detach()), float(z.detach())


def apart(some: dict[str, Tensor], others: dict[str, Tensor]) -> float:
    """The largest difference of a gradient, relative to the norm of `others`."""
    return max(float((some[name] - other).norm() / other.norm()) for name, other in others.items())


@pytest.mark.parametrize(
    "settings",
    [{}, {"layout": "padded"}, {"layout": "shared"}, {"activation_checkpointing": True}],
    ids=["packed", "padded", "shared", "checkpointed"],
)
def test_gradients_are_those_of_transformers(settings, documents, batch_of, loss):
    some = documents(3, seed=1)
    prompt = some[0][:4]
    batch = batch_of([prompt + each for each in some], weight=1 / 50)
    packed = share(batch) if settings.get("layout") == "shared" else batch
    plain, alone, _ = step([packed], loss, **settings)
    found, stats, backend = step([packed], loss, router_aux_loss=AUX, router_z_loss=Z, **settings)
    wanted, aux, z = transformers_gradients(batch)
    assert {"model.layers.0.mlp.gate.weight", "model.layers.1.mlp.gate.weight"} <= wanted.keys()
    own = {name: found[name] - plain[name] for name in wanted}
    assert apart(own, wanted) < 2e-5
    assert torch.equal(stats.logprobs[0], alone.logprobs[0])
    added = float(stats.losses[0] - alone.losses[0])
    assert added == pytest.approx(AUX * aux + Z * z, rel=1e-5)
    metrics = backend.optimizer_step()
    assert metrics["experts/aux_loss"] == pytest.approx(aux, rel=1e-5)
    assert metrics["experts/z_loss"] == pytest.approx(z, rel=1e-5)


def test_micro_batches_count_by_their_tokens(documents, batch_of, loss):
    """Two packs: the loss of each, by its share of the tokens."""
    first = batch_of(documents(2, seed=1), weight=1 / 50)
    second = batch_of(documents(3, seed=2), weight=1 / 50, first_id=2)
    plain, _, _ = step([first, second], loss)
    found, _, backend = step([first, second], loss, router_aux_loss=AUX, router_z_loss=Z)
    tokens = first.num_tokens + second.num_tokens
    parts = [(transformers_gradients(each), each.num_tokens / tokens) for each in (first, second)]
    wanted = {n: sum(part[0][n] * share for part, share in parts) for n in parts[0][0][0]}
    assert apart({name: found[name] - plain[name] for name in wanted}, wanted) < 2e-5
    aux = sum(part[1] * share for part, share in parts)
    assert backend.optimizer_step()["experts/aux_loss"] == pytest.approx(aux, rel=1e-5)


@pytest.mark.parametrize("accumulate", ["pack", "sample"])
def test_tokens_that_are_not_trained_on_count(documents, batch_of, loss, accumulate):
    """Also in a micro-batch without others, and in a step of these alone."""
    first = batch_of(documents(1, seed=1), weight=1 / 50)
    second = empty_batch(batch_of(documents(1, seed=2), weight=1 / 50, first_id=1))
    tokens = first.num_tokens + second.num_tokens
    aux = Z if accumulate == "pack" else 0.0  # see check_experts
    settings = {"router_aux_loss": aux, "router_z_loss": Z, "accumulate": accumulate}
    plain, _, counting = step([first, second], loss, accumulate=accumulate)
    alone, _, _ = step([first], loss)
    assert apart(plain, alone) < 1e-6
    found, stats, backend = step([first, second], loss, **settings)
    of_second, _, _ = step([second], loss, **settings)
    of_first, _, _ = step([first], loss, **settings)
    wanted = {
        name: plain[name]
        + (of_second[name] * second.num_tokens + (of_first[name] - alone[name]) * first.num_tokens) / tokens
        for name in of_second
    }
    assert apart(found, wanted) < 1e-5 and float(stats.losses[1]) > 0.0
    assert not bool(stats.logprobs[1].any())
    assert backend.optimizer_step()["experts/z_loss"] > 0.0
    # Without router losses its routes are still counted, and there is no gradient.
    assert counting._routing()._tokens == tokens * 2 * 2
    nothing, stats, backend = step([second], loss, accumulate=accumulate)
    assert nothing == {} and float(stats.losses[0]) == 0.0
    with raises(TrainError, "no-gradients"):
        backend.optimizer_step()


def test_loads_of_a_step(documents, batch_of, loss):
    """As counted from the router's logits; none without a forward; scoring is not counted."""
    batch = batch_of(documents(3, seed=1), weight=1 / 50)
    _, _, backend = step([batch], loss)
    chosen: list[Tensor] = []
    for layer in decoder_layers(backend.module):
        layer.mlp.gate.register_forward_hook(lambda part, given, out: chosen.append(out[2]))
    backend.logprobs([batch])
    counts = [torch.bincount(each.flatten(), minlength=8).double() for each in chosen]
    shares = torch.stack([each / each.sum() for each in counts])
    metrics = backend.optimizer_step()
    assert metrics["experts/load_max"] == pytest.approx(float(shares.max()) * 8)
    entropy = -(shares * shares.clamp(min=1e-30).log()).sum(-1).mean() / torch.tensor(8.0).log()
    assert metrics["experts/entropy"] == pytest.approx(float(entropy), rel=1e-6)
    assert metrics["experts/dropped_tokens"] == 0.0
    assert "experts/aux_loss" not in metrics and "experts/z_loss" not in metrics


def compiled_step(batch: PackedBatch, loss: Any, *, compiler: str) -> None:
    """Loss, logprobs and gradients of a compiled step are those of an eager one."""
    settings = {"attention": "varlen", "static_capacity": False, "router_aux_loss": AUX, "router_z_loss": Z}
    figures = []
    for execution in ("eager", "compile"):
        backend = LocalBackend(TrainConfig(**settings), model=model("varlen"), total_steps=1)
        if execution == "compile":
            compile_blocks(backend.module, backend=compiler)
            backend._outer.compiled = True
        stats = backend.forward_backward([batch], loss)
        figures.append((stats.logprobs[0], backend.gradients()))
    (eager, wanted), (compiled, found) = figures
    assert (compiled - eager).abs().max() <= (0.0 if compiler == "aot_eager" else 2e-5)
    assert apart(found, wanted) < 2e-5


def test_layers_are_one_graph_with_eager_bits(documents, batch_of, loss):
    """fullgraph: a graph break, or a wait for the device's counts, would raise."""
    compiled_step(batch_of(documents(3, seed=1), weight=1 / 50), loss, compiler="aot_eager")


@pytest.mark.exhaustive
def test_inductor_computes_the_same(documents, batch_of, loss):
    compiled_step(batch_of(documents(3, seed=1), weight=1 / 50), loss, compiler="inductor")


@pytest.mark.parametrize("layout", ["packed", "shared"])
def test_routes_that_an_update_changes(documents, batch_of, loss, layout):
    """As forwards before and after show; in every second step."""
    some = documents(3, seed=1)
    batch = batch_of([some[0][:4] + each for each in some], weight=1 / 50)
    packed = share(batch) if layout == "shared" else batch
    train = TrainConfig(layout=layout, lr=0.01, route_changes_every=2)
    backend = LocalBackend(train, model=model(), total_steps=3)
    seen: list[Tensor] = []

    def routes() -> Tensor:
        seen.clear()
        hidden_states(backend.module, batch, layout="packed")
        return torch.stack(seen).sort(-1).values

    for layer in decoder_layers(backend.module):
        layer.mlp.gate.register_forward_hook(lambda part, given, out: seen.append(out[2]))
    for number in range(3):
        before = routes()
        backend.forward_backward([packed], loss)
        metrics = backend.optimizer_step()
        after = routes()
        kept = (before[..., None] == after[..., None, :]).any(-1).double().mean()
        if number == 1:
            assert "experts/routes_changed" not in metrics
        else:
            assert metrics["experts/routes_changed"] == pytest.approx(1.0 - float(kept)) and kept < 1.0


def test_checkpointed_layers_leave_nothing_behind(documents, batch_of, loss):
    batch = batch_of(documents(3, seed=1), weight=1 / 50)
    *_, backend = step([batch], loss, activation_checkpointing=True, router_aux_loss=AUX)
    assert [part.seen for _, part in routers(backend.module)] == [None, None]
