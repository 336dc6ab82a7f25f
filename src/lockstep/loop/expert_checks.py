"""What a model with experts or delta nets cannot be combined with: refused before its weights are read."""

from __future__ import annotations

from lockstep.config.run import RunConfig
from lockstep.errors import ConfigError
from lockstep.models.architectures import has_delta_nets, is_moe
from lockstep.models.expert_parallel import check_expert_parallel_size
from lockstep.models.load import OpenedModel, prepared_config

_BACKENDS = ("local", "fsdp2")
_ENGINES = ("native", "hf")
_MODES = ("auto", "eager", "compile")


def check_experts(run: RunConfig, opened: OpenedModel | None) -> None:
    """Refuse a run whose model has experts or delta nets, where no parity test covers them.

    Args:
        run: resolved.
        opened: the run's model; None: its config is read again.

    Raises:
        ConfigError: the setting, and what to set instead.
    """
    config = prepared_config(run.model).get_text_config() if opened is None else opened.text
    train, engine = run.train, run.engine_name
    check_expert_parallel_size(config, train.ep)
    if not is_moe(config):
        for name in ("router_aux_loss", "router_z_loss", "route_changes_every"):
            if value := getattr(train, name):
                raise ConfigError(
                    f"no-effect: train.{name} = {value} has no effect: {config.model_type} has no experts; "
                    "leave it out"
                )
    delta_nets = has_delta_nets(config)
    if not is_moe(config) and not delta_nets:
        return
    # Delta nets: the states of a cache are those of engine hf, which has no bits in common with training.
    engines, fix = (("hf",), "'hf'") if delta_nets else (_ENGINES, "'native' or 'hf'")
    own = engine in _ENGINES and run.engine_has_own_memory
    settings = [
        (train.backend in _BACKENDS, "train.backend", train.backend, "'local' or 'fsdp2'"),
        (train.tp == 1, "train.tp", train.tp, "1"),
        (train.ring == 1, "train.ring", train.ring, "1"),
        (train.execution in _MODES, "train.execution", train.execution, "'compile' or 'eager'"),
        (engine in (None, *engines), "engine.name", engine, fix),
        (not own, "engine.process", "separate", "'auto'"),
    ]
    for allowed, name, value, fix in settings:
        if not allowed:
            raise ConfigError(
                f"unsupported-combination: {name} = {value!r} with a model with "
                f"{'delta nets' if delta_nets else 'experts'} ({config.model_type}): no parity "
                f"test covers the two; set {name} = {fix}"
            )
    _check_adapters(run)
    if train.router_aux_loss and train.accumulate == "sample":
        raise ConfigError(
            f"unsupported-combination: train.router_aux_loss = {train.router_aux_loss} with train.accumulate "
            "= 'sample': the loss is of the loads of a whole micro-batch, whose samples would then be "
            "balanced one by one; set train.accumulate = 'pack', or train.router_aux_loss = 0"
        )


def _check_adapters(run: RunConfig) -> None:
    """Refuse adapters of experts where no parity test covers them."""
    critic = run.critic
    adapters = {"model": run.model.lora, "value": None if critic is None else critic.lora}
    named = [role for role, lora in adapters.items() if lora is not None and lora.target_parameters]
    for name, fits, fix in (("backend", ("local",), "local"), ("execution", ("auto", "eager"), "eager")):
        if named and (value := getattr(run.train, name)) not in fits:
            raise ConfigError(
                f"unsupported-combination: train.{name} = {value!r} with {named[0]}.lora.target_parameters: "
                f"no parity test covers the two; set train.{name} = {fix!r}"
            )
