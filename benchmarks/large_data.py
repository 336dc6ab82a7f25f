"""How soon a run on many rows takes its first step, and how much memory that needs, beside a run on 100 rows
and beside `datasets.map` as TRL's SFTTrainer calls it.

    python benchmarks/large_data.py --rows 1000000 --json results/large_data.json

Makes JSON Lines (and with --parquet the same as Parquet) of conversations of two messages, and starts
`lockstep train sft` on a tiny model in a process of its own: with an empty cache, again, and resumed after
100 steps; `lockstep data check`; then a process that loads and tokenises the same rows with `datasets.map`,
with an empty cache and again. Times count from the start of each process to the end of its first optimizer
step, for `datasets.map` to the first tokenised row. Memory is the largest resident set of the process."""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from data_loading import write_rows

ROOT = Path(__file__).resolve().parents[1]
MAP = """
import sys
import datasets, transformers
rows, cache, model = sys.argv[1:]
tokenizer = transformers.AutoTokenizer.from_pretrained(model)

def tokenised(row):
    return dict(tokenizer.apply_chat_template(row["messages"], return_dict=True))

loaded = datasets.load_dataset("json", data_files=rows, split="train", cache_dir=cache)
print(len(loaded.map(tokenised, num_proc=2)[0]["input_ids"]))
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--parquet", action="store_true", help="measure the same rows as Parquet, too")
    parser.add_argument("--no-map", action="store_true", help="leave datasets.map out, which takes long")
    parser.add_argument("--no-check", action="store_true", help="leave `lockstep data check` out")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), args)
    print(json.dumps(result, indent=2))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds to the first step and MiB of memory, by what was started."""
    model = folder / "model"
    subprocess.run([sys.executable, ROOT / "examples" / "tiny_text_model.py", model], check=True)
    sources = {"jsonl": folder / "rows.jsonl"}
    if args.parquet:
        sources["parquet"] = folder / "rows.parquet"
    # In a process of its own: the memory that this takes would count as that of every process started here.
    maker = multiprocessing.get_context("spawn").Process(target=make, args=(sources, args.rows))
    maker.start()
    maker.join()
    few = write_rows(folder / "few.jsonl", rows=100, messages=2)
    found: dict[str, Any] = {"100 rows": train(model, few, folder / "few", steps=args.steps)}
    for kind, source in sources.items():
        run = folder / f"run-{kind}"
        found[f"{kind}, first"] = train(model, source, run, steps=args.steps)
        found[f"{kind}, second"] = train(model, source, folder / f"again-{kind}", steps=args.steps)
        found[f"{kind}, resumed"] = train(model, source, run, steps=args.steps + 20, resume=True)
    if not args.no_check:
        found["data check"] = check(model, sources["jsonl"], folder)
    if not args.no_map:
        for name in ("datasets.map, first", "datasets.map, cached"):
            found[name] = started(
                [sys.executable, "-c", MAP, sources["jsonl"], folder / "map", model], folder
            )
    return {
        "rows": args.rows,
        "bytes": sources["jsonl"].stat().st_size,
        "measured": found,
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "versions": versions(),
    }


def make(sources: dict[str, Path], rows: int) -> None:
    """Write the rows as JSON Lines, and as Parquet with one row group, as `to_parquet` writes them."""
    write_rows(sources["jsonl"], rows=rows, messages=2)
    if "parquet" in sources:
        import pyarrow.json
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.json.read_json(sources["jsonl"]), sources["parquet"])


def train(model: Path, source: Path, run: Path, *, steps: int, resume: bool = False) -> dict[str, Any]:
    """Train, and return what `started` returns, with the share of the time that the loop waited for data."""
    given = ["--model.name", model, "--data.source", source, "--run-dir", run, "--batch-size", 4]
    more = ["--checkpoint.no-export-at-end", "--log.no-tensorboard", "--log.display", "off"]
    argv = ["--resume", run] if resume else ["sft", *given, *more]
    done = len(metrics(run)) if resume else 0
    start = time.time()
    found = started(["-m", "lockstep", "train", *argv, "--steps", steps], run.parent)
    rows = metrics(run)[done:]
    later = rows[5:]
    waited, took = (sum(row[f"time/{name}"] for row in later) for name in ("data", "step"))
    return found | {
        "first step": round(rows[0]["timestamp"] - start, 2),
        "time/data, share": round(waited / took, 4),
        "steps/s": round(len(later) / took, 1),
    }


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of the steps."""
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [row for row in map(json.loads, lines) if "loss" in row]


def check(model: Path, source: Path, folder: Path) -> dict[str, Any]:
    """`lockstep data check`; rows/s are those that it prints."""
    report = folder / "check.json"
    argv = ["-m", "lockstep", "data", "check", "sft", "--model.name", model, "--data.source", source]
    found = started([*argv, "--json", report, "--quiet"], folder)
    (of_data,) = json.loads(report.read_text(encoding="utf-8"))
    return found | {"rows/s": round(of_data["rows"] / of_data["seconds"])}


def started(argv: Sequence[Any], folder: Path) -> dict[str, Any]:
    """Run Python with these arguments; its wall time, the CPU time of it and its children, and its largest
    resident set."""
    environ = os.environ | {"LOCKSTEP_CACHE": str(folder / "cache"), "OMP_NUM_THREADS": "1"}
    words = [str(word) for word in argv]
    start = time.perf_counter()
    words = words if words[0] == sys.executable else [sys.executable, *words]
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, env=environ)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit(f"{' '.join(words)} ended with {os.waitstatus_to_exitcode(status)}")
    return {
        "seconds": round(time.perf_counter() - start, 2),
        "CPU seconds": round(usage.ru_utime + usage.ru_stime, 2),
        "MiB": usage.ru_maxrss // 1024,
    }


def versions() -> dict[str, str]:
    """Of what was measured."""
    from importlib.metadata import version

    names = ("torch", "transformers", "tokenizers", "datasets", "pyarrow")
    return {"python": platform.python_version()} | {name: version(name) for name in names}


if __name__ == "__main__":
    main()
