"""Decoder, head and loss as one module, for engines that own the module whose output is differentiated."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from lockstep.config.train import TrainConfig
from lockstep.models.causal_lm import causal_lm
from lockstep.models.forward import DecoderInputs, decoder_inputs, head_of, run_decoder
from lockstep.ops.logprobs import HeadOptions, linear_logprob_loss, linear_logprobs
from lockstep.protocols.train import TokenLoss
from lockstep.schema.batch import PackedBatch
from lockstep.train.rows import part as part_of


class LossModule(nn.Module):
    """forward(batch, rows, labels, loss) -> the loss of one micro-batch, exactly as LocalBackend computes it.

    Args:
        policy: a transformers causal LM; it is the child `policy`, so a parameter is called "policy." + its
            name.
        config: layout, padding side, execution.
        temperature: logprobs are of logits divided by it.
        compiled: whether the layers are compiled: their inputs must then hold no Python lengths.
    """

    def __init__(self, policy: nn.Module, *, config: TrainConfig, temperature: float, compiled: bool) -> None:
        super().__init__()
        self.policy = policy
        self.config, self.temperature, self.compiled = config, temperature, compiled
        self.logprobs: Tensor | None = None
        self.entropy: Tensor | None = None

    def forward(
        self, batch: PackedBatch, rows: Tensor | slice, labels: Tensor, loss: TokenLoss | None
    ) -> Tensor:
        """The loss, a scalar; without `loss` the logprobs [R]. `self.logprobs` and `self.entropy` keep the
        [R] figures of the last call, detached."""
        inputs = decoder_inputs(
            self.policy,
            batch,
            layout=self.config.layout,
            padding_side=self.config.padding_side,
            compiled=self.compiled,
        )
        hidden = run_decoder(self.policy, inputs)
        hidden = hidden if isinstance(rows, slice) else hidden.index_select(0, rows)
        weight = head_of(self.policy).weight
        if loss is None:
            logprobs, entropy = linear_logprobs(hidden, weight, labels, head=self._head(False))
            value = logprobs
        elif loss.separable:
            token_loss = loss
            value, logprobs, entropy = linear_logprob_loss(
                hidden,
                weight,
                labels,
                lambda lp, ent, part: token_loss(lp, ent, batch, part_of(rows, part)),
                head=self._head(loss.entropy_grad),
            )
        else:
            logprobs, entropy = linear_logprobs(hidden, weight, labels, head=self._head(False))
            value = loss(logprobs, entropy, batch, rows)
        self.logprobs, self.entropy = logprobs.detach(), entropy.detach()
        return value

    def _head(self, entropy_grad: bool) -> HeadOptions:
        head = head_of(self.policy)
        return HeadOptions(
            temperature=self.temperature,
            softcap=head.softcap,
            logit_scale=head.logit_scale,
            bias=head.bias,
            compiled=self.config.execution != "eager",
            entropy_grad=entropy_grad,
        )


class LogprobModule(nn.Module):
    """forward(inputs, labels) -> logprobs and entropy [T], in plain differentiable ops that a compiler of
    whole graphs can open: tensors in, tensors out, no Python closure.

    The head is inside because such a compiler (DeepCompile) reduces only the gradients that its own graph
    makes. It costs the float32 logits of the whole pack, which LossModule never holds.
    """

    def __init__(self, policy: nn.Module, *, temperature: float) -> None:
        super().__init__()
        self.policy = policy
        head = head_of(policy)
        linear = causal_lm(policy).get_output_embeddings()
        self._linear = next(path for path, module in policy.named_modules() if module is linear)
        options = HeadOptions(temperature=temperature, softcap=head.softcap, logit_scale=head.logit_scale)
        self._scale, self._cap = options.scale, options.cap

    def forward(
        self, token_ids: Tensor, positions: Tensor, labels: Tensor, cells: Tensor | None, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Arguments: those of DecoderInputs, and labels [T], negative where nothing is predicted."""
        inputs = DecoderInputs(
            token_ids=token_ids, positions=positions, cells=cells, num_slots=labels.shape[0], kwargs=kwargs
        )
        hidden = run_decoder(self.policy, inputs)
        valid = labels >= 0
        logits = self.policy.get_submodule(self._linear)(hidden).float() * self._scale
        if self._cap is not None:
            logits = self._cap * torch.tanh(logits / self._cap)
        logp = torch.log_softmax(logits, -1)
        logprobs = logp.gather(1, labels.clamp(min=0)[:, None])[:, 0]
        entropy = -(logp.exp() * logp).sum(-1)
        return torch.where(valid, logprobs, 0.0), torch.where(valid, entropy, 0.0)
