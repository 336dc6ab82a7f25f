"""The policy of a replay: its module, the backend that runs it, and the weights loaded into it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

import torch
from torch import Tensor, nn

from lockstep import invariant
from lockstep.config.model import ModelConfig
from lockstep.errors import ConfigError, RecordingError
from lockstep.execution import joint_of
from lockstep.models.architectures import max_positions, text_config
from lockstep.models.dtypes import DTYPES
from lockstep.models.heads import HeadKind
from lockstep.models.load import LoadedModel, load_model, meta_module
from lockstep.models.memory import ModelShape, module_shape
from lockstep.observe.metrics import Spans
from lockstep.protocols.train import StepStats, TokenLoss
from lockstep.recording.reader import recorded_axes, recorded_model
from lockstep.schema.batch import PackedBatch
from lockstep.schema.contract import KernelContract
from lockstep.schema.recording import InputMeta, RecordingHeader
from lockstep.train import BACKENDS
from lockstep_lab.replay.buckets import Bucketing
from lockstep_lab.replay.cell import train_config

if TYPE_CHECKING:
    from lockstep.recording import Recording
    from lockstep_lab.replay.cell import ReplayOptions

Match = Literal["match", "mismatch", "unknown"]


class ReplayBackend(Protocol):
    """What a replay needs of a train backend: parts of TrainBackend, and gradients."""

    contract: KernelContract | None
    spans: Spans
    """Times "forward" and "backward"."""
    reduces_gradients: bool
    """Of the class: it adds gradients up over ranks itself, in backward."""

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]: ...
    def logprobs_own(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """Like `logprobs`, for this rank's own batches, which no other rank has."""
        ...

    def forward_backward(self, batches: Sequence[PackedBatch], loss: TokenLoss) -> StepStats: ...
    def forward_backward_own(self, batches: Sequence[PackedBatch], loss: TokenLoss) -> StepStats:
        """Like `forward_backward`, for this rank's own batches."""
        ...

    def optimizer_step(self) -> dict[str, float]: ...
    def gradients(self) -> dict[str, Tensor]:
        """By Parameter name: float32 copies on the host."""
        ...

    def live_gradients(self) -> dict[str, Tensor]:
        """By Parameter name, as the backend holds them where it can, else copies."""
        ...

    def gradient_norm(self) -> float: ...
    def drop_gradients(self) -> None: ...
    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelSize:
    """Sizes of the model as it is replayed, and with all of its layers."""

    vocab_size: int
    max_positions: int
    num_layers: int
    num_layers_full: int
    parameter_bytes: int
    parameter_bytes_full: int
    """Bytes of the model with all of its layers."""
    shape: ModelShape
    """The sizes that the memory estimate is based on."""


def model_config(header: RecordingHeader, options: ReplayOptions) -> ModelConfig:
    """The recorded model, or the one that the options name.

    A recording cannot make its reader run code: `trust_remote_code` comes from the options alone.

    Raises:
        RecordingError: header.model is no model.
    """
    cell = options.cell
    try:
        config = recorded_model(header)
    except RecordingError:
        if cell.model is None:
            raise
        config = ModelConfig()
    update: dict[str, Any] = {"trust_remote_code": options.trust_remote_code}
    if cell.model is not None:
        update |= {
            "name": cell.model,
            "revision": None,
            "lora": None,
            "num_layers": None,
            "dtype": cell.dtype,
        }
    if cell.num_layers is not None:
        update["num_layers"] = cell.num_layers
    return config.model_copy(update=update)


def model_head(header: RecordingHeader) -> HeadKind:
    """The head of the model whose inputs were recorded."""
    return "scalar" if header.has_scores else "logits"


