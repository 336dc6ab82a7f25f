"""Pages of runs as HTML, for the server and for an exported file. Loads no server."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import math
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, get_args
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup, escape

from lockstep.errors import ConfigError, DataError, LockstepError
from lockstep.observe.files import read_json
from lockstep.observe.text import printable_text
from lockstep.view.about import Setting
from lockstep.view.presets import Preset
from lockstep.view.rollouts import Only, Order, Rollout, RolloutPage, RolloutQuery
from lockstep.view.runs import RunReader, RunRow, open_runs

FOLDER = Path(__file__).resolve().parent
STATIC = FOLDER / "static"
NOTHING = "\N{EN DASH}"
"""Stands for a value that there is not."""
PAGE_ROWS, MOST_ROWS = 50, 100
MOST_TOKENS = 2000
"""Of one rollout beside others; alone, a rollout is shown whole."""
SMOOTHINGS = (0, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Numbers of values that a curve can be the mean of."""
Query = Mapping[str, str]
_SORTED = {
    "run": "id",
    "state": "state",
    "model": "model",
    "algorithm": "algorithm",
    "step": "steps",
    "started": "started",
    "reward": "reward",
    "before": "accuracy_before",
    "after": "accuracy_after",
    "speed": "tokens_per_second",
    "gap": "gap",
}
"""Column of the table of runs -> field of RunRow."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """A chart of one metric."""

    metric: str
    title: str
    hint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A span of a rollout as it is shown."""

    author: str
    text: str | None
    tokens: Markup | None
    """Of the policy, one element each."""
    left: int
    """Tokens that are not shown."""


