"""Train stacks by name: NAME[:OPTION+OPTION...], such as `fsdp2:tp2+ring2` or `deepspeed:zero3+offload`.

Nothing here loads torch: what a stack is and how many ranks it needs are known before anything starts.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lockstep.config.declarations import backends
from lockstep.errors import ConfigError, unknown_name


def _of(option: str) -> str:
    """The backends that have an option."""
    return " or ".join(name for name, backend in backends().items() if option in backend.stacks.options)


OPTIONS: Mapping[str, str] = {
    "tpN": f"N ranks share each matrix ({_of('tp')})",
    "ringN": f"N ranks share the tokens of each pack ({_of('ring')})",
    "zeroN": f"ZeRO stage N, 0 to 3 ({_of('zero')}; 2)",
    "offload": "keep optimizer states in host memory",
    "compile": "compile each decoder layer with torch.compile",
    "joint": "run forward and backward of the decoder as one graph (not zero3)",
    "deepcompile": f"use DeepSpeed's compiler ({_of('deepcompile')}, on a GPU)",
    "ranksN": "use N ranks, whatever --gpus says",
}
DEFAULT_STACKS = tuple(
    f"{backend.name}:{options}".removesuffix(":")
    for backend in sorted(backends().values(), key=lambda backend: backend.stacks.place)
    for options in backend.stacks.usual
)
CHECKED_STACKS = tuple(f"{name}:{more}" for name, b in backends().items() for more in b.stacks.checked)
"""What `lockstep parity check` looks at besides."""
SKIP_WORDS: Mapping[str, str] = {
    **{
        name: f"all stacks of {name}"
        if backend.stacks.skip == "all"
        else f"the stack `{name}`, without options"
        for name, backend in backends().items()
    },
    "tp": "stacks with tensor parallel",
    "ring": "stacks with ring attention",
    "tp_ring": "stacks with both",
}
"""The words that --skip and SKIP_* accept besides a stack's own name."""

