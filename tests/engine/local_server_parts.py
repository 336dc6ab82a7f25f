"""Engines of Lockstep's in processes of their own, and weights for them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from sampled import engine_spec

from lockstep.config.engine import EngineConfig
from lockstep.engine.build import make_engine
from lockstep.engine.spec import EngineSpec
from lockstep.loop.engines import write_model_folder
from lockstep.models.load import LoadedModel
from lockstep.schema.weights import WeightUpdate
from lockstep.transfer import make_transfer


def spec_of(model: LoadedModel, work_dir: Path, **changes: Any) -> EngineSpec:
    return engine_spec(
        **{
            "folder": write_model_folder(model, work_dir / "model"),
            "model_name": model.name,
            "dtype": str(model.dtype).removeprefix("torch."),
            "vocab_size": model.module.config.vocab_size,
            "max_model_len": model.max_positions,
            "eos_token_ids": model.eos_token_ids,
            "tokenizer": model.tokenizer,
            "work_dir": work_dir,
            "threads": torch.get_num_threads(),
            **changes,
        }
    )


class Served:
    """An engine behind its server, to which `push` sends the weights of `model`."""

    def __init__(
        self, model: LoadedModel, folder: Path, *, spec: dict[str, Any] | None = None, **settings: Any
    ) -> None:
        self.config = EngineConfig(**{"process": "separate", "name": "native"} | settings)
        self.model = model
        self.engine: Any = make_engine(self.config, spec=spec_of(model, folder, **spec or {}))
        self.transfer = make_transfer(self.config, self.engine, device="cpu", work_dir=folder)

    def weights(self, *, policy_version: int) -> WeightUpdate:
        """As a train backend has it."""
        module = self.model.module
        return WeightUpdate(
            policy_version=policy_version,
            tensors=lambda: iter(module.named_parameters(remove_duplicate=False)),
            shared_module=module,
        )

    def push(self, version: int) -> None:
        self.transfer.push(self, self.engine, policy_version=version)  # type: ignore[arg-type]
        assert self.transfer.check(self.engine)

    def close(self) -> None:
        self.transfer.close()
        self.engine.close()
