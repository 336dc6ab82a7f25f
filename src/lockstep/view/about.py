"""What a run is: its config, versions, plan, evaluations, warnings, reports, and how to resume it."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, TypeAlias

from lockstep.errors import ConfigError, DataError, LockstepError
from lockstep.observe.files import open_plain
from lockstep.observe.run_history import way_on
from lockstep.view.rollout_reader import RolloutReader
from lockstep.view.rollouts import Rollout

Kind: TypeAlias = Literal["matrix", "parity", "bench", "hang"]
_VERSIONS = ("lockstep", "python", "torch", "transformers", "numpy", "platform", "cpu_threads", "cuda_device")
_SAMPLES = 20
"""Held-out prompts that are shown."""
_LOG_BYTES = 2**20
"""Of the end of each rank's log."""
_MOST_LINES = 200
_MOST_RANKS = 64
_SUITES: Mapping[str, Kind] = {
    "matrix": "matrix",
    "parity": "parity",
    "engines": "parity",
    "bench": "bench",
}
"""Stem of a report's files -> its kind."""
_NO_REPORTS = ("rollouts", "checkpoints", "recordings", "recordings-value", "export", "engine")
_RECORD = re.compile(r"(\d{4}-\d\d-\d\d \d\d:\d\d:\d\d) (.*)")
_LEVEL = re.compile(r"(WARNING|ERROR|CRITICAL) |warning: |\S+:\d+: \w*Warning: ")


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """One setting of the resolved config."""

    key: str
    """Dotted."""
    value: str
    """As TOML."""
    default: str | None
    """As TOML; None: it has none."""
    differs: bool


@dataclass(frozen=True, kw_only=True, slots=True)
class LogLine:
    """An error or a warning of a log."""

    rank: int
    time: str
    """UTC, as in the log."""
    level: Literal["error", "warning"]
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """A report of matrix, parity, bench or hang that belongs to the run."""

    kind: Kind
    name: str
    """Path below the run."""
    path: Path
    html: bool
    """Else JSON."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EvaluatedPrompt:
    """A held-out prompt with its completions before and after training."""

    prompt: str
    before: Rollout | None
    after: Rollout | None


@dataclass(frozen=True, kw_only=True, slots=True)
class About:
    """What a run is."""

    config: tuple[Setting, ...]
    versions: Mapping[str, str]
    axes: Mapping[str, str]
    """What `auto` settings became."""
    contract: Mapping[str, Any] | None
    """The kernel contract; None: the run has none."""
    plan: Mapping[str, Any]
    """The memory plan; empty: none was made."""
    evaluations: tuple[Mapping[str, Any], ...]
    """Results, oldest first."""
    samples: tuple[EvaluatedPrompt, ...]
    log: tuple[LogLine, ...]
    resume: str | None
    """The command that goes on with the run; None if it is finished or still running."""
    reports: tuple[Report, ...]
    problems: tuple[str, ...] = ()


def read_about(
    run: Path,
    *,
    config: Mapping[str, Any],
    manifest: Mapping[str, Any],
    evaluations: tuple[Mapping[str, Any], ...],
    rollouts: RolloutReader,
    ended_early: bool,
) -> About:
    """Return what a run is; what is missing of it is in its problems.

    Args:
        ended_early: whether it can be resumed.
    """
    problems = list[str]()
    found = manifest.get("axes")
    axes: Mapping[str, Any] = found if isinstance(found, dict) else {}
    memory, contract = axes.get("memory"), manifest.get("contract")
    return About(
        config=settings(config, problems),
        versions={name: str(manifest[name]) for name in _VERSIONS if manifest.get(name) is not None},
        axes={name: str(value) for name, value in axes.items() if name != "memory" and value != ""},
        contract=contract if isinstance(contract, dict) else None,
        plan=memory if isinstance(memory, dict) else {},
        evaluations=evaluations,
        samples=evaluated_prompts(rollouts),
        log=read_log(run),
        resume=_resume(run, problems) if ended_early else None,
        reports=find_reports(run),
        problems=tuple(problems),
    )


def settings(config: Mapping[str, Any], problems: list[str]) -> tuple[Setting, ...]:
    """Return the settings of a config beside their defaults. problems: gets what is wrong."""
    kind = str(config.get("kind", ""))
    try:
        defaults = _defaults(kind)
    except ConfigError as error:
        problems.append(f"the defaults of kind = {kind!r:.40} are not known: {error}")
        defaults = {}
    rows = []
    for key, value in _flat(config):
        default = defaults.get(key)
        rows.append(
            Setting(
                key=key,
                value=_toml(value),
                default=None if default is None else _toml(default),
                differs=bool(defaults) and key != "kind" and value != default,
            )
        )
    return tuple(rows)


def _toml(value: Any) -> str:
    from lockstep.config.load import TomlError, toml_value

    try:
        return toml_value(value)
    except TomlError:  # such as a date, which no config has
        return str(value)


@functools.cache
def _defaults(kind: str) -> dict[str, Any]:
    # Here: the config's models take a second to import, which only this page needs.
    from lockstep.config.load import load_run, to_values

    return dict(_flat(to_values(load_run(kind=kind))))


def _flat(values: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Dotted names and values; an empty table has none."""
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{path}{name}.")
        else:
            yield f"{path}{name}", value


