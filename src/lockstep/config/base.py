"""The base of every config, and settings that name secrets."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, TypeVar
from urllib.parse import parse_qsl, urlsplit

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from lockstep.common_errors import unknown
from lockstep.config.old_names import current, warn_once
from lockstep.errors import ConfigError, LockstepError, hide, names_secret, together
from lockstep.observe.files import path_problem
from lockstep.observe.text import printable
from lockstep.observe.trust import read_own

# The base of every config: frozen, unknown keys are errors, and every value is in a range that code can use.


_SECRET_PLACES = ("secrets", "token_env")
"""Settings that say where a secret is; each has a check of its own."""
_OWN_WORDS = ("columns", "kinds")
"""Tables whose keys are columns of the data and kinds of its prompts: one may be called secret."""
_LARGEST, _SMALLEST = 1e30, 1e-30
_COLDEST = 1e-4


def _check_path(path: Path) -> Path:
    if problem := path_problem(str(path)):
        raise ConfigError(f"bad-file-name: {str(path)[:40]!r} is not a valid file name: {problem}")
    return path


def _check_name(name: str) -> str:
    if name != printable(name):
        raise ConfigError(f"wrong-format: {name[:80]!r} contains a control character; remove it")
    if problem := path_problem(name):
        raise ConfigError(f"bad-file-name: {name[:40]!r} is not a valid name: {problem}")
    return name


def is_module_path(value: str) -> bool:
    """Return whether it has the form `module:attribute`."""
    module, _, attribute = value.partition(":")
    return all(part.isidentifier() for part in [*module.split("."), *attribute.split(".")])


@dataclass(frozen=True, slots=True)
class OneOf:
    """A validator: one of our own names, or `module:attribute`, which is looked up when the run starts."""

    kind: str
    names: tuple[str, ...]

    def __call__(self, value: str) -> str:
        if value not in self.names and not is_module_path(value):
            raise unknown(self.kind, value[:80], [*self.names, "module:attribute"])
        return value


def _check_temperature(value: float) -> float:
    if 0 < value < _COLDEST:
        raise ConfigError(f"out-of-range: a temperature of {value:g} is below {_COLDEST:g}; set 0 (greedy)")
    return value


# Bounds that no use comes near, so that no number overflows what counts, indexes or waits with it.
PositiveInt = Annotated[int, Field(gt=0, lt=2**31)]
NonNegativeInt = Annotated[int, Field(ge=0, lt=2**31)]
Seed = Annotated[int, Field(ge=0, lt=2**63)]
"""numpy takes no negative one, torch none of more than 64 bits."""
Seconds = Annotated[float, Field(gt=0, le=1e9)]
"""A time to wait; Python's locks and sockets take no more than 292 years."""
Temperature = Annotated[float, Field(ge=0, le=1e4), AfterValidator(_check_temperature)]
Name = Annotated[str, AfterValidator(_check_name)]
"""One line that may name a file: of a model, a data set, a column, ..."""
FilePath = Annotated[Path, AfterValidator(_check_path)]


class Record(BaseModel):
    """Base of records that are written as JSON and read again. Immutable; `model_copy(update=...)` is not
    validated, so use `lockstep.config.load.override`."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        validate_default=True,
        allow_inf_nan=False,
        ser_json_inf_nan="constants",  # in the free-form tables, which are not checked
    )


_Check = TypeVar("_Check", bound=Callable[[Any], Any])
_MARK = "is_check"


def check(method: _Check) -> _Check:
    """As pydantic's `model_validator(mode="after")`, for a method of a Config that relies on no other one:
    what several of them raise is told together."""
    setattr(method, _MARK, True)
    return method


@cache
def _checks(config: type[Config]) -> tuple[str, ...]:
    """The names of a class's checks, those of its bases first."""
    parts = (item for each in reversed(config.__mro__) for item in vars(each).items())
    marked = (name for name, it in parts if inspect.isfunction(it) and hasattr(it, _MARK))
    return tuple(dict.fromkeys(marked))


