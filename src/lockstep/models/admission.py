"""Admission of a model by a numerical proof: before it is used, a small random copy of *its* config must give
the same logprobs packed, alone, padded and decoded as transformers' eager attention on each document alone.

config ─► miniature ─► each document alone, transformers' eager attention ─┐
                  └──► every way of ours to compute the same token ────────┴─► largest gap ─► kept, or refused

The result is kept by the hash of the miniature's config, so models that differ in sizes only share it. This
module proves the trainer's forward; lockstep.engine.spec proves what the embedded engines decode.
"""

from __future__ import annotations

import copy
import functools
import hashlib
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PretrainedConfig

from lockstep import attention
from lockstep.errors import LockstepError, ModelError
from lockstep.invariant import experts
from lockstep.models import shapes
from lockstep.models.architectures import option, rope_parameters, silence_transformers
from lockstep.models.forward import hidden_states
from lockstep.models.heads import head_of, head_options
from lockstep.observe.files import cache_root, read_json, write_json
from lockstep.observe.text import printable
from lockstep.ops.logprobs import linear_logprobs
from lockstep.packing import pack
from lockstep.schema.batch import TrainSample
from lockstep.version import __version__

log = logging.getLogger(__name__)

TOLERANCE = 1e-4
"""Nats; rounding of float32 on a CPU stays below 2e-5."""
KERNELS = ("sdpa", "varlen")
"""The kernels that a forward is proven with; on a CPU both are exact. The tests of the support table compare
others with them."""
PROVEN = ("shape:", "bundled:")
"""Models that come with Lockstep: the tests prove them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Gap:
    """The token that differs most between one way to compute logprobs and transformers' own."""

    way: str
    """Such as "packed (varlen)"."""
    ours: float
    """Its logprob, in nats."""
    theirs: float
    """The same of transformers' eager attention on the document alone."""
    document: int
    """Tokens of its document."""

    @property
    def size(self) -> float:
        """The absolute difference, in nats; infinite for NaN."""
        size = abs(self.ours - self.theirs)
        return size if size == size else float("inf")


Ways = Callable[[PretrainedConfig], Sequence[Gap]]
"""Runs a miniature in some ways; one Gap for each."""


def admit(config: PretrainedConfig, *, name: str) -> None:
    """Admit a supported config if the trainer's forward is proven for it; runs the proof if needed.

    Args:
        name: ModelConfig.name.

    Raises:
        ModelError: it computes other numbers than transformers does; the text has both.
    """
    if not name.startswith(PROVEN):
        check_proof(config, kind="forward", ways=forward_gaps, name=name)


def check_proof(config: PretrainedConfig, *, kind: str, ways: Ways, name: str) -> tuple[Gap, ...]:
    """Return the gaps of a proof, from the cache or run now.

    Args:
        kind: names the proof in the cache.

    Raises:
        ModelError: a gap is above TOLERANCE, or a way cannot run this config at all.
    """
    try:
        with silence_transformers():
            small = tiny_model(config)
            gaps = _cached_gaps(small, kind, ways)
    except LockstepError:
        raise
    except Exception as error:  # whatever transformers' code or ours raises over such a config
        raise ModelError(
            f"unsupported-model: model.name = {name!r} is not supported: a small copy of its config failed "
            f"to run ({type(error).__name__}: {printable(str(error))[:300]})"
        ) from error
    worst = max(gaps, key=lambda gap: gap.size)
    if worst.size > TOLERANCE:
        raise ModelError(
            f"unsupported-model: model.name = {name!r} is not supported: in a small copy of its config, a "
            f"token of a document of {worst.document} tokens has logprob {worst.ours:.6f} {worst.way}, but "
            f"{worst.theirs:.6f} with transformers' eager attention on that document alone (allowed "
            f"difference: {TOLERANCE:g}). An option in its config.json is not supported; compare it with "
            "the published file"
        )
    return gaps


def forward_gaps(small: PretrainedConfig) -> list[Gap]:
    """Measure a miniature packed, packed in another order, alone and padded on either side, with each
    kernel."""
    docs = documents()
    truth = [eager_logprobs(small, ids) for ids in docs]
    everything, alone = [tuple(range(len(docs)))], [(i,) for i in range(len(docs))]
    gaps = []
    for kernel in KERNELS:
        module = random_miniature(small, attention=attention.implementation(kernel))
        for way, groups, layout in (
            ("packed", everything, {}),
            ("packed in another order", [everything[0][::-1]], {}),
            ("alone", alone, {}),
            ("padded on the right", everything, {"layout": "padded", "padding_side": "right"}),
            ("padded on the left", everything, {"layout": "padded", "padding_side": "left"}),
        ):
            ours = _logprobs(module, docs, groups, layout)
            gaps.append(largest_gap(f"{way} ({kernel})", ours, truth))
    return gaps


