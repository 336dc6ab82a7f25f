"""The columns, curves and problems that the reports of a parity run show."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lockstep_lab.loss_curves.differences import ratio, relative
from lockstep_lab.loss_curves.draw import COLOURS, Curve, Panel, svg, write_png
from lockstep_lab.suite.report import (
    Column,
    Head,
    Place,
    Problem,
    Report,
    Table,
    Tone,
    figures,
    gib,
    milliseconds,
    progress,
    write_report,
)
from lockstep_lab.train_parity.job import Role
from lockstep_lab.train_parity.result import ParityResult, StackResult, by_name, row_name

PNG = "parity.png"


def write_reports(result: ParityResult, out: Path) -> None:
    """Write parity.json, parity.md, parity.html and, where a stack took a step, parity.png into `out`."""
    write_report(report(result), result.as_dict(), out, "parity")
    if any(stack.rows for stack in result.stacks):
        write_png(panels(result), out / PNG, title=f"{result.settings.get('model', '')}")


def report(result: ParityResult) -> Report:
    """Describe the run for its reports."""
    drawn = any(stack.rows for stack in result.stacks)
    with_gradients = any(_gradient_error(stack) is not None for stack in result.stacks)
    columns = [column for column in COLUMNS if with_gradients or column.value is not _gradient_error]
    parts = [[column for column in columns if column.part == part] for part in ("numbers", "speed")]
    return Report(
        title=f"Parity: {result.settings.get('model', '')}, {result.algorithm}",
        verdict=result.verdict,
        tone="good" if result.ok else "bad",
        tables=[
            *(_table(result, part, on=("terminal",)) for part in parts),
            _table(result, columns, on=("markdown", "page")),
        ],
        problems=[Problem(name=name, why=why) for name, why in problems(result)],
        picture=(lambda: svg(panels(result)), PNG) if drawn else None,
        notes=[*result.notes, explanation(result)],
        settings=result.settings,
        facts=result.machine,
        command=result.command,
    )


def _table(result: ParityResult, columns: Sequence[Column], *, on: Sequence[Place]) -> Table:
    def tone(stack: StackResult) -> Tone:
        bad = stack.problems or (result.must_fall and stack.learning_problem)
        return "bad" if bad else "good" if stack.completed else "warn"

    rows = (([stack.name, stack.verdict], (stack,), tone(stack)) for stack in result.stacks)
    return figures(columns, rows, before=[Head("stack", kind="name"), Head("verdict", kind="tone")], on=on)


def _gradient_error(stack: StackResult) -> float | None:
    errors = stack.comparison.gradients if stack.comparison is not None else {}
    return max(errors.values(), default=None)


def _trend(stack: StackResult) -> str | None:
    return "not falling" if stack.learning == "does not fall" else stack.learning


COLUMNS = (
    Column("ranks", "speed", lambda stack: stack.ranks or None),
    Column("steps", "speed", lambda stack: len(stack.rows) or None),
    Column("loss", "numbers", _trend),
    Column("max Δloss", "numbers", "comparison.loss.max", ratio, "max dloss"),
    Column("mean Δloss", "numbers", "comparison.loss.mean", ratio, "mean"),
    Column("max Δgrad norm", "numbers", "comparison.grad_norm.max", ratio, "max dnorm"),
    Column("mean Δgrad norm", "numbers", "comparison.grad_norm.mean", ratio, "mean"),
    Column("max Δlogprob (nats)", "numbers", "comparison.logprob.max", ".1e", "max nats"),
    Column("mean Δlogprob (nats)", "numbers", "comparison.logprob.mean", ".1e", "mean"),
    Column("gradient error", "numbers", _gradient_error, ".1e", "grad err"),
    Column("ms/step", "speed", "step_seconds", milliseconds),
    Column("tokens/s", "speed", "tokens_per_second", ",.0f"),
    Column("peak GiB", "speed", "peak_memory_bytes", gib),
    Column("seconds", "speed", lambda stack: stack.seconds or None, ".0f"),
)


def panels(result: ParityResult) -> list[Panel]:
    """The curves to draw: all losses, and their differences from the reference's, by role."""
    ran = [stack for stack in result.stacks if stack.rows]
    roles = dict.fromkeys(stack.role for stack in ran)
    return [panel for role in roles for panel in _panels([s for s in ran if s.role == role], result, role)]


def _panels(stacks: Sequence[StackResult], result: ParityResult, role: Role) -> list[Panel]:
    colours = {stack.name: COLOURS[i % len(COLOURS)] for i, stack in enumerate(stacks)}
    of_role = "" if role == "policy" else f" of the {role} model"
    losses = [
        Curve(
            name=f"{stack.name} ({stack.ranks} rank{'s' if stack.ranks > 1 else ''})",
            steps=[row.step for row in stack.rows],
            values=[row.loss for row in stack.rows],
            colour=colours[stack.name],
            dashed=not stack.is_reference and len(stacks) > 1,
        )
        for stack in stacks
    ]
    charts = [Panel(title=f"loss{of_role}", curves=losses)]
    reference = by_name(stacks, row_name(result.reference, role))
    if reference is not None:
        far = [
            Curve(
                name=stack.name,
                steps=[row.step for row, _ in zip(stack.rows, reference.rows, strict=False)],
                values=_distances(stack, reference),
                colour=colours[stack.name],
            )
            for stack in stacks
            if not stack.is_reference
        ]
        if far:
            title = f"relative loss difference{of_role} to {result.reference} (0 is drawn at 1e-9)"
            charts.append(Panel(title=title, curves=far, log=True))
    return charts


def _distances(stack: StackResult, reference: StackResult) -> list[float]:
    floor = 0.0 if stack.comparison is None else stack.comparison.loss_floor
    return [relative(a.loss, b.loss, floor=floor) for a, b in zip(stack.rows, reference.rows, strict=False)]


def progress_line(stack: StackResult, done: int, total: int) -> str:
    """Format a line about a stack that has just ended."""
    reasons = [*(stack.problems or filter(None, [stack.reason])), *filter(None, [stack.learning_problem])]
    far = "" if stack.comparison is None else f"losses within {ratio(stack.comparison.loss.max)}"
    seconds = f"{stack.seconds:.1f} s" if stack.seconds else ""
    return progress((done, total), stack.name, stack.verdict, far, seconds, why="; ".join(reasons))


def explanation(result: ParityResult) -> str:
    """Explain what the differences in the table mean."""
    relative_to = (
        "a loss difference is relative to the reference's loss of that step"
        if result.algorithm not in ("grpo", "ppo")
        else "a loss difference is relative to the reference's loss of that step, or to the mean of its "
        "absolute losses where that is larger; falling is measured from the loss at the starting weights"
    )
    return (
        f"{relative_to}; a loss falls when the mean of its last 5 steps (of fewer than 10: of the last half) "
        "is below that of the first by more than 3 standard errors; times are medians without the first step"
    )


def problems(result: ParityResult) -> list[tuple[str, str]]:
    """(stack, why it does not agree, or that its loss does not fall)."""
    return [
        (stack.name, problem)
        for stack in result.stacks
        for problem in (*stack.problems, *filter(None, [stack.learning_problem]))
    ]
