"""A decoder's hidden states and gradients, eager and as a joint graph, for one and the same upstream
gradient."""

from __future__ import annotations

import torch
from parity_models import packs_of
from parity_models import tiny_model as _tiny_model
from torch import Tensor, nn

from lockstep.models.forward import decoder_inputs, run_decoder
from lockstep.packing import Bucket
from lockstep.schema.batch import PackedBatch

BUCKET = Bucket(tokens=64, documents=8, max_seqlen=16)
GROUPS = [[0, 1, 2], [3, 4]]


def tiny_model(architecture: str, kernel: str) -> nn.Module:
    """Two layers: gemma3's one with and one without a sliding window."""
    module = _tiny_model(architecture, kernel)
    module.model.layers = module.model.layers[:2]
    module.config.num_hidden_layers = 2
    return module


def untied(architecture: str, kernel: str) -> nn.Module:
    """A model whose head has a weight of its own."""
    module = tiny_model(architecture, kernel)
    module.lm_head.weight = nn.Parameter(0.5 * module.lm_head.weight.detach() + 0.01)
    module.config.tie_word_embeddings = False
    return module


def batches(*, bucket: Bucket | None = BUCKET) -> list[PackedBatch]:
    return packs_of(GROUPS, bucket=bucket)


def upstream(hidden: Tensor) -> Tensor:
    """[T, C]: another gradient for every element."""
    return torch.linspace(-1.0, 1.0, hidden.numel()).sin().view_as(hidden)


def run(module: nn.Module, packs: list[PackedBatch]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Hidden states of each pack, and the gradients of the parameters by name, of a sum that the tied head
    takes part in too."""
    found = []
    for pack in packs:
        # Inputs as compiled code gets them: the eager kernel of sdpa would go document by document.
        hidden = run_decoder(module, decoder_inputs(module, pack, compiled=True))
        logits = hidden @ module.lm_head.weight.T
        ((hidden * upstream(hidden)).sum() + logits.sin().sum()).backward()
        found.append(hidden.detach())
    grads = {n: p.grad for n, p in module.named_parameters(remove_duplicate=False) if p.grad is not None}
    module.zero_grad()
    return found, grads


def assert_same(one: tuple[list[Tensor], dict[str, Tensor]], other: tuple[list[Tensor], dict[str, Tensor]]):
    """Equal to the bit."""
    for a, b in zip(one[0], other[0], strict=True):
        assert torch.equal(a, b), f"hidden states differ by up to {(a - b).abs().max()}"
    assert one[1].keys() == other[1].keys() and one[1]
    different = [n for n in one[1] if not torch.equal(one[1][n], other[1][n])]
    assert not different, f"gradients differ: {different}"
