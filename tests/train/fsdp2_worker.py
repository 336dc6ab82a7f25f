"""One rank of test_fsdp2.py: an FSDP2Backend beside a LocalBackend that is given the same micro-batches. Runs
the checks named on the command line, one JSON object each on stdout."""

from __future__ import annotations

import importlib.util
import json
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lockstep.config.model import ModelConfig
from lockstep.config.train import TrainConfig
from lockstep.models.load import LoadedModel, load_model
from lockstep.ranks.context import init_ranks
from lockstep.schema.batch import PackedBatch
from lockstep.train.fsdp2 import FSDP2Backend
from lockstep.train.local import LocalBackend

_spec = importlib.util.spec_from_file_location("fixtures", Path(__file__).with_name("conftest.py"))
assert _spec is not None and _spec.loader is not None
fixtures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fixtures)


class OfWholeDocuments(fixtures.WholeSequence):  # type: ignore[name-defined, misc]
    """Not a sum over tokens: the square of what each document's tokens add up to, and an entropy term."""

    entropy_grad = True

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: PackedBatch, rows: Any) -> Tensor:
        document = torch.bucketize(torch.arange(batch.num_slots), batch.cu_seqlens[1:], right=True)[rows]
        weighted = (logprobs + 0.1 * entropy) * batch.loss_weights[rows]
        sums = torch.zeros(len(batch.lengths)).index_add(0, document, weighted)
        return (sums - sums.square()).sum()


def load(*, dtype: str = "float32", shape: str = "tiny-llama", weights: bool = True) -> LoadedModel:
    config = ModelConfig(name=f"shape:{shape}", dtype=dtype)
    return load_model(config, attention="sdpa", device=torch.device("cpu"), materialize=weights)


def settings(**train: Any) -> TrainConfig:
    return TrainConfig(**{"lr": 1e-3, "max_grad_norm": 0.5, "weight_decay": 0.01, **train})


def pair(
    *,
    dtype: str = "float32",
    shape: str = "tiny-llama",
    total_steps: int = 10,
    ref: bool = False,
    **train: Any,
) -> tuple[LocalBackend, FSDP2Backend]:
    config = settings(**train)
    alone = config.model_copy(
        update={
            "tp": 1,
            "ring": 1,
            "execution": "eager",
            "optimizer_device": "model",
            "parameter_device": "model",
        }
    )
    local = LocalBackend(alone, model=load(dtype=dtype, shape=shape), total_steps=total_steps, ref=ref)
    model = load(dtype=dtype, shape=shape, weights=False)
    return local, FSDP2Backend(config, model=model, total_steps=total_steps, ref=ref)


def micro_batches(step: int, count: int = 3) -> list[PackedBatch]:
    docs = [fixtures.random_documents(2 + i, seed=100 * step + i) for i in range(count)]
    return [fixtures.build_batch(d, weight=1 / 50, first_id=10 * i) for i, d in enumerate(docs)]


def relative(ours: Tensor, theirs: Tensor, *, floor: float = 0.0) -> float:
    size = max(float(theirs.double().norm()), floor)
    error = float((ours.double() - theirs.double()).norm())
    return error / size if size else error


def apart(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    return relative(torch.cat([t.flatten() for t in ours]), torch.cat([t.flatten() for t in theirs]))


def gradient_error(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """The largest over Parameters, relative to each one's size, or to 1e-6 of all together."""
    assert list(ours) == list(theirs), (list(ours), list(theirs))
    whole = 1e-6 * float(torch.stack([g.double().norm() for g in theirs.values()]).norm())
    return max(relative(ours[name], theirs[name], floor=whole) for name in theirs)


def compare_steps(
    local: LocalBackend,
    backend: FSDP2Backend,
    *,
    steps: int,
    tolerance: float,
    loss: Any = None,
    count: int = 3,
) -> dict[str, float]:
    """Loss, logprobs, entropy, gradients, norm, and the weights at the end."""
    loss = fixtures.NegativeLogprob() if loss is None else loss
    worst: dict[str, float] = {}

    def see(key: str, error: float) -> None:
        worst[key] = max(worst.get(key, 0.0), error)

    for step in range(steps):
        batches = micro_batches(step, count)
        expected, found = local.forward_backward(batches, loss), backend.forward_backward(batches, loss)
        see("loss", apart(found.losses, expected.losses))
        see("logprobs", apart(found.logprobs, expected.logprobs))
        see("entropy", apart(found.entropy, expected.entropy))
        see("gradient", gradient_error(backend.gradients(), local.gradients()))
        see("norm only", abs(backend.gradient_norm() / local.gradient_norm() - 1))
        see(
            "scored",
            apart(backend.logprobs(batches, model="policy"), local.logprobs(batches, model="policy")),
        )
        theirs, ours = local.optimizer_step(), backend.optimizer_step()
        see("norm", abs(ours["grad_norm"] / theirs["grad_norm"] - 1))
        assert ours["lr"] == theirs["lr"]
    weights = dict(backend.weights(policy_version=1).tensors())
    expected_weights = dict(local.weights(policy_version=1).tensors())
    assert weights.keys() == expected_weights.keys()
    assert all(
        weights[n].dtype == w.dtype and weights[n].shape == w.shape for n, w in expected_weights.items()
    )
    see("weights", max(relative(weights[n], w) for n, w in expected_weights.items()))
    assert all(error < tolerance for error in worst.values()), worst
    return worst


def check_sgd() -> Any:
    return compare_steps(*pair(optimizer="sgd", lr=0.1), steps=4, tolerance=1e-5)


def check_adamw() -> Any:
    return compare_steps(*pair(), steps=4, tolerance=1e-4)


def check_tp() -> Any:
    return compare_steps(*pair(optimizer="sgd", lr=0.1, tp=2), steps=3, tolerance=1e-5)


def check_tp_tied() -> Any:
    """tiny-qwen3: norms on heads, whose gradients are added up; embedding and head are one Parameter."""
    return compare_steps(*pair(shape="tiny-qwen3", tp=2), steps=3, tolerance=1e-4)


def check_ring() -> Any:
    return compare_steps(*pair(optimizer="sgd", lr=0.1, ring=2), steps=3, tolerance=1e-5)


def check_ring_whole() -> Any:
    """A loss that needs all logprobs of a document at once."""
    loss = OfWholeDocuments()
    return compare_steps(*pair(optimizer="sgd", lr=0.1, ring=2), steps=3, tolerance=1e-5, loss=loss)


CHECKS = {name.removeprefix("check_"): f for name, f in list(globals().items()) if name.startswith("check_")}


def main() -> None:
    torch.set_num_threads(1)
    with init_ranks(device="cpu", seconds=60.0):
        for name in sys.argv[1:]:
            torch.manual_seed(0)
            try:
                result = {"check": name, "ok": True, "seen": CHECKS[name]()}
            except Exception:
                result = {"check": name, "ok": False, "seen": traceback.format_exc()[-4000:]}
            print(json.dumps(result), flush=True)


if __name__ == "__main__":
    main()
