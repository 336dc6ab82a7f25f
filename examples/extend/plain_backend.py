"""A train backend: float32, one process, torch's own AdamW, all logits at once.

lockstep train grpo --recipe tiny --train.backend plain_backend:PlainBackend
"""

import copy
import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.train import TrainConfig
from lockstep.errors import TrainError
from lockstep.models.export import export_hf
from lockstep.models.forward import hidden_states
from lockstep.models.heads import head_of
from lockstep.models.load import LoadedModel
from lockstep.protocols.train import FinishSave, Reference, StepStats, TokenLoss
from lockstep.schema.batch import PackedBatch
from lockstep.schema.weights import WeightUpdate
from lockstep.train.optimizer import lr_at
from lockstep.train.state.files import MODEL, Layout, LiveTensors, model_tensors, train_progress
from lockstep.train.state.save_load import load_state, save_state

LAYOUT = Layout(backend="plain_backend:PlainBackend", mesh={})


class PlainBackend:
    """See lockstep.protocols.TrainBackend."""

    shards_weights = False
    contract = None
    support = (
        {
            "status": "unsupported",
            "dtype": ["bfloat16"],
            "reason": "it has no float32 master weights",
            "instead": "model.dtype = 'float32'",
        },
        {
            "status": "unsupported",
            "execution": ["compile", "joint", "deepcompile"],
            "reason": "it compiles nothing",
            "instead": "train.execution = 'eager'",
        },
    )

    def __init__(
        self,
        config: TrainConfig,
        *,
        model: LoadedModel,
        total_steps: int,
        temperature: float = 1.0,
        ref: bool = False,
    ) -> None:
        self.config, self.model, self.total_steps = config, model, total_steps
        self.module = model.module.eval()
        self.device = next(self.module.parameters()).device
        frozen = copy.deepcopy(self.module).requires_grad_(False) if ref else None
        self.ref = None if frozen is None else Reference(functools.partial(self._score, frozen))
        self.temperature = temperature or 1.0
        self.steps_done = 0
        self.named = {name: p for name, p in self.module.named_parameters() if p.requires_grad}
        decayed = {name for name, p in self.named.items() if p.ndim >= 2 and "embed" not in name}
        groups: list[dict[str, Any]] = [
            {"params": [p], "weight_decay": config.weight_decay if name in decayed else 0.0}
            for name, p in self.named.items()
        ]
        self.optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=config.betas, eps=config.eps)
        for p in self.named.values():  # made now, so that a checkpoint of step 0 has them
            moments = {"exp_avg": torch.zeros_like(p), "exp_avg_sq": torch.zeros_like(p)}
            self.optimizer.state[p] = {"step": torch.zeros(()), **moments}

    def _forward(self, module: nn.Module, batch: PackedBatch) -> tuple[Tensor, Tensor]:
        """Logprob of each label and entropy, [T] each; slots with loss_mask False hold anything finite."""
        head = head_of(module)
        logits = nn.functional.linear(hidden_states(module, batch), head.weight, head.bias)
        logprobs = (logits.float() / self.temperature).log_softmax(-1)
        labels = batch.labels.clamp(min=0)[:, None]
        entropy = -(logprobs.exp() * logprobs).sum(-1)
        return logprobs.gather(1, labels)[:, 0], entropy

    def logprobs(self, batches: Sequence[PackedBatch]) -> list[Tensor]:
        """[T] per batch, 0 where loss_mask is False."""
        return self._score(self.module, batches)

    def _score(self, module: nn.Module, batches: Sequence[PackedBatch]) -> list[Tensor]:
        moved = [batch.to(self.device) for batch in batches]
        with torch.no_grad():
            return [torch.where(b.loss_mask, self._forward(module, b)[0], 0.0) for b in moved]

    def forward_backward(self, batches: Sequence[PackedBatch], loss: TokenLoss) -> StepStats:
        """Add the gradients of all micro-batches."""
        stats = StepStats(losses=[], logprobs=[], entropy=[])
        for batch in (batch.to(self.device) for batch in batches):
            logprobs, entropy = self._forward(self.module, batch)
            value, terms = loss(logprobs, entropy, batch, slice(0, batch.num_slots))
            if not bool(value.isfinite()):
                self.optimizer.zero_grad()
                raise TrainError(
                    f"not-finite: step {self.steps_done}: the loss of samples {batch.sample_ids} is {value}"
                )
            value.backward()
            stats.losses.append(value.detach())
            stats.logprobs.append(torch.where(batch.loss_mask, logprobs.detach(), 0.0))
            stats.entropy.append(torch.where(batch.loss_mask, entropy.detach(), 0.0))
            if terms is not None:
                stats.terms.append(terms)
        return stats

    def optimizer_step(self) -> dict[str, float]:
        """Clip, step, schedule."""
        norm = float(nn.utils.clip_grad_norm_(self.named.values(), self.config.max_grad_norm))
        if not norm < float("inf"):
            raise TrainError(f"not-finite: step {self.steps_done}: the gradient's norm is {norm}")
        lr = lr_at(self.steps_done, config=self.config, total_steps=self.total_steps)
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.steps_done += 1
        return {"grad_norm": norm, "lr": lr}

    def compile_report(self) -> None:
        """Nothing is compiled."""

    def weights(self, *, policy_version: int) -> WeightUpdate:
        """The module itself, for an embedded engine."""
        return WeightUpdate(
            policy_version=policy_version,
            tensors=lambda: iter(self.module.state_dict().items()),
            shared_module=self.module,
        )

    def save(self, directory: Path, *, background: bool = False) -> FinishSave:
        """In the format of all backends, so that any of them can go on."""
        return save_state(
            directory,
            parts=LiveTensors(self._state()),
            progress=self._progress(),
            layout=LAYOUT,
            background=background,
        )

    def load(self, directory: Path, *, verified: bool = False) -> None:
        """What any backend saved, in place."""
        parts, progress = LiveTensors(self._state()), self._progress()
        restored = load_state(directory, parts=parts, progress=progress, layout=LAYOUT, verified=verified)
        self.steps_done = restored["step"]

    def export(self, directory: Path) -> None:
        """A Hugging Face folder."""
        export_hf(self.module, self.model.tokenizer, directory)

    def close(self) -> None:
        """Drop the gradients."""
        self.optimizer.zero_grad()

    def _state(self) -> dict[str, Tensor]:
        tensors = {f"{MODEL}{name}": x for name, x in model_tensors(self.module, trained_only=False).items()}
        names = {"exp_avg": "exp_avg", "exp_avg_sq": "exp_avg_sq", "step": "updates"}
        for name, p in self.named.items():
            state = self.optimizer.state[p]
            tensors |= {f"{ours}/{name}": state[theirs] for theirs, ours in names.items()}
        return tensors

    def _progress(self) -> dict[str, Any]:
        return train_progress(
            self.config,
            steps_done=self.steps_done,
            total_steps=self.total_steps,
            dtype=self.model.dtype,
            lora=False,
        )