class Site:
    """Every page, by method.

    Raises:
        DataError: there is no run under `paths`.
    """

    exported: frozenset[str] | None = None
    """Addresses of all pages of an exported file, which link only to each other; None: a server's."""

    def __init__(self, paths: Sequence[Path]) -> None:
        self._paths, self._lock = tuple(paths), threading.Lock()
        self._readers = open_runs(self._paths)

    def close(self) -> None:
        """End what the readers do in the background."""
        for reader in self._readers.values():
            reader.close()

    # Pages. Those of a run take its id; `query` is the URL's.

    def home(self, *, query: Query) -> str:
        """The table of runs."""
        rows = [self._row(reader) for reader in self.runs().values()]
        words = query.get("q", "").casefold().split()
        shown = [row for row in rows if all(word in _searched(row) for word in words)]
        sort = query.get("sort", "-started")
        field = _SORTED.get(sort.removeprefix("-"), "started")
        known = [row for row in shown if getattr(row, field) is not None]
        known.sort(key=lambda row: getattr(row, field), reverse=sort.startswith("-"))
        shown = known + [row for row in shown if getattr(row, field) is None]
        return self._page(
            "runs", "/", title="Runs", rows=shown, total=len(rows), q=query.get("q", ""), sort=sort
        )

    def compare(self, runs: Sequence[str]) -> str:
        """Several runs over each other: their curves, and the settings in which they differ."""
        if not runs:
            raise ConfigError("unknown-name: no run is selected; tick runs in the table and press Compare")
        readers = [self._run(run) for run in dict.fromkeys(runs)]
        names = dict.fromkeys(name for reader in readers for name in names_of(reader))
        settings = [{one.key: one for one in reader.about().config} for reader in readers]
        return self._page(
            "compare",
            "/compare",
            title="Compare",
            rows=[self._row(reader) for reader in readers],
            differences=_differences(settings),
            smooth=smoothing(readers),
            **_charts(readers[0].presets(), list(names)),
        )

    def curves(self, run: str, *, query: Query) -> str:
        """A run's curves."""
        reader = self._run(run)
        charts = _charts(reader.presets(), names_of(reader)) | {"smooth": smoothing([reader])}
        return self._page("curves", address("run", run), title="Curves", **self._of(reader), **charts)

    def rollouts(self, run: str, *, query: Query) -> str:
        """Rollouts of a run: a page of those that the query asks for."""
        reader = self._run(run)
        asked, problems = _rollout_query(query)
        page = reader.rollouts.page(asked)
        return self._page(
            "rollouts",
            address("run", run, "rollouts"),
            title="Rollouts",
            **self._of(reader),
            page=page,
            asked=asked,
            form=query,
            next=replace(asked, offset=asked.offset + asked.limit),
            problems=(*problems, *page.problems),
            steps=reader.rollouts.steps(),
            evaluations=reader.rollouts.evaluations(),
            orders=get_args(Order),
            onlys=get_args(Only),
            details=any(one.gap is not None for one in page.rollouts),
        )

    def group(self, run: str, step: int, prompt: int, *, query: Query) -> str:
        """The rollouts of one prompt beside each other, token by token."""
        reader = self._run(run)
        evaluation = query.get("evaluation") or None
        group = reader.rollouts.group(step, prompt, evaluation=evaluation)
        if not group:
            raise DataError(f"unknown-name: {run} has no rollouts of prompt {prompt} in step {step}")
        only = query.get("sample", "")
        shown = [one for one in group if not only or str(one.sample) == only]
        same = all(_prompt(one) == _prompt(group[0]) for one in group)
        return self._page(
            "group",
            address("run", run, "rollouts", step, prompt),
            title=f"Prompt {prompt}, step {step}",
            **self._of(reader),
            step=step,
            prompt=prompt,
            evaluation=evaluation,
            group=[(one, pieces(one, None if only else MOST_TOKENS)) for one in shown],
            size=len(group),
            shared=_prompt(group[0]) if same else None,
            details=any(one.gaps for one in group),
            worded=all(one.text is not None for one in group[0].tokens(0, 8)),
            names=list(dict.fromkeys(name for one in group for name in one.rewards)),
        )

    def step(self, run: str, step: int | None = None, *, query: Query) -> str:
        """One step: its time, its batch, its memory, all its metrics."""
        reader = self._run(run)
        numbers, given = [int(number) for number in reader.curves().steps], () if step is None else (step,)
        if step is None:
            step = numbers[-1] if numbers else 0
        elif step not in numbers:
            raise DataError(f"unknown-name: {run} has no step {step} in metrics.jsonl")
        detail = reader.step(step)
        return self._page(
            "step",
            address("run", run, "step", *given),
            title=f"Step {step}",
            **self._of(reader),
            detail=detail,
            before=max((number for number in numbers if number < step), default=None),
            after=min((number for number in numbers if number > step), default=None),
            rollouts=step in reader.rollouts.steps(),
            phases=_phases(detail.timeline),
            widest=max((bar.start + bar.seconds for each in detail.timeline for bar in each.bars), default=0),
        )

    def about(self, run: str, *, query: Query) -> str:
        """What the run is."""
        reader = self._run(run)
        about = reader.about()
        keys = dict.fromkeys(key for row in about.evaluations for key in row if key.startswith("eval/"))
        samples = [
            (each, [(name, one, pieces(one, MOST_TOKENS) if one else []) for name, one in _sides(each)])
            for each in about.samples
        ]
        return self._page(
            "about",
            address("run", run, "about"),
            title="About",
            **self._of(reader),
            about=about,
            evaluated=list(keys),
            samples=samples,
        )

    def report_page(self, run: str, name: str, path: Path) -> str:
        """A report that is JSON."""
        content = read_json(path, DataError)
        return self._page(
            "report",
            address("run", run, "report", name),
            title=name,
            **self._of(self._run(run)),
            content=content,
        )

    def error(self, error: LockstepError) -> str:
        """The page in place of one that cannot be shown."""
        return self._page("error", "/", title="Not here", error=str(error))

    @staticmethod
    def refusal(path: str) -> str:
        """The page for a browser without the token."""
        return template("refusal").render(path=path)

    # Data for charts.

    def curve_data(self, run: str, names: Iterable[str], **options: Any) -> dict[str, Any]:
        """What the charts of these metrics draw: `Curves.json`. Raises ConfigError: no such run."""
        return self._run(run).curves().json(list(names), **options)

    def values(self, run: str, step: int) -> dict[str, Any]:
        """All metrics of a step, exactly as they were logged."""
        values = self._run(run).curves().at(step)
        # JSON has no NaN and no infinities.
        return {"step": step, "values": {n: v if math.isfinite(v) else None for n, v in values.items()}}

    def report(self, run: str, name: str) -> tuple[Path, bool]:
        """Return a report's file and whether it is a whole page. Raises DataError: none."""
        for each in self._run(run).about().reports:
            if each.name == name:
                return each.path, each.html
        raise DataError(f"no-such-file: {run} has no report {name}")

    # Parts.

    def runs(self) -> dict[str, RunReader]:
        """The runs by id: those that were there once, and those that have begun since."""
        with self._lock, contextlib.suppress(DataError):  # none is left
            there = {reader.path for reader in self._readers.values()}
            for name, reader in open_runs(self._paths).items():
                if reader.path not in there:
                    names = itertools.chain([name], (f"{name}-{number}" for number in itertools.count(2)))
                    self._readers[next(each for each in names if each not in self._readers)] = reader
        return self._readers

    def page_of(self, reader: RunReader, query: Query) -> RolloutPage:
        """The rollouts that `rollouts` shows."""
        return reader.rollouts.page(_rollout_query(query)[0])

    def _run(self, run: str) -> RunReader:
        reader = self._readers.get(run) or self.runs().get(run)
        if reader is None:
            raise ConfigError(f"unknown-name: there is no run {run!r} here")
        return reader

    def _row(self, reader: RunReader) -> RunRow:
        return reader.row()

    def _of(self, reader: RunReader) -> dict[str, Any]:
        return {"run": self._row(reader)}

    def _page(self, name: str, path: str, **content: Any) -> str:
        exported = self.exported

        def href(*parts: object, **query: object) -> Markup:
            """Attribute of a link to a page; none where the exported file does not have the page."""
            target = address(*parts)
            given = urlencode({name: value for name, value in query.items() if value not in (None, "")})
            if exported is None:
                return Markup(' href="{}"').format(target + (f"?{given}" if given else ""))
            known = target in exported and not given
            return Markup(' href="#{}"').format(target) if known else Markup("")

        return template(name).render(
            layout="page.html.j2" if exported is None else "section.html.j2",
            path=path,
            href=href,
            exported=exported is not None,
            **({"run": None, "problems": ()} | content),
        )


