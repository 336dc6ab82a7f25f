"""Shared by the commands: the model of a run, a checkpoint or a folder, ready to generate; its heads; the
number of ranks."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from lockstep.common_errors import damaged, other_tensors
from lockstep.config.data import DataConfig
from lockstep.config.declarations import backends
from lockstep.config.engine import EngineConfig
from lockstep.config.load import saved_run
from lockstep.config.model import Dtype, ModelConfig
from lockstep.config.rollout import SamplingConfig
from lockstep.config.run import RunConfig, on_ranks
from lockstep.errors import CheckpointError, ConfigError
from lockstep.observe.files import read_json
from lockstep.observe.run_history import recorded_ranks
from lockstep.observe.text import echo
from lockstep.ranks.environment import visible_gpus

if TYPE_CHECKING:
    from lockstep.data.chat import ChatFormat
    from lockstep.engine.hf.engine import HFEngine
    from lockstep.models.load import LoadedModel

_COMPLETE = "complete.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenModel:
    """A policy that can generate."""

    engine: HFEngine
    model: LoadedModel
    run: RunConfig | None
    """The run that it comes from, if any."""
    source: str
    """A description of its weights."""

    @property
    def data(self) -> DataConfig:
        """The run's settings for turning text into prompts; the defaults for a bare model."""
        data = getattr(self.run, "data", None)
        return data if isinstance(data, DataConfig) else DataConfig()

    @property
    def sampling(self) -> SamplingConfig:
        """The run's sampling settings; the defaults for a bare model."""
        own = None if self.run is None else self.run.sampling
        return own or SamplingConfig(max_tokens=256)

    def chat_format(self) -> ChatFormat:
        """Raises ConfigError for a model without a tokenizer."""
        from lockstep.data.chat import ChatFormat

        if self.model.tokenizer is None:
            raise ConfigError(
                f"no-tokenizer: {self.source} has no tokenizer, so it cannot read text; use --num-prompts"
            )
        return ChatFormat(self.data, self.model.tokenizer)


def open_model(where: str, *, checkpoint: str | None, max_batch: int = 64) -> OpenModel:
    """The model of a run directory, or any name that model.name takes.

    Args:
        checkpoint: of a run directory: "export", "last" or a step number. None: the export if there is one,
            else the last checkpoint.

    Raises:
        ConfigError: --checkpoint was given for something that is no run, or is neither a number, last nor
            export.
        CheckpointError: the run has no such checkpoint, or it is damaged.
        ModelError: the model cannot be loaded.
    """
    import torch

    from lockstep.engine.hf.engine import HFEngine
    from lockstep.engine.spec import admit_decoding
    from lockstep.models.load import load_model

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    run, weights = find_run(where, checkpoint) or (None, None)
    config, saved = ModelConfig(name=where), None
    if run is not None and weights is not None:
        config, saved = model_of_run(run, weights, dtype=run.model.dtype)
    model = load_model(config, attention="sdpa", device=device)
    if saved is not None:
        read_checkpoint(model, saved)
    admit_decoding("hf", model)
    return OpenModel(
        engine=HFEngine(EngineConfig(max_batch=max_batch), model=model),
        model=model,
        run=run,
        source=where if weights is None else f"{where} ({weights.name})",
    )


def find_run(where: str, checkpoint: str | None) -> tuple[RunConfig, Path] | None:
    """The run in a folder, and the folder of the weights that `checkpoint` means; None: it is no run's.

    Raises:
        ConfigError: `checkpoint` is given, and there is no run; or see `find_weights`.
        ModelError: it is the path of a run that does not exist.
        CheckpointError: see `find_weights`.
    """
    from lockstep.loop.preflight import check_no_lost_run  # numpy: not for every command

    check_no_lost_run(where)
    folder = Path(where).expanduser()
    file = folder / "config.toml"
    if file.is_file():
        return saved_run(file), find_weights(folder, checkpoint)
    if checkpoint is not None:
        raise ConfigError(
            f"wrong-kind-of-file: --checkpoint {checkpoint} needs a run directory, but {where!r} contains "
            "no config.toml; name a run directory, or leave --checkpoint out"
        )
    return None


def model_of_run(
    run: RunConfig, weights: Path, *, dtype: Dtype | Literal["auto"]
) -> tuple[ModelConfig, Path | None]:
    """Return what to load for a run's weights: an export alone, or the run's model and a checkpoint."""
    if weights.name == "export":
        return ModelConfig(name=str(weights), dtype=dtype), None
    return run.model.model_copy(update={"dtype": dtype}), weights


