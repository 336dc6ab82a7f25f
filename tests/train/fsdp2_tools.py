"""What the checks of fsdp2_worker.py share: the two backends, their inputs, and how they are compared."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import shutil
import tempfile
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from lockstep.algorithms.ppo import ValueLoss
from lockstep.config.model import LoraConfig, ModelConfig
from lockstep.config.train import TrainConfig
from lockstep.models.heads import HeadKind
from lockstep.models.load import LoadedModel, load_model
from lockstep.packing.packs import Bucket, repack
from lockstep.protocols.train import LossOutput
from lockstep.schema.batch import PackedBatch, ValueBatch
from lockstep.train.fsdp2.backend import FSDP2Backend
from lockstep.train.local import LocalBackend

_spec = importlib.util.spec_from_file_location("fixtures", Path(__file__).with_name("conftest.py"))
assert _spec is not None and _spec.loader is not None
fixtures = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(fixtures)


class OfWholeDocuments(fixtures.WholeSequence):  # type: ignore[name-defined, misc]
    """Not a sum over tokens: the square of what each document's tokens add up to, and an entropy term."""

    entropy_grad = True

    def __call__(self, logprobs: Tensor, entropy: Tensor, batch: PackedBatch, rows: Any) -> LossOutput:
        document = torch.bucketize(torch.arange(batch.num_slots), batch.cu_seqlens[1:], right=True)[rows]
        weighted = (logprobs + 0.1 * entropy) * batch.loss_weights[rows]
        sums = torch.zeros(len(batch.lengths)).index_add(0, document, weighted)
        terms = torch.where(batch.loss_mask[rows], logprobs.detach().exp(), 0.0)[None]
        return LossOutput((sums - sums.square()).sum(), terms)


BUCKET = Bucket(tokens=128, documents=16, max_seqlen=32)


