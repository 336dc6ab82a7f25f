"""Rewards: map completions to finite numbers; no failure silently becomes 0.

`on_error` handles rewards that raise, time out, or return anything but a finite number (bool, int, float and
0-d arrays are numbers). A completion without the configured part (`no_answer`) and an answer that a verifier
cannot parse (`junk`) score 0 and are counted, see VerifierProcess.reasoning_gym.
"""

from __future__ import annotations

import math
import re
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from lockstep.config.base import read_secrets
from lockstep.config.rollout import RewardConfig
from lockstep.errors import ConfigError, DataError, RewardError, unknown_name
from lockstep.protocols.reward import RewardInput
from lockstep.rollout.reward_functions import (
    LARGEST_REWARD,
    MATCHES,
    RewardFailure,
    bind,
    in_calls,
    in_process,
    no_column,
    raised,
    score_of,
    short_repr,
)
from lockstep.rollout.reward_process import RewardWorker, close_all
from lockstep.rollout.reward_service import RewardService
from lockstep.rollout.sandbox import probe
from lockstep.rollout.verifiers import VerifierProcess, check_row, require_package
from lockstep.schema.rollout import Prompt

CORRECT = 1.0 - 1e-6
"""Least verifier score of a correct answer; many verifiers give partial credit below it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Scored:
    """The rewards of one completion."""

    total: float
    """Sum of weight * reward."""
    by_name: Mapping[str, float]
    """Unweighted rewards by name. Repeated names are numbered: format, format#2."""
    weights: Mapping[str, float] = field(default_factory=dict)
    """Weights by the same names."""


class Scorer(Protocol):
    """Scores many completions by one reward: a value or an exception for each."""

    def __call__(self, inputs: Sequence[RewardInput], /) -> list[Any]: ...


def check_total(total: float, by_name: Mapping[str, float]) -> None:
    """Raises RewardError for a sum of weighted rewards that no step can compute with."""
    if not abs(total) <= LARGEST_REWARD:
        raise RewardError(
            f"not-finite: the total reward is {total:g} (before weights: {dict(by_name)}), which is too "
            f"large for float32 arithmetic (at most {LARGEST_REWARD:g}); lower rewards.weight"
        )