def model_size(config: ModelConfig, *, dtype: torch.dtype, head: HeadKind = "logits") -> ModelSize:
    """Compute the sizes before any weight is loaded. Raises ModelError."""
    module = meta_module(config, dtype=dtype, head=head)
    whole = module
    if config.num_layers is not None:
        whole = meta_module(config.model_copy(update={"num_layers": None}), dtype=dtype, head=head)
    text, full = text_config(module), text_config(whole)
    return ModelSize(
        vocab_size=int(text.vocab_size),
        max_positions=max_positions(text),
        num_layers=int(text.num_hidden_layers),
        num_layers_full=int(full.num_hidden_layers),
        parameter_bytes=_bytes(module),
        parameter_bytes_full=_bytes(whole),
        shape=module_shape(module),
    )


def _bytes(module: nn.Module) -> int:
    return sum(p.numel() * p.element_size() for p in module.parameters())


def check_inputs_fit(recording: Recording, order: Sequence[int], size: ModelSize, *, name: str) -> None:
    """Refuse a model that cannot be fed the selected inputs.

    Raises:
        RecordingError: fewer positions, or a smaller vocabulary, than an input needs.
    """
    for index in order:
        longest = max(recording.lengths[index], default=0)
        if longest > size.max_positions:
            raise RecordingError(
                f"too-long: input {index}, field 'positions': its longest document has {longest} tokens, but "
                f"{name} has {size.max_positions} positions; replay with the recorded model, with a model "
                f"that has at least {longest} positions (--model), or leave this input out (--inputs)"
            )
    if recording.header.vocab_size <= size.vocab_size:
        return
    for index in order:  # a larger vocabulary need not have been used
        check_ids(recording[index].batch, index=index, vocab_size=size.vocab_size, name=name)


def check_ids(batch: PackedBatch, *, index: int, vocab_size: int, name: str) -> None:
    """Raise RecordingError for a token id outside the model's vocabulary; a GPU would only abort."""
    low, high = (int(x) for x in batch.token_ids.aminmax())
    if low < 0 or high >= vocab_size:
        raise RecordingError(
            f"outside-vocabulary: input {index}, field 'token_ids': it contains id "
            f"{low if low < 0 else high}, but {name} has a vocabulary of {vocab_size} (0 to "
            f"{vocab_size - 1}); replay with the recorded model or with a model that has its vocabulary "
            "(--model), or leave this input out (--inputs)"
        )


def check_tail(batch: PackedBatch, *, index: int, max_positions: int, name: str) -> None:
    """Raise RecordingError for a pad document longer than the model's positions: attention would compute it
    all the same."""
    real = len(batch.sample_ids)
    longest = max(batch.lengths[real:], default=0)
    if longest > max(max_positions, *batch.lengths[:real]):
        raise RecordingError(
            f"too-long: input {index}, field 'tail': a pad document has {longest:,} slots, but {name} has "
            f"{max_positions:,} positions; leave this input out (--inputs)"
        )


def check_usable(meta: InputMeta, *, index: int) -> None:
    """Raise RecordingError for an input of a foreign module that could not be split into documents."""
    if meta.unusable is not None:
        raise RecordingError(
            f"wrong-batch: input {index} stores the module's arguments, not documents ({meta.unusable}), so "
            f"it cannot be replayed. Look at it with `lockstep recording show {index}`, or leave it out "
            "(--inputs)"
        )


