import torch

from lockstep.config.engine import EngineConfig
from lockstep.config.model import ModelConfig
from lockstep.engine.hf.engine import HFEngine
from lockstep.models.load import load_model
from lockstep.schema.rollout import GenerationRequest, SamplingParams
from lockstep.schema.weights import WeightUpdate
from lockstep.transfer import InProcessTransfer


class Backend:
    def __init__(self, module):
        self.module = module

    def weights(self, *, policy_version):
        return WeightUpdate(
            policy_version=policy_version,
            tensors=lambda: iter(self.module.named_parameters()),
            shared_module=self.module,
        )


def test_the_engine_samples_from_the_new_weights_and_stamps_the_version():
    model = load_model(
        ModelConfig(name="shape:tiny-llama", dtype="float32"), attention="sdpa", device=torch.device("cpu")
    )
    engine = HFEngine(EngineConfig(), model=model)
    request = GenerationRequest(
        prompt_token_ids=(5, 6, 7), sampling=SamplingParams(max_tokens=8, temperature=0.0), seeds=(0,)
    )
    old = engine.generate([request])[0][0]
    with torch.no_grad():
        for parameter in model.module.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    InProcessTransfer().push(Backend(model.module), engine, policy_version=3)
    new = engine.generate([request])[0][0]
    assert (old.policy_version, new.policy_version) == (0, 3)
    assert old.logprobs != new.logprobs
    fresh = HFEngine(EngineConfig(), model=model).generate([request])[0][0]
    assert new.logprobs == fresh.logprobs
