"""The JSON of benchmarks/native.py as Markdown, for benchmarks/invariance.md.

gunzip -k benchmarks/results/native-h200.json.gz
python benchmarks/native_tables.py benchmarks/results/native-h200.json
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any


def throughput(found: dict[str, Any]) -> Iterator[str]:
    """Tokens per second, phases, kernels of a decode step."""
    work, sides = found["work"], list(found["phases"])
    raw = [name for name in found["full"] if name not in (*sides, "invariant_of_ordinary", "last")]
    together = f"tokens/s, {work['samples']} samples decoded together"
    yield f"| {together} | {' | '.join((*sides, *raw))} | invariant of ordinary |"
    yield "|---|" + "---:|" * (len(sides) + len(raw) + 1)
    kinds = {
        "full": f"{work['samples']} x {work['tokens']} tokens",
        "ragged": f"{2 * work['samples']} ragged ones, {work['tokens'] // 8} to {work['tokens']} tokens",
    }
    for kind, text in kinds.items():
        one = found[kind]
        cells = [spread(one.get(name), "{:,.0f}") for name in (*sides, *raw)]
        yield f"| {text} | {' | '.join(cells)} | {spread(one['invariant_of_ordinary'], '{:.3f}')} |"
    for key, text, form in (
        ("prefill_and_first_token_seconds", "prefill and first token, ms", "{:.0f}"),
        ("decode_step_ms", "decode step, ms", "{:.2f}"),
        ("decode_tokens_per_second", "decode alone", "{:,.0f}"),
    ):
        scale = 1e3 if key.startswith("prefill") else 1.0
        cells = [form.format(scale * found["phases"][name][key]) for name in sides]
        yield f"| {text} | {' | '.join([*cells, *('' for _ in raw)])} | |"
    yield ""
    yield from decode_step(found["decode_step"])


def decode_step(found: dict[str, Any]) -> Iterator[str]:
    """Where a decode step's time on the device goes."""
    sides = list(found)
    yield f"| one decode step on the device, us | {' | '.join(sides)} |"
    yield "|---|" + "---:|" * len(sides)
    for kind in dict.fromkeys(kind for name in sides for kind in found[name]["kinds"]):
        cells = []
        for name in sides:
            value, total = found[name]["kinds"].get(kind, 0.0), found[name]["us_per_step"]
            cells.append(f"{value:,.0f} ({100 * value / total:.0f} %)" if total else "-")
        yield f"| {kind} | {' | '.join(cells)} |"
    yield f"| all | {' | '.join('{:,.0f}'.format(found[name]['us_per_step']) for name in sides)} |"


def contexts(found: dict[str, Any]) -> Iterator[str]:
    """Few samples, long contexts."""
    work, sides = found["work"], [name for name in found if name in ("invariant", "ordinary")]
    length = work["prompt_tokens"] + work["tokens"]
    yield f"| {work['samples']} contexts of {length:,} tokens | {' | '.join(sides)} |"
    yield "|---|" + "---:|" * len(sides)
    prefill = ["{:,.0f}".format(found[name]["prefill_tokens_per_second"]) for name in sides]
    yield f"| prefill, tokens/s | {' | '.join(prefill)} |"
    step = [spread(found[name]["decode_step_ms"], "{:.2f}") for name in sides]
    yield f"| decode step, ms | {' | '.join(step)} |"
    decode = ["{:,.0f}".format(found[name]["decode_tokens_per_second"]) for name in sides]
    yield f"| decode, tokens/s | {' | '.join(decode)} |"
    yield f"\nInvariant of ordinary, end to end: {spread(found['invariant_of_ordinary'], '{:.3f}')}."


def train(found: dict[str, Any]) -> Iterator[str]:
    """Forward and backward."""
    yield "| forward and backward, `rl_32` | token budget | ms | of ordinary | MFU | peak GiB |"
    yield "|---|---:|---:|---:|---:|---:|"
    for budget, one in found.items():
        for name, side in one.items() if isinstance(one, dict) else ():
            if name == "ready":
                continue
            mfu, peak = ("-" if side[k] is None else f"{side[k]:.3f}" for k in ("mfu", "peak_gib"))
            times = f"{spread(side['ms'], '{:.1f}')} | {spread(side['of_ordinary'], '{:.3f}')}"
            yield f"| {name} | {int(budget):,} | {times} | {mfu} | {peak} |"


def equal(found: dict[str, Any]) -> Iterator[str]:
    """Also of chunks."""
    yield "| model | compared | values | that differ | largest, nats |"
    yield "|---|---|---:|---:|---:|"
    for model, one in found.items():
        for name, row in one["against"].items() if isinstance(one, dict) else ():
            other = row.get("tokens_from_the_first_other_one")
            tokens = f", and {other} tokens" if other else ""
            yield f"| {model} | {name} | {row['values']:,} | {row['differ']:,}{tokens} | {row['max']:.3g} |"


def grpo(found: dict[str, Any]) -> Iterator[str]:
    """Runs of the library's loop."""
    yield "| `lockstep train grpo` | steps | logprob_gap_max | grad norm, median | s/step | generation |"
    yield "|---|---:|---:|---:|---:|---:|"
    for model, one in found.items():
        if not isinstance(one, dict):
            continue
        steady = one["metrics"][1:] or one["metrics"]
        names = ("grad_norm", "time/step", "time/generate")
        norm, step, generate = (statistics.median(row[name] or 0.0 for row in steady) for name in names)
        gap = one["gap_max"]
        yield f"| {model} | {one['steps']} | {gap} | {norm:.3g} | {step:.2f} | {generate:.2f} |"


def spread(value: dict[str, Any] | None, form: str) -> str:
    """median [least, largest]."""
    if value is None:
        return ""
    return f"{form.format(value['median'])} [{form.format(value['min'])}, {form.format(value['max'])}]"


PARTS = {
    "throughput": throughput,
    "contexts": contexts,
    "train": train,
    "equal": equal,
    "chunks": equal,
    "grpo": grpo,
}


def main() -> int:
    found = json.loads(Path(sys.argv[1]).read_text())
    for name, part in PARTS.items():
        if name in found:
            print("\n".join(["", *part(found[name]), "", f"`{found[name]['command']}`"]))
    machine = found.get("machine", {})
    print("\n" + ", ".join(f"{key} {value}" for key, value in machine.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