def address(*parts: object) -> str:
    """The path of a page, such as /run/demo/step/3."""
    return "/" + "/".join(quote(str(part), safe="") for part in parts)


def template(name: str) -> Template:
    """A page's template."""
    return _environment().get_template(f"{name}.html.j2")


def pieces(rollout: Rollout, most: int | None) -> list[Piece]:
    """Return the spans of a rollout, with at most `most` tokens of the policy."""
    shown, at = [], 0
    for span in rollout.spans:
        if span.author != "policy":
            shown.append(
                Piece(author=span.author, text=_words(span.text, span.token_ids), tokens=None, left=0)
            )
            continue
        count = len(span.token_ids) if most is None else max(0, min(len(span.token_ids), most - at))
        tokens = rollout.tokens(at, count)
        at += len(span.token_ids)
        worded = all(one.text is not None for one in tokens)
        shown.append(
            Piece(
                author=span.author,
                text=None if worded else span.text,
                tokens=Markup("").join(map(_token, tokens)),
                left=len(span.token_ids) - count,
            )
        )
    return shown


_TOKEN = Markup('<i data-t="{}">{}</i>')
_LINE_END = Markup('<i data-t="{}" class="nl">{}</i>')


def _token(one: Any) -> Markup:
    figures = (one.id, one.logprob, one.gap, one.entropy, one.advantage)
    data = ",".join(
        "" if each is None else f"{each:.6g}" if isinstance(each, float) else str(each) for each in figures
    )
    text = f"{one.id} " if one.text is None else printable_text(one.text)
    return (_LINE_END if "\n" in text else _TOKEN).format(data, text)


