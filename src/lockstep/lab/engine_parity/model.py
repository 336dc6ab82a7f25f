"""The model of a parity job, for an engine outside the trainer."""

from __future__ import annotations

import torch

from lockstep.engine.spec import EngineSpec
from lockstep.lab.engine_parity.job import EnginesJob
from lockstep.models.causal_lm import text_config
from lockstep.models.load import LoadedModel


def make_engine_spec(job: EnginesJob, model: LoadedModel, *, device: torch.device) -> EngineSpec:
    """A folder with the model's config and tokenizer; with its weights, where the engine is to load them
    itself."""
    from lockstep.loop.engine_spec import write_model_folder
    from lockstep.models.export import export_hf

    work_dir = job.out / "engine"
    folder = work_dir / "model"
    work_dir.mkdir(parents=True, exist_ok=True)
    if job.weights == "folder":
        export_hf(model.module, model.tokenizer, folder)
    else:
        write_model_folder(model, folder)
    return EngineSpec(
        folder=folder,
        weights=job.weights,
        model_name=job.model.name,
        dtype=str(model.dtype).removeprefix("torch."),
        vocab_size=int(text_config(model.module).vocab_size),
        max_model_len=max(map(len, job.prompts)) + job.max_tokens,
        eos_token_ids=model.eos_token_ids,
        tokenizer=model.tokenizer,
        device="cpu" if device.type == "cpu" else f"{device.type}:{device.index or 0}",
        shares_device=device.type == "cuda",
        temperatures=frozenset({0.0, job.temperature}),
        work_dir=work_dir,
        seed=job.seed,
    )
