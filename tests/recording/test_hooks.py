"""`lockstep.record` on a plain Hugging Face loop: nothing changes, the surrogate has its gradients."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import lockstep
from lockstep.algorithms.sft import SFTLoss
from lockstep.config.model import ModelConfig
from lockstep.config.train import TrainConfig
from lockstep.models.load import load_model
from lockstep.ops.losses import ppo_clip
from lockstep.recording import Recording
from lockstep.train.local import LocalBackend


def model() -> nn.Module:
    config = ModelConfig(name="shape:tiny-llama", dtype="float32")
    return load_model(config, attention="hf:sdpa", device=torch.device("cpu")).module


def batch(seed: int) -> tuple[Tensor, Tensor]:
    ids = torch.randint(3, 256, (3, 9), generator=torch.Generator().manual_seed(seed))
    mask = torch.ones_like(ids)
    mask[0, :4] = 0
    mask[2, :2] = 0
    return ids, mask


def policy_loss(module: nn.Module, ids: Tensor, mask: Tensor, *, entropy: float = 0.0) -> Tensor:
    logits = module(input_ids=ids, attention_mask=mask, logits_to_keep=5).logits[:, :-1] / 0.7
    logps = logits.log_softmax(-1)
    chosen = logps.gather(2, ids[:, -4:, None])[..., 0]
    advantages = torch.tensor([[1.0], [-0.5], [2.0]])
    ratio = torch.exp(chosen - chosen.detach() + 0.1)
    value = ppo_clip(ratio, advantages, clip_low=0.2, clip_high=0.2).mean()
    return value + entropy * (logps.exp() * logps).sum(-1).mean()


def train(directory: Path | None, *, entropy: float = 0.0) -> list[tuple[float, list[Tensor]]]:
    module = model().train()
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-2)
    handle = None if directory is None else lockstep.record(module, directory, temperature=0.7)
    seen = []
    for step in range(2):
        for micro_batch in range(2):
            loss = policy_loss(module, *batch(2 * step + micro_batch), entropy=entropy)
            loss.backward()
            with torch.no_grad():
                module(input_ids=batch(0)[0])
        seen.append((float(loss.detach()), [p.grad.clone() for p in module.parameters()]))
        optimizer.step()
        optimizer.zero_grad()
    if handle is not None:
        handle.close()
    return seen


def test_the_run_is_the_same_to_the_bit_and_the_surrogate_has_its_gradients(tmp_path: Path) -> None:
    plain, recorded = train(None), train(tmp_path / "r")
    for (loss, gradients), (other, others) in zip(plain, recorded, strict=True):
        assert loss == other
        assert all(torch.equal(a, b) for a, b in zip(gradients, others, strict=True))
    recording = Recording.open(tmp_path / "r")
    assert [tuple(meta.key) for meta in recording.metas] == [(0, 0, 0), (0, 1, 0), (1, 0, 0), (1, 1, 0)]
    assert {meta.num_micro_batches for meta in recording.metas} == {2}
    assert recording.lengths[0] == (5, 9, 7)
    assert recording.header.axes["padding_side"] == "left"
    loaded = load_model(
        ModelConfig(name="shape:tiny-llama", dtype="float32"), attention="sdpa", device=torch.device("cpu")
    )
    config = TrainConfig(attention="sdpa", device="cpu", grad_accum_dtype="float32")
    backend = LocalBackend(config, model=loaded, total_steps=1, temperature=0.7)
    inputs = [recording[0], recording[1]]
    stats = backend.forward_backward([one.batch for one in inputs], SFTLoss())
    for one, logprobs in zip(inputs, stats.logprobs, strict=True):
        assert one.outputs is not None and one.outputs.logprobs is not None
        torch.testing.assert_close(one.outputs.logprobs, logprobs, rtol=0, atol=1e-5)
    names = [name for name, _ in loaded.module.named_parameters()]
    own = torch.cat([backend.gradients()[name].flatten() for name in names])
    foreign = torch.cat([g.flatten() for g in plain[0][1]])
    assert float((own - foreign).norm() / foreign.norm()) < 1e-5


@pytest.mark.parametrize(("entropy", "low", "high"), [(0.0, 0.0, 1e-5), (0.1, 1e-2, 1.0)])
def test_the_residual_tells_an_entropy_bonus(tmp_path: Path, entropy: float, low: float, high: float) -> None:
    train(tmp_path / "r", entropy=entropy)
    for meta in Recording.open(tmp_path / "r").metas:
        assert low <= meta.documents[0]["call"]["relative_residual"] < high