def _words(text: str | None, ids: Sequence[int]) -> str:
    return " ".join(map(str, ids)) if text is None else text


def _prompt(rollout: Rollout) -> str:
    first = rollout.spans[0]
    return _words(first.text, first.token_ids) if first.author == "prompt" else ""


def _sides(sample: Any) -> list[tuple[str, Rollout | None]]:
    return [("before", sample.before), ("after", sample.after)]


def _searched(row: RunRow) -> str:
    return " ".join((row.id, row.state, row.model, row.algorithm, row.kind, str(row.path))).casefold()


def names_of(reader: RunReader) -> list[str]:
    """Names of all metrics of a run, those of evaluations last."""
    curves = reader.curves()
    evaluated = (
        name
        for row in curves.evaluations
        for name, value in row.items()
        if name.startswith("eval/") and isinstance(value, int | float)
    )
    return list(dict.fromkeys((*curves.names, *evaluated)))


def _charts(presets: Iterable[Preset], names: Sequence[str]) -> dict[str, Any]:
    """Return the charts that come first, and all metrics by the part of their name before the slash."""
    groups: dict[str, list[Chart]] = {}
    for name in names:
        head, slash, _ = name.partition("/")
        groups.setdefault(head if slash else "policy", []).append(Chart(metric=name, title=name, hint=""))
    first = [Chart(metric=one.metric(names), title=one.title, hint=one.hint) for one in presets]
    return {"presets": first, "groups": groups}


def smoothing(readers: Iterable[RunReader]) -> int:
    """How many values a curve is the mean of, unless the user says otherwise: a fiftieth of the steps."""
    steps = max(len(reader.curves().steps) for reader in readers)
    return max((each for each in SMOOTHINGS if each * 50 <= steps), default=0)


def _differences(runs: Sequence[Mapping[str, Setting]]) -> list[tuple[str, list[str]]]:
    """Return (key, value of each run) of the settings that are not the same in all runs."""
    keys = dict.fromkeys(key for settings in runs for key in settings)
    rows = [(key, [run[key].value if key in run else "" for run in runs]) for key in keys]
    return [(key, values) for key, values in rows if len(set(values)) > 1]


def _rollout_query(query: Query) -> tuple[RolloutQuery, list[str]]:
    """Return what the form asks for, and what of it is no number."""
    problems = []

    def number(name: str, kind: type[int] | type[float]) -> Any:
        text = query.get(name, "").strip()
        try:
            value = kind(text) if text else None
        except ValueError:
            value = math.nan
        if value is not None and not math.isfinite(value):
            problems.append(f"{name} = {text!r} is not a number, so it selects nothing")
            return None
        return value

    try:
        ids = tuple(int(word) for word in query.get("ids", "").replace(",", " ").split())
    except ValueError:
        ids = ()
        problems.append(f"ids = {query['ids']!r} are not token ids, such as 12, 345, so they select nothing")
    order: Any = query.get("order")
    only: Any = query.get("only")
    return RolloutQuery(
        first_step=number("first_step", int),
        last_step=number("last_step", int),
        text=query.get("text", ""),
        ids=ids,
        min_reward=number("min_reward", float),
        max_reward=number("max_reward", float),
        min_length=number("min_length", int),
        max_length=number("max_length", int),
        finish_reason=query.get("finish_reason") or None,
        prompt_index=number("prompt_index", int),
        order=order if order in get_args(Order) else "step",
        descending=query.get("descending") == "1",
        only=only if only in get_args(Only) else None,
        evaluation=query.get("evaluation") or None,
        offset=max(0, number("offset", int) or 0),
        limit=max(1, min(MOST_ROWS, number("limit", int) or PAGE_ROWS)),
    ), problems


