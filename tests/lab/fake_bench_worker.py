"""Stands in for lockstep_lab.step_bench.worker: does to a job what the behaviour of its cell asks for."""

import json
import os
import sys
import time
from pathlib import Path

path = Path(sys.argv[1])
job = json.loads(path.read_text())
out, cell = Path(job["out"]), job["cell"]
behaviour = json.loads((out.parent.parent / "behaviour.json").read_text()).get(cell, {"scale": 1.0})
print(f"{cell}: pid {os.getpid()}", flush=True)


def write(name: str, value: dict) -> None:
    (out / f"{name}.part").write_text(json.dumps(value))
    (out / f"{name}.part").rename(out / name)


def outcome(status: str, reason: str = "", **more: object) -> None:
    write("result.json", {"status": status, "reason": reason, **more})


how = behaviour.get("how", "measure")
if how == "refuse":
    outcome("refused", "the kernel contracts differ in gemm")
    sys.exit(2)
if how == "slow start":
    time.sleep(600)
if how == "oom":
    print("torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB", file=sys.stderr)
    sys.exit(1)
write("ready.json", {"load_seconds": 1.0, "first_step_seconds": 2.0, "compile_seconds": 0.5, "graphs": 3})
done = 0
while True:
    turn = (out / "turn").read_text() if (out / "turn").exists() else "0"
    if turn == "end":
        break
    if int(turn) <= done:
        time.sleep(0.005)
        continue
    done += 1
    if how == "crash" and done == 2:
        raise ValueError("the second step broke")
    if how == "hang" and done == 2:
        time.sleep(600)
    with (out.parent / "order.txt").open("a") as file:
        file.write(f"{cell} {done}\n")
    # the machine becomes slower from turn to turn: 1, 2, 3, ... times
    unit = behaviour["scale"] * done
    row = {"generate": 6 * unit, "forward": 1 * unit, "backward": 2 * unit, "train": 3 * unit}
    row |= {"optimizer": 0.5 * unit, "weights": 0.0, "step": 9.5 * unit}
    with (out / "rows.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
if how == "no end":
    time.sleep(600)
outcome(
    "ok",
    recompiles=behaviour.get("recompiles", 0),
    peak_memory_bytes=2**30,
    memory_kind="CUDA memory allocated",
    tokens=1200,
    sampled_tokens=600,
    training_flops=3e12,
    peak_flops=4e12,
    logprob_gap=behaviour.get("gap", 0.0),
    axes={"dtype": "float32", "attention": "varlen"},
)
