"""Errors that many places raise, made from what differs there.

    raise missing_package("--out rows.parquet", "pyarrow") from error

As the sentence is the same everywhere, so are its code, its fields and its order: what, why, what to do.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

from lockstep.errors import ConfigError, EngineError, LockstepError, unknown_name

OR_A_PATH = "; a path to a TOML file, such as ./run.toml, works as well"


def unknown(
    kind: str, name: str, known: Iterable[str], /, *, at: str = "", more: str = "", **fields: Any
) -> ConfigError:
    """A name that is none of `known`.

    Args:
        at: what the message begins with, such as "engine.name: ".
        more: what it ends with.
        fields: as of LockstepError; `code` is "unknown-name" if it is not given.
    """
    text = f"{at}{unknown_name(kind, name, known)}{more}"
    return ConfigError(text, **{"code": "unknown-name", **fields})


def missing_package(
    needed_by: str, package: str, *, extra: str = "", or_else: str = "", cause: ImportError | None = None
) -> ConfigError:
    """A package that is not installed, or cannot be imported.

    Args:
        extra: the extra of lockstep-rl that installs it; empty: pip installs the package itself.
        or_else: another way out.
        cause: what its import raised. It is named if it is not that the package itself is missing.
    """
    end = f", or {or_else}" if or_else else ""
    missing = cause is None or (cause.name or "").partition(".")[0] == package.replace("-", "_")
    why = "which is not installed" if missing else f"which cannot be imported ({cause})"
    wanted = f"'lockstep-rl[{extra}]'" if extra else package
    return ConfigError(f"missing-package: {needed_by} needs {package}, {why}; pip install {wanted}{end}")


def cannot_write(
    error: type[LockstepError], path: Path | str, cause: Exception, fix: str, *, done: str = "written"
) -> LockstepError:
    """A file or folder that the system does not let us write.

    Args:
        done: what cannot be done to it: "written", "created".
    """
    reason = getattr(cause, "strerror", None) or cause
    return error(f"cannot-write: {path} cannot be {done} ({reason}); {fix}")


def already_exists(what: str, fix: str) -> ConfigError:
    """A place to write to that is taken."""
    return ConfigError(f"already-exists: {what} already exists; {fix}")


def damaged(
    error: type[LockstepError], path: Path | str, why: object, /, *, fix: str = "", **fields: Any
) -> LockstepError:
    """A file that Lockstep wrote, and that cannot be what it wrote."""
    return error(f"damaged-file: {path} is damaged ({why}){fix and f'; {fix}'}", **fields)


def hash_differs(
    error: type[LockstepError], path: Path | str, found: str, expected: str, /, **fields: Any
) -> LockstepError:
    """A file whose content has another hash than the one that was stored."""
    return error(
        f"hash-differs: {path} is damaged: its hash is {found}, expected {expected[:80]!a}", **fields
    )


def leads_out(error: type[LockstepError], link: object, folder: object, /, **fields: Any) -> LockstepError:
    """A link in a folder of ours that leads, or may lead, to another place."""
    text = f"{link} is a link that points outside {folder}; put the file or folder itself there"
    return error(f"leads-out-of-folder: {text}", **fields)


def no_effect(setting: str, value: object, why: str, *, fix: str = "leave it out") -> ConfigError:
    """A setting that nothing reads under the other settings.

    Args:
        why: such as "with name = 'kto'".
    """
    return ConfigError(f"no-effect: {setting} = {_as_toml(value)} has no effect {why}; {fix}")


def _as_toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, Path):
        return repr(str(value))
    return repr(list(value) if isinstance(value, tuple) else value)


def other_tensors(
    error: type[LockstepError],
    what: str,
    missing: Collection[str],
    unknown: Collection[str] = (),
    *,
    misshapen: Collection[str] = (),
    code: str = "wrong-weights",
) -> LockstepError:
    """Tensors by other names, or of other shapes, than the model has."""
    kinds = ((missing, "missing"), (unknown, "unknown"), (misshapen, "of another shape"))
    found = [f"{len(n)} {kind} {[each[:80] for each in sorted(n)[:5]]}" for n, kind in kinds if n]
    return error(f"{what}: weights do not fit the model: {', '.join(found)}", code=code)


def other_shape(
    error: type[LockstepError], what: str, shape: Iterable[int], expected: Iterable[int]
) -> LockstepError:
    """A tensor whose shape is not the model's."""
    return error(f"wrong-shape: {what} has shape {list(shape)}, but the model's is {list(expected)}")


def outside_vocabulary(
    error: type[LockstepError], where: str, token: int, vocab_size: int, *, fix: str
) -> LockstepError:
    """A token id that the model has no row for."""
    why = f"token id {token} is outside the vocabulary of {vocab_size} entries"
    return error(f"outside-vocabulary: {where}: {why}; {fix}")


def too_large(error: type[LockstepError], what: str, size: int, most: int) -> LockstepError:
    """Data from elsewhere of more bytes than are read."""
    return error(f"too-large: {what} has {size:,} bytes; at most {most:,} are read")


def not_finite(where: str) -> EngineError:
    """Logits or logprobs of an engine that are NaN or infinite."""
    why = "the weights have diverged or the compute dtype overflows (model.dtype)"
    return EngineError(f"not-finite: {where} are not finite; {why}")


def wrong_variable(name: str, value: str | None, why: str) -> ConfigError:
    """An environment variable that cannot be used, and what to set."""
    return ConfigError(f"wrong-environment: {name} = {(value or '')[:80]!r} in the environment {why}")
