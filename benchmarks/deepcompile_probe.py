"""Does DeepSpeed's DeepCompile run this policy? One JSON line per try: {sdpa, varlen} x ZeRO {1, 3} x {eager,
deepcompile}, three steps each, every try in a process of its own. Also under torchrun or deepspeed.

    python benchmarks/deepcompile_probe.py [--timeout 150] [--only varlen,3,deepcompile]
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import re
import subprocess
import sys
import time


def attempt(attention: str, stage: int, execution: str) -> dict[str, object]:
    import torch

    from lockstep.algorithms.offline import SFTLoss
    from lockstep.config.model import ModelConfig
    from lockstep.config.train import TrainConfig
    from lockstep.models.load import load_model
    from lockstep.packing import pack
    from lockstep.schema.batch import TrainSample
    from lockstep.train.deepspeed.backend import DeepSpeedBackend

    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", 0)))
    torch.cuda.set_device(device)
    config = ModelConfig(name="shape:llama-3.2-1b", num_layers=4, dtype="bfloat16")
    model = load_model(config, attention=attention, device=device)
    backend = DeepSpeedBackend(
        TrainConfig(static_capacity=True, lr=1e-4),
        model=model,
        total_steps=3,
        zero_stage=stage,
        deepcompile=execution == "deepcompile",
    )
    mask = torch.arange(512) < 511
    ids = torch.randint(0, 100_000, (4, 512), generator=torch.Generator().manual_seed(0))
    batch = pack([TrainSample(token_ids=row, loss_mask=mask) for row in ids], [mask / 2044.0] * 4)
    losses, seconds, norms = [], [], []
    for _ in range(3):
        start = time.perf_counter()
        stats = backend.forward_backward([batch], SFTLoss())
        losses.append(float(stats.losses[0]))
        norms.append(backend.optimizer_step()["grad_norm"])
        seconds.append(round(time.perf_counter() - start, 3))
    peak = round(torch.cuda.max_memory_allocated() / 2**30, 2)
    return {"losses": losses, "grad_norms": norms, "seconds": seconds, "peak_gib": peak}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--timeout", type=float, default=150.0)
    parser.add_argument("--only", default="")
    parser.add_argument("--child", default="")
    args, _ = parser.parse_known_args()  # the deepspeed launcher adds --local_rank
    if args.child:
        attention, stage, execution = args.child.split(",")
        print("RESULT " + json.dumps(attempt(attention, int(stage), execution)), flush=True)
        os._exit(0)
    cells = itertools.product(("sdpa", "varlen"), ("1", "3"), ("eager", "deepcompile"))
    for number, cell in enumerate([args.only.split(",")] if args.only else cells):
        # Under a launcher the tries, one after the other, cannot share the launcher's store.
        environ = {**os.environ, "TORCHELASTIC_USE_AGENT_STORE": "False"}
        if "MASTER_PORT" in environ:
            environ["MASTER_PORT"] = str(int(environ["MASTER_PORT"]) + 1 + number)
        command = [sys.executable, __file__, "--child", ",".join(cell)]
        row: dict[str, object] = dict(zip(("attention", "zero_stage", "execution"), cell, strict=True))
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=args.timeout, env=environ)
            found = re.search(r"^RESULT (.*)$", done.stdout, re.MULTILINE)
            if found:
                row |= {"status": "ok", **json.loads(found[1])}
            else:
                lines = [line for line in (done.stdout + done.stderr).splitlines() if line.strip()]
                errors = [line for line in lines if re.search(r"(Error|Exception|error):|Error\b", line)]
                row |= {
                    "status": "failed",
                    "exit": done.returncode,
                    "error": errors[-1:],
                    "tail": lines[-12:],
                }
        except subprocess.TimeoutExpired as error:
            tail = (error.stderr or b"")[-600:]
            row |= {"status": "timeout", "tail": tail.decode(errors="replace").splitlines()}
        if os.environ.get("RANK", "0") == "0":
            print(json.dumps(row), flush=True)


if __name__ == "__main__":
    main()