class Policy:
    """The module, its backend, and the weights loaded into it.

    Args:
        spans: times the backend's forward and backward.

    Raises:
        ModelError, RecordingError, ConfigError: the model or the weights cannot be loaded.
    """

    def __init__(
        self,
        recording: Recording,
        options: ReplayOptions,
        *,
        order: Sequence[int],
        bucketing: Bucketing,
        spans: Spans,
    ) -> None:
        self.recording, self.options = recording, options
        self.config = model_config(recording.header, options)
        self._device = torch.device(options.cell.device)
        self._settings = contextlib.ExitStack()
        self.settings_apply = options.cell.batch_invariant and self._device.type == "cuda"
        """Whether the cell needs CUDA's settings for batch invariance, which hold for the whole process."""
        self._settings.enter_context(invariant.configured(self.settings_apply))
        self._bucketing, self._inputs = bucketing, len(order)
        self._stored_folders: dict[tuple[str | None, str | None, int], Path | None] = {}
        alone = options.cell.ranks == 1 and not options.simulate and not options.shuffle
        # DeepSpeed takes a module's weights when its engine is made, and ranks share one engine.
        self._fixed = options.optimizer_step or (options.cell.deepspeed and not alone)
        self._load(recording.metas[order[0]])
        self._spans = spans
        self.moved = False
        """Whether an optimizer step has changed the weights."""
        self.backend = self._build()

    def _load(self, meta: InputMeta) -> None:
        """Load the module with the weights that this input saw."""
        self._checkpoint: Path | None = None
        self.model = self._load_base()
        self.fingerprint = "" if self._stored(meta) else self._fingerprint(self.model.module)
        # After the fingerprint, which is of the weights in the recorded dtype.
        self._cast()
        if self.options.cell.batch_invariant:
            invariant.convert(self.model.module, device=self._device, dtype=self._cell_dtype)
        self._load_weights_of(meta)

    # --- weights --------------------------------------------------------------------------------------------

    def use(self, meta: InputMeta) -> Match:
        """Load the weights that this input saw, if they are stored, and return whether the loaded weights are
        those."""
        if self._fixed or self._stored(meta) == self._checkpoint:
            return self.match(meta)
        if self.options.cell.deepspeed:
            self.backend.close()
            before = joint_of(self.model.module)
            self._load(meta)
            self.backend = self._build()
            after = joint_of(self.model.module)
            if before is not None and after is not None:
                # Graphs do not depend on the values of weights, so they need not be compiled again.
                after.adopt(before)
        else:
            self._load_weights_of(meta)
        return self.match(meta)

    def adopt(self, module: nn.Module) -> None:
        """Copy the weights of a module of the same architecture, until `use` loads others."""
        self._copy(module)
        self.fingerprint, self._checkpoint = self._fingerprint(module), None

    def weights_of(self, meta: InputMeta) -> str:
        """An id of the weights that `use` loads for this input; inputs with equal ids share weights."""
        stored = None if self._fixed else self._stored(meta)
        return "" if stored is None else meta.weights or str(stored)

    def match(self, meta: InputMeta) -> Match:
        """Whether the loaded weights are those that saw this input, by fingerprint."""
        if self.moved:
            return "mismatch"
        if meta.weights is None:
            return "unknown"
        same = meta.weights == self.fingerprint and self.recorded_layers
        return "match" if same else "mismatch"

    def describe_weights(self, meta: InputMeta) -> str:
        """Describe in one line where the weights come from and whether they are the recorded ones."""
        source = self.config.name if self._checkpoint is None else f"{self.config.name}, {self._checkpoint}"
        cast = "" if self._loaded_dtype == self._cell_dtype else f", converted to {self.options.cell.dtype}"
        about = f"weights of {source}{cast}: fingerprint {self.fingerprint}"
        if not self.recorded_layers:
            return f"{about}; with --num-layers this is another model: nothing recorded is comparable with it"
        match self.match(meta):
            case "match":
                return f"{about}, the recorded one"
            case "mismatch":
                stored = "" if meta.checkpoint else " (the recording stores none for this input)"
                return f"{about}, NOT the recorded {meta.weights}{stored}: differences are of the weights too"
        return f"{about}; the recording names none, so nobody knows whether these are the recorded weights"

    @property
    def recorded_layers(self) -> bool:
        """Whether the model has as many layers as the one that was recorded."""
        return bool(self.config.num_layers == self.recording.header.model.get("num_layers"))

    @property
    def _cell_dtype(self) -> torch.dtype:
        return DTYPES[self.options.cell.dtype]

    @property
    def _loaded_dtype(self) -> torch.dtype:
        return self.model.dtype

    def _load_base(self) -> LoadedModel:
        """Load the model in the recorded dtype; the weights are converted afterwards, as in the run."""
        dtype = self.options.cell.dtype
        if self.options.cell.model is None:
            dtype = recorded_axes(self.recording.header, given=("attention",))["dtype"]
        config = self.config.model_copy(update={"dtype": cast(Any, dtype)})
        head = model_head(self.recording.header)
        return load_model(config, attention=self.options.cell.attention, device=self._device, head=head)

    @staticmethod
    def _fingerprint(module: nn.Module) -> str:
        from lockstep.recording.files import fingerprint, module_tensors

        return fingerprint(module_tensors(module).items())

    def _load_weights_of(self, meta: InputMeta) -> None:
        folder = self._stored(meta)
        if folder == self._checkpoint:
            return
        from lockstep.recording.weights import load_weights

        if folder is None:
            base = self._load_base().module
            self.fingerprint = self._fingerprint(base)
            self._copy(base)
        else:
            fewer = self.options.cell.num_layers is not None
            self.fingerprint = load_weights(self.model.module, folder, cast=True, partial=fewer)
        self._checkpoint = folder

    def _stored(self, meta: InputMeta) -> Path | None:
        """The folder with the weights of an input; None: not stored, or --model is given."""
        if self.options.cell.model is not None:
            return None
        key = (meta.checkpoint, meta.weights, meta.step)
        if key not in self._stored_folders:
            from lockstep.recording.weights import find_weights

            self._stored_folders[key] = find_weights(self.recording.path, meta)
        return self._stored_folders[key]

    @torch.no_grad()
    def _copy(self, source: nn.Module) -> None:
        from lockstep.recording.files import module_tensors

        tensors = module_tensors(source)
        for name, tensor in module_tensors(self.model.module).items():
            tensor.copy_(tensors[name])

    def _cast(self) -> None:
        """Convert parameters only: buffers such as rotary frequencies have a dtype of their own."""
        for parameter in self.model.module.parameters():
            if parameter.dtype != self._cell_dtype:
                # `.data`: the Parameter remains the same object, and tied ones remain tied.
                parameter.data = parameter.data.to(self._cell_dtype)

    # --- backend --------------------------------------------------------------------------------------------

    def _build(self) -> ReplayBackend:
        cell = self.options.cell
        tokens = self.recording.header.capacity.get("token_budget") or 4096
        train = train_config(cell, static_capacity=self._bucketing.static, token_budget=max(1, int(tokens)))
        model = dataclasses.replace(self.model, dtype=self._cell_dtype)
        if self.options.loss == "recorded" and (router_losses := self.recording.header.router_losses):
            if cell.deepspeed:
                raise ConfigError(
                    "unsupported-combination: the recorded loss has router losses "
                    f"({', '.join(router_losses)}), which DeepSpeed's backend does not compute; replay "
                    "without --zero-stage and --deepcompile, or choose --loss logprob-sum"
                )
            train = train.model_copy(update=dict(router_losses))
        if cell.deepspeed:
            train = train.model_copy(update={"zero_stage": 1 if cell.zero_stage is None else cell.zero_stage})
        kind: Any = BACKENDS.load("deepspeed" if cell.deepspeed else "local")
        backend: ReplayBackend = kind(
            train,
            model=model,
            total_steps=self._inputs if self.options.optimizer_step else 0,
            temperature=self.recording.header.temperature,
            spans=self._spans,
        )
        return backend

    def take_back_settings(self) -> None:
        """Restore the process's settings: another cell may run in it."""
        self._settings.close()

    def close(self) -> None:
        """Close the backend and restore the process's settings."""
        self.backend.close()
        self.take_back_settings()


def weights_summary(policy: Policy, matches: Mapping[Match, int], description: str) -> dict[str, Any]:
    """Where the weights came from and how many inputs they match, as summary.json has it."""
    total = {name: matches.get(name, 0) for name in ("match", "mismatch", "unknown")}
    if total["mismatch"]:
        verdict: bool | None = False
    else:
        verdict = True if total["match"] and not total["unknown"] else None
    return {
        "model": policy.config.name,
        "fingerprint": policy.fingerprint,
        "matches": verdict,
        "inputs": total,
        "statement": description,
    }
