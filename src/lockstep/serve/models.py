"""A base model in memory, the adapters and copies that clients train, and what samples from them.

Every training client and sampler has modules of its own over one set of base weights; only adapters, or with
full training all weights, are its own. So clients cannot change each other's numbers.
"""

from __future__ import annotations

import copy
import dataclasses
import math
import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from lockstep import invariant
from lockstep.config.engine import EngineConfig
from lockstep.config.model import LoraConfig, ModelConfig
from lockstep.config.train import TrainConfig
from lockstep.engine.native.engine import NativeEngine
from lockstep.engine.spec import admit_decoding
from lockstep.models.architectures import architecture_of, causal_lm, text_config
from lockstep.models.forward import decoder_inputs, run_decoder
from lockstep.models.heads import head_options
from lockstep.models.load import LoadedModel, load_model
from lockstep.models.lora import add_lora, targets_of
from lockstep.observe.files import write_json
from lockstep.ops.logprobs import HeadOptions, head_logits, linear_logprobs
from lockstep.packing import pack
from lockstep.schema.batch import IGNORE_LABEL, PackedBatch, RolloutSample, TrainSample, policy_samples
from lockstep.schema.rollout import Completion, GenerationRequest
from lockstep.schema.weights import WeightUpdate
from lockstep.serve.losses import ServedLoss
from lockstep.serve.wire import Datum
from lockstep.train.local import LocalBackend
from lockstep.train.loss_module import LossModule, head_rows, scatter
from lockstep.train.state.files import write_tensors

ALPHA = 32.0
"""Scale of adapters: their output is multiplied by ALPHA / rank, whatever the rank, as in the hosted API."""
MOST_RANK = 512
MAX_BATCH = 64
"""Samples that are decoded together."""
_HEAD_A, _HEAD_B = "parametrizations.weight.0.lora_A", "parametrizations.weight.0.lora_B"