def evaluated_prompts(rollouts: RolloutReader) -> tuple[EvaluatedPrompt, ...]:
    """Return held-out prompts with the completions of the first and of the newest evaluation."""
    names = rollouts.evaluations()
    before = rollouts.first_of("before", _SAMPLES) if "before" in names else []
    newest = [name for name in names if name != "before"][-1:]
    after = {one.prompt_index: one for name in newest for one in rollouts.first_of(name, _SAMPLES)}
    first = {one.prompt_index: one for one in before}
    return tuple(
        EvaluatedPrompt(
            prompt=(first.get(index) or after[index]).spans[0].text or "",
            before=first.get(index),
            after=after.get(index),
        )
        for index in dict.fromkeys((*first, *after))
    )


def read_log(run: Path) -> tuple[LogLine, ...]:
    """Return the errors and warnings at the end of the ranks' logs, oldest first."""
    logs = [(int(path.stem[5:]), path) for path in run.glob("logs/rank-*.log") if path.stem[5:].isdigit()]
    lines = [line for rank, path in sorted(logs)[:_MOST_RANKS] for line in _log_lines(path, rank)]
    return tuple(sorted(lines, key=lambda line: line.time)[-_MOST_LINES:])


def _log_lines(path: Path, rank: int) -> Iterator[LogLine]:
    try:
        with open_plain(path, DataError, root=path.parents[1]) as file:
            file.seek(max(0, file.seek(0, 2) - _LOG_BYTES))
            text = file.read(_LOG_BYTES).decode("utf-8", "replace")
    except DataError:  # removed, or no log of ours
        return
    in_traceback = False
    for match in filter(None, map(_RECORD.fullmatch, text.splitlines())):
        said = match[2]
        if said.startswith("Traceback (most recent call last)"):
            in_traceback = True
        elif in_traceback and said and not said.startswith(" "):
            # The line after the frames names the error.
            in_traceback = False
            yield LogLine(rank=rank, time=match[1], level="error", text=said)
        elif level := _LEVEL.match(said):
            named = level[1] in ("ERROR", "CRITICAL")
            yield LogLine(rank=rank, time=match[1], level="error" if named else "warning", text=said)


def _resume(run: Path, problems: list[str]) -> str | None:
    try:
        return way_on(run)
    except LockstepError as error:
        problems.append(str(error))
        return None


def find_reports(run: Path) -> tuple[Report, ...]:
    """Return the reports of matrix, parity, bench and hangs in a run's folder and up to two levels below."""
    found = list[Report]()
    for folder in _report_folders(run):
        for stem, kind in _SUITES.items():
            # The page and the JSON say the same.
            page = next((p for end in ("html", "json") if (p := folder / f"{stem}.{end}").is_file()), None)
            if page is not None:
                found.append(_report(run, page, kind))
        if (folder / "hang.json").is_file():
            found.append(_report(run, folder / "hang.json", "hang"))
    return tuple(found)


def _report(run: Path, path: Path, kind: Kind) -> Report:
    return Report(kind=kind, name=str(path.relative_to(run)), path=path, html=path.suffix == ".html")


def _report_folders(run: Path) -> Iterator[Path]:
    yield run
    first = _below(run)
    yield from first
    for folder in first:
        yield from _below(folder)
    yield from _below(run / "logs" / "ranks")


def _below(folder: Path) -> Sequence[Path]:
    if folder.name in _NO_REPORTS or not folder.is_dir():
        return []
    return sorted(path for path in folder.iterdir() if path.is_dir() and path.name not in _NO_REPORTS)