class Collectives(TorchDispatchMode):
    """Counts collectives by the name of their operation."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.counts[func._opname] += 1
        return func(*args, **(kwargs or {}))


def load(
    *,
    dtype: str = "float32",
    shape: str = "tiny-llama",
    weights: bool = True,
    head: HeadKind = "logits",
    lora: LoraConfig | None = None,
    attention: str = "sdpa",
) -> LoadedModel:
    """With LoRA, B is not 0: the first step has gradients of A too."""
    config = ModelConfig(name=f"shape:{shape}", dtype=dtype, lora=lora)
    device = torch.device("cpu")
    model = load_model(config, attention=attention, device=device, materialize=weights, head=head)
    if lora is None:
        return model
    if model.source is not None:
        return dataclasses.replace(model, source=TrainedAdapters(model.source))
    with torch.no_grad():
        for name, parameter in model.module.named_parameters():
            if ".lora_B." in name:
                parameter.copy_(adapter_of(name, parameter))
    return model


def adapter_of(name: str, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(sum(map(ord, name)))
    return (0.05 * torch.randn(like.shape, generator=generator)).to(like.dtype)


@dataclasses.dataclass
class TrainedAdapters:
    """A WeightSource whose B are not 0."""

    base: Any

    @property
    def device(self) -> torch.device:
        return self.base.device

    def read(self, name: str, *, device: torch.device) -> Tensor:
        values = self.base.read(name, device=device)
        return adapter_of(name, values) if ".lora_B." in name else values

    def read_part(self, name: str, *, dim: int, start: int, stop: int, device: torch.device) -> Tensor:
        if ".lora_B." in name:
            return self.read(name, device=device).narrow(dim, start, stop - start)
        return self.base.read_part(name, dim=dim, start=start, stop=stop, device=device)


def settings(**train: Any) -> TrainConfig:
    return TrainConfig(**{"lr": 1e-3, "max_grad_norm": 0.5, "weight_decay": 0.01, **train})


def pair(
    *,
    dtype: str = "float32",
    shape: str = "tiny-llama",
    total_steps: int = 10,
    ref: bool = False,
    head: HeadKind = "logits",
    lora: LoraConfig | None = None,
    **train: Any,
) -> tuple[LocalBackend, FSDP2Backend]:
    config, attention = settings(**train), train.get("attention", "sdpa")
    alone = config.model_copy(
        update={
            "tp": 1,
            "ring": 1,
            "ring_comm": "auto",
            "execution": "eager",
            "optimizer_device": "model",
            "parameter_device": "model",
        }
    )
    whole = load(dtype=dtype, shape=shape, head=head, lora=lora, attention=attention)
    local = LocalBackend(alone, model=whole, total_steps=total_steps, ref=ref)
    model = load(dtype=dtype, shape=shape, weights=False, head=head, lora=lora, attention=attention)
    return local, FSDP2Backend(config, model=model, total_steps=total_steps, ref=ref)


def micro_batches(step: int, count: int = 3) -> list[PackedBatch]:
    docs = [fixtures.random_documents(2 + i, seed=100 * step + i) for i in range(count)]
    return [fixtures.build_batch(d, weight=1 / 50, first_id=10 * i) for i, d in enumerate(docs)]


def value_batches(step: int, count: int = 3) -> list[PackedBatch]:
    """The same documents for a value model: returns and old values are random."""
    generator = torch.Generator().manual_seed(step)
    found: list[PackedBatch] = []
    for batch in micro_batches(step, count):
        fields = {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
        returns, old = torch.randn(2, batch.num_slots, generator=generator)
        found.append(ValueBatch(**fields, returns=returns, old_values=0.1 * old))
    return found


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
    both: tuple[LocalBackend, FSDP2Backend],
    *,
    steps: int,
    tolerance: float,
    loss: Any = None,
    count: int = 3,
    bucket: Bucket | None = None,
) -> dict[str, float]:
    """Loss, logprobs, entropy, gradients, norm, and the weights at the end."""
    local, backend = both
    loss = fixtures.NegativeLogprob() if loss is None else loss
    batches_of = value_batches if isinstance(loss, ValueLoss) else micro_batches
    worst: dict[str, float] = {}

    def see(key: str, error: float) -> None:
        worst[key] = max(worst.get(key, 0.0), error)

    for step in range(steps):
        batches = [repack(batch, bucket) for batch in batches_of(step, count)]
        expected, found = local.forward_backward(batches, loss), backend.forward_backward(batches, loss)
        see("loss", apart(found.losses, expected.losses))
        see("logprobs", apart(found.logprobs, expected.logprobs))
        see("logprobs", apart(found.terms, expected.terms))
        see("entropy", apart(found.entropy, expected.entropy))
        see("gradient", gradient_error(backend.gradients(), local.gradients()))
        see("norm only", abs(backend.gradient_norm() / local.gradient_norm() - 1))
        see(
            "scored",
            apart(backend.logprobs(batches), local.logprobs(batches)),
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


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """An empty folder that all ranks see."""
    names: list[Any] = [tempfile.mkdtemp(prefix="lockstep-fsdp2-") if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(names)
    try:
        yield Path(names[0])
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(names[0])


def folder(parent: Path, name: str) -> Path:
    if dist.get_rank() == 0:
        (parent / name).mkdir()
    dist.barrier()
    return parent / name


def train(backend: Any, steps: Sequence[int]) -> list[float]:
    """Losses and gradient norms."""
    figures: list[float] = []
    for step in steps:
        stats = backend.forward_backward(micro_batches(step), fixtures.NegativeLogprob())
        figures += [float(loss) for loss in stats.losses] + [backend.optimizer_step()["grad_norm"]]
    return figures


def difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    return max(abs(a / b - 1) for a, b in zip(ours, theirs, strict=True))


def another(*, dtype: str, seed: int, **train: Any) -> FSDP2Backend:
    config = ModelConfig(name="shape:tiny-qwen3", dtype=dtype, seed=seed)
    model = load_model(config, attention="sdpa", device=torch.device("cpu"), materialize=False)
    return FSDP2Backend(settings(**train), model=model, total_steps=10)


def equal_tensors(one: Path, other: Path) -> bool:
    """Whether two checkpoints hold the same bits."""

    def read(place: Path) -> dict[str, Tensor]:
        found = {}
        for path in sorted(place.glob("*.safetensors")):
            if not path.name.startswith("rng"):
                found |= load_file(path)
        return found

    a, b = read(one), read(other)
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
