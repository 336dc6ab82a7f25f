"""Reports of a bisection: for the terminal, as Markdown, as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lockstep_lab.bisect.arms import InputDifference
from lockstep_lab.bisect.crash import RECORDING, TRACEBACK, CrashFinding
from lockstep_lab.bisect.divergence import HEAD, Difference, Finding
from lockstep_lab.bisect.run import BisectResult


def verdict(result: BisectResult) -> str:
    """The verdict, which is printed last."""
    finding = result.finding
    if finding is None:
        return (
            f"bisect: no difference beyond tolerance in {result.inputs} inputs; the largest: "
            f"{_input_text(result.largest)}"
        )
    cause = f"; cause: {result.cause}" if result.cause else ""
    gradual = (
        "; no single tensor is beyond its tolerance, this is the largest step" if finding.gradual else ""
    )
    return f"bisect: input {result.index} differs; {finding.description}{gradual}{cause}"


def lines(result: BisectResult) -> list[str]:
    """The report without the verdict."""
    text = [f"a: {result.a.label}", f"b: {result.b.label}", f"inputs compared: {result.inputs}"]
    text += [f"largest difference: {_input_text(result.largest)}"]
    finding = result.finding
    if finding is None or result.difference is None:
        return text
    text += ["", f"input {result.index}: {_input_text(result.difference)}"]
    for x, y, gap in result.three_way:
        text.append(f"  {x} against {y}: {_input_text(gap)}")
    one, other = finding.arms
    text += ["", f"{one.name} ({one.label}) against {other.name} ({other.label}), in order of execution:"]
    text += _aligned(_table(finding))
    if finding.first.where is not None:
        document, position = finding.first.where
        text.append(f"largest at document {document}, token {position}")
    if finding.weights:
        text.append(finding.weights)
    if finding.growth:
        text += ["", "growth over the layers (relative):"]
        text += _aligned([[str(d.key), f"{d.relative:.2e}"] for d in finding.growth])
    return text


def markdown(result: BisectResult, *, repro: str) -> str:
    """Format OUT/bisect.md."""
    finding = result.finding
    parts = ["# Bisection", "", verdict(result), ""]
    parts += [f"- a: {result.a.label}", f"- b: {result.b.label}", f"- inputs compared: {result.inputs}"]
    parts += [f"- largest difference: {_input_text(result.largest)}", ""]
    if finding is None or result.difference is None:
        return "\n".join(parts)
    parts += [f"## Input {result.index}", "", f"{_input_text(result.difference)}", ""]
    if result.three_way:
        rows = [[x, y, f"{g.logprob:.3g}", f"{g.gradient:.3g}"] for x, y, g in result.three_way]
        parts += [*_markdown_table(["side", "side", "logprobs, nats", "gradients, relative"], rows), ""]
    one, other = finding.arms
    parts += [f"## {one.name} against {other.name}, in order of execution", ""]
    parts += [*_markdown_table(_HEADINGS, _table(finding)[1:]), "", finding.weights, ""]
    if finding.growth:
        rows = [[str(d.key), f"{d.relative:.2e}"] for d in finding.growth]
        parts += ["## Growth over the layers", "", *_markdown_table(["layer", "relative"], rows), ""]
    if repro:
        parts += ["## Reproduction", "", f"`python {repro}` (plain torch; tensors are beside it)", ""]
    return "\n".join(parts)


def as_dict(result: BisectResult) -> dict[str, Any]:
    """For --json."""
    finding = result.finding
    values: dict[str, Any] = {
        "a": result.a.label,
        "b": result.b.label,
        "inputs": result.inputs,
        "largest": _input_dict(result.largest),
        "differs": finding is not None,
        "index": result.index,
        "cause": result.cause or None,
        "three_way": [{"sides": [x, y], **_input_dict(gap)} for x, y, gap in result.three_way],
        "verdict": verdict(result),
    }
    if finding is not None and result.difference is not None:
        values["difference"] = _input_dict(result.difference)
        values["first"] = _difference_dict(finding.first)
        values["sides"] = [arm.name for arm in finding.arms]
        values["statement"], values["gradual"] = finding.description, finding.gradual
        values["weights"] = finding.weights
        values["around"] = [_difference_dict(d) for d in finding.around]
        values["growth"] = [_difference_dict(d) for d in finding.growth]
    return values


def crash_verdict(finding: CrashFinding | None) -> str:
    """The verdict of a search for a crash, which is printed last."""
    if finding is None:
        return "bisect: no selected input crashes"
    trial = finding.shrunk.trial
    return (
        f"bisect: input {finding.index} crashes with {finding.shrunk.crash.type}; it still does with "
        f"{_count(len(trial.parts), 'document')}, {_count(trial.tokens, 'token')} and "
        f"{_count(trial.num_layers, 'layer')}"
    )


def crash_lines(finding: CrashFinding) -> list[str]:
    """The report of a crash without the verdict."""
    trial = finding.shrunk.trial
    parts = ", ".join(f"{i} ({n} tokens)" for i, n in trial.parts)
    outcome = (
        "fails as expected" if finding.confirmed else "does NOT fail here: the crash needs more than this"
    )
    text = [
        f"cell: {finding.label}",
        f"input {finding.index}: {_count(finding.documents, 'document')}, {_count(finding.tokens, 'token')}, "
        f"{_count(finding.num_layers, 'layer')}",
        f"smallest: {_count(len(trial.parts), 'document')}, {_count(trial.tokens, 'token')}, "
        f"{_count(trial.num_layers, 'layer')}; documents: {parts}",
        f"{_count(finding.shrunk.trials, 'trial')} in {_count(finding.workers, 'worker process', 'es')}",
        f"crash: {finding.shrunk.crash}",
        f"recording: {RECORDING}, traceback: {TRACEBACK}",
        f"{finding.command}    ({outcome})",
    ]
    if not finding.shrunk.complete:
        text.append("the budget of trials was used up (--max-trials): it may get smaller")
    return text


def crash_markdown(finding: CrashFinding | None) -> str:
    """Format OUT/bisect.md of a search for a crash."""
    body = [] if finding is None else [f"- {line}" for line in crash_lines(finding)]
    trace = "" if finding is None else finding.shrunk.crash.traceback
    fenced = ["", "```", trace.replace("```", "'''").rstrip(), "```", ""] if trace else [""]
    return "\n".join(["# Bisection of a crash", "", crash_verdict(finding), "", *body, *fenced])


def crash_dict(finding: CrashFinding | None) -> dict[str, Any]:
    """For --json."""
    if finding is None:
        return {"crashes": False, "verdict": crash_verdict(None)}
    crash, trial = finding.shrunk.crash, finding.shrunk.trial
    return {
        "crashes": True,
        "cell": finding.label,
        "index": finding.index,
        "parts": [list(part) for part in trial.parts],
        "documents": len(trial.parts),
        "tokens": trial.tokens,
        "num_layers": trial.num_layers,
        "trials": finding.shrunk.trials,
        "complete": finding.shrunk.complete,
        "workers": finding.workers,
        "crash": {"type": crash.type, "line": crash.line, "message": crash.message},
        "command": finding.command,
        "confirmed": finding.confirmed,
        "verdict": crash_verdict(finding),
    }


_HEADINGS = ["", "tensor", "kind", "shape", "max abs", "relative", "allowed"]


def _table(finding: Finding) -> list[list[str]]:
    rows = [_HEADINGS]
    for d in finding.around:
        mark = ">" if d.key == finding.first.key else "!" if d.beyond else ""
        largest = "" if d.max_abs is None else f"{d.max_abs:.3e}"
        allowed = f"{d.allowed:.1e}" + (" nats" if d.key.path == HEAD else "")
        rows.append([mark, str(d.key), d.kind, str(list(d.shape)), largest, f"{d.relative:.2e}", allowed])
    return rows


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows]


def _markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    def line(cells: Sequence[str]) -> str:
        return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"

    return [line(headings), line(["---"] * len(headings)), *(line(row) for row in rows)]


def _count(number: int, noun: str, plural: str = "s") -> str:
    return f"{number} {noun}{'' if number == 1 else plural}"


def _input_text(difference: InputDifference) -> str:
    text = f"logprobs {difference.logprob:.3g} nats"
    return (
        f"{text}, gradients {difference.gradient:.3g} relative ({difference.parameter})"
        if difference.parameter
        else text
    )


def _input_dict(difference: InputDifference) -> dict[str, Any]:
    return {
        "logprob": difference.logprob,
        "gradient": difference.gradient,
        "parameter": difference.parameter or None,
    }


def _difference_dict(d: Difference) -> dict[str, Any]:
    names = ("kind", "shape", "max_abs", "relative", "allowed", "noise", "beyond")
    where = None if d.where is None else {"document": d.where[0], "token": d.where[1]}
    return {**d.key._asdict(), **{name: getattr(d, name) for name in names}, "where": where}
