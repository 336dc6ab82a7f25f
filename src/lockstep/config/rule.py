"""A refused combination of settings, as `config/rules.py` and `config/train_rules.py` list them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Rule:
    """A refused combination of settings of one table."""

    when: Callable[[Any], Any]
    """Given the table of settings, says whether it is this combination."""
    say: str
    """"CODE: what is wrong, why, and what to set", a template of str.format, where {0} is the table."""
    at: str = ""
    """The setting at fault, as the table names it; "": the first word after the code."""

    @property
    def code(self) -> str:
        """The kind of mistake, a key of `lockstep.errors.CODES`."""
        return self.say.partition(": ")[0]

    @property
    def text(self) -> str:
        """The template without the code."""
        return self.say.partition(": ")[2]

    @property
    def setting(self) -> str:
        """The setting at fault."""
        return self.at or self.text.partition(" ")[0]
