"""A rank of test_ranks.py: rank 0 trains models on both ranks and one alone, and prints how they compare."""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path

import torch
from safetensors.torch import load_file

from lockstep.errors import TrainError
from lockstep.ranks.context import RankContext, init_ranks
from lockstep.serve.losses import make_loss
from lockstep.serve.models import AdamSettings, AdapterSpec, BaseModel, TrainingModel
from lockstep.serve.ranks import RankedModel, RankModels
from lockstep.serve.wire import Datum

LOSS = make_loss("cross_entropy", {})
ADAM = AdamSettings(learning_rate=0.01, beta1=0.9, beta2=0.95, eps=1e-8, weight_decay=0.0, grad_clip_norm=1.0)


def datum(number: int, weight: float = 1.0) -> Datum:
    tokens = torch.tensor([5, 6, 7, 8, 9, *range(20, 21 + number % 4), 40 + number])
    weights = torch.full((len(tokens) - 1,), weight)
    return Datum(inputs=tokens[:-1], targets=tokens[1:], floats={"weights": weights})


DATA = [datum(number) for number in range(5)]


def same(one: list[torch.Tensor], other: list[torch.Tensor]) -> bool:
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


def saved(model: RankedModel | TrainingModel) -> dict[str, torch.Tensor]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "weights.safetensors"
        model.save_weights(path)
        return load_file(path)


def gap(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    return max(float((one[name] - other[name]).abs().max()) for name in one | other)


def compare(models: RankModels, base: BaseModel, folder: Path) -> dict[str, object]:
    spec, found = AdapterSpec(rank=4, seed=7), dict[str, object]()
    alone, whole, split = TrainingModel(base, spec), models.make(base, spec), models.make(base, spec)
    found["forward"] = same(alone.forward(DATA), whole.forward(DATA))
    one, two = alone.forward_backward(DATA, LOSS), whole.forward_backward(DATA, LOSS)
    found["forward_backward"] = same(one[0], two[0]) and one[1] == two[1]
    for part in (DATA[:1], DATA[1:4], DATA[4:]):
        split.forward_backward(part, LOSS)
    norms = [model.optim_step(ADAM)["grad_norm"] for model in (alone, whole, split)]
    weights = [saved(model) for model in (alone, whole, split)]
    found["norm"], found["chunks"] = abs(norms[1] / norms[0] - 1.0), norms[1] == norms[2]
    found["weights"], found["chunked weights"] = gap(weights[0], weights[1]), gap(weights[1], weights[2])
    found["stepped"] = gap(weights[1], saved(TrainingModel(base, spec)))

    found["replicas"] = same(*([x] for x in whole.forward([DATA[1]] * 2)))
    for first in (True, False):  # rank 1 has the datum that fails: of the step's first call, and of a later
        if not first:
            whole.forward_backward(DATA[:2], LOSS)
        try:
            whole.forward_backward([datum(0), datum(1, weight=3e38)], LOSS)
        except TrainError as error:
            found[f"failed, {first}"] = str(error)
    split.forward_backward(DATA[:2], LOSS)
    for model in (whole, split):
        model.optim_step(ADAM)
    found["after a failure"] = gap(saved(whole), saved(split))

    whole.save(folder)
    loaded = models.make(base, spec, folder, optimizer=True)
    for model in (whole, loaded):
        model.forward_backward(DATA[:1], LOSS)  # rank 1 has nothing
        model.optim_step(ADAM)
    found["loaded"] = gap(saved(whole), saved(loaded))
    del whole, split, model
    models.idle()
    found["kept"] = len(models._replicas)
    return found


def main(ranks: RankContext, out: Path) -> None:
    base = BaseModel("tiny", "shape:tiny-qwen3", device=ranks.device, dtype="float32")
    models = RankModels([base], ranks)
    if not ranks.is_first:
        models.follow()
        return
    (out / "state").mkdir()
    (out / "found.json").write_text(json.dumps(compare(models, base, out / "state")))
    models.end()


if __name__ == "__main__":
    with init_ranks(device="cpu", seconds=120) as context:
        main(context, Path(sys.argv[1]))
