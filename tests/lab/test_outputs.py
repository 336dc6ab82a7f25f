from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file

from lockstep.schema.batch import PackedBatch
from lockstep_lab.replay.outputs import KeptOutputs, gradient_places


def batch() -> PackedBatch:
    return PackedBatch(
        token_ids=torch.tensor([1, 2, 3, 4, 0, 0]),
        positions=torch.tensor([0, 1, 2, 0, 0, 1]),
        cu_seqlens=torch.tensor([0, 3, 4, 6], dtype=torch.int32),
        max_seqlen=3,
        labels=torch.tensor([2, 3, -100, -100, -100, -100]),
        loss_mask=torch.tensor([False, True, False, False, False, False]),
        loss_weights=torch.zeros(6),
        lengths=(3, 1, 2),
        sample_ids=(0, 1),
    )


def test_logprobs_of_trained_tokens_and_summed_gradients(tmp_path: Path) -> None:
    kept = KeptOutputs(gradient_inputs=2, entries=4)
    kept.add_logprobs(7, torch.tensor([0.0, -2.5, 0.0, 0.0, 9.0, 9.0]), batch())
    small, large = torch.tensor([[1.0, 2.0]]), torch.arange(10.0)
    assert kept.wants_gradients
    kept.add_gradients(7, {"a": small, "b": large})
    kept.add_gradients(9, {"a": 10 * small, "b": large.bfloat16()})
    assert not kept.wants_gradients
    kept.write(tmp_path)
    found = load_file(tmp_path / "outputs.safetensors")
    assert found["logprobs/7"].tolist() == [-2.5]
    assert found["gradients/a"].tolist() == [11.0, 22.0]
    places = gradient_places("b", 10, 4)
    assert places is not None and found["gradients/b"].tolist() == (2 * large[places]).tolist()
    assert kept.summary() == {
        "file": "outputs.safetensors",
        "logprobs": 1,
        "gradient_inputs": [7, 9],
        "gradients": "6 of 12 entries",
    }


def test_places_depend_on_the_name_only() -> None:
    assert gradient_places("a", 4, 4) is None
    first, again, other = (gradient_places(name, 10**6, 64) for name in ("a", "a", "b"))
    assert first is not None and again is not None and other is not None
    assert first.tolist() == again.tolist() == sorted(first.tolist()) != other.tolist()
    assert first.shape == (64,) and int(first.min()) >= 0 and int(first.max()) < 10**6


def test_gradients_are_copies() -> None:
    kept, gradient = KeptOutputs(gradient_inputs=1), torch.ones(3)
    kept.add_gradients(0, {"a": gradient})
    gradient.zero_()
    assert kept.gradients["a"].tolist() == [1.0, 1.0, 1.0]
