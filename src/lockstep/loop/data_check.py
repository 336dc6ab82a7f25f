"""Look at every row of a run's data, in several processes: what each becomes, and which are at fault."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from typing import Any, cast

import numpy as np

from lockstep.config.data import DataConfig
from lockstep.config.run import GRPORun, OfflineRun, RunConfig
from lockstep.data import verdicts
from lockstep.data.documents import DocumentSet
from lockstep.data.held_out import evaluates, load_train_and_held_out
from lockstep.data.lazy import LAST_KEPT, MAKE_SECONDS, STATES
from lockstep.data.prompts import FixedPrompts
from lockstep.data.verdicts import Verdict
from lockstep.environments.hosts import tools_of
from lockstep.errors import ConfigError, DataError, TrainError
from lockstep.loop.documents import offline_task
from lockstep.models.architectures import silence_transformers
from lockstep.models.load import OpenedModel, open_model
from lockstep.processes.child import gc_paused
from lockstep.processes.supervisor import die_with

_ITEMS = 512
"""Items in one task of a worker."""
_AHEAD = 3
"""Tasks that each worker is given at once."""
NAMED = 100
"""Rows at fault that are named."""
Checked = DocumentSet[Any] | FixedPrompts
Progress = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class SetReport:
    """The counts of one of a run's data sections."""

    section: str
    """data or eval_data."""
    source: str
    rows: int
    kept: int
    """Documents, pairs or prompts that are trained on."""
    left_out: Mapping[str, int]
    """By reason; `bad` are rows at fault."""
    truncated: int
    tokens: int
    trained_tokens: int
    lengths: Mapping[str, int]
    """Tokens of an item: median, 99 %, longest."""
    bad: list[str]
    """The messages of the first NAMED rows at fault."""
    notes: list[str]
    seconds: float
    kept_in: str | None
    """The file in which a run finds this; None: every run looks at a small set itself, and one that streams
    its rows finds nothing."""


def check_data(run: RunConfig, *, workers: int, progress: Progress) -> list[SetReport]:
    """Look at every row of the run's data, and keep the verdict where a run on it finds it.

    Args:
        workers: processes.
        progress: called with (items done, all items).

    Raises:
        ConfigError: there is nothing to look at, or the settings are wrong.
        DataError: a source cannot be read.
        TrainError: a worker ended.
    """
    reports = [_checked(run, section, workers, progress) for section in _sections(run)]
    if not reports:
        raise ConfigError(
            f"nothing-to-do: data.source = {run.data.source!r} generates its rows, so there are none to check"
        )
    return reports


def _sections(run: RunConfig) -> Iterator[str]:
    for name in ("data", "eval_data"):
        section = getattr(run, name)
        if section is not None and not section.generated:
            yield name


def _open(run: RunConfig, section: str) -> Checked:
    """The set of a section, in which a row at fault is no error."""
    config, other = (_lenient(getattr(run, name)) for name in (section, _other(section)))
    if not run.online:
        offline = cast(OfflineRun, run)
        task = offline_task(offline)
        assert config is not None, "one of _sections"
        return task.load(config, open_model(run.model, task.head))
    online = cast(GRPORun, run)
    opened: OpenedModel = open_model(run.model)
    # Prompts of evaluations come first, those of training without them: as in a run.
    changed = online.model_copy(update={section: config, _other(section): other})
    sets = load_train_and_held_out(
        changed,
        tokenizer=opened.tokenizer,
        vocab_size=int(opened.text.vocab_size),
        hold_out="hash" if evaluates(online) or section == "eval_data" else None,
        tools=tools_of(online.environment),
    )
    found = sets[section == "eval_data"]
    assert isinstance(found, FixedPrompts), "the section is of a file"
    return found


def _other(section: str) -> str:
    return "eval_data" if section == "data" else "data"


def _lenient(config: DataConfig | None) -> DataConfig | None:
    """The same rows, of which those at fault are no error."""
    if config is None or config.generated:
        return config
    changes = {"on_bad_row": "skip", "workers": 0, "streaming": False, "shuffle_buffer": 10_000}
    return config.model_copy(update=changes)


