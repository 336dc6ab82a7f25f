"""How fast a large run is read for `lockstep view`: 10^5 rollouts of 200 tokens, 10^5 steps of metrics.

    python benchmarks/view_large.py write DIR              # DIR/rollouts and DIR/metrics, about 0.8 GB
    python benchmarks/view_large.py measure DIR --json FILE

`measure` reads the runs in a fresh process with an empty cache folder: wall and CPU seconds of
- first_page, first_search: an open reader's first page of rollouts and first search, with no index;
- index: until the index holds all rollouts, and its size;
- search: each of several searches and views once it does;
- curves: the first read, a read after one more step, and the data of a preset's charts;
and the RSS of the process that does all of this.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from lockstep.version import __version__
from lockstep.view.rollouts import RolloutQuery
from lockstep.view.runs import RunReader

ROLLOUTS, STEPS, GROUP, PROMPTS = 100_000, 200, 8, 4000
TOKENS, PROMPT_TOKENS = 200, 40
METRIC_STEPS = 100_000
QUERIES = {
    "a rare word": RolloutQuery(text="needle"),
    "a frequent word": RolloutQuery(text="answer"),
    "a phrase": RolloutQuery(text="therefore the answer"),
    "a text that is not there": RolloutQuery(text="qqqqqqqq"),
    "two characters": RolloutQuery(text="th"),
    "two token ids": RolloutQuery(ids=(1004, 1005)),
    "highest reward": RolloutQuery(only="highest reward"),
    "the last step first": RolloutQuery(descending=True),
    "truncated, page 100": RolloutQuery(only="truncated", offset=4950),
}
CHARTS = (
    *("reward/mean", "eval/lenient_accuracy", "entropy", "kl_ref", "clip_fraction_high"),
    *("rollout/completion_tokens_mean", "rollout/truncated", "grad_norm"),
)
_SYLLABLES = [f"{a}{b}" for a in "bcdfghklmnprst" for b in "aeiou"]


def words(count: int, random: np.random.Generator) -> np.ndarray[Any, Any]:
    """Words that no two of are equal, and a few that searches look for."""
    made = {"".join(random.choice(_SYLLABLES, size=random.integers(1, 4))) for _ in range(3 * count)}
    return np.array(["the", "therefore", "answer", "is", *sorted(made)[:count]])


def write_rollouts(run: Path, *, rollouts: int = ROLLOUTS, steps: int = STEPS) -> None:
    """Write rollouts/ of a run, with the numbers that log.token_details adds left out."""
    random = np.random.default_rng(0)
    vocabulary = words(5000, random)
    share = 1.0 / np.arange(1, len(vocabulary) + 1)
    share /= share.sum()
    number = 0
    for step in range(steps):
        count = rollouts // steps
        picks = random.choice(len(vocabulary), size=(count, TOKENS), p=share)
        logprobs = -random.exponential(0.5, size=(count, TOKENS))
        rows = []
        for index in range(count):
            prompt = (step * count + index) // GROUP % PROMPTS
            chosen = picks[index]
            text = " ".join(vocabulary[chosen])
            question = np.random.default_rng(prompt).integers(len(vocabulary), size=PROMPT_TOKENS)
            if number % 25_000 == 7:
                text += " needle"
            rows.append(
                {
                    "step": step,
                    "prompt_index": prompt,
                    "sample": index % GROUP,
                    "prompt": " ".join(vocabulary[question]),
                    "completion": text,
                    "skip_special_tokens": False,
                    "prompt_token_ids": question.tolist(),
                    "token_ids": (chosen + 1000).tolist(),
                    "rollout_logprobs": logprobs[index].round(6).tolist(),
                    "finish_reason": "length" if index % 16 == 0 else "stop",
                    "reward": float(index % GROUP == 0),
                    "rewards": {"math": float(index % GROUP == 0), "format": 0.5},
                    "seed": number,
                    "policy_version": step,
                }
            )
            number += 1
        path = run / "rollouts" / f"step-{step:06d}.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def metric_line(step: int, names: list[str], random: np.random.Generator) -> str:
    values = dict(zip(names, random.random(len(names)).tolist(), strict=True))
    return json.dumps({"step": step, "timestamp": 1.8e9 + step * 0.5, **values}) + "\n"


def metric_names() -> list[str]:
    known = [name for name in CHARTS if not name.startswith("eval/")]
    return [*known, "loss", "time/step", *(f"metric/{number}" for number in range(46))]


def write(folder: Path) -> None:
    """Write both runs."""
    config = 'kind = "grpo"\nsteps = {}\n[model]\nname = "made"\n[rollout]\nsave = true\n'
    manifest = {"lockstep": __version__, "started": "2027-01-15T08:00:00+00:00"}
    random, names = np.random.default_rng(1), metric_names()
    for name, steps in (("rollouts", STEPS), ("metrics", METRIC_STEPS)):
        run = folder / name
        (run / "rollouts").mkdir(parents=True, exist_ok=True)
        (run / "config.toml").write_text(config.format(steps))
        (run / "manifest.json").write_text(json.dumps(manifest))
        (run / "summary.json").write_text('{"outcome": "finished"}')
        with (run / "metrics.jsonl").open("w") as file:
            file.writelines(metric_line(step, names, random) for step in range(steps))
    write_rollouts(folder / "rollouts")


def timed(work: Callable[[], Any]) -> tuple[dict[str, float], Any]:
    """Seconds of `work`, and what it returned."""
    wall, cpu = time.perf_counter(), time.process_time()
    result = work()
    seconds = {"seconds": time.perf_counter() - wall, "cpu": time.process_time() - cpu}
    return {name: round(value, 4) for name, value in seconds.items()}, result


def measure_rollouts(run: Path, cache: Path) -> dict[str, Any]:
    """First pages without an index, the index, and searches with it."""
    reader = RunReader(run, cache=cache)
    first, page = timed(lambda: reader.rollouts.page(RolloutQuery()))
    assert len(page.rollouts) == 50 and page.indexed < 1
    search, _ = timed(lambda: reader.rollouts.page(RolloutQuery(text="answer")))
    index, share = timed(lambda: reader.rollouts.build(seconds=1800))
    assert share == 1.0
    searches = {}
    for name, query in QUERIES.items():
        reader.rollouts.page(query)
        seconds, page = timed(lambda query=query: reader.rollouts.page(query))  # type: ignore[misc]
        searches[name] = {**seconds, "found": page.total}
    reader.close()
    size = sum(path.stat().st_size for path in cache.iterdir())
    return {
        "first_page": first,
        "first_search": search,
        "index": {**index, "bytes": size},
        "search": searches,
    }


def measure_curves(run: Path) -> dict[str, Any]:
    """Reading metrics.jsonl, a step more, and the data of the charts of a preset."""
    reader, path = RunReader(run), run / "metrics.jsonl"
    cold, curves = timed(reader.curves)
    warm, drawn = timed(lambda: curves.json(CHARTS, smooth=100))
    size, random = path.stat().st_size, np.random.default_rng(2)
    try:
        with path.open("a") as file:
            file.write(metric_line(METRIC_STEPS, metric_names(), random))
        more, curves = timed(reader.curves)
        assert len(curves.steps) == METRIC_STEPS + 1
    finally:
        os.truncate(path, size)
    points = max(len(each["x"]) for each in drawn["series"].values())
    return {"read": cold, "one_step_more": more, "eight_charts": {**warm, "points": points}}


def measure(folder: Path, file: Path) -> None:
    """Measure both runs, and write what was found."""
    rollouts = [path.stat().st_size for path in (folder / "rollouts" / "rollouts").iterdir()]
    with tempfile.TemporaryDirectory(prefix="view-large-") as cache:
        found = measure_rollouts(folder / "rollouts", Path(cache))
    found["curves"] = measure_curves(folder / "metrics")
    found |= {
        "rss_mib": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024, 1),
        "rollouts": ROLLOUTS,
        "rollout_bytes": sum(rollouts),
        "metric_steps": METRIC_STEPS,
        "metric_bytes": (folder / "metrics" / "metrics.jsonl").stat().st_size,
        "lockstep": __version__,
        "python": platform.python_version(),
        "cores": os.cpu_count(),
        "load": os.getloadavg()[0],
    }
    file.write_text(json.dumps(found, indent=2) + "\n")
    print(json.dumps(found, indent=2))


def main() -> None:
    """Write the runs, or measure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("write", "measure"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--json", type=Path, help="file for the figures")
    arguments = parser.parse_args()
    if arguments.what == "write":
        write(arguments.folder)
    else:
        measure(arguments.folder, arguments.json)


if __name__ == "__main__":
    main()