def _phases(timeline: Iterable[Any]) -> list[tuple[str, float, float]]:
    """Return (phase, mean seconds of a rank, most seconds of a rank), in order of appearance."""
    ranks = list(timeline)
    found: dict[str, list[float]] = {}
    for number, rank in enumerate(ranks):
        for bar in rank.bars:
            found.setdefault(bar.phase, [0.0] * len(ranks))[number] += bar.seconds
    return [(phase, sum(each) / len(each), max(each)) for phase, each in found.items()]


# How values are shown.


def figure(value: object) -> str:
    r"""A number with four significant digits, such as 12,345 or 1.234e-7; text stays as it is.

    Example:
        >>> [figure(value) for value in (None, 12345.6, 3, 0.0123456, 1.234e-7, float("inf"))]
        ['\u2013', '12,346', '3', '0.01235', '1.234e-7', 'inf']
    """
    if value is None:
        return NOTHING
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return str(value)
    size = abs(value)
    if value == 0 or ((isinstance(value, int) or value.is_integer()) and size < 1e9):
        return f"{value:,.0f}"
    if size >= 1e9 or size < 1e-3:
        mantissa, _, exponent = f"{value:.3e}".partition("e")
        return f"{mantissa}e{int(exponent)}"
    return f"{value:,.{max(0, 3 - math.floor(math.log10(size)))}f}"


def fixed(value: float | None, form: str) -> str:
    """A number in a column of such numbers."""
    return NOTHING if value is None or math.isnan(value) else format(value, form)


def duration(seconds: float | None) -> str:
    """A time such as 340 ms, 4.2 s, 3 m 05 s or 2 h 07 m."""
    if seconds is None or math.isnan(seconds):
        return NOTHING
    if seconds < 1:
        return f"{seconds * 1e3:.0f} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes:02} m" if hours else f"{minutes} m {rest:02} s"


def moment(seconds: float | None) -> str:
    """Local date and time."""
    return NOTHING if seconds is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(seconds))


def percent(part: float, whole: float) -> str:
    """A length in an SVG."""
    return f"{100 * part / whole:.3f}%" if whole else "0%"


def marked(text: str, word: str) -> Markup:
    """The text with every occurrence of `word` marked, in any case."""
    lower, word = text.lower(), word.lower()
    if not word or len(lower) != len(text):
        return escape(printable_text(text))
    parts, at = [], 0
    while (found := lower.find(word, at)) >= 0:
        parts += [escape(printable_text(text[at:found]))]
        at = found + len(word)
        parts += [Markup("<mark>{}</mark>").format(printable_text(text[found:at]))]
    return Markup("").join([*parts, escape(printable_text(text[at:]))])


def around(text: str, word: str, *, end: bool = False, size: int = 240) -> str:
    """The part of a text that a line of a table has room for: where `word` is, or its beginning or end."""
    found = text.lower().find(word.lower()) if word else -1
    at = found - size // 3 if found >= 0 else len(text) - size if end else 0
    at = max(0, at)
    return ("…" if at else "") + text[at : at + size] + ("…" if at + size < len(text) else "")


@functools.cache
def _environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(FOLDER / "templates"),
        autoescape=True,
        # Runs on every expression, before jinja's own escaping of what is no Markup.
        finalize=lambda value: value if isinstance(value, Markup) else printable_text(str(value)),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.globals["SMOOTHINGS"] = SMOOTHINGS
    environment.filters |= {
        "figure": figure,
        "fixed": fixed,
        "duration": duration,
        "moment": moment,
        "percent": percent,
        "marked": marked,
        "around": around,
        "pretty": lambda value: json.dumps(value, indent=2, ensure_ascii=False, default=str),
    }
    return environment
