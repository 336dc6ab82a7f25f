"""The spec of an engine with its own weights: a folder of the run's model without weights, its dtype, lengths
and device."""

from __future__ import annotations

import copy
from pathlib import Path

import torch

from lockstep.config.run import GRPORun
from lockstep.engine.build import cuda_index
from lockstep.engine.spec import EngineSpec
from lockstep.errors import ConfigError
from lockstep.loop.axes import Axes
from lockstep.models.causal_lm import causal_lm, hf_config, text_config
from lockstep.models.load import LoadedModel
from lockstep.models.quiet import quiet_transformers


def external_engine_spec(run: GRPORun, axes: Axes, model: LoadedModel, *, work_dir: Path) -> EngineSpec:
    """Build the spec of `run`'s engine; writes `work_dir`/model.

    Raises:
        ConfigError: engine.max_model_len is too short for the run.
    """
    device = _numbered(axes.device)
    engine = run.engine
    elsewhere = engine.url is not None or (
        bool(engine.cuda_devices) and cuda_index(device) not in engine.cuda_devices
    )
    work_dir = work_dir.absolute()
    return EngineSpec(
        folder=write_model_folder(model, work_dir / "model"),
        weights="pushed",
        model_name=model.name,
        dtype=axes.dtype,
        vocab_size=text_config(model.module).vocab_size,
        max_model_len=max_model_len(run, max_positions=model.max_positions),
        eos_token_ids=model.eos_token_ids,
        tokenizer=model.tokenizer,
        device=device,
        shares_device=device != "cpu" and not elsewhere,
        temperatures=frozenset({run.rollout.sampling.temperature, run.eval.temperature}),
        work_dir=work_dir,
        seed=run.seed,
        batch_invariant=axes.batch_invariant,
        execution=model.execution,
        threads=torch.get_num_threads(),
    )


def max_model_len(run: GRPORun, *, max_positions: int) -> int:
    """Return the longest prompt and completion of training and evaluations, at most the model's positions.

    Raises:
        ConfigError: engine.max_model_len is below what training needs.
    """
    trained = run.data.max_prompt_tokens + run.rollout.sampling.max_tokens
    own = run.engine.max_model_len
    if own is not None and own < trained:
        raise ConfigError(
            f"contradiction: engine.max_model_len = {own} is below data.max_prompt_tokens + "
            f"rollout.sampling.max_tokens = {trained}; raise it, or leave it out"
        )
    return min(own or run.longest_sequence, max_positions)


def write_model_folder(model: LoadedModel, folder: Path) -> Path:
    """Write config, generation config and tokenizer as transformers saves them, without weights."""
    folder.mkdir(parents=True, exist_ok=True)
    module = causal_lm(model.module)
    config = copy.deepcopy(hf_config(model.module))
    config.architectures = [type(module).__name__]
    config.dtype = model.dtype
    with quiet_transformers():
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