@dataclass(frozen=True, kw_only=True, slots=True)
class AdapterSpec:
    """The adapters of a training client."""

    rank: int
    seed: int
    attention: bool = True
    mlp: bool = True
    unembed: bool = True

    def config(self, module: nn.Module) -> LoraConfig:
        """Those of a module's decoder."""
        record = architecture_of(text_config(module))
        of_attention = () if record is None else record.attention_linears
        both = targets_of(module, LoraConfig())
        targets = [name for name in both if (self.attention if name in of_attention else self.mlp)]
        return LoraConfig(rank=self.rank, alpha=ALPHA, target_modules=tuple(targets))

    @property
    def shape(self) -> AdapterSpec:
        """What decides names and sizes."""
        return dataclasses.replace(self, seed=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class AdamSettings:
    """The numbers of one optimizer step."""

    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float
    """0: gradients are not clipped."""


class HeadAdapter(nn.Module):
    """The adapter of the output head, which losses and engines read as one weight: W + (ALPHA / rank) B A."""

    def __init__(self, weight: Tensor, *, rank: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        a = torch.empty(rank, weight.shape[1])
        nn.init.kaiming_uniform_(a, a=math.sqrt(5), generator=generator)  # as peft draws its A
        self.lora_A = nn.Parameter(a.to(weight))
        self.lora_B = nn.Parameter(weight.new_zeros(weight.shape[0], rank))

    def forward(self, weight: Tensor) -> Tensor:
        """[V, C] of the base head's."""
        return adapted(weight, self.lora_A, self.lora_B)


def adapted(weight: Tensor, a: Tensor, b: Tensor) -> Tensor:
    """[V, C]: weight + (ALPHA / rank) b @ a: one function for trainer and sampler, so that they agree to the
    bit."""
    return weight + (ALPHA / a.shape[0]) * (b @ a)


class BaseModel:
    """A model that clients train and sample from.

    Args:
        folder: whatever model.name takes.

    Raises:
        ModelError, ConfigError: see `load_model`; or the model has no batch-invariant form, or engine native
            cannot decode it.
    """

    def __init__(self, name: str, folder: str, *, device: torch.device, dtype: str = "auto") -> None:
        self.name, self.folder = name, folder
        config = ModelConfig.model_validate({"name": folder, "dtype": dtype})
        self.loaded = load_model(config, attention="varlen", device=device)
        self.loaded.module.requires_grad_(False)
        embedding: Any = causal_lm(self.loaded.module).get_input_embeddings()
        self.vocab_size = int(embedding.weight.shape[0])
        self.max_positions = self.loaded.max_positions
        self.train_config = TrainConfig(
            backend="local",
            device=device.type,
            attention="varlen",
            layout="packed",
            execution="eager",
            batch_invariant=True,
        )
        # What a run checks before it begins. Otherwise the first request of each client would fail.
        admit_decoding("native", self.loaded)
        self.copy(None)

    def copy(self, spec: AdapterSpec | None, *, own: bool = False, trains: bool = False) -> LoadedModel:
        """Return a batch-invariant copy of the model.

        Args:
            spec: adapters to add.
            own: give it weights of its own; otherwise it shares those of the base model.
            trains: whether gradients go to the head's adapter. Otherwise the head is one weight, which
                `Sampler` fills.
        """
        memo = {} if own else {id(p): p for p in self.loaded.module.parameters()}
        module = copy.deepcopy(self.loaded.module, memo)
        if spec is not None:
            add_lora(module, spec.config(module), seed=spec.seed)
        invariant.convert(module)
        if spec is not None and spec.unembed:
            head: Any = causal_lm(module).get_output_embeddings()
            if trains:
                adapter = HeadAdapter(head.weight, rank=spec.rank, seed=spec.seed)
                parametrize.register_parametrization(head, "weight", adapter, unsafe=True)
            else:
                head.weight = nn.Parameter(head.weight.detach().clone(), requires_grad=False)
        return dataclasses.replace(self.loaded, module=module.requires_grad_(True) if own else module)


class TrainingModel:
    """What one training client trains.

    Args:
        spec: adapters; None: all weights are trained.
        weights: what `trained` returned, to start from; None: adapters that change nothing.
    """

    def __init__(
        self, base: BaseModel, spec: AdapterSpec | None, weights: Mapping[str, Tensor] | None = None
    ) -> None:
        self.base, self.spec = base, spec
        model = base.copy(spec, own=spec is None, trains=True)
        self._module = model.module
        self._head = causal_lm(model.module).get_output_embeddings()
        if weights is not None:
            copy_named(self._named(), weights)
        self.backend = LocalBackend(base.train_config, model=model, total_steps=1)

    def _named(self) -> dict[str, Tensor]:
        return {name: p for name, p in self._module.named_parameters() if p.requires_grad}

    def trained(self) -> dict[str, Tensor]:
        """Return the trained weights by name: live, not copied."""
        return {name: p.detach() for name, p in self._named().items()}

    def forward(self, datums: Sequence[Datum]) -> list[Tensor]:
        """Return [L] float32 per datum: the logprob of each target, nats."""
        # One datum a pack: the rows are batch-invariant, and their sums do not depend on who came with whom.
        values = self.backend.logprobs([document(datum) for datum in datums])
        return [value[: len(d.inputs)] for value, d in zip(values, datums, strict=True)]

    def forward_backward(
        self, datums: Sequence[Datum], loss: ServedLoss
    ) -> tuple[list[Tensor], dict[str, float]]:
        """Add the gradients of the loss. Returns the logprobs as `forward` does, and metrics.

        Raises:
            TrainError: a loss is not finite; the gradients are as before the call.
        """
        with self.backend.keeping_gradients():
            logprobs, losses = self.add_gradients(datums, loss)
        return logprobs, loss.total(losses)

    def add_gradients(self, datums: Sequence[Datum], loss: ServedLoss) -> tuple[list[Tensor], list[float]]:
        """`forward_backward` with the loss of each datum, and without gradients if it fails."""
        stats = self.backend.forward_backward([document(datum) for datum in datums], loss)
        logprobs = [v[: len(d.inputs)] for v, d in zip(stats.logprobs, datums, strict=True)]
        return logprobs, [float(one) for one in stats.losses]

    def optim_step(self, adam: AdamSettings) -> dict[str, float]:
        """Take an AdamW step with these numbers. Raises TrainError: no gradients, or not finite ones."""
        self.backend.use_rates(
            lr=adam.learning_rate,
            betas=(adam.beta1, adam.beta2),
            eps=adam.eps,
            weight_decay=adam.weight_decay,
            max_grad_norm=adam.grad_clip_norm or math.inf,
        )
        return self.backend.optimizer_step()

    def save(self, folder: Path) -> None:
        """Save everything that decides how training goes on into an empty folder."""
        self.backend.save(folder)()

    def save_weights(self, path: Path) -> None:
        """Save what a sampler needs."""
        write_tensors(path, {name: t.contiguous() for name, t in self.trained().items()})

    def export(self, folder: Path) -> None:
        """Write into an empty folder what other programs load: adapters as peft does, or the whole model as
        transformers does.

        Raises:
            ModelError: the disk is full, or the like.
        """
        if self.spec is None:
            self.backend.export(folder)
            return
        head = next(n for n, m in self._module.named_modules() if m is self._head)
        renamed = {}
        for name, tensor in self.trained().items():
            for given, written in ((_HEAD_A, "lora_A.weight"), (_HEAD_B, "lora_B.weight")):
                name = name.replace(given, written)
            renamed[f"base_model.model.{name.replace('.default.', '.')}"] = tensor.contiguous()
        write_tensors(folder / "adapter_model.safetensors", renamed)
        targets = self.spec.config(self.base.loaded.module).target_modules  # in ours they are adapters
        config = {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": self.base.folder,
            "r": self.spec.rank,
            "lora_alpha": ALPHA,
            "target_modules": [*targets, *([head] if self.spec.unembed else [])],
        }
        write_json(folder / "adapter_config.json", config)

    @classmethod
    def load(
        cls, base: BaseModel, spec: AdapterSpec | None, folder: Path, *, optimizer: bool
    ) -> TrainingModel:
        """Return a model as `save` left it; without `optimizer`, its states begin anew.

        Raises:
            CheckpointError: the folder is damaged, or of another model.
        """
        model = cls(base, spec)
        model.backend.load(folder)
        return model if optimizer else cls(base, spec, model.trained())


class Sampler:
    """Samples from one base model with adapters of one shape, of which one set is active at a time.

    Args:
        spec: of the adapters; None with `own`: of all weights; None: the base model itself.
    """

    def __init__(self, base: BaseModel, spec: AdapterSpec | None, *, own: bool = False) -> None:
        self.base = base
        self._model = base.copy(spec, own=own)
        self._module = self._model.module
        self._engine = NativeEngine(EngineConfig(name="native", max_batch=MAX_BATCH), model=self._model)
        self._scorer = LossModule(self._module, config=base.train_config, temperature=1.0, compiled=False)
        self._active: tuple[Path, float] | None = None
        self._version = 0

    def activate(self, weights: Path, *, written: float) -> None:
        """Sample from these weights from now on.

        Args:
            written: when; a file of the same name may have had other weights.
        """
        if (weights, written) == self._active:
            return
        tensors = load_file(weights)
        head_a, head_b = (_pop(tensors, ending) for ending in (_HEAD_A, _HEAD_B))
        copy_named(dict(self._module.named_parameters()), tensors, whole=False)
        if head_a is not None and head_b is not None:
            base: Any = causal_lm(self.base.loaded.module).get_output_embeddings()
            head: Any = causal_lm(self._module).get_output_embeddings()
            with torch.no_grad():
                a, b = head_a.to(base.weight), head_b.to(base.weight)
                head.weight.copy_(adapted(base.weight, a, b))
        self._active, self._version = (weights, written), self._version + 1
        update = WeightUpdate(
            policy_version=self._version, tensors=lambda: iter(()), shared_module=self._module
        )
        self._engine.update_weights(update)

    def generate(self, requests: Sequence[GenerationRequest], *, seconds: float) -> list[list[Completion]]:
        """Return the samples of each request; those that are not done after `seconds` end with "abort".

        Raises:
            EngineError: see Engine.generate.
        """
        deadline = threading.Timer(seconds, self._engine.abort)
        deadline.daemon = True
        deadline.start()
        try:
            return self._engine.generate(requests)
        finally:
            deadline.cancel()

    @torch.no_grad()
    def score(self, token_ids: Sequence[int]) -> Tensor:
        """[L - 1] float32: the logprob of each token but the first at temperature 1, bitwise `forward`'s."""
        ids = torch.tensor(token_ids, dtype=torch.int64)
        batch = document(Datum(inputs=ids[:-1], targets=ids[1:], floats={}))
        device = next(self._module.parameters()).device
        rows, labels = head_rows(batch, static=False, device=device)
        values: Tensor = self._scorer(batch.to(device), rows, labels, None)
        return scatter(values, rows, batch.num_slots)[: len(ids) - 1].cpu()

    @torch.no_grad()
    def candidates(self, token_ids: Sequence[int], ids: Tensor | int, *, last: int) -> tuple[Tensor, Tensor]:
        """Score other tokens in place of each of the last tokens of a document.

        Args:
            ids: [R, K] int64, -1 for none; or how many of the likeliest.
            last: R.

        Returns:
            ids [R, K] and their logprobs [R, K] float32 at temperature 1, bitwise `score`'s of the document;
            0 for -1.
        """
        whole = torch.tensor(token_ids, dtype=torch.int64)
        batch = document(Datum(inputs=whole[:-1], targets=whole[1:], floats={}))
        weight: Tensor = causal_lm(self._module).get_output_embeddings().weight
        rows = torch.arange(len(token_ids) - 1 - last, len(token_ids) - 1, device=weight.device)
        config = self.base.train_config
        inputs = decoder_inputs(
            self._module,
            batch.to(weight.device),
            layout=config.layout,
            padding_side=config.padding_side,
            compiled=False,
        )
        hidden = run_decoder(self._module, inputs, rows)
        head = head_options(self._module, temperature=1.0, compiled=False)
        if isinstance(ids, int):
            ids = likeliest(hidden, weight, head, count=min(ids, self.base.vocab_size))
        columns = [linear_logprobs(hidden, weight, c, head=head)[0] for c in ids.to(weight.device).unbind(1)]
        return ids.cpu(), torch.stack(columns, 1).cpu()

    def close(self) -> None:
        self._engine.close()


def likeliest(hidden: Tensor, weight: Tensor, head: HeadOptions, *, count: int) -> Tensor:
    """[R, count] int64: the tokens with the highest logits of hidden states [R, C], the highest first."""
    found = []
    for part in hidden.split(64):  # the logits of a whole prompt would not fit
        logits = head_logits(part, weight, head, weight.new_empty(len(part), len(weight)))
        found.append(logits.topk(count, dim=1).indices)
    return torch.cat(found)


def document(datum: Datum) -> PackedBatch:
    """Return a datum as a micro-batch: a document of its inputs and its last target, [L + 1].

    Every position is scored: which ones count is in the weights and advantages.
    """
    inputs, targets = datum.inputs, datum.targets
    token_ids = torch.cat([inputs, targets[-1:]])
    mask = torch.ones(len(token_ids), dtype=torch.bool)
    mask[-1] = False
    floats = {name: torch.cat([values, torch.zeros(1)]) for name, values in datum.floats.items()}
    sample: TrainSample
    if "advantages" in floats:
        rollout = RolloutSample(token_ids=token_ids, loss_mask=mask, rollout_logprobs=floats["logprobs"])
        sample = policy_samples([rollout], [floats["advantages"]])[0]
    else:
        sample = TrainSample(token_ids=token_ids, loss_mask=mask)
    # The losses of policies have no weights: gspo has its mask there.
    weights = floats.get("weights", floats.get("sequence_ratio_mask", torch.ones(len(token_ids))))
    batch = pack([sample], [weights])
    # A target need not be the next input: recipes put any id where nothing is trained.
    labels = torch.cat([targets, torch.tensor([IGNORE_LABEL])])
    return dataclasses.replace(batch, labels=labels)


@torch.no_grad()
def copy_named(own: Mapping[str, Tensor], weights: Mapping[str, Tensor], *, whole: bool = True) -> None:
    """Copy weights by name. `whole`: each of `own` gets one."""
    assert weights.keys() <= own.keys() and (not whole or weights.keys() == own.keys())
    for name, tensor in weights.items():
        own[name].copy_(tensor)


def _pop(tensors: dict[str, Tensor], ending: str) -> Tensor | None:
    name = next((name for name in tensors if name.endswith(ending)), None)
    return None if name is None else tensors.pop(name)
