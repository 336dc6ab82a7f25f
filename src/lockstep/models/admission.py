"""Admission of a model by a numerical proof: before it is used, a small random copy of *its* config must give
the same logprobs and gradients packed, alone, padded, with a shared prompt and decoded as transformers' eager
attention on each document alone.

config ─► miniature ─► each document alone, transformers' eager attention ─┐
                  └──► every way of ours to compute the same token ────────┴─► largest gap ─► kept, or refused

The result is kept by the hash of the miniature's config, so models that differ in sizes only share it. This
module proves the trainer's forward; lockstep.engine.spec proves what the embedded engines decode.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

from torch import nn
from transformers import PretrainedConfig

from lockstep.errors import LockstepError, ModelError
from lockstep.models.architectures import SHIPPED, architecture_of, silence_transformers
from lockstep.models.miniature import empty_module, tiny_model
from lockstep.models.proof_rows import Gap, forward_gaps
from lockstep.observe.files import cache_root, read_json, write_json
from lockstep.observe.text import printable
from lockstep.version import __version__

log = logging.getLogger(__name__)

PROVEN = ("shape:", "bundled:")
"""Models that come with Lockstep: the tests prove them."""


Ways = Callable[[PretrainedConfig], Sequence[Gap]]
"""Runs a miniature in some ways; the Gaps of each, in the order in which they are looked at."""


def admit(config: PretrainedConfig, *, name: str) -> None:
    """Admit a checked config if the trainer's forward is proven for it; runs the proof if needed.

    Args:
        name: ModelConfig.name.

    Raises:
        ModelError: it computes other numbers than transformers does; the text has both.
    """
    if name.startswith(PROVEN):
        return
    check_proof(config, kind="forward", ways=forward_gaps, name=name)
    if architecture_of(config) is None:
        log.warning(
            "architecture %s has no record, but passes its proof: %s trains as generic, eager and with "
            "engine hf; `lockstep prove` shows the rows",
            config.model_type,
            printable(name),
        )


def check_proof(config: PretrainedConfig, *, kind: str, ways: Ways, name: str) -> tuple[Gap, ...]:
    """Return the gaps of a proof, from the cache or run now.

    Raises:
        ModelError: the first that is too large, or a way cannot run this config at all; see `measured_gaps`.
    """
    gaps = measured_gaps(config, kind=kind, ways=ways, name=name)
    if failed := next((gap for gap in gaps if not gap.passed), None):
        raise ModelError(
            f"unsupported-model: model.name = {name!r} is not supported: in a small copy of its config, "
            f"{failed.in_words()}. An option in its config.json is not supported; compare it with the "
            "published file"
        )
    return gaps


def measured_gaps(config: PretrainedConfig, *, kind: str, ways: Ways, name: str) -> tuple[Gap, ...]:
    """Return the gaps of a proof, from the cache or run now, whatever their size.

    Args:
        kind: names the proof in the cache.

    Raises:
        ModelError: a way cannot run this config.
    """
    try:
        with silence_transformers():
            small = tiny_model(config)
            if kind == "forward" and architecture_of(config) is None:
                _check_parts(config, small)
            return _cached_gaps(small, kind, ways) if _may_be_kept(config) else tuple(ways(small))
    except LockstepError:
        raise
    except Exception as error:  # whatever transformers' code or ours raises over such a config
        raise ModelError(
            f"unsupported-model: model.name = {name!r} is not supported: a small copy of its config failed "
            f"to run ({type(error).__name__}: {printable(str(error))[:300]})"
        ) from error


def _check_parts(config: PretrainedConfig, small: PretrainedConfig) -> None:
    """Refuse a model with parts that its miniature lacks, such as experts from the fourth layer on: nothing
    would be proven of them. And one whose miniature is large. Records say how such a config shrinks.

    Raises:
        ModelError: names the parts, or the size.
    """
    whole, part = empty_module(config), empty_module(small)
    if (size := sum(parameter.numel() for parameter in part.parameters())) > _MOST_PARAMETERS:
        raise ModelError(
            f"unsupported-model: architecture {config.model_type!r} has no record in Lockstep, and the small "
            f"copy of its config that is checked has {size:,} parameters, more than {_MOST_PARAMETERS:,}; "
            "write a record whose `shrink` makes it small"
        )
    if lacking := sorted(_classes(whole) - _classes(part)):
        raise ModelError(
            f"unsupported-model: architecture {config.model_type!r} has no record in Lockstep, and the small "
            f"copy of its config that is checked has no {', '.join(lacking)}; write a record whose `shrink` "
            "keeps them"
        )


_MOST_PARAMETERS = 2**25


def _classes(module: nn.Module) -> set[str]:
    return {type(part).__name__ for part in module.modules()}


def _may_be_kept(config: PretrainedConfig) -> bool:
    """Whether `proof_key` covers all code of a proof: not if the model or its record come from elsewhere."""
    record = architecture_of(config)
    ours = record is None or record is SHIPPED.get(record.model_type)
    return ours and type(config).__module__.startswith("transformers.")


def proof_key(small: PretrainedConfig, kind: str) -> str:
    """Hash everything that the proof depends on: the miniature's config, versions, and our own code."""
    config = {key: value for key, value in small.to_dict().items() if key not in _NO_OPTIONS}
    versions = {name: version(name) for name in ("torch", "transformers")} | {"lockstep": __version__}
    whole = {"config": config, "kind": kind, "versions": versions, "code": _own_code()}
    return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:32]


_PACKAGES = ("torch", "transformers")
_NO_OPTIONS = ("_name_or_path", "transformers_version", "architectures", "dtype", "id2label", "label2id")
_CODE = ("attention", "engine", "execution", "invariant", "models", "ops", "packing")


@functools.cache
def _own_code() -> str:
    """Hash of the packages that a proof runs: a change to them needs new proofs."""
    digest = hashlib.sha256()
    for package in _CODE:
        for file in sorted((Path(__file__).parents[1] / package).rglob("*.py")):
            digest.update(file.read_bytes())
    return digest.hexdigest()


_memory: dict[str, tuple[Gap, ...]] = {}


def _cached_gaps(small: PretrainedConfig, kind: str, ways: Ways) -> tuple[Gap, ...]:
    """The gaps from this process, from the cache folder, or run now."""
    key = proof_key(small, kind)
    if key not in _memory:
        file = cache_root() / "admitted" / f"{key}.json"
        gaps = _read(file)
        if gaps is None:
            gaps = tuple(ways(small))
            _write(file, kind, gaps)
        _memory[key] = gaps
    return _memory[key]


def _read(file: Path) -> tuple[Gap, ...] | None:
    """The gaps of a cached proof; None: there is none, or it is damaged and must be run again."""
    if not file.is_file():
        return None
    try:
        rows = read_json(file, ModelError)["gaps"]
        gaps = tuple(Gap(**row) for row in rows)
        if gaps and all(type(v) is float for gap in gaps for v in (gap.size, gap.allowed)):
            return gaps
    except (ModelError, KeyError, TypeError, AttributeError) as error:
        log.warning("%s is damaged (%s), so the check runs again", file, printable(str(error)))
    return None


def _write(file: Path, kind: str, gaps: Sequence[Gap]) -> None:
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        write_json(file, {"kind": kind, "gaps": [asdict(gap) for gap in gaps]})
    except OSError as error:  # a cache that cannot be written only costs time
        log.warning(
            "cannot store the result of the check in %s (%s); set LOCKSTEP_CACHE to a writable folder",
            file,
            error,
        )