def _checked(run: RunConfig, section: str, workers: int, progress: Progress) -> SetReport:
    start = time.monotonic()
    found = _open(run, section)
    items, source = found.items, getattr(run, section).source
    states, lengths = np.zeros(items.rows, np.uint8), np.zeros(items.rows, np.int32)
    trained, done, bad = 0, 0, dict[int, str]()
    for part in _parts(run, section, found, workers=workers):
        places = slice(part.first, part.first + len(part.states))
        states[places], lengths[places] = part.states, part.lengths
        trained += part.trained
        done += len(part.states)
        bad |= part.bad
        progress(done, items.rows)
    counts = {name: int(np.count_nonzero(states == code)) for code, name in enumerate(STATES)}
    kept = lengths[states <= LAST_KEPT]
    left_out = {int(number): STATES[states[number]] for number in np.flatnonzero(states > LAST_KEPT)}
    named = {number: bad[number] for number in sorted(bad)[:NAMED]}
    report = SetReport(
        section=section,
        source=source,
        rows=items.rows // items.of_row,
        kept=len(kept),
        left_out={name: n for name in STATES[LAST_KEPT + 1 :] if (n := counts[name]) and name != "absent"},
        truncated=counts["truncated"],
        tokens=int(kept.sum()),
        trained_tokens=trained,
        lengths=_quantiles(kept),
        bad=list(named.values()),
        notes=list(found.notes),
        seconds=time.monotonic() - start,
        kept_in=None,
    )
    if found.verdict_key is None or getattr(run, section).streaming:
        return report
    verdict = Verdict(
        rows=items.rows,
        left_out=left_out,
        bad=named,
        statistics={"tokens": report.tokens, "trained_tokens": trained, "lengths": dict(report.lengths)},
    )
    return replace(report, kept_in=str(verdicts.write(found.verdict_key, verdict)))


def _quantiles(lengths: np.ndarray) -> dict[str, int]:
    if not len(lengths):
        return {}
    median, most = (int(np.quantile(lengths, share)) for share in (0.5, 0.99))
    return {"median": median, "99 %": most, "longest": int(lengths.max())}


@dataclass(frozen=True, kw_only=True)
class _Part:
    """The result of one task: consecutive items."""

    first: int
    states: np.ndarray
    lengths: np.ndarray
    trained: int
    bad: dict[int, str]


def _parts(run: RunConfig, section: str, found: Checked, *, workers: int) -> Iterator[_Part]:
    """Yield the results as they are done."""
    places = range(0, found.items.rows, _ITEMS)
    if len(places) == 1 or workers == 1:
        yield from (_part(found, first) for first in places)
        return
    # Spawned: a fork of a process with threads may find their locks taken.
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(
        workers - 1, mp_context=context, initializer=_start, initargs=(run, section, os.getpid())
    )
    left, running = iter(places), set[Future[_Part]]()
    try:
        with _one_tokenizer_thread():
            while True:
                more = itertools.islice(left, _AHEAD * (workers - 1) - len(running))
                running |= {pool.submit(_part_of_worker, first) for first in more}
                # This process is one of the workers, and looks at rows while the others import torch.
                own = next(left, None)
                if own is not None:
                    yield _part(found, own)
                elif not running:
                    return
                done, running = wait(
                    running,
                    timeout=MAKE_SECONDS if own is None else 0,
                    return_when=FIRST_COMPLETED,
                )
                if own is None and not done:
                    raise DataError(
                        f"deadline: {_ITEMS} rows of data.source = {found.items.config.source!r} were not "
                        f"read, rendered and tokenised within {MAKE_SECONDS:g} s; look for a row that is "
                        "very long, or for a disk that does not answer"
                    )
                yield from (future.result() for future in done)
    except BrokenProcessPool as error:
        raise TrainError(
            f"process-died: a process that looks at the rows of {found.items.config.source!r} ended by "
            f"itself ({error}); was it killed for memory? Look with fewer processes: --workers 1"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _one_tokenizer_thread() -> Iterator[None]:
    """The other processors have workers of their own."""
    name = "TOKENIZERS_PARALLELISM"
    before = os.environ.get(name)
    os.environ[name] = "false"
    try:
        yield
    finally:
        if before is None:
            del os.environ[name]
        else:
            os.environ[name] = before


_found: Checked | None = None
"""A worker's."""


def _start(run: RunConfig, section: str, parent: int) -> None:
    global _found
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent
    die_with(parent)
    with silence_transformers():
        _found = _open(run, section)


def _part_of_worker(first: int) -> _Part:
    assert _found is not None, "the pool calls _start first"
    return _part(_found, first)


def _part(found: Checked, first: int) -> _Part:
    items = found.items
    numbers = range(first, min(first + _ITEMS, items.rows))
    with gc_paused():  # what is made here lives to the end of the part: it took a third of the time
        outcomes = items.outcomes(numbers)
        states = [STATES.index("bad" if each.error else each.state) for each in outcomes]
        bad = {n: str(e.error) for n, e in zip(numbers, outcomes, strict=True) if e.error is not None}
        return _Part(
            first=first,
            states=np.array(states, np.uint8),
            lengths=np.array([each.tokens for each in outcomes], np.int32),
            trained=sum(each.trained for each in outcomes),
            bad=dict(itertools.islice(bad.items(), NAMED)),
        )
