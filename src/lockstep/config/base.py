"""The base of every config: frozen, unknown keys are errors, and every value is in a range that code can
use."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Annotated, Any, TypeVar

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from lockstep.config.secrets import check_no_secret
from lockstep.errors import ConfigError, LockstepError, together, unknown_name
from lockstep.observe.files import path_problem
from lockstep.observe.text import printable

_SECRET_PLACES = ("secrets", "token_env")
"""Settings that say where a secret is; each has a check of its own."""
_OWN_WORDS = ("columns", "kinds")
"""Tables whose keys are columns of the data and kinds of its prompts: one may be called secret."""
_LARGEST, _SMALLEST = 1e30, 1e-30
_COLDEST = 1e-4


def _check_path(path: Path) -> Path:
    if problem := path_problem(str(path)):
        raise ConfigError(f"bad-file-name: {str(path)[:40]!r} cannot be the name of a file: {problem}")
    return path


def _check_name(name: str) -> str:
    if name != printable(name):
        raise ConfigError(f"wrong-format: {name[:80]!r} holds a control character; write it without")
    if problem := path_problem(name):
        raise ConfigError(f"bad-file-name: {name[:40]!r} cannot be a name: {problem}")
    return name


def is_module_path(value: str) -> bool:
    """Whether it has the form `module:attribute`."""
    module, _, attribute = value.partition(":")
    return all(part.isidentifier() for part in [*module.split("."), *attribute.split(".")])


@dataclass(frozen=True, slots=True)
class OneOf:
    """A validator: one of our own names, or `module:attribute`, which is looked up when the run starts."""

    kind: str
    names: tuple[str, ...]

    def __call__(self, value: str) -> str:
        if value not in self.names and not is_module_path(value):
            raise ConfigError(
                unknown_name(self.kind, value[:80], [*self.names, "module:attribute"]), code="unknown-name"
            )
        return value


def _check_temperature(value: float) -> float:
    if 0 < value < _COLDEST:
        raise ConfigError(f"out-of-range: a temperature of {value:g} is below {_COLDEST:g}; set 0 for greedy")
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
                        f"out-of-range: {name} = {number!r} is not 0 and not between {_SMALLEST:g} and "
                        f"{_LARGEST:g} in size, which float32 can compute with"
                    )
        return self

    @check
    def _check_no_secrets(self) -> Config:
        """config.toml, manifests and recordings are files that everybody may read."""
        for name, value in self:
            if name not in _SECRET_PLACES:
                instead = "put it into an environment variable or a file of mode 0600"
                if "secrets" in type(self).model_fields:
                    instead += ", and write where it is: secrets = {NAME = 'env:VARIABLE'} or 'file:/path'"
                check_no_secret(name, value, instead=instead, by_name=name not in _OWN_WORDS)
        return self
