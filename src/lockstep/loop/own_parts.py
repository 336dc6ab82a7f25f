"""What parts of the user's, named as `module:attribute`, declare about themselves."""

from __future__ import annotations

import inspect

from lockstep.config.declarations import Entry, own_rows
from lockstep.config.record import record_refusal
from lockstep.config.run import GRPORun, RunConfig
from lockstep.config.support import SETTINGS, check_own_settings
from lockstep.errors import ConfigError
from lockstep.registry import load_object, require_call, require_members


def own_support(run: RunConfig, *, attention: str) -> list[Entry]:
    """The rows of the support table in the attribute `support` of the run's backend, engine and kernel; none
    of a part that has no such attribute, and none of ours.

    Args:
        attention: what train.attention resolved to.

    Raises:
        ConfigError: there is no such part, or its attribute holds no rows.
    """
    engine = getattr(run, "engine", None)
    chosen = {
        "backend": run.train.backend,
        "engine": "" if engine is None else engine.name,
        "attention": "" if attention.startswith("hf:") else attention,
    }
    rows = []
    for axis, name in chosen.items():
        if ":" in name:
            part = load_object(name, what=f"{SETTINGS[axis]} = {name!r}")
            rows += own_rows(getattr(part, "support", ()), axis=axis, name=name)
    return rows


def check_own_backend(run: RunConfig) -> None:
    """Check a run's settings against the attributes `reads` and `refuses` of a backend of the user's; without
    them it reads no setting that some backends do not read, and refuses none.

    Raises:
        ConfigError: a setting that the backend does not read, or refuses; or the run cannot be recorded,
            because the backend says that it shards weights; or its `save` cannot copy to memory.
    """
    name = run.train.backend
    if ":" in name:
        part = load_object(name, what=f"train.backend = {name!r}")
        check_own_settings(
            run.train,
            lora=run.model.lora is not None,
            reads=getattr(part, "reads", ()),
            refuses=getattr(part, "refuses", ()),
        )
        refusal = (
            record_refusal(run.record, run.train, lora=bool(run.model.lora))
            if getattr(part, "shards_weights", False)
            else None
        )
        if refusal is not None:
            raise ConfigError(refusal, code="unsupported-combination")
        copies = run.cluster is not None and run.cluster.peer_copy
        if copies and "in_memory" not in inspect.signature(part.save).parameters:
            raise ConfigError(
                f"unsupported-combination: cluster.peer_copy = true with train.backend = {name!r}, whose "
                "save has no argument in_memory; give it one (lockstep.protocols.TrainBackend.save), or set "
                "cluster.peer_copy = false"
            )


_ALGORITHM = ("keep", "advantages", "loss_weights", "loss")
_KERNEL = ("cu_seqlens", "max_seqlen", "lengths", "scale", "window", "mask")


def check_own_algorithm(run: GRPORun) -> None:
    """Check the signatures of an algorithm, an advantage estimator and an objective of the user's, before
    anything is loaded or sampled for them.

    Raises:
        ConfigError: there is no such part, or it cannot be called as it will be.
    """
    for field, given, named in (
        ("name", ("config",), ("max_tokens",)),
        ("advantage", ("rewards", "mask"), ()),
        ("objective", ("terms", "config"), ()),
    ):
        if ":" in (name := getattr(run.algorithm, field) or ""):
            what = f"algorithm.{field} = {name!r}"
            part = load_object(name, what=what)
            if field == "name":
                require_members(part, _ALGORITHM, what=what)
            require_call(part, *given, named=named, what=what)


def check_own_attention(name: str) -> None:
    """Check the signature of an attention kernel of the user's; others are left alone.

    Raises:
        ConfigError: there is no such kernel, or it cannot be called as it will be.
    """
    if ":" in name and not name.startswith("hf:"):
        what = f"train.attention = {name!r}"
        require_call(load_object(name, what=what), "q", "k", "v", named=_KERNEL, what=what)