class RewardSet:
    """All rewards of a run.

    `search_paths`: folders, besides the working directory, that are searched for `module:attribute`.
    `functions`: callables that replace `configs`, each with the settings of a default RewardConfig. They run
    in this process, as they cannot be sent to another; rewards named `module:attribute` have processes of
    their own, so that close() should be called.

    Raises:
        ConfigError: an unknown name, wrong kwargs, a module that does not import, a package that is not
            installed.

    Example:
        >>> rewards = RewardSet([RewardConfig(name="verifier", answer="last_number")])
        >>> rewards.score([RewardInput(prompt=..., completion="It is 4.", row=row, ...)])
        [Scored(total=1.0, by_name={'verifier': 1.0})]
    """

    def __init__(
        self,
        configs: Sequence[RewardConfig],
        *,
        search_paths: Sequence[Path] = (),
        functions: Sequence[Callable[..., Any]] = (),
    ) -> None:
        self.counts: Counter[str] = Counter()
        self._scoring = threading.Lock()
        """Held by `score`: a call may still be running after an abort."""
        self._process = VerifierProcess()
        self._workers: list[RewardWorker] = []
        self._services: list[RewardService] = []
        self._functions = bool(functions)
        self._columns: dict[str, tuple[str, ...]] = {}
        """Reward -> the columns of the rows that it cannot be called without."""
        if functions:
            self._configs = tuple(RewardConfig(name=_function_name(f)) for f in functions)
        else:
            self._configs = tuple(configs)
        self._names = _numbered([config.name for config in self._configs])
        self._weights = dict(zip(self._names, (config.weight for config in self._configs), strict=True))
        values: list[Any] = list(functions) or [None] * len(self._configs)
        try:
            self._scorers = [
                self._scorer(config, name, search_paths) if value is None else self._callable(config, value)
                for config, name, value in zip(self._configs, self._names, values, strict=True)
            ]
        except BaseException:
            self.close()
            raise

    def __bool__(self) -> bool:
        return bool(self._configs)

    def score(self, inputs: Sequence[RewardInput]) -> list[Scored | None]:
        """Return one entry per input, in order; None if a reward failed under on_error = drop.

        Raises:
            RewardError: a reward failed under on_error = fail; names reward and row. Its __cause__ is the
                exception, or a RewardFailure with the traceback from the reward's process.
            ConfigError: the rows lack what a reward needs in principle (a verifier, an answer column).
        """
        columns: list[list[float | None]] = []
        with self._scoring:
            for config, name, scorer in zip(self._configs, self._names, self._scorers, strict=True):
                outcomes = scorer(inputs)
                columns.append(
                    [
                        self._settle(outcome, config, name, sample)
                        for outcome, sample in zip(outcomes, inputs, strict=True)
                    ]
                )
        scored: list[Scored | None] = []
        for values in zip(*columns, strict=True) if columns else [()] * len(inputs):
            present = [value for value in values if value is not None]
            if len(present) < len(values):
                self.counts["dropped"] += 1
                scored.append(None)
                continue
            # fsum rounds once, so the total does not depend on the order of the rewards.
            total = math.fsum(c.weight * value for c, value in zip(self._configs, present, strict=True))
            by_name = dict(zip(self._names, present, strict=True))
            check_total(total, by_name)
            scored.append(Scored(total=total, by_name=by_name, weights=self._weights))
        return scored

    def check_rows(self, prompts: Iterable[Prompt]) -> None:
        """Check the reference answers of `math` before a run.

        Raises:
            ConfigError: the rows have no answers.
            DataError: an answer is blank, or neither text nor a number, and on_error = fail would end the
                run on it.
        """
        if not any(config.name == "math" and config.on_error == "fail" for config in self._configs):
            return
        for prompt in prompts:
            try:
                _answer_text(prompt.row)
            except RewardFailure as failure:
                where = prompt.where or f"row {prompt.index + 1}"
                raise DataError(f"wrong-row: {where}: reward 'math': {failure}") from failure

    def strict(self, row: Mapping[str, Any], completion: str) -> bool | None:
        """Return whether the first `verifier` or `math` reward gives full marks to its configured part of the
        completion.

        Return None without such a reward, or if it failed under on_error = drop (counted).
        """
        for config, name, scorer in zip(self._configs, self._names, self._scorers, strict=True):
            if config.name in ("verifier", "math"):
                sample = _bare_input(row, completion)
                value = self._settle(scorer([sample])[0], config, name, sample)
                return None if value is None else value >= CORRECT
        return None

    def check_row(self, row: Mapping[str, Any]) -> None:
        """Check that a row has the columns that the rewards need, see reward_rows. Raises ConfigError."""
        for config in () if self._functions else self._configs:
            check_row(config, row)
        for name, columns in self._columns.items():
            missing = [column for column in columns if column not in row]
            if missing:
                raise ConfigError(f"missing-column: reward {name!r} {no_column(missing[0], row)}")

    def pop_counts(self) -> dict[str, int]:
        """Return and reset the counts: NAME/no_answer, NAME/junk, NAME/timeout (of the junk), NAME/failed,
        NAME/retried (requests) and dropped (rollouts)."""
        counts = dict(+self.counts)
        self.counts.clear()
        return counts

    def notes(self) -> list[str]:
        """Return notes for the start of a run: which layers of the verifiers' sandbox are missing."""
        if not any(config.name in ("verifier", "math") for config in self._configs):
            return []
        isolation = probe()
        if isolation.warning is not None:
            return [f"warning: verifiers' sandbox: {isolation.describe()}: {isolation.warning}"]
        return [f"verifiers' sandbox: {isolation.describe()}"] if isolation.missing else []

    def close(self) -> None:
        """End the processes of verifiers and rewards. The set stays usable: it starts new ones when
        needed."""
        for service in self._services:
            service.close()
        self._process.close()
        close_all(self._workers)

    def _settle(self, outcome: Any, config: RewardConfig, name: str, sample: RewardInput) -> float | None:
        """The outcome as a finite float; None for a failure under drop."""
        if isinstance(outcome, ConfigError):
            raise outcome
        cause = outcome if isinstance(outcome, BaseException) else None
        if cause is None:
            value = score_of(outcome)
            if isinstance(value, float):
                return value
            problem = value
        else:
            problem = str(cause) if isinstance(cause, RewardFailure) else raised(cause)
        if config.on_error == "drop":
            self.counts[f"{name}/failed"] += 1
            return None
        raise RewardError(
            f"reward-failed: reward {name!r} on {_name_row(sample)}: {problem}. Fix the reward or the row, "
            "or set on_error = 'drop' to drop such rollouts"
        ) from cause

    def _scorer(self, config: RewardConfig, name: str, search_paths: Sequence[Path]) -> Scorer:
        if ":" in config.name:
            return self._started(config, config.name, search_paths)
        if config.name in ("verifier", "math"):
            _no_kwargs(config)
            package = {"verifier": "reasoning_gym", "math": "math_verify"}[config.name]
            require_package(package, needed_by=f"reward {config.name!r}")
            judge = {"verifier": self._verify, "math": self._math}[config.name]
            return partial(_each, partial(self._judge, judge, config, name), config.on_error == "fail")
        if config.name == "format":
            _check_pattern(config)
            return self._started(config, MATCHES)
        if config.name == "http":
            _no_kwargs(config)
            assert config.url is not None, "RewardConfig checks it"
            service = RewardService(
                config.url,
                token_env=config.token_env,
                batch_size=config.batch_size,
                concurrency=config.max_concurrency,
                retries=config.retries,
                timeout=config.timeout_seconds,
            )
            self._services.append(service)
            return partial(self._serve, self._services[-1], name)
        builtin = {"ids": _ids, "length": _length}
        if config.name not in builtin:
            known = [*builtin, "format", "http", "verifier", "math", "module:attribute"]
            raise ConfigError(unknown_name("reward", config.name, known), code="unknown-name")
        return partial(_each, builtin[config.name](config), config.on_error == "fail")

    def _serve(self, service: RewardService, name: str, inputs: Sequence[RewardInput]) -> list[Any]:
        outcomes, retried = service.score(inputs)
        if retried:
            self.counts[f"{name}/retried"] += retried
        return outcomes

    def _started(self, config: RewardConfig, target: str, search_paths: Sequence[Path] = ()) -> Scorer:
        worker = RewardWorker(
            config.name,
            target,
            kwargs=partial(_arguments, config),
            timeout=config.timeout_seconds,
            concurrency=config.max_concurrency,
            path=search_paths,
        )
        self._workers.append(worker)
        self._columns[config.name] = worker.columns
        if worker.asynchronous:
            return worker.together
        return partial(in_calls, worker.one, config.on_error == "fail", batched=worker.batched)

    def _callable(self, config: RewardConfig, value: Callable[..., Any]) -> Scorer:
        reward = bind(config.name, {}, value)
        self._columns[config.name] = reward.columns
        return in_process(
            reward,
            timeout=config.timeout_seconds,
            concurrency=config.max_concurrency,
            stop_at_failure=config.on_error == "fail",
        )

    def _judge(
        self,
        judge: Callable[..., tuple[float, str | None]],
        config: RewardConfig,
        name: str,
        sample: RewardInput,
    ) -> float:
        check_row(config, sample.row)  # first: what nothing can be compared with is no wrong answer
        if config.name == "math":
            _answer_text(sample.row)
        answer = EXTRACTORS[config.answer](sample.completion)
        if answer is None:
            self.counts[f"{name}/no_answer"] += 1
            return 0.0
        score, junk = judge(config, sample.row, answer)
        if junk is not None:
            self.counts[f"{name}/junk"] += 1
            self.counts[f"{name}/timeout"] += junk.startswith("TimeoutError")
        return score

    def _verify(self, config: RewardConfig, row: Mapping[str, Any], answer: str) -> tuple[float, str | None]:
        return self._process.reasoning_gym(
            row, answer, timeout=config.timeout_seconds, allowed=config.allow_unsandboxed
        )

    def _math(self, config: RewardConfig, row: Mapping[str, Any], answer: str) -> tuple[float, str | None]:
        expected = _answer_text(row)
        text = answer if config.answer in ("text", "last_line") else f"${answer}$"
        return self._process.math(expected, text, timeout=config.timeout_seconds)


