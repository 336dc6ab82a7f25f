"""Stands in for `python -m lockstep replay` in the matrix's tests: writes what a replay writes, or dies.

What it does is in FAKE_REPLAY, a JSON file {"words of the cell": behaviour}: the first entry whose words are
all among the arguments counts. "" is the default. A behaviour is a dict of:

    shift: added to every logprob        scale: every gradient times this       speed: tokens per second
    fail: {index: [status, type, line]}  exit: status                           say: printed
    signal: name, sent to itself         sleep: seconds, before anything        silent: writes nothing
"""

import json
import os
import signal
import sys
import time
from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

INPUTS = 3


def behaviour(words: list[str]) -> dict:
    table = json.loads(Path(os.environ["FAKE_REPLAY"]).read_text())
    return next(what for key, what in table.items() if set(key.split()) <= set(words))


def row(index: int, what: dict) -> dict:
    bad = what.get("fail", {}).get(str(index))
    base = {"index": index, "tokens": 10 * (index + 1), "first_call": index == 0, "computed_slots": 100}
    if bad is not None:
        status, kind, line = bad
        return base | {"status": status, "error": {"type": kind, "line": line, "log": "tracebacks/0.txt"}}
    times = {"forward_ms": 50.0 if index == 0 else 1.0 + index, "backward_ms": 2.0}
    return base | times | {"status": "ok", "peak_memory_bytes": 2**30}


def main() -> int:
    words = sys.argv[1:]
    with open(os.environ["FAKE_REPLAY"] + ".calls", "a") as calls:
        calls.write(json.dumps({"pid": os.getpid(), "words": words}) + "\n")
    what = behaviour(words)
    print(what.get("say", "hello"), flush=True)
    time.sleep(what.get("sleep", 0))
    if "signal" in what:
        os.kill(os.getpid(), getattr(signal, what["signal"]))
    if "exit" in what or what.get("silent"):
        return what.get("exit", 0)
    out = Path(words[words.index("--out") + 1])
    out.mkdir()
    rows = [row(index, what) for index in range(INPUTS)]
    (out / "results.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    done = [r for r in rows if r["status"] == "ok"]
    summed = [r["index"] for r in done][:1]
    summary = {
        "totals": {"tokens_per_second": what.get("speed", 1000.0)},
        "steady_ms": {"forward": 2.5, "backward": 2.0},
        "memory": {"peak_bytes": 3 * 2**30},
        "compile": {"graphs": 2, "recompiles": 0, "graph_breaks": 0},
        "weights": {"statement": what.get("weights", "the recorded ones")},
        "outputs": {"gradient_inputs": summed},
        "interrupted": False,
    }
    (out / "summary.json").write_text(json.dumps(summary))
    tensors = {
        f"logprobs/{r['index']}": np.arange(4, dtype=np.float32) - 5 + np.float32(what.get("shift", 0))
        for r in done
    }
    tensors["gradients/w"] = np.array([3.0, 4.0], dtype=np.float32) * np.float32(what.get("scale", 1))
    save_file(tensors, out / "outputs.safetensors")
    return 0 if len(done) == INPUTS else 1


if __name__ == "__main__":
    sys.exit(main())
