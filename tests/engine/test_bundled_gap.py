"""The engine's logprobs on the bundled model are the trainer's, to float32 rounding."""

import pytest
import torch

from lockstep.config.engine import EngineConfig
from lockstep.config.model import ModelConfig
from lockstep.config.train import TrainConfig
from lockstep.engine.hf.engine import HFEngine
from lockstep.models.load import load_model
from lockstep.packing import PackLimits, plan_micro_batches
from lockstep.schema.batch import policy_samples, rollout_samples
from lockstep.schema.rollout import GenerationRequest, SamplingParams, Trajectory
from lockstep.train.local import LocalBackend

PROMPTS = (
    "What is 3 + 4?",
    "Write one sentence about the sea.",
    "List three colours and say where each of them is found in a forest in autumn.",
    "Who are you?",
)
SAMPLES = 4
TEMPERATURE = 0.9


@pytest.mark.slow
def test_logprob_gap_of_the_bundled_model_is_rounding():
    model = load_model(ModelConfig(dtype="float32"), attention="sdpa", device=torch.device("cpu"))
    assert model.tokenizer is not None
    requests = [
        GenerationRequest(
            prompt_token_ids=tuple(model.tokenizer(text)["input_ids"]),
            sampling=SamplingParams(max_tokens=16 * (index + 1), temperature=TEMPERATURE, ignore_eos=True),
            seeds=tuple(range(SAMPLES * index, SAMPLES * (index + 1))),
        )
        for index, text in enumerate(PROMPTS)
    ]
    # fewer rows than samples: some start late, in the places of those that finished
    engine = HFEngine(EngineConfig(max_batch=10), model=model)
    completions = [completion for group in engine.generate(requests) for completion in group]
    assert len(completions) == 16
    samples = policy_samples(rollout_samples(map(Trajectory.of, completions)), None)
    batches = plan_micro_batches(
        samples, [sample.loss_mask.float() for sample in samples], PackLimits(token_budget=512)
    )
    backend = LocalBackend(TrainConfig(), model=model, total_steps=1, temperature=TEMPERATURE)
    gaps = [
        (own - batch.rollout_logprobs)[batch.loss_mask].abs()
        for batch, own in zip(batches, backend.logprobs(batches), strict=True)
    ]
    gap = torch.cat(gaps)
    assert len(batches) > 1 and len(gap) == sum(len(c.token_ids) for c in completions)
    print(f"{len(gap)} tokens: logprob gap mean {gap.mean():.1e}, max {gap.max():.1e} nats")
    assert gap.mean() <= 1e-4
    # A wrong token, mask or position costs whole nats; a sum over another order, rounding.
    assert gap.max() <= 1e-3