def find_weights(run_dir: Path, checkpoint: str | None) -> Path:
    """The folder of the weights that `checkpoint` means; reads names only and changes nothing.

    Raises:
        ConfigError: for a word that means nothing.
        CheckpointError: there is none.
    """
    export = run_dir / "export"
    has_export = (export / "config.json").is_file()
    saved = {int(p.name.removeprefix("step-")): p for p in _complete(run_dir)}
    known = [*(["export"] if has_export else []), *map(str, sorted(saved))]
    if checkpoint in (None, "export") and has_export:
        return export
    if checkpoint in (None, "last") and saved:
        return max(saved.values(), key=_sequence)
    if checkpoint is not None and checkpoint.isdecimal() and int(checkpoint) in saved:
        return saved[int(checkpoint)]
    if checkpoint is not None and checkpoint not in ("export", "last") and not checkpoint.isdecimal():
        raise ConfigError(
            f"unknown-name: --checkpoint {checkpoint} is not export, last or a step; available: "
            f"{', '.join(known)}"
        )
    raise CheckpointError(
        f"no-such-file: {run_dir} has no {'weights' if checkpoint is None else f'checkpoint {checkpoint}'}; "
        f"available: {', '.join(known) or 'none'}",
        setting="--checkpoint",
    )


def read_checkpoint(model: LoadedModel, directory: Path) -> None:
    """Copy a checkpoint's weights (all of them, or a LoRA run's adapters) into the model.

    Raises:
        CheckpointError: a file is missing or damaged, or does not fit the model.
    """
    import torch

    from lockstep.train.state.index import StoredTensors, read_index

    own = dict(model.module.named_parameters())
    trained = {n for n, p in own.items() if p.requires_grad}
    try:
        opened = StoredTensors(read_index(directory))
    except CheckpointError as error:
        raise error.with_message(f"{error}; choose another --checkpoint") from error
    with opened as stored, torch.no_grad():
        weights = stored.weights()
        unknown, missing = weights.keys() - own.keys(), trained - weights.keys()
        misshapen = [n for n, load in weights.items() if n in own and own[n].shape != load.shape]
        if unknown or missing or misshapen:
            raise other_tensors(
                CheckpointError, str(directory), missing, unknown, misshapen=misshapen, code="other-model"
            )
        for name, load in weights.items():
            own[name].copy_(load())


def check_heads(run: RunConfig) -> None:
    """Raise ConfigError unless `train.tp` divides the heads of the model, and `train.ep` its experts;
    ModelError: it is not here."""
    if run.train.tp == run.train.ep == 1:
        return
    import torch

    from lockstep.models.architectures import text_config
    from lockstep.models.expert_parallel import check_expert_parallel_size
    from lockstep.models.load import meta_module
    from lockstep.models.tensor_parallel import check_tensor_parallel_size

    config = text_config(meta_module(run.model, dtype=torch.float32))
    check_tensor_parallel_size(config, run.train.tp)
    check_expert_parallel_size(config, run.train.ep)


def _complete(run_dir: Path) -> list[Path]:
    """Finished checkpoints; one that is being written has another name or no complete.json yet."""
    folders = (run_dir / "checkpoints").glob("step-*")
    return [p for p in folders if p.name.removeprefix("step-").isdecimal() and (p / _COMPLETE).is_file()]


def _sequence(checkpoint: Path) -> int:
    """The position of the checkpoint among the saves of the run."""
    value = read_json(checkpoint / _COMPLETE, CheckpointError, root=checkpoint)
    sequence = value.get("sequence") if isinstance(value, dict) else None
    if not isinstance(sequence, int):
        why = f"its sequence is {sequence!r:.80}"
        raise damaged(CheckpointError, checkpoint / _COMPLETE, why, fix="name a step with --checkpoint")
    return sequence


def default_ranks(run: RunConfig, *, resume: Path | None = None) -> int:
    """Return the number of ranks where none is named: one for each GPU that the run can use; on a CPU one.

    Args:
        resume: a run's folder: it goes on with as many ranks as it had, if there are so many GPUs.
    """
    train = run.train
    spans = train.backend == "auto" or (train.backend in backends() and backends()[train.backend].spans_ranks)
    if not spans or train.device not in ("auto", "cuda") or run.cluster is not None:
        return 1
    gpus = visible_gpus()
    if gpus > 1:
        import torch  # the settings are checked by now

        gpus = min(gpus, torch.cuda.device_count())
    if resume is not None:
        gpus = min(gpus, recorded_ranks(resume))
    together = train.tp * train.ring
    ranks = together * min(gpus // together, run.documents_per_update)
    ranks -= ranks % train.ep
    if ranks <= 1:
        return 1
    try:
        on_ranks(run, ranks)
    except ConfigError as error:
        echo(f"--ranks auto -> 1, of {gpus} GPUs: {error}")
        return 1
    return ranks
