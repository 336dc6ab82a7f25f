"""train.execution = "auto": whether compiling pays for itself within a run.

Compiling costs seconds once and saves some of every token that is trained and sampled, in proportion to the
model. Everything here is a function of settings and sizes, so every rank and every start of a run decides
alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, TypeVar

from lockstep.config.ppo import PPORun
from lockstep.config.run import GRPORun, OfflineRun, RunConfig
from lockstep.config.support import check_backend
from lockstep.errors import ConfigError

SAVED_TRAINING = 2.4e-15
SAVED_SAMPLING = 1.5e-15
"""Seconds that compiled blocks save, per token and parameter. One H200, shape:llama-3.2-1b (1.24e9
parameters), bfloat16, engine native, 167,000 tokens a step: forward and backward 2.73 -> 2.24 s, generation
2.47 -> 2.16 s. What is saved is mostly traffic between kernels, so slower GPUs save more."""
COMPILE_SECONDS = 60.0
"""A first start, with nothing in the cache of compiled code, takes 30 to 60 s longer there; a later one about
15 s. Which one it will be is not looked up: the choice would depend on the machine's files."""


Value = TypeVar("Value")


@dataclass(frozen=True, kw_only=True, slots=True)
class Choice(Generic[Value]):
    """What an "auto" became."""

    value: Value
    reason: str
    """For the user; empty: nothing to explain."""


def tokens_per_step(run: RunConfig) -> int:
    """Return the most tokens that one step can have: every document as long as settings allow."""
    if isinstance(run, GRPORun):
        samples = run.rollout.prompts_per_step * run.rollout.group_size
        return samples * (run.data.max_prompt_tokens + run.rollout.sampling.max_tokens)
    assert isinstance(run, OfflineRun)
    return run.documents_per_update * run.data.max_length


def seconds_saved_per_step(
    run: RunConfig, *, parameters: int, ranks: int, value_parameters: int = 0
) -> float:
    """Return the estimated seconds by which compiled blocks shorten each step.

    Args:
        parameters: of the model.
        ranks: that share the step.
        value_parameters: of PPO's value model, which samples nothing.
    """
    per_token = SAVED_TRAINING * run.train.epochs_per_batch
    if isinstance(run, GRPORun) and run.engine.name == "native" and not run.engine.eager:
        per_token += SAVED_SAMPLING
    saved = per_token * parameters
    if isinstance(run, PPORun):
        saved += SAVED_TRAINING * run.value.train(run.train).epochs_per_batch * value_parameters
    return saved * tokens_per_step(run) / ranks


def steps_to_pay(seconds_saved: float) -> int:
    """Return the number of steps after which compiling has paid for itself.

    Args:
        seconds_saved: of each step, above 0.
    """
    return math.floor(COMPILE_SECONDS / seconds_saved) + 1


def choose_execution(
    run: RunConfig, *, parameters: int, device: str, ranks: int, tested: bool, value_parameters: int = 0
) -> Choice[str]:
    """Return what train.execution = "auto" means for `run`: "eager" or "compile".

    Args:
        parameters: of the model.
        device: "cpu", "cuda" or "cuda:N".
        ranks: that share a step.
        tested: the support table has the run, compiled, as supported.
        value_parameters: of PPO's value model.
    """
    if not device.startswith("cuda"):
        return Choice(value="eager", reason="")
    train = run.train.model_copy(update={"execution": "compile"})
    try:
        check_backend(train, lora=run.model.lora is not None)
    except ConfigError as error:
        return Choice(value="eager", reason=f"compiled is refused: {error}")
    if not tested:
        return Choice(value="eager", reason="no parity test has run with this combination compiled")
    if train.static_capacity is False:
        return Choice(value="eager", reason="without static capacities every new length would compile again")
    saved = seconds_saved_per_step(run, parameters=parameters, ranks=ranks, value_parameters=value_parameters)
    needed = steps_to_pay(saved)
    pays = run.steps >= needed
    return Choice(
        value="compile" if pays else "eager",
        reason=f"compiling takes about {COMPILE_SECONDS:.0f} s and saves at most {saved:.2g} s of a step, so "
        f"it pays from {needed:,} steps on, and the run has {run.steps:,}",
    )
