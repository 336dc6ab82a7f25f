import pytest
import torch

from lockstep.config.model import ModelConfig
from lockstep.models.load import LoadedModel, load_model


@pytest.fixture(scope="session")
def tiny_models() -> dict[str, LoadedModel]:
    """float32 models with random weights large enough that tokens and positions matter."""
    return {name: _sharpened(name) for name in ("llama", "qwen3", "mistral", "gemma3")}


@pytest.fixture
def tiny(tiny_models: dict[str, LoadedModel]) -> LoadedModel:
    return tiny_models["llama"]


def _sharpened(name: str) -> LoadedModel:
    config = ModelConfig(name=f"shape:tiny-{name}", dtype="float32", seed=3)
    model = load_model(config, attention="sdpa", device=torch.device("cpu"))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        tied = model.module.config.tie_word_embeddings
        for path, parameter in model.module.named_parameters():
            if parameter.ndim == 2:
                # large tied embeddings would make every model repeat its last token
                scale = 0.15 if tied and "embed" in path else 3 / parameter.shape[1] ** 0.5
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)
    return model