def _answer_text(row: Mapping[str, Any]) -> str:
    """The row's answer as math-verify takes it; a list of one answer is that answer.

    Raises:
        ConfigError: the row has no answer.
        RewardFailure: it is blank, or neither text nor a number, whose Python text matches no completion.
    """
    if "answer" not in row:
        raise ConfigError(
            "missing-column: reward 'math' needs a column 'answer'; the rows' columns are "
            f"{', '.join(row)}. Set data.answer_column"
        )
    value = row["answer"]
    one = value[0] if isinstance(value, list) and len(value) == 1 else value
    # isfinite of a whole number beyond any float is an OverflowError.
    number = type(one) is int or (isinstance(one, float | Decimal) and math.isfinite(one))
    if number or (isinstance(one, str) and one.strip()):
        return str(one)
    keys = f" with the keys {', '.join(map(str, value))}" if isinstance(value, Mapping) else ""
    kind = f" ({type(value).__name__}{keys}), neither text nor a number"
    raise RewardFailure(
        f"the row's answer is {short_repr(value)}{', which is blank' if isinstance(one, str) else kind}; "
        "put the answer into a separate column and set data.answer_column to its name"
    )


def lenient_correct(row: Mapping[str, Any], completion: str) -> tuple[bool, bool] | None:
    """Return (first number correct, last number correct) of the whole completion, compared as numbers with
    the row's answer.

    None: the row's answer is not a number, so this measure does not apply. The lenient accuracy of a set is
    the larger of the two means, see `lenient_accuracy`.

    Example:
        >>> lenient_correct({"answer": "#### 1,042"}, "1042 is 1000 + 42")
        (True, False)
    """
    expected = answer_number(row.get("answer"))
    if expected is None:
        return None
    first, last = (answer_number(number) for number in (first_number(completion), last_number(completion)))
    return first == expected, last == expected