def largest_gap(way: str, ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> Gap:
    """Return the largest gap over all documents; `ours` and `theirs` have one tensor of logprobs for each."""
    tokens = [
        Gap(way=way, ours=float(a), theirs=float(b), document=1 + len(left))
        for left, right in zip(ours, theirs, strict=True)
        for a, b in zip(left, right, strict=True)
    ]
    return max(tokens, key=lambda gap: gap.size)


def eager_logprobs(small: PretrainedConfig, ids: Sequence[int]) -> Tensor:
    """[L - 1] logprobs of all tokens but the first, by transformers alone, in a model that has seen no other
    document: some rotary embeddings remember."""
    module: Any = _eager(json.dumps(small.to_dict(), sort_keys=True, default=str), small)
    with torch.inference_mode():
        logits = copy.deepcopy(module)(input_ids=torch.tensor([list(ids)]), use_cache=False).logits[0]
    labels = torch.tensor(ids[1:])[:, None]
    logprobs: Tensor = logits[:-1].float().log_softmax(-1).gather(1, labels)[:, 0]
    return logprobs


_last_eager: dict[str, nn.Module] = {}


def _eager(key: str, small: PretrainedConfig) -> nn.Module:
    """One model is kept: a proof asks for the same one many times."""
    if key not in _last_eager:
        _last_eager.clear()
        _last_eager[key] = random_miniature(small, attention="eager")
    return _last_eager[key]


def _logprobs(
    module: nn.Module,
    docs: Sequence[Sequence[int]],
    groups: Sequence[Sequence[int]],
    layout: Mapping[str, Any],
) -> list[Tensor]:
    """[L - 1] logprobs of each document, by the trainer's forward; `groups` are the packs."""
    options = head_options(module, temperature=1.0, compiled=False)
    by_document: dict[int, Tensor] = {}
    for group in groups:
        samples = [_sample(i, docs[i]) for i in group]
        batch = pack(samples, [torch.ones(len(sample)) for sample in samples])
        with torch.inference_mode():
            hidden = hidden_states(module, batch, **layout)
            logprobs, _ = linear_logprobs(hidden, head_of(module).weight, batch.labels, head=options)
        by_document |= dict(zip(batch.sample_ids, batch.split(logprobs), strict=True))
    return [by_document[i][:-1] for i in range(len(docs))]


def _sample(number: int, ids: Sequence[int]) -> TrainSample:
    mask = torch.ones(len(ids), dtype=torch.bool)
    mask[-1] = False
    return TrainSample(token_ids=torch.tensor(ids), loss_mask=mask, sample_id=number)


def proof_key(small: PretrainedConfig, kind: str) -> str:
    """Hash everything that the proof depends on: the miniature's config, versions, and our own code."""
    config = {key: value for key, value in small.to_dict().items() if key not in _NO_OPTIONS}
    versions = {name: version(name) for name in ("torch", "transformers")} | {"lockstep": __version__}
    whole = {"config": config, "kind": kind, "versions": versions, "code": _own_code()}
    return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:32]


_PACKAGES = ("torch", "transformers")
_NO_OPTIONS = ("_name_or_path", "transformers_version", "architectures", "dtype", "id2label", "label2id")
_CODE = ("attention", "engine", "models", "ops", "packing")


