"""Proof that the embedded engines, which decode token by token over their caches, agree with transformers'
eager attention on prompt and completion alone: see lockstep.models.admission."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import PretrainedConfig

from lockstep.config.declarations import engines
from lockstep.config.engine import EngineConfig
from lockstep.engine import ENGINES
from lockstep.errors import ConfigError
from lockstep.models.admission import (
    PROVEN,
    Gap,
    check_proof,
    documents,
    eager_logprobs,
    largest_gap,
    random_miniature,
)
from lockstep.models.architectures import text_config
from lockstep.models.load import LoadedModel, attention_implementation
from lockstep.protocols.engine import InferenceEngine, ReceivesWeights, SharesWeights
from lockstep.registry import require_call, require_members
from lockstep.schema.rollout import GenerationRequest, SamplingParams

EMBEDDED = tuple(name for name, engine in engines().items() if not engine.external)
_COMPLETION = 8  # the shortest document stays within the lengths that the miniature names
_SEEDS = (1, 2)


def admit_decoding(engine: str, model: LoadedModel) -> None:
    """Let an embedded engine sample with `model` if its decoding is proven; runs the proof if need be.

    Raises:
        ModelError: it computes other numbers than transformers does; the text has both.
    """
    if engine in EMBEDDED and not model.name.startswith(PROVEN):
        decoding_proof(engine, text_config(model.module), name=model.name)


def decoding_proof(engine: str, config: PretrainedConfig, *, name: str) -> tuple[Gap, ...]:
    """Raises ModelError, see `check_proof`."""
    return check_proof(
        config, kind=f"decoded by {engine}", ways=lambda small: [decoded_gap(engine, small)], name=name
    )


def decoded_gap(engine: str, small: PretrainedConfig) -> Gap:
    """The largest logprob gap over two samples of each document as a prompt, in one batch."""
    kernel = "varlen" if engine == "native" else "sdpa"
    module = random_miniature(small, attention=attention_implementation(kernel))
    model = LoadedModel(
        module=module,
        tokenizer=None,
        eos_token_ids=(),
        pad_token_id=0,
        dtype=torch.float32,
        name="miniature",
        max_positions=1024,
    )
    sampling = SamplingParams(max_tokens=_COMPLETION)
    requests = [
        GenerationRequest(prompt_token_ids=tuple(ids), sampling=sampling, seeds=_SEEDS) for ids in documents()
    ]
    settings = {"kv_cache_tokens": 1024} if engine == "native" else {}
    instance = ENGINES.load(engine)(EngineConfig(name=engine, max_batch=8, **settings), model=model)
    try:
        completions = [sample for group in instance.generate(requests) for sample in group]
    finally:
        instance.close()
    ours = [torch.tensor(sample.logprobs) for sample in completions]
    theirs = [
        eager_logprobs(small, [*sample.prompt_token_ids, *sample.token_ids])[-len(sample.token_ids) :]
        for sample in completions
    ]
    return largest_gap(f"decoded by engine {engine}", ours, theirs)


# Checks that an engine has the members that its protocol declares.


def load_engine_class(name: str) -> Any:
    """Import the engine that `name` means, and check it.

    Returns:
        The class, or a function that makes an engine; either has the attribute `external`.

    Raises:
        ConfigError: there is no such engine, or it lacks members; the text names all of them.
    """
    found = ENGINES.load(name)
    if inspect.isclass(found):
        wanted = ["external", *methods(protocol_of(getattr(found, "external", False)))]
    else:
        wanted = ["external"]
    what = f"engine.name = {name!r}"
    require_members(found, wanted, what=what)
    if ":" in name:
        require_call(found, "config", named=["spec" if found.external else "model"], what=what)
    return found


def require_engine(engine: Any, *, name: str) -> InferenceEngine:
    """Return `engine`. Raises ConfigError, and closes it, if it lacks a member that its protocol declares."""
    what = f"an object of engine.name = {name!r}"
    require_members(engine, ("close", "external"), what=what)
    protocol = protocol_of(engine.external)
    try:
        require_members(engine, [*methods(protocol), *attributes(protocol)], what=what)
    except ConfigError:
        engine.close()
        raise
    checked: InferenceEngine = engine
    return checked


def protocol_of(external: bool) -> type:
    """The protocol of an engine with that attribute."""
    return ReceivesWeights if external else SharesWeights


def methods(protocol: type) -> list[str]:
    """Names of the methods that `protocol` declares, inherited ones first."""
    return [
        name
        for base in _bases(protocol)
        for name, value in vars(base).items()
        if inspect.isfunction(value) and not name.startswith("_")
    ]


def attributes(protocol: type) -> list[str]:
    """Names of the attributes that `protocol` declares, inherited ones first."""
    return [
        name
        for base in _bases(protocol)
        for name in [
            *inspect.get_annotations(base),
            *(name for name, value in vars(base).items() if isinstance(value, property)),
        ]
    ]


def _bases(protocol: type) -> list[type]:
    return [base for base in reversed(protocol.__mro__) if base.__module__ == InferenceEngine.__module__]
