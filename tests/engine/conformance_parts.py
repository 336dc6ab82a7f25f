"""What the conformance suite compares with: the engine under test, its model, and slow references."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

from lockstep.models.load import LoadedModel
from lockstep.models.shapes import random_model, shape_config
from lockstep.schema.rollout import Completion, GenerationRequest, SamplingParams
from lockstep.schema.weights import WeightUpdate

VOCAB = 320
EOS = 7
LONG = 300
"""Tokens: more than two blocks of any engine's prefix cache."""
MAX_MODEL_LEN = 512
TEMPERATURES = (0.0, 0.6, 1.0, 1.3)
FIELDS = ("top_p", "top_k", "min_p", "min_tokens", "penalties", "stop", "min_tokens with stop")
"""What `Subject.refuses` may name."""


@dataclass(kw_only=True)
class Subject:
    """An engine under test and what it must agree with."""

    engine: Any
    model: LoadedModel
    """Its weights are those that `push` gave the engine last; EOS is its only end-of-sequence id."""
    push: Callable[[int], None]
    """Give the engine the weights that `model` has now, as this version."""
    version: int = 0
    tolerance: float = 1e-4
    """Largest |logprob - reference|, nats; logprobs of another kind are off by 0.05 and more."""
    exact: bool = True
    """Greedy tokens equal the reference's, and tokens do not depend on the batch: float32 on a CPU."""
    seeded: bool = True
    own_noise: bool | None = None
    """It draws Lockstep's noise, a function of (seed, position); None: if it has no weights of its own."""
    temperatures: tuple[float, ...] = TEMPERATURES
    """Those that the engine was made for."""
    refuses: frozenset[str] = field(default_factory=frozenset)
    """Of FIELDS: what this engine refuses at all, or at these temperatures."""
    sleeps: bool = True

    def __post_init__(self) -> None:
        assert self.refuses <= set(FIELDS), self.refuses

    @property
    def ours(self) -> bool:
        """Whether a sample that is cut and continued is the one made at once, at any temperature."""
        return not self.engine.external if self.own_noise is None else self.own_noise

    def generate(self, *requests: GenerationRequest, **kwargs: Any) -> list[list[Completion]]:
        return self.engine.generate(requests, **kwargs)

    def hottest(self) -> float:
        """A temperature at which it samples."""
        return 1.0 if 1.0 in self.temperatures else max(self.temperatures)


def conformance_model(
    *, tied: bool = False, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> LoadedModel:
    """Two layers with a head_dim that vLLM has kernels for, weights of which every one matters, and a
    tokenizer whose ids are pairs of letters, so that any text is found at token boundaries."""
    config = shape_config("tiny-llama")
    config.head_dim = 32
    config.vocab_size = VOCAB
    config.max_position_embeddings = MAX_MODEL_LEN
    config.tie_word_embeddings = tied
    config.eos_token_id, config.bos_token_id, config.pad_token_id = EOS, None, None
    module = random_model(config, seed=3, dtype=dtype, device=torch.device(device), attention="sdpa")
    sharpen(module, seed=0)
    return LoadedModel(
        module=module,
        tokenizer=pairs_tokenizer(),
        eos_token_ids=(EOS,),
        pad_token_id=0,
        dtype=dtype,
        name="conformance",
        max_positions=MAX_MODEL_LEN,
    )


def sharpen(module: torch.nn.Module, *, seed: int) -> None:
    """New weights, large enough that tokens and positions matter; in place."""
    generator = torch.Generator().manual_seed(seed)
    tied = module.config.tie_word_embeddings
    with torch.no_grad():
        for path, parameter in module.named_parameters():
            if parameter.ndim == 2:
                scale = 0.15 if tied and "embed" in path else 2.5 / parameter.shape[1] ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def pairs_tokenizer() -> PreTrainedTokenizerFast:
    """Id i is a pair of letters, EOS is <eos>: decoding puts them one after the other."""
    letters = "abcdefghijklmnopqr"
    pairs = [a + b for a in letters for b in letters][:VOCAB]
    vocab = {pair: i for i, pair in enumerate(pairs) if i != EOS} | {"<eos>": EOS}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<eos>"))
    raw.pre_tokenizer = (
        pre_tokenizers.FixedLength(length=2) if hasattr(pre_tokenizers, "FixedLength") else None
    )
    raw.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<eos>")


def prompt(length: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    ids = torch.randint(VOCAB, (length,), generator=generator)
    ids[ids == EOS] = EOS + 1
    return tuple(ids.tolist())


def request(
    ids: Sequence[int], seeds: Sequence[int] = (0,), *, max_tokens: int = 12, **sampling: Any
) -> GenerationRequest:
    sampling.setdefault("ignore_eos", True)
    return GenerationRequest(
        prompt_token_ids=tuple(ids),
        sampling=SamplingParams(max_tokens=max_tokens, **sampling),
        seeds=tuple(seeds),
    )


def reference_logits(model: LoadedModel, ids: Sequence[int]) -> torch.Tensor:
    """[len(ids), VOCAB] of a full forward with eager attention in float32: a bfloat16 reference would round
    as much as the engine does."""
    config = type(model.module.config).from_dict(model.module.config.to_dict())
    rng = torch.get_rng_state()
    slow = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32).eval()
    torch.set_rng_state(rng)
    slow.load_state_dict(model.module.state_dict())
    device = next(model.module.parameters()).device
    with torch.no_grad():
        return slow.to(device)(torch.tensor([list(ids)], device=device)).logits[0].float().cpu()


def reference_greedy(model: LoadedModel, ids: Sequence[int], count: int) -> list[int]:
    """`count` tokens, each the argmax of a forward over everything before it."""
    found: list[int] = []
    for _ in range(count):
        found.append(int(reference_logits(model, [*ids, *found])[-1].argmax()))
    return found


def gaps(model: LoadedModel, completion: Completion, temperature: float) -> torch.Tensor:
    """|logprob - reference| of each token, at the temperature that it was sampled at."""
    ids = completion.prompt_token_ids + completion.token_ids
    logits = reference_logits(model, ids)[len(completion.prompt_token_ids) - 1 : -1] / (temperature or 1.0)
    wanted = logits.log_softmax(-1).gather(-1, torch.tensor(completion.token_ids).unsqueeze(-1)).squeeze(-1)
    return (wanted - torch.tensor(completion.logprobs)).abs()


def embedded(engine: Any, model: LoadedModel, **more: Any) -> Iterator[Subject]:
    """The subject of an engine over the model's own module, until its fixture ends."""

    def push(version: int) -> None:
        engine.update_weights(
            WeightUpdate(
                policy_version=version,
                tensors=lambda: iter(model.module.state_dict().items()),
                shared_module=model.module,
            )
        )

    yield Subject(engine=engine, model=model, push=push, **more)
    engine.close()
