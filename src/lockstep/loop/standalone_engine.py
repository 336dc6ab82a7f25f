"""An engine for a model that is not being trained, for `lockstep generate`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from lockstep.config.engine import EngineConfig, resolved
from lockstep.config.model import ModelConfig
from lockstep.engine.build import is_external, make_engine
from lockstep.engine.spec import EngineSpec
from lockstep.loop.axes import is_native
from lockstep.models.exported import export_model, exported_folder
from lockstep.models.load import LoadedModel, load_model
from lockstep.protocols.engine import InferenceEngine


@dataclass(frozen=True, kw_only=True, slots=True)
class EngineRequest:
    """The model to sample from, and the sampling it must allow."""

    model: ModelConfig
    adjust: Callable[[LoadedModel], None] | None
    """Copies other weights into the loaded model, such as a checkpoint's. None: the model as it is."""
    longest: int
    """Longest prompt and completion together, in tokens."""
    temperatures: frozenset[float]
    work_dir: Path
    """For the logs of a started server, and for a folder of weights where it needs one. Made when used."""
    seed: int = 0


def standalone_config(config: EngineConfig, model: ModelConfig) -> EngineConfig:
    """Return `config` with "auto" resolved for a model that is only sampled from. Raises ConfigError."""
    return resolved(config, native=is_native(model, _device()))


def _device() -> torch.device:
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def open_engine(config: EngineConfig, request: EngineRequest) -> InferenceEngine:
    """Start the engine, ready to generate; the caller closes it.

    Raises:
        ConfigError: the engine cannot run like this here.
        ModelError: the model cannot be loaded.
        EngineError: it did not start.
    """
    device = _device()
    config = standalone_config(config, request.model)
    if not is_external(config):
        model = load_model(request.model, attention="sdpa", device=device)
        if request.adjust is not None:
            request.adjust(model)
        return make_engine(config, model=model)
    return make_engine(config, spec=_external_spec(config, request, device))


def _external_spec(config: EngineConfig, request: EngineRequest, device: torch.device) -> EngineSpec:
    """The spec of an external engine whose folder has the weights: none are sent to it."""
    work_dir = request.work_dir.absolute()
    work_dir.mkdir(parents=True, exist_ok=True)
    if request.adjust is not None:
        model = load_model(request.model, attention="sdpa", device=torch.device("cpu"))
        request.adjust(model)
        exported = export_model(model, work_dir=work_dir)
    else:
        exported = exported_folder(request.model, device=device, work_dir=work_dir)
    return EngineSpec(
        folder=exported.folder.absolute(),
        weights="folder",
        model_name=request.model.name,
        dtype=exported.dtype,
        vocab_size=exported.vocab_size,
        max_model_len=config.max_model_len or request.longest,
        eos_token_ids=exported.eos_token_ids,
        tokenizer=exported.tokenizer,
        device="cpu" if device.type == "cpu" else f"cuda:{torch.cuda.current_device()}",
        shares_device=False,
        temperatures=request.temperatures,
        work_dir=work_dir,
        seed=request.seed,
    )
