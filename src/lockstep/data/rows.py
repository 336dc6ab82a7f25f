"""Rows: their place in a source, and generated ones, of reasoning_gym tasks and id-level prompts.

A generated row is a pure function of (config, stream, slot, attempt): nothing is stored, any row can be made
at any time. A further attempt replaces an excluded or repeated question by another one, deterministically.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Protocol

import numpy as np

from lockstep.common_errors import missing_package, unknown
from lockstep.config.data import DataConfig
from lockstep.errors import ConfigError, unknown_name

FIRST_ROWS = 1000
"""Rows that are looked at before a model is loaded, and before all others."""
BATCH_ROWS = 256
"""Rows that are rendered and tokenised together."""
SLOTS = 512
"""Slots of one block: one reasoning_gym dataset object serves a block, because some tasks prepare `size`
items."""
TRIES = 8
"""Attempts per slot inside a block; later attempts come from further datasets."""


class RowGenerator(Protocol):
    """Rows by address."""

    def row(self, stream: str, slot: int, attempt: int) -> dict[str, Any]:
        """Return row number `slot` of `stream`; another `attempt` is another row for the same slot."""
        ...


def stable_seed(*parts: object) -> int:
    """Derive a 30-bit seed from the parts, the same on every machine (hash() is not)."""
    digest = hashlib.blake2b("/".join(map(str, parts)).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % 2**30


def reasoning_gym_dataset(task: str, settings: Mapping[str, Any], *, seed: int, size: int) -> Any:
    """Create a reasoning_gym dataset.

    Raises:
        ConfigError: reasoning_gym is not installed, there is no such task, or it refuses a setting.
    """
    try:
        import reasoning_gym
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise missing_package(
            f"data.source = 'reasoning_gym:{task}'", "reasoning-gym", cause=error
        ) from error
    if task not in DATASETS:
        raise ConfigError(unknown_name("reasoning_gym task", task, DATASETS), code="unknown-name")
    for reserved, instead in (("size", "data.size"), ("seed", "data.seed")):
        if reserved in settings:
            raise ConfigError(
                f"contradiction: data.task.{reserved} cannot be set directly; set {instead} instead"
            )
    fields = DATASETS[task][1].__dataclass_fields__
    for name in settings:
        if name not in fields:
            known = [field for field in fields if field not in ("size", "seed")]
            raise unknown(f"data.task setting of {task}", name, known, code="unknown-setting")
    try:
        return reasoning_gym.create_dataset(task, seed=seed, size=size, **settings)
    except (AssertionError, ValueError, TypeError) as error:
        raise ConfigError(
            f"refused: reasoning_gym refuses data.task = {dict(settings)!r} for {task!r}: "
            f"{error or type(error).__name__}"
        ) from error


class ReasoningGymRows:
    """Rows of one reasoning_gym task.

    A row has question, answer, metadata, and the verifier by reference: `verifier` names the task and
    `verifier_settings` its keyword arguments, from which `lockstep.rollout.verifiers` builds the task's
    score_answer.
    """

    def __init__(self, config: DataConfig) -> None:
        self.task = config.source.partition(":")[2]
        self.settings = dict(config.task)
        self._seed = config.seed
        # A lone dataset is cheap, but tasks with a corpus read it every time.
        self._dataset = lru_cache(maxsize=16)(self._make)
        self._make(0)

    def _make(self, seed: int) -> Any:
        return reasoning_gym_dataset(self.task, self.settings, seed=seed, size=SLOTS * TRIES)

    def row(self, stream: str, slot: int, attempt: int) -> dict[str, Any]:
        """See RowGenerator."""
        seed = stable_seed(self.task, self._seed, stream, slot // SLOTS, attempt // TRIES)
        entry = self._dataset(seed)[slot % SLOTS + (attempt % TRIES) * SLOTS]
        return {
            **entry,
            "verifier": f"reasoning_gym:{self.task}",
            "verifier_settings": self.settings,
        }


class IdRows:
    """Random prompt ids for models without a tokenizer; `data.task` takes vocab_size, min_tokens and
    max_tokens."""

    def __init__(self, config: DataConfig, *, vocab_size: int | None) -> None:
        settings = {"vocab_size": vocab_size, "min_tokens": 4, "max_tokens": 16}
        for name in config.task:
            if name not in settings:
                setting = f"data.task.{name}"
                raise unknown(
                    "data.task setting of 'ids'", name, settings, code="unknown-setting", setting=setting
                )
        settings.update(config.task)
        for name, value in settings.items():
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ConfigError(
                    f"out-of-range: data.task.{name} = {value!r} of data.source = 'ids' must be a positive "
                    "integer"
                )
        self.vocab_size, self.low, self.high = (int(value or 0) for value in settings.values())
        if self.low > self.high:
            raise ConfigError(
                f"contradiction: data.task.min_tokens = {self.low} exceeds data.task.max_tokens = {self.high}"
            )
        self._seed = config.seed

    def row(self, stream: str, slot: int, attempt: int) -> dict[str, Any]:
        """See RowGenerator. The row's prompt is the list of ids under `token_ids`."""
        rng = np.random.default_rng([stable_seed("ids", self._seed, stream), slot, attempt])
        ids = rng.integers(0, self.vocab_size, size=int(rng.integers(self.low, self.high + 1)))
        return {"token_ids": [int(i) for i in ids]}


# Where a row of data stands, for messages: line N of a .jsonl file, row N of any other source, from 1.


class PlacedRow(dict[str, Any]):
    """A row that knows its place in its source."""

    __slots__ = ("where",)

    def __init__(self, values: Mapping[str, Any], *, where: str) -> None:
        super().__init__(values)
        self.where = where
        """Source and place, such as "problems.jsonl, line 31"."""


def place(row: Mapping[str, Any], source: str, position: int) -> str:
    """Return where a row stands: its own place, else by its `position` in `source`, from 0.

    Example:
        >>> place({"prompt": "1 + 1?"}, "problems.parquet", 30)
        'problems.parquet, row 31'
    """
    return row.where if isinstance(row, PlacedRow) else f"{source}, row {position + 1}"
