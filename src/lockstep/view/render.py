"""Pages of runs as HTML, for the server and for an exported file. Loads no server."""

from __future__ import annotations

import contextlib
import functools
import math
import re
import threading
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, get_args
from urllib.parse import quote, urlencode

from jinja2 import Environment, FileSystemLoader, StrictUndefined, Template
from markupsafe import Markup

from lockstep.errors import ConfigError, DataError, LockstepError
from lockstep.observe.files import read_json, read_plain
from lockstep.observe.text import printable_text
from lockstep.view.about import Setting
from lockstep.view.rollouts import LIMIT, Only, Order, Rollout, RolloutQuery, Span, Token
from lockstep.view.runs import RunReader, RunRow, open_runs
from lockstep.view.steps import RankTimeline

FOLDER = Path(__file__).resolve().parent
STATIC = FOLDER / "static"
NOTHING = "\N{EN DASH}"
"""Stands for a value that there is not."""
PAGE_ROWS = 50
MOST_TOKENS = 2000
"""Of one rollout beside others; alone, a rollout is shown whole."""
SMOOTHINGS = (0, 5, 10, 20, 50, 100, 200, 500, 1000)
"""Numbers of values that a curve can be the mean of."""
Query = Mapping[str, str]
Piece = tuple[str, str | None, Markup | None, int]
"""Of a rollout, as it is shown: author, text, tokens, number of tokens that are left out."""
_NUMBERS = {
    **dict.fromkeys(("first_step", "last_step", "min_length", "max_length", "offset", "limit"), int),
    **dict.fromkeys(("min_reward", "max_reward"), float),
}
"""Fields of RolloutQuery that are numbers."""


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
        rows = [reader.row() for reader in self.runs().values()]
        words, sort = query.get("q", "").casefold().split(), query.get("sort", "-started")
        shown = [row for row in rows if all(word in _searched(row) for word in words)]
        field = sort.removeprefix("-")
        if field in {one.name for one in fields(RunRow)}:
            known = [row for row in shown if getattr(row, field) is not None]
            known.sort(key=lambda row: getattr(row, field), reverse=sort.startswith("-"))
            shown = known + [row for row in shown if getattr(row, field) is None]
        return self._page("runs", title="Runs", rows=shown, total=len(rows), q=query.get("q", ""), sort=sort)

    def compare(self, runs: Iterable[str]) -> str:
        """Several runs over each other: their curves, and the settings in which they differ."""
        readers = [self._run(run) for run in dict.fromkeys(runs)]
        if not readers:
            raise ConfigError("unknown-name: no run is selected; tick runs in the table and press Compare")
        settings = [{one.key: one for one in reader.about().config} for reader in readers]
        differences = _differences(settings)
        return self._page("curves", "compare", title="Compare", differences=differences, **_charts(readers))

    def curves(self, run: str, *, query: Query) -> str:
        """A run's curves."""
        reader = self._run(run)
        return self._page("curves", reader=reader, title="Curves", differences=None, **_charts([reader]))

    def rollouts(self, run: str, *, query: Query) -> str:
        """Rollouts of a run: a page of those that the query asks for."""
        reader = self._run(run)
        asked, problems = _rollout_query(query)
        page = reader.rollouts.page(asked)
        return self._page(
            "rollouts",
            "rollouts",
            reader=reader,
            title="Rollouts",
            page=page,
            asked=asked,
            form=query,
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
        evaluation, sample = query.get("evaluation") or None, query.get("sample", "")
        group = reader.rollouts.group(step, prompt, evaluation=evaluation)
        if not group:
            raise DataError(f"unknown-name: {run} has no rollouts of prompt {prompt} in step {step}")
        prompts = {words(one.spans[0]) for one in group}
        return self._page(
            "group",
            *("rollouts", step, prompt),
            reader=reader,
            title=f"Prompt {prompt}, step {step}",
            step=step,
            prompt=prompt,
            evaluation=evaluation,
            group=[one for one in group if sample in ("", str(one.sample))],
            most=None if sample else MOST_TOKENS,
            size=len(group),
            shared=prompts.pop() if len(prompts) == 1 else None,
            details=any(one.gaps for one in group),
            worded=all(one.text is not None for one in group[0].tokens(0, 8)),
            names=list(dict.fromkeys(name for one in group for name in one.rewards)),
        )

    def step(self, run: str, step: int | None = None, *, query: Query) -> str:
        """One step, or the last: its time, its batch, its memory, all its metrics."""
        reader = self._run(run)
        numbers, given = [int(number) for number in reader.curves().steps], () if step is None else (step,)
        if step is None:
            step = numbers[-1] if numbers else 0
        elif step not in numbers:
            raise DataError(f"unknown-name: {run} has no step {step} in metrics.jsonl")
        detail = reader.step(step)
        return self._page(
            "step",
            *("step", *given),
            reader=reader,
            title=f"Step {step}",
            detail=detail,
            before=max((number for number in numbers if number < step), default=None),
            after=min((number for number in numbers if number > step), default=None),
            rollouts=step in reader.rollouts.steps(),
            phases=_phases(detail.timeline),
            between={bar.phase: bar.seconds for bar in detail.between},
            widest=max((bar.start + bar.seconds for each in detail.timeline for bar in each.bars), default=0),
        )

    def about(self, run: str, *, query: Query) -> str:
        """What the run is."""
        reader = self._run(run)
        about = reader.about()
        keys = dict.fromkeys(key for row in about.evaluations for key in row if key.startswith("eval/"))
        return self._page("about", "about", reader=reader, title="About", about=about, evaluated=list(keys))

    def report(self, run: str, name: str) -> tuple[str, bool]:
        """A report, and whether it is a whole page of its own. Raises DataError: there is none."""
        reader = self._run(run)
        report = next((each for each in reader.about().reports if each.name == name), None)
        if report is None:
            raise DataError(f"no-such-file: {run} has no report {name}")
        if report.html:
            return read_plain(report.path, DataError, root=reader.path).decode("utf-8", "replace"), True
        content = read_json(report.path, DataError, root=reader.path)
        return self._page("report", "about", reader=reader, title=name, content=content), False

    def error(self, error: LockstepError, run: str | None = None) -> str:
        """The page in place of one, maybe of a run, that cannot be shown."""
        reader = None if run is None else self._readers.get(run)
        return self._page("error", reader=reader, title="Not here", tab=None, error=str(error))

    @staticmethod
    def refusal(path: str) -> str:
        """The page for a browser without the token."""
        return template("refusal").render(path=path)

    # Data.

    def curve_data(self, run: str, names: Iterable[str], **options: Any) -> dict[str, Any]:
        """What the charts of these metrics draw: `Curves.json`. Raises ConfigError: no such run."""
        return self._run(run).curves().json(list(names), **options)

    def runs(self) -> dict[str, RunReader]:
        """The runs by id: those that were there once, and those that have begun since."""
        with self._lock, contextlib.suppress(DataError):  # none is left
            self._readers = open_runs(self._paths, known=self._readers)
        return self._readers

    # Parts.

    def _run(self, run: str) -> RunReader:
        reader = self._readers.get(run) or self.runs().get(run)
        if reader is None:
            raise ConfigError(f"unknown-name: there is no run {run!r} here")
        return reader

    def _page(self, name: str, *parts: object, reader: RunReader | None = None, **content: Any) -> str:
        """Render a template. parts: of the page's address, below that of the run."""
        of_run = {} if reader is None else {"run": reader.row()}
        return template(name).render(
            layout="page.html.j2" if self.exported is None else "section.html.j2",
            path=address(*(() if reader is None else ("run", reader.id)), *parts),
            href=self._href,
            exported=self.exported is not None,
            **{"run": None, "tab": parts[0] if parts else ""} | of_run | content,
        )

    def _href(self, *parts: object, **query: object) -> Markup:
        """Attribute of a link to a page; none where the exported file does not have the page."""
        target = address(*parts)
        given = urlencode({name: value for name, value in query.items() if value not in (None, "")})
        if self.exported is None:
            return Markup(' href="{}"').format(target + (f"?{given}" if given else ""))
        known = target in self.exported and not given
        return Markup(' href="#{}"').format(target) if known else Markup("")


def address(*parts: object) -> str:
    """The path of a page, such as /run/demo/step/3."""
    return "/" + "/".join(quote(str(part), safe="") for part in parts)


def template(name: str) -> Template:
    """A page's template."""
    return _environment().get_template(f"{name}.html.j2")


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


def _charts(readers: Sequence[RunReader]) -> dict[str, Any]:
    """Return what the macro `charts` takes: the charts that come first, and all metrics by the part of their
    name before the slash."""
    names = list(dict.fromkeys(name for reader in readers for name in names_of(reader)))
    groups: dict[str, list[str]] = {}
    for name in names:
        head, slash, _ = name.partition("/")
        groups.setdefault(head if slash else "policy", []).append(name)
    return {
        "runs": [reader.id for reader in readers],
        "presets": [(one.metric(names), one.title, one.hint) for one in readers[0].presets()],
        "groups": groups,
        "smooth": smoothing(readers),
    }


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
    problems, numbers, ids = list[str](), dict[str, Any](), tuple[int, ...]()
    for name, kind in _NUMBERS.items():
        text = query.get(name, "").strip()
        try:
            numbers[name] = kind(text) if text else None
        except ValueError:
            numbers[name] = math.nan
        if numbers[name] is not None and not -1e18 < numbers[name] < 1e18:
            numbers[name] = None
            problems.append(f"{name} = {text!r} is not a number, so it selects nothing")
    try:
        ids = tuple(int(word) for word in query.get("ids", "").replace(",", " ").split())
    except ValueError:
        problems.append(f"ids = {query['ids']!r} are not token ids, such as 12, 345, so they select nothing")
    numbers["offset"] = max(0, numbers["offset"] or 0)
    numbers["limit"] = max(1, min(LIMIT, numbers["limit"] or PAGE_ROWS))
    order: Any = query.get("order")
    only: Any = query.get("only")
    return RolloutQuery(
        text=query.get("text", ""),
        ids=ids,
        finish_reason=query.get("finish_reason") or None,
        order=order if order in get_args(Order) else "step",
        descending=query.get("descending") == "1",
        only=only if only in get_args(Only) else None,
        evaluation=query.get("evaluation") or None,
        **numbers,
    ), problems


def _phases(ranks: Sequence[RankTimeline]) -> dict[str, tuple[float, float]]:
    """Return phase -> (mean seconds of a rank, most seconds of a rank), in order of appearance."""
    found: dict[str, list[float]] = {}
    for number, rank in enumerate(ranks):
        for bar in rank.bars:
            found.setdefault(bar.phase, [0.0] * len(ranks))[number] += bar.seconds
    return {phase: (sum(each) / len(each), max(each)) for phase, each in found.items()}


# Filters of the templates.


def pieces(rollout: Rollout, most: int | None = MOST_TOKENS) -> list[Piece]:
    """Return the spans of a rollout, with at most `most` tokens of the policy. The policy's spans have a text
    beside the tokens only if these are shown as ids; those of others have only a text."""
    shown, at = list[Piece](), 0
    for span in rollout.spans:
        if span.author != "policy":
            shown.append((span.author, words(span), None, 0))
            continue
        size = len(span.token_ids)
        tokens = rollout.tokens(at, size if most is None else max(0, min(size, most - at)))
        at += size
        text = None if all(one.text is not None for one in tokens) else span.text
        shown.append((span.author, text, Markup("").join(map(_token, tokens)), size - len(tokens)))
    return shown


def _token(one: Token) -> Markup:
    figures = (one.logprob, one.gap, one.entropy, one.advantage)
    data = ",".join((str(one.id), *("" if each is None else f"{each:.6g}" for each in figures)))
    text = f"{one.id} " if one.text is None else printable_text(one.text)
    line_end = Markup(' class="nl"') if "\n" in text else ""
    return Markup('<i data-t="{}"{}>{}</i>').format(data, line_end, text)


def words(span: Span) -> str:
    """The text of a span, or its token ids where the run has no text."""
    return " ".join(map(str, span.token_ids)) if span.text is None else span.text


def figure(value: object) -> str:
    r"""A number with four significant digits, such as 12,345 or 1.234e-7; text stays as it is.

    Example:
        >>> [figure(value) for value in (None, 12345.6, 3, 0.0123456, 1.234e-7, float("inf"))]
        ['\u2013', '12,346', '3', '0.01235', '1.234e-7', 'inf']
    """
    if value is None:
        return NOTHING
    if isinstance(value, bool) or not isinstance(value, int | float) or not -1e300 < value < 1e300:
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
    parts = re.split(f"({re.escape(word)})", text, flags=re.IGNORECASE) if word else [text]
    mark = Markup("<mark>{}</mark>").format
    shown = map(printable_text, parts)
    return Markup("").join(mark(each) if number % 2 else each for number, each in enumerate(shown))


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
    for each in (around, duration, figure, fixed, marked, moment, percent, pieces, words):
        environment.filters[each.__name__] = each
    environment.globals["SMOOTHINGS"] = SMOOTHINGS
    environment.globals["parts"] = environment.get_template("parts.html.j2").module
    return environment
