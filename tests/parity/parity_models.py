"""Tiny models of every supported architecture, and what the parity tests compare."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from lockstep import attention
from lockstep.models.forward import head_of, hidden_states
from lockstep.packing import Bucket, RowCapacity, pack, share
from lockstep.schema.batch import PackedBatch, TrainSample

_SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "tie_word_embeddings": True,
}
_KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
ARCHITECTURES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "qwen2": ("Qwen2Config", "Qwen2ForCausalLM", {}),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", {}),
    "mistral": ("MistralConfig", "MistralForCausalLM", {"sliding_window": 4}),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {
            "sliding_window": 4,
            "layer_types": _KINDS,
            "query_pre_attn_scalar": 8,
            "final_logit_softcapping": 30.0,
        },
    ),
}
LENGTHS = (5, 12, 1, 9, 3)
BUCKET = Bucket(tokens=64, documents=16, max_seqlen=16)


def tiny_model(architecture: str, kernel: str, *, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Weights large enough that attention is far from uniform; norms and biases are not ones and zeros."""
    config_name, class_name, extra = ARCHITECTURES[architecture]
    config = getattr(transformers, config_name)(**{**_SIZES, **extra})
    module: nn.Module = getattr(transformers, class_name)._from_config(
        config, attn_implementation=attention.implementation(kernel)
    )
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            gain = 2 if "self_attn" in name else 0.7
            scale = 0.2 if parameter.ndim == 1 else gain * parameter.shape[-1] ** -0.5
            shift = parameter if parameter.ndim == 1 else 0.0
            parameter.copy_(shift + scale * torch.randn(parameter.shape, generator=generator))
    return module.to(dtype)


def tiny_samples() -> list[TrainSample]:
    samples = []
    for index, length in enumerate(LENGTHS):
        generator = torch.Generator().manual_seed(index)
        mask = torch.ones(length, dtype=torch.bool)
        mask[-1] = False
        ids = torch.randint(0, 97, (length,), generator=generator)
        samples.append(TrainSample(token_ids=ids, loss_mask=mask, sample_id=index))
    return samples


PROMPTS = (4, 4, 1, 7, 1)
"""Of documents that begin alike: a one-token completion, a document of one token, a prompt in a prompt, and a
prompt of one token."""
ROWS = RowCapacity(rows=64, keys=128, segments=24, longest=16)
"""BUCKET's, of layout shared."""


def shared_samples() -> list[TrainSample]:
    """`tiny_samples` that begin alike and are trained on what is behind their prompts."""
    samples = []
    common = torch.randint(0, 97, (4,), generator=torch.Generator().manual_seed(9))
    for sample, prompt in zip(tiny_samples(), PROMPTS, strict=True):
        ids, mask = sample.token_ids.clone(), sample.loss_mask.clone()
        length = min(prompt, 4) if len(ids) > 1 else 0
        ids[:length] = common[:length]
        mask[: prompt - 1] = False
        samples.append(dataclasses.replace(sample, token_ids=ids, loss_mask=mask))
    return samples


def packs_of(
    groups: list[list[int]], *, bucket: Bucket | None = None, layout: str = "packed"
) -> list[PackedBatch]:
    """Of `tiny_samples`, or, in layout shared, of `shared_samples`."""
    if layout == "shared":
        packs = _packs(shared_samples(), groups)
        return [share(batch, None if bucket is None else ROWS) for batch in packs]
    return _packs(tiny_samples(), groups, bucket=bucket)


def _packs(
    samples: list[TrainSample], groups: list[list[int]], *, bucket: Bucket | None = None
) -> list[PackedBatch]:
    # Different weights, so that a gradient credited to the wrong document cannot cancel out.
    weights = [0.1 * (1 + s.sample_id) * torch.ones(len(s)) for s in samples]
    return [pack([samples[i] for i in g], [weights[i] for i in g], bucket=bucket) for g in groups]


def token_logprobs(module: nn.Module, batch: PackedBatch, **layout: Any) -> Tensor:
    """[T] with a graph; 0 where the mask is False."""
    hidden = hidden_states(module, batch, **layout)
    head = head_of(module)
    logits = hidden @ head.weight.T * head.logit_scale
    logits = logits if head.bias is None else logits + head.bias
    logits = logits if head.softcap is None else head.softcap * torch.tanh(logits / head.softcap)
    chosen = logits.float().log_softmax(-1).gather(1, batch.labels.clamp(min=0)[:, None])[:, 0]
    return torch.where(batch.loss_mask, chosen, 0.0)


def measure(
    module: nn.Module, batches: list[PackedBatch], *, grad: bool = True, **layout: Any
) -> tuple[dict[int, Tensor], dict[str, Tensor]]:
    """Logprobs by sample id, and gradients by parameter name, of sum(-loss_weights * logprobs)."""
    logprobs: dict[int, Tensor] = {}
    for batch in batches:
        with torch.set_grad_enabled(grad):
            lp = token_logprobs(module, batch, **layout)
        if grad:
            (-lp * batch.loss_weights).sum().backward()
        logprobs.update(zip(batch.sample_ids, batch.split(lp.detach()), strict=True))
    grads = {n: p.grad for n, p in module.named_parameters() if p.grad is not None}
    module.zero_grad()
    return logprobs, grads


def largest_gap(a: dict[int, Tensor], b: dict[int, Tensor]) -> float:
    assert a.keys() == b.keys() and all(v.isfinite().all() for v in (*a.values(), *b.values()))
    return max((a[i] - b[i]).abs().max().item() for i in a)


def relative_error(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    """Frobenius norm of the difference of all gradients over that of `a`."""
    assert a.keys() == b.keys() and a
    difference = sum((a[n].double() - b[n].double()).square().sum().item() for n in a)
    return float((difference / sum(a[n].double().square().sum().item() for n in a)) ** 0.5)


def rms_gap(a: dict[int, Tensor], b: dict[int, Tensor]) -> float:
    return float(torch.cat([a[i] - b[i] for i in a]).square().mean().sqrt())
