"""The DeepSpeedEngines of train/deepspeed/backend.py: around the policy, and around its frozen copy."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lockstep.config.train import TrainConfig
from lockstep.execution import CompileWatch, prepare_compiler
from lockstep.execution.regions import decoder_layers
from lockstep.models.forward import head_of
from lockstep.models.heads import scalar_head
from lockstep.train.compiled import compile_module
from lockstep.train.contract import compile_options
from lockstep.train.deepspeed.engine import ZeroEngine
from lockstep.train.deepspeed.setup import announced_build, basic_optimizer, ds_config
from lockstep.train.loss_module import LogprobModule, LossModule
from lockstep.train.optimizer import NamedParameter

Outer = LossModule | LogprobModule


@dataclass(frozen=True, kw_only=True, slots=True)
class ZeroBuilder:
    """Builds the engines; holds what they have in common."""

    ds: Any
    """The deepspeed package."""
    config: TrainConfig
    device: torch.device
    dtype: torch.dtype
    temperature: float

    def outer(self, module: nn.Module) -> Outer:
        """The module that DeepSpeed wraps: decoder, head and loss."""
        if self.config.execution == "deepcompile":
            return LogprobModule(module, temperature=self.temperature)
        compiled = self.config.execution != "eager"
        return LossModule(module, config=self.config, temperature=self.temperature, compiled=compiled)

    def policy(self, outer: Outer, named: Sequence[NamedParameter], *, with_states: bool) -> ZeroEngine:
        """The engine that trains `named`; without states no step can follow."""
        offload = with_states and self.config.optimizer == "adamw" and self.config.optimizer_device == "cpu"
        settings = ds_config(self.config, named, dtype=self.dtype, with_optimizer=with_states)
        with self._starting(offload=offload):
            engine, _, _, _ = self.ds.initialize(
                model=outer,
                optimizer=basic_optimizer(self.ds, self.config, named, with_states=with_states),
                model_parameters=[p.parameter for p in named],
                config=settings,
            )
        self._register_head(outer)
        return ZeroEngine(self.ds, engine, outer=outer, named=named, device=self.device)

    def reference(self, module: nn.Module, *, like: nn.Module) -> tuple[nn.Module, Any]:
        """A frozen module inside of one that computes logprobs, never by DeepCompile; and, at stage 3, the
        engine that splits its weights over the ranks. `like`: the policy."""
        deepcompile = self.config.execution == "deepcompile"
        config = self.config.model_copy(update={"execution": "eager"} if deepcompile else {})
        compiled = config.execution != "eager"
        if compiled:
            self.compile(module, like=like)
        outer = LossModule(module, config=config, temperature=self.temperature, compiled=compiled).eval()
        if self.config.zero_stage < 3:
            return outer, None
        settings = ds_config(self.config, [], dtype=self.dtype, with_optimizer=False)
        with self._starting():
            engine, _, _, _ = self.ds.initialize(model=outer, config=settings)
        self._register_head(outer)
        return outer, engine

    def compile(self, module: nn.Module, *, like: nn.Module | None = None) -> CompileWatch | None:
        """Compile as the config's `compile` or `joint` says. Stage 3 wraps every module's forward in hooks
        that no graph can hold, so there a layer is gathered whole and only what is inside of its forward is
        compiled.
        """
        if self.config.zero_stage < 3:
            return compile_module(module, self.config, like=like)
        prepare_compiler()
        # A leaf is gathered as a whole by its own hooks, so none is left on the modules inside the graph.
        layers, options = decoder_layers(module), compile_options(module)
        self.ds.utils.set_z3_leaf_modules(module, list({type(layer) for layer in layers}))
        for layer in layers:
            # Not layer.compile(): that compiles the call with all hooks around forward, and ZeRO 3 gathers in
            # hooks.
            compiled: Any = torch.compile(layer.forward, fullgraph=True, dynamic=False, options=options)
            layer.forward = compiled
        return CompileWatch(max_recompiles=self.config.max_recompiles)

    @contextlib.contextmanager
    def _starting(self, *, offload: bool = False) -> Iterator[None]:
        """A context for `deepspeed.initialize`: what it prints is not this program's output."""
        if self.device.type == "cuda":
            index = self.device.index
            # deepspeed.initialize asserts that LOCAL_RANK is set, and moves the model to the CUDA device of
            # that number.
            os.environ["LOCAL_RANK"] = str(torch.cuda.current_device() if index is None else index)
        else:
            os.environ.setdefault("LOCAL_RANK", "0")
        # Collectives over shared memory for a CPU: a minute of compiling before the first step, for sums that
        # gloo makes as well. DeepSpeed keeps this table to be edited.
        self.ds.ops.__compatible_ops__["deepspeed_shm_comm"] = False
        with announced_build(("cpu_adam",) if offload else ()), contextlib.redirect_stdout(sys.stderr):
            yield

    def _register_head(self, outer: Outer) -> None:
        """Register the head at stage 3: it is used by the outer module, not by the module that owns it."""
        if self.config.zero_stage == 3 and isinstance(outer, LossModule):
            scores = scalar_head(outer.policy)
            head = head_of(outer.policy) if scores is None else scores
            for tensor in (head.weight, head.bias):
                if tensor is not None:
                    self.ds.zero.register_external_parameter(outer, tensor)
