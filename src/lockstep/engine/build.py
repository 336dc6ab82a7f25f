"""The engine of a config, and several of them behind a dispatcher."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import cast

from lockstep.config.engine import EngineConfig, has_own_weights
from lockstep.engine.admission import admit_decoding
from lockstep.engine.members import load_engine_class, require_engine
from lockstep.engine.replicas import Dispatcher, DispatcherOfOwnWeights
from lockstep.engine.served.engine import ServedEngine
from lockstep.engine.spec import EngineSpec
from lockstep.errors import ConfigError, EngineError
from lockstep.models.load import LoadedModel
from lockstep.protocols.engine import InferenceEngine, ReceivesWeights, SharesWeights


def is_external(config: EngineConfig) -> bool:
    """Whether the engine has weights of its own, which must be sent to it."""
    return has_own_weights(config) or bool(load_engine_class(config.name).external)


def make_engine(
    config: EngineConfig, *, model: LoadedModel | None = None, spec: EngineSpec | None = None
) -> InferenceEngine:
    """Build the engine that `config` names; a Dispatcher when `config.replicas` is above 1.

    Args:
        model: the model that an embedded engine samples with.
        spec: for an external engine: the model that it serves, and where.

    Raises:
        ConfigError: unknown engine, or one that cannot run like this here.
        EngineError: an engine did not start; those that did are closed.
        ModelError: its decoding of this model fails the proof of lockstep.engine.admission.
    """
    factory = load_engine_class(config.name)
    if has_own_weights(config) and not factory.external:
        factory = ServedEngine

    def make(index: int, **inputs: LoadedModel | EngineSpec) -> InferenceEngine:
        return require_engine(factory(one_of(config, index), **inputs), name=config.name)

    if not factory.external:
        if model is None:
            raise ConfigError(
                f"missing-argument: engine {config.name!r} samples with the trainer's modules and got no "
                "model",
                name="model",
            )
        admit_decoding(config.name, model)
        return _together(config, lambda _: make(0, model=model), external=False)
    if spec is None:
        raise ConfigError(
            f"missing-argument: engine {config.name!r} has weights of its own and got no EngineSpec of the "
            "model",
            name="spec",
        )
    if config.max_model_len is not None:
        spec = dataclasses.replace(spec, max_model_len=config.max_model_len)
    _check_devices(config, spec)
    return _together(
        config,
        lambda i: make(i, spec=spec_of(config, spec, i)),
        external=True,
    )


def one_of(config: EngineConfig, index: int) -> EngineConfig:
    """The config of one replica, with its own GPUs."""
    if config.replicas == 1:
        return config
    devices = config.cuda_devices[index * config.tp : (index + 1) * config.tp]
    return config.model_copy(update={"replicas": 1, "cuda_devices": devices})


def spec_of(config: EngineConfig, spec: EngineSpec, index: int) -> EngineSpec:
    """The spec of one replica: a folder of its own, and whether it shares the trainer's GPU."""
    devices = one_of(config, index).cuda_devices
    shares = spec.shares_device and (not devices or cuda_index(spec.device) in devices)
    work_dir = spec.work_dir / f"replica-{index}" if config.replicas > 1 else spec.work_dir
    return dataclasses.replace(spec, shares_device=shares, work_dir=work_dir)


def cuda_index(device: str) -> int:
    """N of "cuda:N"; 0 for "cuda"."""
    return int(device.partition(":")[2] or 0)


def _check_devices(config: EngineConfig, spec: EngineSpec) -> None:
    if spec.device == "cpu" and config.cuda_devices:
        raise ConfigError(
            f"unsupported-combination: engine.cuda_devices = {list(config.cuda_devices)} with a model on the "
            "CPU; leave it out, or set train.device = 'cuda'"
        )
    gpus = config.replicas * config.tp
    if spec.device != "cpu" and config.url is None and gpus > 1 and not config.cuda_devices:
        raise ConfigError(
            f"contradiction: engine.replicas * engine.tp = {config.replicas} * {config.tp} engines' worth "
            f"of GPUs would all be {spec.device}; set engine.cuda_devices to {gpus} GPUs",
            setting="engine.cuda_devices",
        )
    if spec.device == "cpu" and config.tp > 1:
        raise ConfigError(
            f"unsupported-combination: engine.tp = {config.tp} on a CPU has no GPUs to split matrices over; "
            "set engine.tp = 1"
        )


def _together(
    config: EngineConfig, make: Callable[[int], InferenceEngine], *, external: bool
) -> InferenceEngine:
    """The engine, or a dispatcher over all replicas. Servers start at the same time, a minute each."""
    if config.replicas == 1:
        return make(0)
    if not external:
        return Dispatcher([cast(SharesWeights, make(index)) for index in range(config.replicas)])
    with ThreadPoolExecutor(config.replicas, thread_name_prefix="lockstep-start") as executor:
        starts = [executor.submit(make, index) for index in range(config.replicas)]
    failed = [start.exception() for start in starts]
    if any(failed):
        for start, error in zip(starts, failed, strict=True):
            if error is None:
                start.result().close()
        where, first = next((i, error) for i, error in enumerate(failed) if error is not None)
        if isinstance(first, EngineError):
            raise first.with_message(
                f"replica {where} of {config.replicas}: {first}", kind=EngineError
            ) from first
        raise first
    return DispatcherOfOwnWeights([cast(ReceivesWeights, start.result()) for start in starts])
