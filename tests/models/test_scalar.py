"""Models with a scalar head: where it comes from, and what the trainer's forward makes of it."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from raising import raises
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForSequenceClassification

from lockstep.config.model import ModelConfig
from lockstep.config.train import TrainConfig
from lockstep.errors import ModelError
from lockstep.models.export import export_hf
from lockstep.models.heads import linear_values, scalar_head
from lockstep.models.load import LoadedModel, load_model
from lockstep.packing import Planner
from lockstep.protocols.train import LossOutput, StepStats
from lockstep.schema.batch import PackedBatch, TrainSample
from lockstep.train.local import LocalBackend

CPU = torch.device("cpu")
SHAPE = ModelConfig(name="shape:tiny-llama", dtype="float32")


def load(config: ModelConfig = SHAPE, *, materialize: bool = True) -> LoadedModel:
    return load_model(config, attention="sdpa", device=CPU, head="scalar", materialize=materialize)


@pytest.fixture(scope="module")
def policy_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("policy") / "model"
    export_hf(load_model(SHAPE, attention="sdpa", device=CPU).module, None, folder)
    return folder


def test_fresh_head_over_the_policys_decoder(policy_folder: Path) -> None:
    """From a shape and from a folder of a causal LM: its decoder, and the same drawn head, also where weights
    are read part by part."""
    config = SHAPE.model_copy(update={"name": str(policy_folder)})
    policy = load_model(SHAPE, attention="sdpa", device=CPU).module.state_dict()
    for model in (load(), load(config)):
        weights = model.module.state_dict()
        assert {name for name in weights if name not in policy} == {"score.weight"}
        assert all(torch.equal(weights[name], policy[name]) for name in weights if name in policy)
    head = weights["score.weight"]
    hidden = head.shape[1]
    assert head.shape[0] == 1
    assert float(head.std()) == pytest.approx(1 / (hidden + 1), rel=0.3)
    for sharded in (load(materialize=False), load(config, materialize=False)):
        assert sharded.source is not None
        assert torch.equal(sharded.source.read("score.weight", device=CPU), head)
        part = sharded.source.read_part("score.weight", dim=1, start=3, stop=9, device=CPU)
        assert torch.equal(part, head[:, 3:9])


def test_an_export_keeps_the_head_and_loads_in_transformers(tmp_path: Path) -> None:
    model = load()
    scores = scalar_head(model.module)
    assert scores is not None
    with torch.no_grad():
        scores.weight.add_(1.0)
    export_hf(model.module, None, tmp_path / "value")
    theirs = AutoModelForSequenceClassification.from_pretrained(tmp_path / "value")
    assert theirs.config.num_labels == 1
    again = load(SHAPE.model_copy(update={"name": str(tmp_path / "value")}))
    for name, weight in model.module.state_dict().items():
        assert torch.equal(theirs.state_dict()[name], weight)
        assert torch.equal(again.module.state_dict()[name], weight)


@pytest.mark.parametrize("materialize", [True, False])
def test_head_of_the_wrong_width_is_refused(tmp_path: Path, materialize: bool) -> None:
    export_hf(load().module, None, tmp_path / "value")
    file = tmp_path / "value" / "model.safetensors"
    weights = load_file(file)
    weights["score.weight"] = weights["score.weight"].expand(2, -1).contiguous()
    save_file(weights, file, metadata={"format": "pt"})
    with raises(ModelError, "wrong-shape: score.weight"):
        load(SHAPE.model_copy(update={"name": str(tmp_path / "value")}), materialize=materialize)


def test_masked_rows_may_hold_anything() -> None:
    """Value 0 and no gradient, also of the weight."""
    hidden = torch.tensor([[1.0, 2.0], [float("nan"), float("inf")], [3.0, -1.0]], requires_grad=True)
    weight = torch.tensor([[0.5, 0.25]], requires_grad=True)
    values = linear_values(hidden, weight, torch.tensor([True, False, True]))
    assert values.tolist() == [1.0, 0.0, 1.25]
    values.sum().backward()
    assert hidden.grad is not None and hidden.grad.tolist() == [[0.5, 0.25], [0.0, 0.0], [0.5, 0.25]]
    assert weight.grad is not None and weight.grad.tolist() == [[4.0, 1.0]]


class SquaredSum:
    """Half the squared value of every slot, weighted."""

    separable, entropy_grad, terms = True, False, ("value",)

    def __call__(
        self, logprobs: Tensor, entropy: Tensor, batch: PackedBatch, rows: Tensor | slice
    ) -> LossOutput:
        loss = (0.5 * logprobs.square() * batch.loss_weights[rows]).sum()
        return LossOutput(loss, logprobs.detach()[None])

    def metrics(self, batches: object, stats: StepStats) -> dict[str, float]:
        return {}


def documents() -> list[TrainSample]:
    """Two of one prompt, one of another; the last token of the last one is scored too."""
    generator = torch.Generator().manual_seed(0)
    samples = []
    for number, length in enumerate((9, 12, 6)):
        ids = torch.randint(0, 100, (length,), generator=generator)
        ids[:4] = torch.arange(4) + (number == 2)
        mask = torch.arange(length) >= 3
        mask[-1] = number == 2
        samples.append(ScoredSample(token_ids=ids, loss_mask=mask, sample_id=number))
    return samples


class ScoredSample(TrainSample):
    def __post_init__(self) -> None:
        """The last token may be scored."""


@pytest.mark.parametrize("layout", ["packed", "shared", "padded"])
@pytest.mark.parametrize("static", [False, True])
def test_values_and_gradients_are_transformers(layout: str, static: bool) -> None:
    model = load()
    theirs = AutoModelForSequenceClassification.from_config(
        copy.deepcopy(model.module.config), dtype=torch.float32, attn_implementation="eager"
    )
    theirs.load_state_dict(model.module.state_dict())
    samples = documents()
    expected, total = [], torch.zeros(())
    for sample in samples:
        hidden = theirs.model(input_ids=sample.token_ids[None], use_cache=False).last_hidden_state[0]
        values = torch.where(sample.loss_mask, theirs.score(hidden)[:, 0], 0.0)
        expected.append(values.detach())
        total = total + 0.5 * values.square().sum()
    total.backward()  # type: ignore[no-untyped-call]
    train = TrainConfig(layout=layout, attention="sdpa", token_budget=64)  # type: ignore[arg-type]
    backend = LocalBackend(train.model_copy(update={"static_capacity": static}), model=model, total_steps=1)
    planner = Planner(
        token_budget=64, layout=train.layout, static_capacity=static, max_seqlen=12, max_documents=3
    )
    batches = planner(samples, [sample.loss_mask.float() for sample in samples])
    scored = dict[int, Tensor]()
    for batch, values in zip(batches, backend.logprobs(batches), strict=True):
        scored |= dict(zip(batch.sample_ids, batch.split(values), strict=True))
    for number, values in enumerate(expected):
        torch.testing.assert_close(scored[number], values, rtol=0, atol=1e-6)
    stats = backend.forward_backward(batches, SquaredSum())
    assert float(sum(stats.losses)) == pytest.approx(total.item(), rel=1e-5)
    for name, gradient in backend.gradients().items():
        torch.testing.assert_close(gradient, theirs.get_parameter(name).grad, rtol=1e-4, atol=1e-6)