_NUMBERED = re.compile(r"(tp|ring|zero|ranks)(\d+)")
_SWITCHES = ("offload", "compile", "joint", "deepcompile")
_EXECUTIONS = ("compile", "joint", "deepcompile")
_WORDS = {"ring": "ring attention", "zero": "zeroN", "deepcompile": "deepcompile"}
"""The options that a backend may lack. Tensor parallel has reasons of its own, where settings are checked."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stack:
    """One way to train."""

    backend: str
    tp: int = 1
    ring: int = 1
    zero: int | None = None
    offload: bool = False
    compile: bool = False
    joint: bool = False
    deepcompile: bool = False
    ranks: int | None = None
    """Ranks in the stack's name; None: as many as the suite gives."""

    @property
    def name(self) -> str:
        """The name with its options in one order."""
        words = [f"zero{self.zero}"] if self.zero is not None else []
        words += [f"{axis}{size}" for axis, size in (("tp", self.tp), ("ring", self.ring)) if size > 1]
        words += [word for word in _SWITCHES if getattr(self, word)]
        words += [] if self.ranks is None else [f"ranks{self.ranks}"]
        return self.backend + (":" + "+".join(words) if words else "")

    @property
    def log_stem(self) -> str:
        """The stem of NAME_test.log: `deepspeed` (ZeRO 2, as such suites have it), `fsdp2_tp2_ring2`, ..."""
        plain = backends()[self.backend].stacks.plain
        plain = self.name.replace(f":{plain}", ":", 1) if plain else self.name
        return re.sub(r"[^a-z0-9]+", "_", plain).strip("_")

    @property
    def execution(self) -> str:
        """The value of train.execution."""
        return next((mode for mode in _EXECUTIONS if getattr(self, mode)), "eager")

    def train_settings(self) -> dict[str, Any]:
        """The fields of TrainConfig that the stack sets."""
        settings: dict[str, Any] = {"backend": self.backend, "tp": self.tp, "ring": self.ring}
        if self.zero is not None:
            settings["zero_stage"] = self.zero
        if self.offload:
            settings["optimizer_device"] = "cpu"
        if self.execution != "eager":
            settings["execution"] = self.execution
        return settings

    def ranks_for(self, gpus: int | None, *, default: int) -> int:
        """The number of ranks that the stack runs on.

        Args:
            gpus: the requested number; tp * ring must divide it. None: from `default` the nearest number that
            does:
                the largest below it, else tp * ring.

        Raises:
            ConfigError: tp * ring does not divide the requested number.
        """
        if not backends()[self.backend].spans_ranks:
            return 1
        share, ranks = self.tp * self.ring, self.ranks if self.ranks is not None else gpus
        if ranks is None:
            return max(share, default // share * share)
        if ranks % share:
            axes = " * ".join(f"{a} {n}" for a, n in (("tp", self.tp), ("ring", self.ring)) if n > 1)
            raise ConfigError(
                f"not-divisible: {axes} = {share} does not divide {ranks} ranks; use "
                f"{_nearest(ranks, share)} ranks (--gpus, NUM_GPUS), or smaller axes"
            )
        return ranks


def parse_stack(text: str) -> Stack:
    """Parse a stack's name.

    Raises:
        ConfigError: an unknown backend or option, one that is given twice, or one that the backend has not.

    Example:
        >>> parse_stack("fsdp2:ring2+tp2").name
        'fsdp2:tp2+ring2'
    """
    backend, colon, rest = text.strip().partition(":")
    if backend not in backends():
        raise ConfigError(
            f"unknown-name: --stacks: stack {text!r}: {unknown_name('train backend', backend, backends())}"
        )
    options: dict[str, Any] = {}
    for word in rest.split("+") if colon else []:
        name, value = _option(word, text)
        if name in options:
            raise ConfigError(f"duplicate: --stacks: stack {text!r}: {name} is given twice; name it once")
        options[name] = value
    stack = Stack(backend=backend, **options)
    _check(stack, text)
    return stack


def parse_stacks(text: str) -> list[Stack]:
    """Parse stacks joined by commas, each once, in the order given. Raises ConfigError."""
    stacks = [parse_stack(word) for word in text.split(",") if word.strip()]
    if not stacks:
        raise ConfigError(
            f"empty: --stacks {text!r} names no stack; give some, such as {','.join(DEFAULT_STACKS)}"
        )
    names = [stack.name for stack in stacks]
    twice = sorted({name for name in names if names.count(name) > 1})
    if twice:
        raise ConfigError(f"duplicate: --stacks names {', '.join(twice)} twice; name each stack once")
    return stacks


def skipped(stack: Stack, words: Iterable[str]) -> str | None:
    """The word of --skip that leaves this stack out; None: it runs."""
    applies = {
        stack.backend: backends()[stack.backend].stacks.skip == "all" or stack.name == stack.backend,
        "tp": stack.tp > 1,
        "ring": stack.ring > 1,
        "tp_ring": stack.tp > 1 and stack.ring > 1,
    }
    return next((word for word in words if applies.get(word) or word == stack.name), None)


def parse_skip(text: str, *, source: str = "--skip") -> list[str]:
    """Parse words and stack names joined by commas. Raises ConfigError."""
    words = []
    for word in (word.strip() for word in text.split(",") if word.strip()):
        plain = word.lower().replace("-", "_")
        if plain in SKIP_WORDS:
            words.append(plain)
            continue
        try:
            words.append(parse_stack(word).name)
        except ConfigError:
            problem = unknown_name("word", word, SKIP_WORDS)
            raise ConfigError(f"wrong-format: {source}: {problem}; a stack's name works as well") from None
    return words


def _option(word: str, text: str) -> tuple[str, Any]:
    if word in _SWITCHES:
        return word, True
    match = _NUMBERED.fullmatch(word)
    if match is None:
        raise ConfigError(f"unknown-name: --stacks: stack {text!r}: {unknown_name('option', word, OPTIONS)}")
    name, number = match[1], int(match[2])
    if name != "zero" and not 1 <= number <= 4096:
        raise ConfigError(f"out-of-range: --stacks: stack {text!r}: {word} must be from 1 to 4096")
    return name, number


def _check(stack: Stack, text: str) -> None:
    backend, plain = backends()[stack.backend], Stack(backend=stack.backend)
    if not backend.spans_ranks:
        options = [w for w in ("tp", "ring", "ranks") if getattr(stack, w) not in (1, None)]
        if options:
            others = _of(options[0]) or " or ".join(n for n, other in backends().items() if other.spans_ranks)
            raise ConfigError(
                f"unsupported-combination: --stacks: stack {text!r}: {stack.backend} runs in one process, so "
                f"it does not support {options[0]}; use {others}"
            )
    for option, what in _WORDS.items():
        given = getattr(stack, option) != getattr(plain, option)
        if given and option not in backend.stacks.options:
            raise ConfigError(
                f"unsupported-combination: --stacks: stack {text!r}: {what} is available only with "
                f"{_of(option)}; leave it out, or use {_of(option)}"
            )
    if stack.zero is not None and stack.zero > 3:
        raise ConfigError(
            f"out-of-range: --stacks: stack {text!r}: there is no ZeRO stage {stack.zero}; use zero0 to zero3"
        )
    modes = [mode for mode in _EXECUTIONS if getattr(stack, mode)]
    if len(modes) > 1:
        raise ConfigError(
            f"contradiction: --stacks: stack {text!r}: {' and '.join(modes)} exclude each other; choose one"
        )
    if stack.joint and stack.zero == 3:
        raise ConfigError(
            f"unsupported-combination: --stacks: stack {text!r}: joint needs whole weights; use zero2, or "
            "compile"
        )


def _nearest(ranks: int, share: int) -> str:
    below, above = ranks // share * share, -(-ranks // share) * share
    return f"{below} or {above}" if below else str(above)
