"""What the tests of the native engine share: policies, requests, and what an engine makes of them."""

import dataclasses

import torch

from lockstep import invariant
from lockstep.config.engine import EngineConfig
from lockstep.config.model import ModelConfig
from lockstep.engine.build import make_engine
from lockstep.models.load import load_model
from lockstep.schema.rollout import GenerationRequest, SamplingParams

ROOMY = {"max_batch": 16, "prefill_chunk": 64}
TIGHT = {"max_batch": 5, "prefill_chunk": 32, "kv_cache_tokens": 260}
"""About two of the longest samples: some are preempted, prompts come in three chunks."""


def policy(shape, dtype, *, converted=True, execution="eager"):
    """Random weights everywhere, norms and biases too: zeros and ones hide what is done with them."""
    config = ModelConfig(name=f"shape:{shape}", dtype=dtype)
    model = load_model(config, attention="varlen", device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.module.parameters():
            scale = 0.3 if parameter.ndim == 1 else 2 / parameter.shape[1] ** 0.5
            noise = torch.randn(parameter.shape, generator=generator) * scale
            parameter.copy_(noise + float(parameter.ndim == 1 and parameter[0] == 1))
    if converted:
        invariant.convert(model.module)
    return dataclasses.replace(model, execution=execution)


def requests(temperature=0.7):
    sampling = SamplingParams(max_tokens=30, temperature=temperature, ignore_eos=True)
    return [
        GenerationRequest(
            prompt_token_ids=tuple(
                torch.randint(3, 200, (n,), generator=torch.Generator().manual_seed(n)).tolist()
            ),
            sampling=sampling,
            seeds=tuple(range(samples)),
        )
        for n, samples in ((1, 2), (7, 4), (90, 4), (33, 2))
    ]


def generated(model, asked, *, ahead=0, **settings):
    """All completions in one list, and the engine, closed."""
    engine = make_engine(EngineConfig(name="native", **settings), model=model)
    engine.ahead = ahead
    completions = [c for row in engine.generate(asked) for c in row]
    engine.close()
    return completions, engine
