"""Supervised fine-tuning on a few rows.

python examples/sft_tiny.py                     # a tiny model with random weights, seconds
python examples/sft_tiny.py bundled:smollm2-135m
"""

import json
import sys
import tempfile
from pathlib import Path

from tiny_text_model import save

from lockstep import load_run, train_offline

ROWS = [
    {"prompt": f"How many letters has {word}?", "completion": f"{word} has {len(word)} letters."}
    for word in ("ant", "bear", "camel", "donkey", "echidna", "flamingo", "gorilla", "heron")
]


def main(model: str | None = None) -> dict[str, object]:
    """Train on six rows, measure the loss on the other two."""
    with tempfile.TemporaryDirectory() as folder:
        for name, rows in (("train", ROWS[:6]), ("held-out", ROWS[6:])):
            text = "".join(json.dumps(row) + "\n" for row in rows)
            Path(folder, f"{name}.jsonl").write_text(text)
        overrides = {
            "model.name": model or str(save(Path(folder, "model"))),
            "data.source": str(Path(folder, "train.jsonl")),
            "eval_data.source": str(Path(folder, "held-out.jsonl")),
            "steps": 20,
            "batch_size": 6,
            "train.lr": 5e-5 if model else 1e-2,
        }
        summary = train_offline(load_run("sft-smollm2", kind="sft", overrides=overrides))
    print(f"held-out loss {summary['eval_before']['loss']:.3f} -> {summary['eval_after']['loss']:.3f}")
    return summary


if __name__ == "__main__":
    main(*sys.argv[1:2])
