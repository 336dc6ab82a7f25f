"""What a proof compares: every way of ours to run a miniature, against transformers' eager attention on each
document alone.

Both sides differentiate the same loss, a sum of all trained tokens' logprobs with random weights, so one
backward compares the gradients of all Parameters.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from lockstep import attention
from lockstep.models.architectures import caps_scores
from lockstep.models.forward import hidden_states
from lockstep.models.heads import head_of, head_options
from lockstep.models.miniature import VOCABULARY, documents, random_miniature
from lockstep.ops.logprobs import linear_logprobs
from lockstep.packing import pack
from lockstep.schema.batch import TrainSample

TOLERANCE = 1e-4
"""Nats; rounding of float32 on a CPU stays below 2e-5."""
GRADIENT_TOLERANCE = 1e-4
"""Of the difference's norm, relative to the gradient's."""
_SMALL_GRADIENT = 1e-2
"""Gradients below this share of the whole gradient's norm, such as that of a bias of keys, which is rounding
and nothing else, are measured against the share."""
KERNELS = ("sdpa", "varlen")
"""The kernels that a forward is proven with; on a CPU both are exact. The tests of the support table compare
others with them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """Where one way to compute something differs most from transformers' own."""

    way: str
    """A row of the proof, such as "packed (varlen)"."""
    what: str
    """What is compared, such as "the logprob of a token in a document of 9 tokens"."""
    ours: float
    theirs: float
    """The same of the reference."""
    size: float
    """Nats, or relative to a gradient's norm; infinite for NaN."""
    allowed: float
    reference: str = "with transformers' eager attention on that document alone"

    of_gradient: bool = False

    @property
    def passed(self) -> bool:
        """Whether the row holds."""
        return self.size <= self.allowed

    def in_words(self) -> str:
        """Both numbers, and what they are of."""
        return (
            f"{self.what} is {self.ours:.6f} {self.way}, but {self.theirs:.6f} {self.reference} "
            f"(difference {self.size:.1e}, allowed {self.allowed:g})"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Figures:
    """The logprobs of some documents, and the gradients of the loss."""

    logprobs: Sequence[Tensor]
    """[trained tokens] of each document."""
    gradients: Mapping[str, Tensor]
    """Parameter name -> gradient; those that no loss reaches are not in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """Documents, and which of their tokens are trained."""

    ids: Sequence[Sequence[int]]
    prompts: Sequence[int]
    """Tokens of each document that are not trained, at least 1: a first token has no logprob."""

    def weights(self, index: int) -> Tensor:
        """[trained tokens], the weights of the loss."""
        generator = torch.Generator().manual_seed(index)
        return torch.rand(len(self.ids[index]) - self.prompts[index], generator=generator) + 0.5


def corpora() -> tuple[Corpus, Corpus]:
    """Documents of their own, and documents with a common prompt."""
    ids = documents()
    generator = torch.Generator().manual_seed(1)
    prompt, *rest = (torch.randint(VOCABULARY, (n,), generator=generator).tolist() for n in (10, 3, 8, 20))
    return (
        Corpus(ids=ids, prompts=[1] * len(ids)),
        Corpus(ids=[prompt + more for more in rest], prompts=[len(prompt)] * len(rest)),
    )


def forward_gaps(small: PretrainedConfig) -> list[Gap]:
    """Measure a miniature alone, packed in two orders, with a shared prompt, and padded on either side: the
    logprobs and gradients, with each kernel."""
    own, group = corpora()
    truth, truth_of_group = eager_figures(small, own), eager_figures(small, group)
    everything, alone = [tuple(range(len(own.ids)))], [(i,) for i in range(len(own.ids))]
    gaps = []
    for kernel in kernels_of(small):
        module = random_miniature(small, attention=attention.implementation(kernel))
        for way, groups, layout in (
            ("alone", alone, {}),
            ("packed", everything, {}),
            ("packed in another order", [everything[0][::-1]], {}),
            ("padded on the right", everything, {"layout": "padded", "padding_side": "right"}),
            ("padded on the left", everything, {"layout": "padded", "padding_side": "left"}),
        ):
            gaps += compare(f"{way} ({kernel})", figures(module, own, groups, layout), truth, own)
        shared = figures(module, group, [(0, 1, 2)], {"layout": "shared"})
        gaps += compare(f"with a shared prompt ({kernel})", shared, truth_of_group, group)
    return gaps


def kernels_of(small: PretrainedConfig) -> tuple[str, ...]:
    """KERNELS that can compute a model: torch's flash attention has no caps."""
    return KERNELS[:1] if caps_scores(small) else KERNELS


def compare(way: str, ours: Figures, theirs: Figures, corpus: Corpus) -> list[Gap]:
    """Return the largest gap of the logprobs and that of the gradients."""
    return [
        largest_gap(way, ours.logprobs, theirs.logprobs, [len(ids) for ids in corpus.ids]),
        gradient_gap(way, ours.gradients, theirs.gradients),
    ]


def largest_gap(way: str, ours: Sequence[Tensor], theirs: Sequence[Tensor], lengths: Sequence[int]) -> Gap:
    """Return the largest gap over all documents.

    Args:
        ours, theirs: one tensor of logprobs for each document.
        lengths: tokens of the documents.
    """
    tokens = [
        Gap(
            way=way,
            what=f"the logprob of a token in a document of {length} tokens",
            ours=float(a),
            theirs=float(b),
            size=_finite(abs(float(a) - float(b))),
            allowed=TOLERANCE,
        )
        for left, right, length in zip(ours, theirs, lengths, strict=True)
        for a, b in zip(left, right, strict=True)
    ]
    return max(tokens, key=lambda gap: gap.size)


def gradient_gap(way: str, ours: Mapping[str, Tensor], theirs: Mapping[str, Tensor]) -> Gap:
    """Return the largest gap over all Parameters; one without a gradient counts as one of zeros."""
    whole = torch.stack([gradient.norm() for gradient in theirs.values()]).norm()
    gaps = []
    for name, right in theirs.items():
        left = ours.get(name, torch.zeros_like(right))
        difference = (left - right).flatten()
        at = int(difference.abs().nan_to_num(nan=float("inf")).argmax())
        gaps.append(
            Gap(
                way=way,
                what=f"element {at} of the gradient of {name}",
                ours=float(left.flatten()[at]),
                theirs=float(right.flatten()[at]),
                size=_finite(float(difference.norm() / right.norm().clamp(min=_SMALL_GRADIENT * whole))),
                allowed=GRADIENT_TOLERANCE,
                of_gradient=True,
            )
        )
    return max(gaps, key=lambda gap: gap.size)


def _finite(size: float) -> float:
    return size if size == size else float("inf")


def figures(
    module: nn.Module, corpus: Corpus, groups: Sequence[Sequence[int]], layout: Mapping[str, Any]
) -> Figures:
    """Return what the trainer's forward computes; `groups` are the packs."""
    module.zero_grad(set_to_none=True)
    module.train()  # as in training: dropout and the like, whatever their keys in the config, show as gaps
    options = head_options(module, temperature=1.0, compiled=False)
    by_document: dict[int, Tensor] = {}
    for group in groups:
        samples = [sample(i, corpus) for i in group]
        batch = pack(samples, [torch.ones(len(sample)) for sample in samples])
        hidden = hidden_states(module, batch, **layout)
        logprobs, _ = linear_logprobs(hidden, head_of(module).weight, batch.labels, head=options)
        by_document |= dict(zip(batch.sample_ids, batch.split(logprobs), strict=True))
    trained = [by_document[i][corpus.prompts[i] - 1 : -1] for i in range(len(corpus.ids))]
    return _differentiated(module, trained, corpus)


def _differentiated(module: nn.Module, trained: Sequence[Tensor], corpus: Corpus) -> Figures:
    loss = torch.stack([(t * corpus.weights(i)).sum() for i, t in enumerate(trained)]).sum()
    loss.backward()
    gradients = {name: p.grad for name, p in module.named_parameters() if p.grad is not None}
    return Figures(logprobs=[t.detach() for t in trained], gradients=gradients)


def sample(number: int, corpus: Corpus) -> TrainSample:
    """Return a document of the corpus as the trainer takes it."""
    ids = torch.tensor(corpus.ids[number])
    mask = torch.ones(len(ids), dtype=torch.bool)
    mask[: corpus.prompts[number] - 1] = False
    mask[-1] = False
    return TrainSample(token_ids=ids, loss_mask=mask, sample_id=number)


def eager_figures(
    small: PretrainedConfig, corpus: Corpus, *, prepare: Callable[[nn.Module], object] = lambda module: None
) -> Figures:
    """Return what transformers computes alone, each document in a model that has seen no other: some rotary
    embeddings remember.

    Args:
        prepare: changes the module first, in place.
    """
    module = random_miniature(small, attention="eager")
    prepare(module)
    trained = [
        _eager_logprobs(fresh(module), ids)[prompt - 1 :]
        for ids, prompt in zip(corpus.ids, corpus.prompts, strict=True)
    ]
    return _differentiated(module, trained, corpus)


def fresh(module: nn.Module) -> nn.Module:
    """Return a copy with buffers of its own over the same Parameters."""
    return copy.deepcopy(module, {id(p): p for p in module.parameters()})


def _eager_logprobs(module: Any, ids: Sequence[int]) -> Tensor:
    """[L - 1] logprobs of all tokens but the first."""
    logits = module(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    labels = torch.tensor(ids[1:])[:, None]
    logprobs: Tensor = logits[:-1].float().log_softmax(-1).gather(1, labels)[:, 0]
    return logprobs


def eager_logprobs(small: PretrainedConfig, documents: Sequence[Sequence[int]]) -> list[Tensor]:
    """[L - 1] logprobs of all tokens of each document but the first, by transformers alone."""
    module = random_miniature(small, attention="eager")
    with torch.inference_mode():
        return [_eager_logprobs(fresh(module), ids) for ids in documents]