class Config(Record):
    """Base of all configs: a record whose numbers people set, so that each of them is one to compute with."""

    section: ClassVar[str | None] = None
    """Dotted path of the table in a run that has this type, "" for a run: of those with renamed settings."""

    @classmethod
    def completed(cls, values: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return settings as they are checked: short forms written out, and what is not set where it depends
        on what is."""
        return values

    if not TYPE_CHECKING:

        def __init__(self, **values: Any) -> None:
            if self.section is not None:
                values = current(values, origin=type(self).__name__, section=self.section)
            # None leaves a setting that is "auto" by default as it is, as in `load_run`.
            auto = {name for name, field in type(self).model_fields.items() if field.default == "auto"}
            values = {name: value for name, value in values.items() if value is not None or name not in auto}
            super().__init__(**self.completed(values))

        # Otherwise pydantic would validate JSON through it, as Python values, and refuse lists for tuples.
        __init__.__pydantic_base_init__ = True

    @model_validator(mode="after")
    def _check_all(self) -> Config:
        found: list[LockstepError] = []
        for name in _checks(type(self)):
            try:
                getattr(self, name)()
            except LockstepError as error:
                found.append(error)
        if found:
            raise together(found)
        return self

    @check
    def _check_floats(self) -> Config:
        """Numbers become float32: a larger one would be infinite there, a smaller one 0."""
        for name, value in self:
            for number in value if isinstance(value, tuple) else (value,):
                if isinstance(number, float) and number and not _SMALLEST <= abs(number) <= _LARGEST:
                    raise ConfigError(
                        f"out-of-range: {name} = {number!r} is outside the range of float32: its absolute "
                        f"value must be 0 or between {_SMALLEST:g} and {_LARGEST:g}"
                    )
        return self

    @check
    def _check_no_secrets(self) -> Config:
        """config.toml, manifests and recordings are files that everybody may read."""
        for name, value in self:
            if name not in _SECRET_PLACES:
                instead = "put it into an environment variable or a file with mode 0600"
                if "secrets" in type(self).model_fields:
                    instead += ", and refer to it: secrets = {NAME = 'env:VARIABLE'} or 'file:/path'"
                check_no_secret(name, value, instead=instead, by_name=name not in _OWN_WORDS)
        return self


# Secrets among settings: a config is a file that everybody may read, so it names where a secret is.
#
# [engine.secrets] HF_TOKEN = "env:MY_HF_TOKEN"        # an environment variable of the run OTHER_KEY =
# "file:/run/secrets/key"    # a file that only its owner can read (mode 0600)


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_MOST_BYTES = 65536
_SAVED: set[str] = set()
"""Secrets of runs that were started before settings were searched for secrets."""
_NO_SECRETS = ("true", "false", "none", "null", "0", "1", "empty", "dummy", "unused", "not-needed")
"""Placeholders for a key where the client needs one but the server does not, as EMPTY in vLLM's examples."""
_WELL_KNOWN = re.compile(
    # With a digit in a run of letters: sk-SK-instructions is a data set in Slovak.
    r"(?<![A-Za-z0-9_])(sk-[A-Za-z0-9_-]{0,200}?(?<![A-Za-z0-9])(?=[A-Za-z]{0,99}[0-9])[A-Za-z0-9]{16}"
    r"|hf_[A-Za-z0-9]{20,}|gh[pousr]_[A-Za-z0-9]{20,}"
    r"|github_pat_[A-Za-z0-9_]{20,}|xox[abprs]-[A-Za-z0-9-]{10,}|AKIA[A-Z0-9]{16}|AIza[A-Za-z0-9_-]{30,}"
    r"|eyJ[A-Za-z0-9_-]{10,}\.[A-Za-z0-9_-]{10,}\.|-----BEGIN [A-Z ]*PRIVATE KEY-----)"
    # No English word follows: "the bearer certificates" is a prompt.
    r"|(?i:\bbearer +(?:(?=[A-Za-z._~+/-]{0,99}[0-9])[A-Za-z0-9._~+/-]{8}|[A-Za-z0-9._~+/-]{24}))"
)
"""Beginnings that services give their keys, a token of JSON, a private key, a header."""


def _check_reference(reference: str) -> str:
    kind, _, place = reference.partition(":")
    if (kind == "env" and _VARIABLE.fullmatch(place) and not _WELL_KNOWN.search(place)) or (
        kind == "file" and Path(place).is_absolute() and "\0" not in place
    ):
        return reference
    raise ConfigError(
        "wrong-format: does not refer to a secret; write 'env:NAME' for an environment variable, or "
        "'file:/absolute/path' for a file with mode 0600"
    )


def _check_variable(name: str) -> str:
    if _VARIABLE.fullmatch(name) and not _WELL_KNOWN.search(name):
        return name
    raise ConfigError(
        "wrong-format: is not the name of an environment variable (letters, digits and _); give the name of "
        "the variable that holds the token, not the token"
    )


SecretPlace = Annotated[str, AfterValidator(_check_reference)]
"""The place of a secret."""
Variable = Annotated[str, AfterValidator(_check_variable)]
"""The name of an environment variable."""


def read_secrets(places: Mapping[str, str], *, setting: str) -> dict[str, str]:
    """Return the secrets at `places`; they are taken out of every later text.

    Raises:
        ConfigError: a variable is not set, or a file is missing, or others than its owner can read it.
    """
    secrets = {}
    for name, place in places.items():
        kind, _, where = place.partition(":")
        value = os.environ.get(where, "") if kind == "env" else _read_file(where, f"{setting}.{name}")
        if not value:
            problem = "the variable is unset" if kind == "env" else "the file is empty"
            raise ConfigError(
                f"wrong-environment: {setting}.{name} = {place!r}: {problem}; put the secret there"
            )
        hide(value)
        secrets[name] = value
    return secrets


def _read_file(path: str, setting: str) -> str:
    raw = read_own(Path(path), ConfigError, secret=True, limit=_MOST_BYTES)
    try:
        return raw.decode("utf-8").strip()
    except UnicodeDecodeError as error:
        raise ConfigError(f"not-text: {setting}: {path} is not UTF-8 text") from error


def check_no_secret(name: str, value: Any, *, instead: str, by_name: bool = True) -> None:
    """Check that neither the setting `name` nor anything in it is a secret.

    Args:
        instead: what to do with a secret of this table.
        by_name: False: the keys of this table are the user's own words, and say nothing about the values.

    Raises:
        ConfigError: it is one; the text does not have it.
    """
    for path, text in _texts(name, value):
        why = _why_secret(path.rpartition(".")[2] if by_name else "", text)
        if why is None:
            continue
        hide(text)  # from the errors of other settings as well, which are reported together
        if text not in _SAVED:
            raise ConfigError(
                f"secret-in-config: {printable(path)} {why}, and every reader of config.toml would see it; "
                f"{instead}",
                setting=path,
            )


def accept_saved_secrets(values: Mapping[str, Any], *, origin: str) -> None:
    """Accept, in this process, the secrets that a run's own config.toml holds since before they were refused:
    the run must still resume. Warns about each."""
    for path, text in _texts("", values):
        parts = path.split(".")
        by_name = not set(parts) & set(_OWN_WORDS)
        why = _why_secret(parts[-1] if by_name else "", text)
        if why is not None and not set(parts) & set(_SECRET_PLACES):
            hide(text)
            _SAVED.add(text)
            warn_once(
                f"{origin}: {printable(path.lstrip('.'))} {why}, which everyone who can read this file can "
                "read; a new run would refuse it, but this run continues with it"
            )


def _texts(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(f"{path}.{key}", item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(path, item)


def _why_secret(name: str, value: str) -> str | None:
    if _WELL_KNOWN.search(value):
        return "contains what looks like a key or a token"
    if names_secret(name) and _like_a_secret(name, value):
        return "has the name of a secret"
    if "://" in value:
        try:
            parts = urlsplit(value)
        except ValueError:
            return None
        if parts.password:
            return "contains a password in a URL"
        if any(names_secret(key) and given for key, given in parse_qsl(parts.query)):
            return "contains a secret in the query of a URL"
    return None


def _like_a_secret(name: str, value: str) -> bool:
    """Return whether a value under a secret's name may be one (not `end_token = "</answer>"` or a path)."""
    if not value or value.startswith(("/", "~/")):
        return False
    if re.search("token|auth$", name, re.IGNORECASE):
        plain = re.fullmatch(r"[A-Za-z0-9._~+/=-]{12,}", value)
        return plain is not None and any(character.isdigit() for character in value)
    return value.lower() not in _NO_SECRETS
