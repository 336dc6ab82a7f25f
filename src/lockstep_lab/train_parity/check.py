"""`lockstep parity check`: what an installation can train with, before a GPU is there.

Imports; whether each backend class has the methods of TrainBackend, with its signatures; which sizes of
tensor parallel a model has; which stacks could run on this machine, and why the others could not.
"""

from __future__ import annotations

import functools
import importlib
import importlib.metadata
import importlib.util
import inspect
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from lockstep.config.declarations import backends
from lockstep.config.model import ModelConfig
from lockstep.config.problems import first_data
from lockstep.config.run import RunConfig
from lockstep.config.support import check_backend, check_support
from lockstep.config.train import TrainConfig
from lockstep.errors import ConfigError, LockstepError
from lockstep.processes.child import Child, describe_status
from lockstep.protocols.train import TrainBackend
from lockstep.train import BACKENDS
from lockstep_lab.train_parity.stacks import Stack

Kind = Literal["import", "interface", "model", "stack"]
Status = Literal["ok", "missing", "problem", "refused"]

REQUIRED = (
    "torch",
    "transformers",
    "safetensors",
    "numpy",
    "pydantic",
    "rich",
    "jinja2",
    "matplotlib",
)
_NEEDED = {
    package: f"stacks of {name}: {fix}"
    for name, backend in backends().items()
    for package, fix in backend.needs.items()
}
OPTIONAL = {
    **_NEEDED,
    "reasoning_gym": "the documents that sft is fed without --dataset",
}
"""Module -> what it is for."""
IMPORT_SECONDS = 120.0
EXTRAS = ("gradients", "gradient_norm", "drop_gradients")
"""The methods that a parity run needs of a backend beyond the protocol."""
_DISTRIBUTIONS = {"reasoning_gym": "reasoning-gym"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One line of the report."""

    kind: Kind
    name: str
    status: Status
    """missing: an optional package. refused: a stack that cannot run here, which is not an error."""
    detail: str = ""


def check_all(
    stacks: Sequence[Stack], *, model: ModelConfig, gpus: int | None, device_count: int
) -> list[Finding]:
    """Run every check and return the findings in order.

    Args:
        gpus: requested ranks; None: what each stack needs.
        device_count: GPUs that torch sees; 0: the stacks would run on the CPU, over gloo.
    """
    sizes, text = _sizes(model)
    return [
        *check_imports(),
        *check_interfaces(),
        *sizes,
        *(check_stack(s, model=model, text=text, gpus=gpus, device_count=device_count) for s in stacks),
    ]


# --- imports ------------------------------------------------------------------------------------------------


def check_imports() -> list[Finding]:
    """Import the required packages and those of backends; look for the other optional ones."""
    findings = []
    for name in REQUIRED:
        try:
            importlib.import_module(name)
        except ImportError as error:
            findings.append(Finding(kind="import", name=name, status="problem", detail=f"{error}"))
        else:
            findings.append(Finding(kind="import", name=name, status="ok", detail=_version(name)))
    for name, use in OPTIONAL.items():
        there = importlib.util.find_spec(name) is not None
        status: Status = "ok" if there else "missing"
        detail = _version(name) if there else use
        if name in _NEEDED and there and (failure := import_failure(name)):
            status, detail = "problem", failure
        findings.append(Finding(kind="import", name=name, status=status, detail=detail))
    return findings


@functools.cache
def import_failure(name: str) -> str:
    """Why an installed package cannot be imported; empty: it can. Imported in a process of its own, because
    it may write and change settings."""
    with tempfile.TemporaryFile() as errors:
        child = Child([sys.executable, "-c", f"import {name}"], output=(None, errors))
        status = child.wait(IMPORT_SECONDS)
        child.end()
        errors.seek(0)
        lines = errors.read().decode(errors="replace").strip().splitlines()
    if status is None:
        return f"import {name} takes more than {IMPORT_SECONDS:g} s"
    return f"import {name} fails: {lines[-1] if lines else describe_status(status)}" if status else ""


def _version(module: str) -> str:
    try:
        return importlib.metadata.version(_DISTRIBUTIONS.get(module, module))
    except importlib.metadata.PackageNotFoundError:
        return "version unknown"


# --- interfaces ---------------------------------------------------------------------------------------------


def check_interfaces() -> list[Finding]:
    """Check each backend class against TrainBackend."""
    findings = []
    for name in BACKENDS:
        try:
            kind = BACKENDS.load(name)
        except (LockstepError, ImportError) as error:
            findings.append(Finding(kind="interface", name=name, status="problem", detail=str(error)))
            continue
        problems = interface_problems(kind)
        count = len(_methods(TrainBackend))
        detail = "; ".join(problems) or f"{kind.__name__} has the {count} methods of TrainBackend"
        findings.append(
            Finding(kind="interface", name=name, status="problem" if problems else "ok", detail=detail)
        )
    return findings


def interface_problems(kind: type[Any]) -> list[str]:
    """The ways in which a class fails to be a train backend; empty: it is one."""
    problems = []
    for name, expected in _methods(TrainBackend).items():
        method = getattr(kind, name, None)
        if not callable(method):
            problems.append(f"has no method {name}")
            continue
        problem = _signature_problem(expected, method)
        if problem:
            problems.append(f"{name}: {problem}")
    problems += [f"has no method {name}" for name in EXTRAS if not callable(getattr(kind, name, None))]
    constructor = inspect.signature(kind.__init__).parameters
    required = ("config", "model", "total_steps", "temperature", "ref", "spans")
    missing = [name for name in required if name not in constructor]
    if missing:
        problems.append(f"its constructor takes no {', '.join(missing)}")
    return problems


def _methods(protocol: type[Any]) -> dict[str, Any]:
    return {
        name: value
        for name, value in vars(protocol).items()
        if inspect.isfunction(value) and not name.startswith("_")
    }


def _signature_problem(expected: Any, method: Any) -> str:
    """Why the method rejects a call that the protocol allows; empty: it takes every one."""
    parameters = list(inspect.signature(expected).parameters.values())
    by_position = [p for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD]
    least = [p for p in by_position if p.default is p.empty]
    by_name = [p for p in parameters if p.kind is p.KEYWORD_ONLY]
    needed = [p for p in by_name if p.default is p.empty]
    for places, names in ((least, needed), (by_position, by_name), ([], parameters)):
        try:
            inspect.signature(method).bind(*places, **{p.name: p for p in names})
        except TypeError as error:
            return str(error)
    return ""


# --- the model ----------------------------------------------------------------------------------------------


def _sizes(model: ModelConfig) -> tuple[list[Finding], Any]:
    """Findings about the sizes that divide the model, and its text config; None if it cannot be read."""
    import torch

    from lockstep.models.architectures import text_config
    from lockstep.models.load import meta_module
    from lockstep.models.tensor_parallel import tensor_parallel_sizes

    try:
        text = text_config(meta_module(model, dtype=torch.bfloat16))
    except LockstepError as error:
        return [Finding(kind="model", name=model.name, status="problem", detail=str(error))], None
    sizes = ", ".join(map(str, tensor_parallel_sizes(text)))
    try:
        _check_ring(text)
    except ConfigError as error:
        ring = str(error)
    else:
        ring = "ring attention of any size"
    detail = (
        f"{text.num_attention_heads} query heads, {text.num_key_value_heads} key/value heads: tensor "
        f"parallel of {sizes}; {ring}; tp * ring must divide the ranks"
    )
    return [Finding(kind="model", name=model.name, status="ok", detail=detail)], text


def _check_ring(text: Any) -> None:
    """Raise ConfigError unless the model's layers can run on a ring, where everything else allows it."""
    import torch

    from lockstep.models.forward import check_ring

    check_ring("varlen", text, layout="packed", compiled=False, device=torch.device("cpu"))


# --- stacks -------------------------------------------------------------------------------------------------


def check_stack(
    stack: Stack, *, model: ModelConfig, text: Any, gpus: int | None, device_count: int
) -> Finding:
    """Whether this machine could run a stack on this model."""
    try:
        ranks = stack.ranks_for(gpus, default=device_count or 2)
        _check_settings(stack, model, device="cuda" if device_count else "cpu")
        for package in backends()[stack.backend].needs:
            if importlib.util.find_spec(package) is None:
                raise ConfigError(f"missing-package: the package {package} is missing; {OPTIONAL[package]}")
            if failure := import_failure(package):
                raise ConfigError(failure, code="missing-package")
        if stack.tp > 1 and text is not None:
            from lockstep.models.tensor_parallel import check_tensor_parallel_size

            check_tensor_parallel_size(text, stack.tp)
        if stack.tp > 1 and text is None:
            raise ConfigError(
                f"unknown-name: the config of {model.name} cannot be read, so tp cannot be checked"
            )
        if stack.ring > 1 and text is not None:
            _check_ring(text)
    except LockstepError as error:
        return Finding(kind="stack", name=stack.name, status="refused", detail=str(error))
    where = f"{ranks} rank{'s' if ranks > 1 else ''} on the CPU, gloo"
    if device_count:
        shared = f", sharing {device_count} GPUs over gloo: never tried; times would not be a real job's"
        where = f"{ranks} rank{'s' if ranks > 1 else ''}" + (
            shared if ranks > device_count else ", one GPU each"
        )
    return Finding(kind="stack", name=stack.name, status="ok", detail=f"runs here: {where}")


def _check_settings(stack: Stack, model: ModelConfig, *, device: str) -> None:
    """Make the checks of a training run. Raises ConfigError."""
    from pydantic import ValidationError

    try:
        train = TrainConfig.model_validate(stack.train_settings() | {"device": device})
    except ValidationError as error:
        raise ConfigError(
            error.errors()[0]["msg"].removeprefix("Value error, "), **first_data(error)
        ) from error
    check_backend(train, lora=model.lora is not None)
    check_support(RunConfig.model_construct(kind="parity", train=train, model=model))
