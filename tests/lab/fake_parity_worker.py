"""Stands in for lockstep_lab.train_parity.worker: does to a job what the behaviour of its stack asks for."""

import json
import os
import signal
import sys
import time
from pathlib import Path

job = json.loads(Path(sys.argv[1]).read_text())
out, stack = Path(job["out"]), job["stack"]
behaviour = json.loads((out.parent / "behaviour.json").read_text()).get(stack, "agree")
print(f"{stack}: pid {os.getpid()}", flush=True)


def rows(count: int, *, shift: float = 0.0) -> None:
    with (out / "metrics.jsonl").open("w") as file:
        for step in range(1, count + 1):
            row = {"step": step, "loss": (5.0 - 0.2 * step) * (1.0 + shift), "grad_norm": 1.0, "lr": 0.1}
            row |= {"tokens": 10, "seconds": 0.5, "tokens_per_second": 20.0, "peak_memory_bytes": 2**30}
            file.write(json.dumps(row) + "\n")


def outcome(status: str, reason: str = "") -> None:
    value = {"status": status, "reason": reason, "attention": "sdpa", "dtype": "float32", "statement": "fake"}
    (out / "result.json").write_text(json.dumps(value))


steps = len(job["steps"])
if behaviour == "agree":
    rows(steps)
    outcome("ok")
elif behaviour == "differ":
    rows(steps, shift=0.1)
    outcome("ok")
elif behaviour == "flat":
    with (out / "metrics.jsonl").open("w") as file:
        for step in range(1, steps + 1):
            row = {"step": step, "loss": 5.0 - 0.2 * step, "grad_norm": float("nan"), "lr": 0.1}
            row["loss"] = 4.0 if step % 2 else 4.1
            row |= {"tokens": 10, "seconds": 0.5, "tokens_per_second": 20.0, "peak_memory_bytes": 2**30}
            file.write(json.dumps(row).replace("NaN", '"NaN"') + "\n")
    outcome("ok")
elif behaviour == "crash":
    rows(3)
    raise ValueError("the third step <b>broke</b>")
elif behaviour == "kill":
    os.kill(os.getpid(), signal.SIGKILL)
elif behaviour == "oom":
    rows(1)
    print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", file=sys.stderr)
    sys.exit(1)
elif behaviour == "refuse":
    outcome("refused", "train.tp = 2 does not divide the model's 9 query heads")
    sys.exit(2)
elif behaviour == "hang":
    rows(2)
    time.sleep(600)
elif behaviour == "garbage":
    (out / "metrics.jsonl").write_text('{"step": 1}\nnot json\n')
    (out / "result.json").write_text("[]")
    sys.exit(0)
