"""Engines as a run makes them: what they serve, one without a trainer, and what is reported of them."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from lockstep.config.engine import EngineConfig, has_own_weights
from lockstep.config.engine import resolved as resolved_engine
from lockstep.config.model import ModelConfig
from lockstep.config.run import GRPORun
from lockstep.engine.build import cuda_index, is_external, make_engine
from lockstep.engine.spec import EngineSpec
from lockstep.errors import ConfigError
from lockstep.loop.determinism import convert_copy
from lockstep.loop.resolve import Resolved, is_native
from lockstep.models.architectures import causal_lm, hf_config, silence_transformers, text_config
from lockstep.models.export import export_model, exported_folder
from lockstep.models.load import LoadedModel, allocated, load_model
from lockstep.models.tensor_parallel import apply_tensor_parallel, tensor_parallel_plan
from lockstep.protocols import TrainBackend
from lockstep.protocols.engine import InferenceEngine, WeightTransfer, receives_weights
from lockstep.ranks.context import RankContext
from lockstep.schema.weights import WeightPart

# The spec of an engine with its own weights: a folder of the run's model without weights, its dtype, lengths
# and device.


def external_engine_spec(resolved: Resolved[GRPORun], model: LoadedModel, *, work_dir: Path) -> EngineSpec:
    """Build the spec of the run's engine; writes `work_dir`/model.

    Raises:
        ConfigError: engine.max_model_len is too short for the run.
    """
    run, device = resolved.run, _numbered(resolved.device)
    engine = run.engine
    elsewhere = engine.url is not None or (
        bool(engine.cuda_devices) and cuda_index(device) not in engine.cuda_devices
    )
    work_dir = work_dir.absolute()
    return EngineSpec(
        folder=write_model_folder(model, work_dir / "model"),
        weights="pushed",
        model_name=model.name,
        dtype=resolved.dtype,
        vocab_size=text_config(model.module).vocab_size,
        max_model_len=max_model_len(run, max_positions=model.max_positions),
        eos_token_ids=model.eos_token_ids,
        tokenizer=model.tokenizer,
        device=device,
        shares_device=device != "cpu" and not elsewhere,
        temperatures=frozenset({run.rollout.sampling.temperature, run.eval.temperature}),
        work_dir=work_dir,
        seed=run.seed,
        batch_invariant=resolved.batch_invariant,
        execution=model.execution,
        threads=torch.get_num_threads(),
    )


def max_model_len(run: GRPORun, *, max_positions: int) -> int:
    """Return the longest prompt and completion of training and evaluations, at most the model's positions.

    Raises:
        ConfigError: engine.max_model_len is below what training needs.
    """
    trained = run.longest_unit
    own = run.engine.max_model_len
    if own is not None and own < trained:
        raise ConfigError(
            f"contradiction: engine.max_model_len = {own} is less than data.max_prompt_tokens + "
            f"{run.rollout.length_setting} = {trained}; raise it, or leave it out"
        )
    return min(own or run.longest_sequence, max_positions)


def write_model_folder(model: LoadedModel, folder: Path) -> Path:
    """Write config, generation config and tokenizer as transformers saves them, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    module = causal_lm(model.module)
    config = copy.deepcopy(hf_config(model.module))
    config.architectures = [type(module).__name__]
    config.dtype = model.dtype
    with silence_transformers():
        config.save_pretrained(folder)
        if module.generation_config is not None:
            module.generation_config.save_pretrained(folder)
        if model.tokenizer is not None:
            model.tokenizer.save_pretrained(folder)
    return folder


def _numbered(device: str) -> str:
    """cuda -> cuda:N."""
    parsed = torch.device(device)
    if parsed.type == "cuda" and parsed.index is None:
        return f"cuda:{torch.cuda.current_device()}"
    return device


# The model of an engine in the trainer's process.


def engine_model(resolved: Resolved[GRPORun], model: LoadedModel, backend: TrainBackend) -> LoadedModel:
    """Return the model that the engine samples with: the trainer's own module where its Parameters are whole
    between calls, else a second module, into which every weight push copies. Its weights are not read: the
    first push comes before the first sample."""
    update = backend.weights(policy_version=0)
    if update.shared_module is model.module:
        return model
    merged = resolved.run.model.model_copy(
        update={"lora": None}
    )  # a backend that sends weights sends them merged
    device = torch.device(resolved.device)
    own = load_model(merged, attention=resolved.attention, device=device, materialize=False)
    own = dataclasses.replace(own, execution=model.execution)
    if update.part is not None and resolved.engine == "native":
        own = _rank_part(own, update.part, batch_invariant=resolved.batch_invariant)
        return allocated(own, device=device)
    own = allocated(own, device=device)
    return convert_copy(own) if resolved.batch_invariant else own


def leads_engine(resolved: Resolved[GRPORun], ranks: RankContext) -> bool:
    """Return whether this rank samples: the ranks of train.tp run an engine native in their own processes
    together, and the first of them asks for all samples."""
    run = resolved.run
    together = run.train.tp if resolved.engine == "native" and not has_own_weights(run.engine) else 1
    return ranks.rank % together == 0


def _rank_part(model: LoadedModel, part: WeightPart, *, batch_invariant: bool) -> LoadedModel:
    """Cut a model without weights to this rank's part, as the trainer's is."""
    if batch_invariant:
        model = convert_copy(model)
    plan = tensor_parallel_plan(model.module, size=part.group.size(), plan=part.plan)
    return dataclasses.replace(model, tp=apply_tensor_parallel(model.module, group=part.group, plan=plan))


# An engine for a model that is not being trained, for `lockstep generate`.


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
    return resolved_engine(config, native=is_native(model.dtype, _device()))


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


# What the manifest and the display of a run say of its engine.


def engine_report(engine: InferenceEngine, transfer: WeightTransfer) -> dict[str, Any]:
    """Return the manifest's fields: the weight transport and, for an external engine, its version, command
    and environment."""
    described = engine.describe() if receives_weights(engine) else {}
    return {"transport": transfer.transport, **described}


def report_lines(report: Mapping[str, Any]) -> list[str]:
    """Return the report as lines for the display; none for an engine inside this process."""
    if set(report) == {"transport"}:
        return []
    scalars = [f"{key} {value}" for key, value in report.items() if not isinstance(value, Mapping | list)]
    lines = ["engine: " + ", ".join(scalars)]
    environment = report.get("environment")
    if isinstance(environment, Mapping) and environment:
        lines.append("engine environment: " + " ".join(f"{k}={v}" for k, v in sorted(environment.items())))
    return lines