@functools.cache
def _own_code() -> str:
    """Hash of the packages that a proof runs: a change to them needs new proofs."""
    digest = hashlib.sha256()
    for package in _CODE:
        for file in sorted((Path(__file__).parents[1] / package).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


_memory: dict[str, tuple[Gap, ...]] = {}


def _cached_gaps(small: PretrainedConfig, kind: str, ways: Ways) -> tuple[Gap, ...]:
    """The gaps from this process, from the cache folder, or run now."""
    key = proof_key(small, kind)
    if key not in _memory:
        file = cache_root() / "admitted" / f"{key}.json"
        gaps = _read(file)
        if gaps is None:
            gaps = tuple(ways(small))
            _write(file, kind, gaps)
        _memory[key] = gaps
    return _memory[key]


def _read(file: Path) -> tuple[Gap, ...] | None:
    """The gaps of a cached proof; None: there is none, or it is damaged and must be run again."""
    if not file.is_file():
        return None
    try:
        rows = read_json(file, ModelError)["gaps"]
        gaps = tuple(Gap(**row) for row in rows)
        if gaps and all(type(v) is float for gap in gaps for v in (gap.ours, gap.theirs)):
            return gaps
    except (ModelError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s is damaged (%s), so the check runs again", file, printable(str(error)))
    return None


def _write(file: Path, kind: str, gaps: Sequence[Gap]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"kind": kind, "tolerance": TOLERANCE, "gaps": [asdict(gap) for gap in gaps]})
    except OSError as error:  # a cache that cannot be written only costs time
        log.warning(
            "cannot store the result of the check in %s (%s); set LOCKSTEP_CACHE to a writable folder",
            file,
            error,
        )


# A small random model with another model's options, for admission proofs.
#
# Layers, heads, vocabulary and the lengths in the config shrink; everything that decides *which* function is
# computed stays: kinds of layers, rotary embedding, windows, soft caps, biases, activation, head size, ties.


LENGTHS = (3, 9, 20, 40)
"""Tokens of the documents of a proof: within the miniature's lengths, and far beyond them."""
WINDOW = 6
"""The largest sliding window of a miniature: most documents are longer."""
POSITIONS = 16
"""The shortest length that the config names, such as a rotary embedding's original one; others in
proportion."""
VOCABULARY = 64
_HEAD_GROUP = 8
_EXPERTS, _CHOSEN = 8, 4
"""The most experts of a miniature, and the most that a token gets."""


def tiny_model(config: PretrainedConfig) -> Any:
    """Return a small copy of a supported config: at least two layers, one of each kind."""
    small: Any = copy.deepcopy(config.get_text_config())
    _shrink_lengths(small)
    _shrink_heads(small)
    kinds = option(small, "layer_types")
    small.num_hidden_layers = 2
    if kinds is not None:
        different = list(dict.fromkeys(kinds))
        small.layer_types = different * (2 // len(different))
        small.num_hidden_layers = len(small.layer_types)
    if (window := option(small, "sliding_window")) is not None:
        small.sliding_window = min(window, WINDOW)
    small.intermediate_size = 64
    _shrink_experts(small)
    small.vocab_size = VOCABULARY
    small.pad_token_id = small.bos_token_id = small.eos_token_id = None
    small.initializer_range = 0.2  # wide enough for attention to matter
    small.return_dict, small.output_attentions, small.output_hidden_states = True, False, False
    return small


def random_miniature(small: PretrainedConfig, *, attention: str) -> nn.Module:
    """Build the miniature in float32 on the CPU, with the same weights on every call.

    Args:
        attention: name in transformers' AttentionInterface.
    """
    cpu = torch.device("cpu")
    own = copy.deepcopy(small)  # a model writes into its config
    module = shapes.random_model(own, seed=0, dtype=torch.float32, device=cpu, attention=attention)
    if attention != "eager":  # that is transformers' own, which this one is compared with
        experts.install(module)
    return module


def documents() -> list[list[int]]:
    """Token ids of the documents of a proof."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(VOCABULARY, (length,), generator=generator).tolist() for length in LENGTHS]


def _shrink_lengths(small: Any) -> None:
    """Scale all lengths by one factor, so that their ratios stay the same."""
    ropes = rope_parameters(small)
    originals = [rope[_ORIGINAL] for rope in ropes if rope.get(_ORIGINAL)]
    scale = POSITIONS / min(originals, default=small.max_position_embeddings)
    for rope in ropes:
        if rope.get(_ORIGINAL):
            rope[_ORIGINAL] = max(1, round(rope[_ORIGINAL] * scale))
    small.max_position_embeddings = max(1, round(small.max_position_embeddings * scale))


_ORIGINAL = "original_max_position_embeddings"


def _shrink_experts(small: Any) -> None:
    """Keep the layers with experts that two layers have, and the share of experts that a token gets."""
    for name in ("num_experts", "num_local_experts"):
        if (number := option(small, name)) is not None:
            small.num_experts_per_tok = min(small.num_experts_per_tok, _CHOSEN)
            setattr(small, name, min(number, _EXPERTS))
    for name in ("moe_intermediate_size", "shared_expert_intermediate_size"):
        if option(small, name) is not None:
            setattr(small, name, 32)
    if (every := option(small, "decoder_sparse_step")) is not None:
        small.decoder_sparse_step = min(every, 2)
        dense = option(small, "mlp_only_layers") or []
        small.mlp_only_layers = [0] if dense else []


def _shrink_heads(small: Any) -> None:
    """Keep at most two key/value heads, with the same number of query heads for each, up to eight."""
    heads, kv_heads = small.num_attention_heads, small.num_key_value_heads
    small.head_dim = getattr(small, "head_dim", None) or small.hidden_size // heads
    small.num_key_value_heads = min(kv_heads, 2)
    small.num_attention_heads = small.num_key_value_heads * min(heads // kv_heads, _HEAD_GROUP)
    # A multiple of the number of heads, as transformers asks.
    small.hidden_size = small.num_attention_heads * -(-64 // small.num_attention_heads)
