"""Fill the demo blocks from finished runs: the README shows what the first printed and the curve, and
benchmarks/demo.md the table, and completions before and after.

python scripts/demo_report.py runs/demo-0 runs/demo-1 runs/demo-2 --log demo.log
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BEGIN, END = "<!-- demo:begin -->", "<!-- demo:end -->"
SHOWN = 2
"""Prompts whose completions are shown."""


@dataclass(frozen=True)
class Run:
    """What one finished run left behind."""

    path: Path
    config: dict[str, Any]
    manifest: dict[str, Any]
    summary: dict[str, Any]
    steps: list[dict[str, Any]]
    evaluations: list[dict[str, Any]]
    before: list[dict[str, Any]]
    after: list[dict[str, Any]]


def main(argv: list[str]) -> int:
    """Write the block and the image; 0."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN_DIR")
    parser.add_argument("--readme", type=Path, default=Path("README.md"))
    parser.add_argument("--page", type=Path, default=Path("benchmarks/demo.md"))
    parser.add_argument("--image", type=Path, default=Path("docs/images/demo.png"))
    parser.add_argument("--cpu", help="the processor; default: what this machine calls its own")
    parser.add_argument("--log", type=Path, help="what the first run printed; its main lines are shown")
    parser.add_argument("--command", default="make demo", help="what started the runs")
    arguments = parser.parse_args(argv)
    runs = [read(path) for path in arguments.runs]
    plot(runs, arguments.image)
    image = os.path.relpath(arguments.image, arguments.readme.parent)
    block = f"![mean reward per step, and held-out accuracy]({image})"
    if arguments.log is not None:
        printed = arguments.log.read_text(encoding="utf-8").splitlines()
        block = console(printed, command=arguments.command) + "\n\n" + block
    fill(arguments.readme, block)
    fill(arguments.page, report(runs, cpu=arguments.cpu or processor(), command=arguments.command))
    print(f"demo_report: {len(runs)} runs in {arguments.readme}, {arguments.page} and {arguments.image}")
    return 0


def read(path: Path) -> Run:
    """A run directory; SystemExit for one that did not finish."""
    summary = json.loads((path / "summary.json").read_text(encoding="utf-8"))
    if summary["outcome"] != "finished" or not summary["eval_before"] or not summary["eval_after"]:
        raise SystemExit(f"demo_report: {path} did not finish with evaluations before and after")
    lines = rows(path / "metrics.jsonl")
    return Run(
        path=path,
        config=tomllib.loads((path / "config.toml").read_text(encoding="utf-8")),
        manifest=json.loads((path / "manifest.json").read_text(encoding="utf-8")),
        summary=summary,
        steps=[line for line in lines if "evaluation" not in line],
        evaluations=[line for line in lines if "evaluation" in line],
        before=rows(path / "rollouts" / "evaluation-before.jsonl"),
        after=rows(path / "rollouts" / "evaluation-after.jsonl"),
    )


def rows(path: Path) -> list[dict[str, Any]]:
    """The objects of a JSONL file."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def report(runs: list[Run], *, cpu: str, command: str) -> str:
    """The Markdown of the page's block."""
    held_out = {run.summary["eval_after"]["num_prompts"] for run in runs}
    lines = [
        f"Held-out accuracy on {', '.join(map(str, sorted(held_out)))} problems, before -> after training:",
        "",
        *table(runs),
        "",
        machine(runs[0], cpu, command),
        "",
        f"The same {SHOWN} held-out problems before and after training (seed {runs[0].config['seed']}):",
        "",
        "```text",
        *completions(runs[0]),
        "```",
    ]
    return "\n".join(lines)


def console(printed: list[str], *, command: str) -> str:
    """A listed block for tests/docs: what came before the steps, the first and last step, what came after."""
    steps = [
        i for i, line in enumerate(printed) if line.startswith("step ") and not line.endswith(" ...")
    ]  # without the lines that say what a step is at
    if not steps:
        raise SystemExit("demo_report: the log has no line of a step; run with --log.display plain")
    first, last = steps[0], steps[-1]
    start = next(i for i, line in enumerate(printed) if line.startswith("run directory"))
    before = [line for line in printed[start : first + 1] if not line.endswith(" ...")]
    kept = [*before, "...", *printed[last - 1 :]]
    lines = ["<!-- test: listed: six minutes -->", "```console", f"$ {command}", *kept, "```"]
    return "\n".join(line.rstrip() for line in lines)


