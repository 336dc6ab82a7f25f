"""Value and reward models in one process: layouts, execution modes and numbers of micro-batches give the loss
and the gradients of eager packs. Other stacks: test_train_backends.py."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from parity_models import relative_error
from torch import Tensor

from lockstep.algorithms.offline import RewardModel
from lockstep.algorithms.ppo import ValueLoss
from lockstep.config.algorithm import RewardModelLossConfig
from lockstep.config.model import ModelConfig
from lockstep.config.ppo import ValueConfig
from lockstep.config.support import cells_tested_by
from lockstep.config.train import TrainConfig
from lockstep.execution import install_joint
from lockstep.models.load import load_model
from lockstep.ops.losses import loss_weights
from lockstep.packing import Bucket, RowCapacity, pack, share
from lockstep.protocols.train import TokenLoss
from lockstep.schema.batch import PackedBatch, ScoredSample, TrainSample, ValueSample
from lockstep.train import base
from lockstep.train.local import LocalBackend

BUCKET = Bucket(tokens=128, documents=12, max_seqlen=16)
ROWS = RowCapacity(rows=128, keys=256, segments=48, longest=16)
LENGTHS = (5, 12, 7, 9, 6, 6, 11, 4)
PARTS = {1: [range(8)], 2: [range(6), range(6, 8)], 4: [range(0, 2), range(2, 4), range(4, 6), range(6, 8)]}
"""Number of micro-batches -> the documents of each; pairs stay together."""
LOCAL = sorted(
    {
        (cell["execution"], cell["layout"])
        for test in ("parity/test_documents.py", "parity/test_compiled.py", "execution/test_joint_backend.py")
        for cell in cells_tested_by(f"ci-cpu:tests/{test}")
        if cell["backend"] == "local" and cell["dtype"] == "float32" and cell["attention"] == "sdpa"
    }
)
"""Of the support table: what `local` offers on a CPU."""


@pytest.fixture(autouse=True)
def _op_by_op(monkeypatch: pytest.MonkeyPatch) -> None:
    torch._dynamo.reset()
    monkeypatch.setattr(base, "install_joint", functools.partial(install_joint, compiler="aot_eager"))
    blocks = functools.partial(base.compile_blocks, backend="aot_eager")
    monkeypatch.setattr(base, "compile_blocks", blocks)


def documents(role: str) -> tuple[list[TrainSample], list[Tensor], TokenLoss]:
    """Documents that begin with the same two tokens, their weights, and the loss."""
    generator = torch.Generator().manual_seed(0)
    samples: list[TrainSample] = []
    for number, length in enumerate(LENGTHS):
        ids = torch.randint(3, 200, (length,), generator=generator)
        ids[:2] = torch.tensor([7, 8])
        mask = torch.zeros(length, dtype=torch.bool)
        fields: dict[str, Any] = {"token_ids": ids, "loss_mask": mask, "sample_id": number}
        if role == "value":
            mask[1:-1] = True
            figures = torch.where(mask, torch.randn(2, length, generator=generator), 0.0)
            samples.append(ValueSample(**fields, returns=figures[0], old_values=figures[1]))
        else:
            mask[-1] = True
            samples.append(ScoredSample(**fields, margin=0.25 * (number // 2)))
    if role == "value":
        weights = loss_weights([sample.loss_mask for sample in samples], aggregation="token_mean")
        return samples, weights, ValueLoss(ValueConfig())
    task = RewardModel(RewardModelLossConfig(center_coef=0.01))
    return samples, task.loss_weights(samples), task.loss()


def trained(
    role: str, *, parts: Sequence[Sequence[int]], execution: str = "eager", layout: str = "packed"
) -> tuple[float, dict[str, Tensor], dict[int, Tensor]]:
    """The loss, the gradients, and the values or scores of each document."""
    samples, weights, loss = documents(role)
    bucket = None if execution == "eager" else BUCKET
    batches: list[PackedBatch] = [
        pack([samples[i] for i in part], [weights[i] for i in part], bucket=bucket) for part in parts
    ]
    if layout == "shared":
        batches = [share(batch, None if bucket is None else ROWS) for batch in batches]
    model = load_model(
        ModelConfig(name="shape:tiny-llama", dtype="float32", num_layers=2),
        attention="sdpa",
        device=torch.device("cpu"),
        head="scalar",
    )
    settings: Any = {"execution": execution, "layout": layout, "attention": "sdpa"}
    backend = LocalBackend(TrainConfig(**settings), model=model, total_steps=1)
    stats = backend.forward_backward(batches, loss)
    gradients = {name: gradient.clone() for name, gradient in backend.gradients().items()}
    outputs: dict[int, Tensor] = {}
    for batch, values in zip(batches, stats.logprobs, strict=True):
        outputs.update(zip(batch.sample_ids, batch.split(values.cpu()), strict=True))
    backend.close()
    return float(sum(float(each) for each in stats.losses)), gradients, outputs


def assert_equal(role: str, **how: Any) -> None:
    (loss, gradients, outputs), expected = trained(role, **how), trained(role, parts=PARTS[1])
    assert loss == pytest.approx(expected[0], rel=3e-6)
    assert relative_error(expected[1], gradients) < 3e-6
    assert outputs.keys() == expected[2].keys()
    for number, values in outputs.items():
        torch.testing.assert_close(values, expected[2][number], rtol=3e-6, atol=3e-6)


@pytest.mark.parametrize("role", ["value", "rm"])
@pytest.mark.parametrize(("execution", "layout"), LOCAL)
def test_every_mode_and_layout_is_eager_packed(role: str, execution: str, layout: str) -> None:
    assert_equal(role, parts=PARTS[2], execution=execution, layout=layout)


@pytest.mark.parametrize("role", ["value", "rm"])
@pytest.mark.parametrize("count", [2, 4])
def test_micro_batches_add_up(role: str, count: int) -> None:
    assert_equal(role, parts=PARTS[count])


def test_the_support_table_offers_every_mode_and_layout() -> None:
    assert {mode for mode, _ in LOCAL} == {"eager", "compile", "joint"}
    assert {layout for _, layout in LOCAL} == {"packed", "padded", "shared"}
