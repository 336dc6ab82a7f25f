"""A tiny policy with random weights, pairs for a reward model, and prompts: python prepare.py [FOLDER]."""

import importlib.util
import json
import sys
from pathlib import Path

PROBLEMS = [(a, b) for a in range(2, 8) for b in range(3, 9)]


def main(folder: Path) -> None:
    """Write policy/, pairs.jsonl and prompts.jsonl."""
    script = Path(__file__).parents[1] / "tiny_text_model.py"
    spec = importlib.util.spec_from_file_location("tiny_text_model", script)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    module.save(folder / "policy")
    prompts = [[{"role": "user", "content": f"What is {a} + {b}?"}] for a, b in PROBLEMS]
    pairs = [
        {"prompt": prompt, "chosen": f"{a} + {b} = {a + b}.", "rejected": f"It is {a * b}, I believe."}
        for prompt, (a, b) in zip(prompts, PROBLEMS, strict=True)
    ]
    for name, rows in (("pairs", pairs), ("prompts", [{"context_messages": prompt} for prompt in prompts])):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