def lenient_accuracy(marks: Sequence[tuple[bool, bool]]) -> float:
    """Return the larger of first-number and last-number accuracy over the set.

    Example:
        >>> lenient_accuracy([(True, False), (True, True), (False, False), (False, True)])
        0.5
    """
    if not marks:
        raise ValueError("lenient_accuracy of no rows")
    return max(sum(first for first, _ in marks), sum(last for _, last in marks)) / len(marks)


def _each(
    score: Callable[[RewardInput], Any], stop_at_failure: bool, inputs: Sequence[RewardInput]
) -> list[Any]:
    """`in_calls` of one sample each."""
    return in_calls(lambda samples: [score(samples[0])], stop_at_failure, inputs)


def _ids(config: RewardConfig) -> Callable[[RewardInput], float]:
    _no_kwargs(config)

    def ids(sample: RewardInput) -> float:
        """Share of even ids; 0 for an empty completion."""
        tokens = sample.completion_token_ids
        return sum(token % 2 == 0 for token in tokens) / len(tokens) if tokens else 0.0

    return ids


def _length(config: RewardConfig) -> Callable[[RewardInput], float]:
    target = config.kwargs.get("target")
    if set(config.kwargs) != {"target"} or isinstance(target, str | bool) or target is None or target <= 0:
        raise ConfigError(
            f"missing-setting: reward 'length' needs kwargs = {{target = TOKENS > 0}}, got {config.kwargs}",
            setting="rewards.kwargs",
        )
    return lambda sample: -abs(len(sample.completion_token_ids) - target) / target


def _check_pattern(config: RewardConfig) -> None:
    pattern = config.kwargs.get("pattern")
    if set(config.kwargs) != {"pattern"} or not isinstance(pattern, str):
        raise ConfigError(
            "missing-setting: reward 'format' needs kwargs = {pattern = 'REGULAR EXPRESSION'}, got "
            f"{config.kwargs}",
            setting="rewards.kwargs",
        )
    try:
        re.compile(pattern, re.DOTALL)
    except re.error as error:
        raise ConfigError(
            f"wrong-format: reward 'format': kwargs.pattern = {pattern!r} is not a valid regex: {error}",
            setting="rewards.kwargs.pattern",
        ) from error


def _no_kwargs(config: RewardConfig) -> None:
    if config.kwargs:
        raise ConfigError(
            f"no-effect: reward {config.name!r} takes no kwargs, got {config.kwargs}; remove them",
            setting="rewards.kwargs",
        )


def _function_name(function: Callable[..., Any]) -> str:
    return str(getattr(function, "__name__", type(function).__name__))