def table(runs: list[Run]) -> list[str]:
    """Accuracies, by kind of problem where the runs have kinds (eval.kinds), reward and time."""
    kinds = [key for key in runs[0].summary["eval_after"] if key.startswith("lenient_accuracy/")]
    keys = ["strict_accuracy", "lenient_accuracy", *kinds, "mean_reward"]
    titles = ["strict", "lenient", *(f"lenient, {key.partition('/')[2]}" for key in kinds), "mean reward"]
    return [
        f"| seed | {' | '.join(titles)} | wall time |",
        "|---" * (len(titles) + 2) + "|",
        *(table_row(run, keys) for run in runs),
    ]


def table_row(run: Run, keys: list[str]) -> str:
    """The numbers of `keys` before and after one run, and its time."""
    before, after = run.summary["eval_before"], run.summary["eval_after"]

    def change(key: str) -> str:
        old, new = before[key], after[key]
        return "—" if old is None or new is None else f"{old:.3f} -> {new:.3f} ({new - old:+.3f})"

    minutes = run.summary["wall_seconds"] / 60
    return f"| {run.config['seed']} | " + " | ".join(map(change, keys)) + f" | {minutes:.1f} min |"


def machine(run: Run, cpu: str, command: str) -> str:
    """Where and with what the numbers were made."""
    axes, manifest = run.manifest["axes"], run.manifest
    return (
        f"`{command}`, {run.summary['steps']} steps; {cpu}, {manifest['cpu_threads']} threads, "
        f"{axes['dtype']}; lockstep {manifest['lockstep']}, torch {manifest['torch']}, "
        f"transformers {manifest['transformers']}, Python {manifest['python']}. The evaluation before "
        f"training may use {run.config['eval']['before_max_tokens_factor']} times the tokens."
    )


def processor() -> str:
    """The CPU's name, and whether it has AMX."""
    fields = {}
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        fields.setdefault(key.strip(), value.strip())
    amx = "with AMX bfloat16" if "amx_bf16" in fields.get("flags", "").split() else "without AMX"
    return f"{fields.get('model name', 'unnamed CPU')} {amx}"


def completions(run: Run) -> list[str]:
    """The first problems that were wrong before, else simply the first; long completions are cut."""
    after = {row["prompt_index"]: row for row in run.after}
    pairs = [(row, after[row["prompt_index"]]) for row in run.before if row["prompt_index"] in after]
    pairs.sort(key=lambda pair: pair[0]["reward"] >= pair[1]["reward"])
    lines = []
    for before, later in pairs[:SHOWN]:
        lines += [f"prompt  {before['prompt']!r}", f"before  {shown(before)}", f"after   {shown(later)}", ""]
    return lines[:-1]


def shown(row: dict[str, Any]) -> str:
    """One completion on one line."""
    text = repr(row["token_ids"] if row["completion"] is None else row["completion"])
    return f"[{row['reward']:.2f}] {text if len(text) <= 200 else text[:200] + '...'}"


def plot(runs: list[Run], image: Path) -> None:
    """Mean reward per step of every run, and the held-out points."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 3.5), dpi=120)
    for number, run in enumerate(runs):
        color = f"C{number}"
        steps = [line["step"] + 1 for line in run.steps]
        label = f"seed {run.config['seed']}: mean reward of a step"
        axes.plot(steps, [line["reward/mean"] for line in run.steps], color=color, label=label, linewidth=1)
        known = [line for line in run.evaluations if line.get("eval/lenient_accuracy") is not None]
        key = "eval/lenient_accuracy" if known else "eval/mean_reward"
        points = known or run.evaluations
        axes.plot(
            [line["step"] for line in points],
            [line[key] for line in points],
            "o--",
            color=color,
            markersize=5,
        )
    axes.plot([], [], "o--", color="black", label=f"held-out {key.removeprefix('eval/').replace('_', ' ')}")
    axes.set_xlabel("step")
    axes.set_ylabel("reward, accuracy")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    figure.tight_layout()
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, metadata={"Software": None})
    pyplot.close(figure)


def fill(page: Path, block: str) -> None:
    """Exchange the block of a page."""
    page.write_text(filled(page.read_text(encoding="utf-8"), block), encoding="utf-8")


def filled(page: str, block: str) -> str:
    """`page` with the block between the marks exchanged; SystemExit without the marks."""
    if page.count(BEGIN) != 1 or page.count(END) != 1:
        raise SystemExit(f"demo_report: the page needs {BEGIN} and {END}, once each")
    head, rest = page.split(BEGIN)
    return f"{head}{BEGIN}\n\n{block}\n\n{END}{rest.split(END)[1]}"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
