"""How long the rows of a data set take to become documents: with `load_sft`, and with `datasets.map` as TRL's
SFTTrainer calls it (which marks no answers, and keeps its result in a cache), alternating in one process.

    python benchmarks/data_loading.py --rows 20000 --json results/data_loading.json
    python benchmarks/data_loading.py --rows 2000 --messages 40

Each row is a conversation of `--messages` messages; all rows have as many words. Each side starts with the
tokenizer loaded and ends with token ids, `load_sft` also with loss masks. Times are medians of `--repeats`.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

WORDS = "the of and to in is that was he for it with as his on be at by had not are but from or have an they"
WORDS_OF_ROW = 100


def main(argv: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=5000)
    parser.add_argument("--messages", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--processes", type=int, default=2, help="of datasets.map (default: %(default)s)")
    parser.add_argument("--json", type=Path, help="write the result to this file")
    args = parser.parse_args(argv)
    with tempfile.TemporaryDirectory() as folder:
        result = measure(Path(folder), args)
    print(json.dumps(result, indent=2))
    if args.json is not None:
        args.json.write_text(json.dumps(result, indent=2) + "\n", encoding="utf-8")


def measure(folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Seconds and rows per second of each side."""
    import datasets
    import tokenizers
    import torch
    import transformers

    from lockstep.config.data import DataConfig
    from lockstep.data.sft import load_sft
    from lockstep.models.source import bundled_folder

    tokenizer = transformers.AutoTokenizer.from_pretrained(bundled_folder("smollm2-135m"))
    rows = write_rows(folder / "rows.jsonl", rows=args.rows, messages=args.messages)

    def ours() -> None:
        load_sft(DataConfig(source=str(rows)), tokenizer=tokenizer).items.make_all()

    def tokenised(row: dict[str, Any]) -> dict[str, Any]:
        return dict(tokenizer.apply_chat_template(row["messages"], return_dict=True))

    def theirs() -> None:
        loaded = datasets.load_dataset(
            "json", data_files=str(rows), split="train", cache_dir=str(folder / "cache")
        )
        loaded.map(tokenised, num_proc=args.processes, load_from_cache_file=False)

    sides: dict[str, Callable[[], None]] = {"lockstep": ours, "datasets.map": theirs}
    seconds: dict[str, list[float]] = {side: [] for side in sides}
    for _ in range(args.repeats):
        for side, run in sides.items():
            start = time.perf_counter()
            run()
            seconds[side].append(time.perf_counter() - start)
    medians = {side: statistics.median(times) for side, times in seconds.items()}
    return {
        "rows": args.rows,
        "messages": args.messages,
        "processes of datasets.map": args.processes,
        "seconds": {side: round(median, 3) for side, median in medians.items()},
        "rows/s": {side: round(args.rows / median) for side, median in medians.items()},
        "all": {side: [round(each, 3) for each in times] for side, times in seconds.items()},
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "versions": {
            "python": platform.python_version(),
            **{m.__name__: m.__version__ for m in (torch, transformers, tokenizers, datasets)},
        },
    }


def write_rows(path: Path, *, rows: int, messages: int) -> Path:
    """Conversations of two speakers in turn, of WORDS_OF_ROW words in all."""
    words, of_words = WORDS.split(), random.Random(0)
    each = max(1, WORDS_OF_ROW // messages)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(rows):
            texts = [" ".join(of_words.choices(words, k=each)) for _ in range(messages)]
            turns = [
                {"role": ("user", "assistant")[number % 2], "content": text}
                for number, text in enumerate(texts)
            ]
            file.write(json.dumps({"messages": turns}) + "\n")
    return path


if __name__ == "__main__":
    main()