def _arguments(config: RewardConfig) -> dict[str, Any]:
    """The keyword arguments of a reward in its own process."""
    return {**config.kwargs, **read_secrets(config.secrets, setting="rewards.secrets")}


def _numbered(names: Sequence[str]) -> list[str]:
    seen: Counter[str] = Counter()
    result = []
    for name in names:
        seen[name] += 1
        result.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return result


def _name_row(sample: RewardInput) -> str:
    row = sample.where or ("" if sample.index is None else f"row {sample.index + 1}")
    prompt = str(sample.row.get("problem") or sample.prompt)
    return f"{row} (prompt {prompt[:80]!r}, completion {sample.completion[:80]!r})"


def _bare_input(row: Mapping[str, Any], completion: str) -> RewardInput:
    return RewardInput(
        prompt=str(row.get("problem", "")),
        completion=completion,
        row=row,
        prompt_token_ids=(),
        completion_token_ids=(),
        finish_reason="stop",
    )


# Extract the answer from a completion.


# A sign counts only where no value stands before it: "5-9" is 5 and 9, "= -4" is -4. A group of thousands is
# exactly three digits. The exponent is bounded, so that no completion can ask for a number of a billion
# digits.
_NUMBER = re.compile(
    r"(?:(?<![0-9A-Za-z.)\]])[-+\u2212])?"
    r"(?:(?:[0-9]{1,3}(?:,[0-9]{3})+(?![0-9])|[0-9]+)(?:\.[0-9]+)?|(?<![0-9])\.[0-9]+)"
    r"(?:[eE][-+]?[0-9]{1,3}(?![0-9A-Za-z]))?"
)
_BOXED = re.compile(r"\\boxed\s*\{")
_BRACE = re.compile(r"[{}]")
_OPEN, _CLOSE = "<answer>", "</answer>"


def numbers(text: str) -> list[str]:
    """Return every number in the text, in order, as plain text: no thousands separators, no plus sign, an
    ASCII minus.

    Example:
        >>> numbers("5 - 9 = -4, or about 1,234.50.")
        ['5', '9', '-4', '1234.50']
    """
    matches = (match.group() for match in _NUMBER.finditer(text))
    return [n.replace(",", "").replace("\u2212", "-").lstrip("+") for n in matches]


def first_number(text: str) -> str | None:
    """Return the first number in the text, see `numbers`; None: there is none."""
    values = numbers(text)
    return values[0] if values else None


def last_number(text: str) -> str | None:
    """Return the last number in the text, see `numbers`; None: there is none."""
    values = numbers(text)
    return values[-1] if values else None


def last_line(text: str) -> str | None:
    """Return the last line that is not blank, stripped."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return lines[-1] if lines else None


def boxed(text: str) -> str | None:
    r"""Return the content of the last complete \boxed{...}, braces balanced."""
    starts = {match.end() - 1 for match in _BOXED.finditer(text)}
    found: tuple[int, int] | None = None
    opened: list[int] = []
    for brace in _BRACE.finditer(text):  # once over the text: a policy may write any number of \boxed{
        if brace.group() == "{":
            opened.append(brace.start())
        elif opened and (start := opened.pop()) in starts and (found is None or start > found[0]):
            found = start, brace.start()
    return None if found is None else text[found[0] + 1 : found[1]].strip()


def tags(text: str) -> str | None:
    """Return the content of the last <answer>...</answer>, stripped."""
    content, position = None, 0
    while (start := text.find(_OPEN, position)) >= 0 and (end := text.find(_CLOSE, start)) >= 0:
        content, position = text[start + len(_OPEN) : end].strip(), end + len(_CLOSE)
    return content


def whole(text: str) -> str | None:
    """Return the whole text, stripped; None when nothing is left."""
    return text.strip() or None


EXTRACTORS: dict[str, Callable[[str], str | None]] = {
    "text": whole,
    "first_number": first_number,
    "last_number": last_number,
    "last_line": last_line,
    "boxed": boxed,
    "tags": tags,
}


def answer_number(answer: object) -> Decimal | None:
    """Parse a dataset's answer as a number; None when it is not one number. GSM8K's "... #### 42" is 42."""
    text = str(answer).rpartition("####")[2].strip().lstrip("$")
    match = _NUMBER.fullmatch(text)
    return Decimal(numbers(text)[0]) if match else None
