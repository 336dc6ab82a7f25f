"""Does a run that hangs say which rank, and why?

    python benchmarks/faults.py hangs --n 2 --resume benchmarks/results/hangs.json.gz
    python benchmarks/faults.py hangs --kind stopped --show
    python benchmarks/faults.py overhead --resume benchmarks/results/hangs.json.gz
    python benchmarks/faults.py provider --resume benchmarks/results/hangs.json.gz
    python benchmarks/faults.py slow --n 1000 --resume benchmarks/results/hangs.json.gz

Each case is a run of `tiny.toml` (random weights, fsdp2, two ranks, gloo on the CPU) in which one rank has
one fault, at one place of a step, under a watchdog of SECONDS. Judged are the rank and the cause that the run
ends with; the seconds from the last sign of progress to the report are noted. --resume adds to what the file
holds. The exit status is 0 when every case that was run is right.

`slow` is one run of so many steps, in each of which a rank computes for twice the watchdog's deadline before
its forward, by turns rank 1 alone, for which rank 0 waits in a collective, and both. It must end by itself.

`overhead` runs a few steps of the recipe `demo` on two ranks, and counts the CPU seconds of each rank inside
its flight record, and in what calls it around each collective. `provider` runs them on a Ray that it starts
on this machine, and counts the CPU seconds, from the end of the first step to that of the last, of what there
is beside the ranks: the driver, the process that hosts the ranks, and Ray's own. A driver and an actor that
do nothing stand beside them: what they take is Ray's, and the rest is ours.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gzip
import importlib.metadata
import json
import os
import platform
import queue
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from lockstep.processes.programs import role_of

SECONDS = 8.0
"""Deadline of the watchdog."""
TINY = """
kind = "grpo"
steps = 3
[model]
name = "shape:tiny-llama"
dtype = "float32"
[data]
source = "ids"
max_prompt_tokens = 16
[rollout]
prompts_per_step = 4
group_size = 2
[rollout.sampling]
max_tokens = 8
[[rewards]]
name = "ids"
[train]
backend = "fsdp2"
device = "cpu"
lr = 1e-3
token_budget = 128
[eval]
before = false
after = false
every = 0
[checkpoint]
every = 1
background = false
[log]
tensorboard = false
"""
EXPECTED: dict[str, tuple[tuple[str, ...], int | None]] = {
    "skipped": (("skipped collective",), 1),
    "shape": (("wrong shape",), 1),
    "order": (("other order",), 1),
    "reward": (("sleeping reward",), 1),
    "engine-dead": (("Unreachable", "Connection refused", "nothing listens"), 1),
    "engine-silent": (("engine does not answer",), 1),
    "producer": (("queue without a producer",), 1),
    "disk": (("No space left", "free some space"), None),
    "stopped": (("stopped process",), 1),
    "data": (("ended early",), 1),
    "lock": (("lock that nobody frees",), 1),
    "writes": (("slow or stuck file",), 0),
}
"""Kind -> any of these words is the cause; the rank to blame, None: all have the same disk."""

# --- the faults, in the rank --------------------------------------------------------------------------------


def once_at(owner: Any, name: str, fault: Callable[[], None], *, call: int = 2) -> None:
    """Have `fault` run before the n-th call of a method."""
    original, calls = getattr(owner, name), [0]

    def method(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if calls[0] == call:
            fault()
        return original(*args, **kwargs)

    setattr(owner, name, method)


def inject(kind: str, rank: int) -> None:
    """Prepare this rank's fault, if it has one."""
    import torch
    import torch.distributed as dist

    from lockstep.engine.hf.engine import HFEngine
    from lockstep.train.fsdp2.backend import FSDP2Backend

    bad = rank == EXPECTED[kind][1]

    def in_other_order() -> None:
        """Two gradients in flight, as bucketed reductions are; rank 1 has them the other way round."""
        sizes = (64, 4096) if not bad else (4096, 64)
        for work in [dist.all_reduce(torch.zeros(size), async_op=True) for size in sizes]:
            work.wait()

    if kind == "order":
        once_at(FSDP2Backend, "optimizer_step", in_other_order)
    if kind == "shape":
        shape = (4097,) if bad else (4096,)
        once_at(FSDP2Backend, "optimizer_step", lambda: dist.all_reduce(torch.zeros(shape)))
    if not bad:
        return
    if kind == "skipped":
        once_at(FSDP2Backend, "optimizer_step", skip_next_all_reduce)
    if kind == "stopped":
        once_at(FSDP2Backend, "forward_backward", lambda: os.kill(os.getpid(), signal.SIGSTOP))
    if kind == "lock":
        once_at(FSDP2Backend, "forward_backward", deadlock)
    if kind == "producer":
        once_at(FSDP2Backend, "forward_backward", wait_for_dead_producer)
    if kind == "data":
        once_at(FSDP2Backend, "forward_backward", end_of_data)
    if kind.startswith("engine"):
        once_at(HFEngine, "submit_all", lambda: ask_engine(dead=kind == "engine-dead"))
    if kind == "writes":
        once_at(FSDP2Backend, "optimizer_step", slow_writes)


def skip_next_all_reduce() -> None:
    """As a branch does that only this rank takes."""
    import torch.distributed as dist

    original = dist.all_reduce

    def skip(*_: Any, **__: Any) -> None:
        dist.all_reduce = original

    dist.all_reduce = skip


def slow_writes() -> None:
    """As of a file system that has gone: the next checkpoint never reaches it."""
    os.fsync = lambda _: time.sleep(3600)


def deadlock() -> None:
    """A thread has the lock and waits for us."""
    lock, done = threading.Lock(), threading.Event()
    taken = threading.Event()

    def hold() -> None:
        with lock:
            taken.set()
            done.wait()

    threading.Thread(target=hold, daemon=True).start()
    taken.wait()
    with lock:
        done.set()


def wait_for_dead_producer() -> None:
    """The thread that fills the queue has died."""
    items: queue.Queue[int] = queue.Queue()
    producer = threading.Thread(target=lambda: None)
    producer.start()
    producer.join()
    items.get()


def end_of_data() -> None:
    """As a loop does whose data has ended on this rank only."""
    from lockstep.observe import flight

    flight.note(phase="finished")
    os._exit(0)


def ask_engine(*, dead: bool) -> None:
    """A request to a server that has been killed, or accepts and never answers."""
    from lockstep.engine.remote.http import HttpClient

    code = (
        "import socket, time; s = socket.create_server(('127.0.0.1', 0)); "
        "print(s.getsockname()[1], flush=True); time.sleep(3600)"
    )
    server = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    port = int(server.stdout.readline())
    if dead:
        server.kill()
        server.wait()
    HttpClient(f"http://127.0.0.1:{port}", name="engine").post("/generate", {}, seconds=3600.0)


REWARD = """
import os, time
calls = 0
def sleeping(prompt, completion, row, **more):
    global calls
    calls += 1
    if os.environ.get("RANK") == "1" and calls > 4:
        time.sleep(3600)
    return float(len(completion) % 3)
"""


def rank_main(kind: str, toml: str, run: str) -> int:
    """`lockstep train` of one rank."""
    from lockstep.cli.main import main

    inject(kind, int(os.environ["RANK"]))
    return main(["train", toml, "--run-dir", run, "--rank-timeout", str(SECONDS)])


# --- what the record costs ----------------------------------------------------------------------------------

OVERHEAD_STEPS = 3
MOST_OVERHEAD = 0.001
"""Share of a step."""


class Spent:
    """CPU seconds that a wrapper adds to what it wraps. Every fourth call goes past the wrapper: the clocks,
    read in the middle of a step with cold caches, take as long as what they measure."""

    def __init__(self) -> None:
        self.calls = 0
        self._sums, self._counts = [0.0, 0.0], [0, 0]
        """With the wrapper, and past it."""

    def seconds(self) -> float:
        """Of all calls, had each gone through the wrapper."""
        (ours, past), (one, other) = self._sums, self._counts
        return self.calls * (ours / max(1, one) - past / max(1, other))

    def around(self, make: Callable[..., Any]) -> Callable[..., Any]:
        """`make`, which wraps a call, with the clocks around what it makes."""
        clock = time.thread_time

        def made(call: Callable[..., Any], *more: Any) -> Callable[..., Any]:
            inside = [0.0, 0.0]

            @functools.wraps(call)
            def noted(*args: Any, **kwargs: Any) -> Any:
                inside[0] = clock()
                try:
                    return call(*args, **kwargs)
                finally:
                    inside[1] = clock()

            choices = (make(noted, *more), noted)

            @functools.wraps(choices[0])
            def counted(*args: Any, **kwargs: Any) -> Any:
                self.calls += 1
                past = self.calls % 4 == 0
                inside[:] = 0.0, 0.0
                began = clock()
                try:
                    return choices[past](*args, **kwargs)
                finally:
                    self._sums[past] += clock() - began - (inside[1] - inside[0])
                    self._counts[past] += 1

            return counted

        return made


def overhead_main(recipe: str, run: str) -> int:
    """`lockstep train` of one rank, with clocks around what records, in every call."""
    from lockstep.cli.main import main
    from lockstep.observe.flight import FlightRecorder
    from lockstep.ranks import collectives

    spent = {name: Spent() for name in ("note", "collective", "wait")}
    note = FlightRecorder.note
    FlightRecorder.note = spent["note"].around(lambda call: note)(lambda *_, **__: None)
    collectives._recorded = spent["collective"].around(collectives._recorded)
    collectives._ended_by = spent["wait"].around(collectives._ended_by)
    flags = ["--steps", str(OVERHEAD_STEPS), "--train.backend", "fsdp2", "--train.device", "cpu"]
    flags += ["--eval.no-before", "--eval.no-after", "--eval.every", "0", "--checkpoint.no-save-at-end"]
    status = main(["train", "grpo", "--recipe", recipe, "--run-dir", run, *flags])
    found = {name: (each.seconds(), each.calls) for name, each in spent.items()}
    Path(f"overhead-{os.environ['RANK']}.json").write_text(json.dumps(found))
    return status


def overhead(recipe: str = "demo") -> dict[str, Any]:
    """CPU seconds in the recorders of both ranks over the seconds of the steps."""
    from lockstep.ranks.launch import launch_command

    folder = Path(tempfile.mkdtemp(prefix="overhead-"))
    before = Path.cwd()
    try:
        os.chdir(folder)
        words = [sys.executable, str(Path(__file__).resolve()), "overhead-rank", recipe, "run"]
        status = launch_command(words, ranks=2, timeout=500, watch=1800, log_dir=folder / "logs")
        if status != 0:
            raise RuntimeError(f"the run ended with status {status}")
        lines = (folder / "run/metrics.jsonl").read_text().splitlines()
        steps = [row["time/step"] for row in map(json.loads, lines) if "time/step" in row]
        ranks = [json.loads((folder / f"overhead-{rank}.json").read_text()) for rank in range(2)]
    finally:
        os.chdir(before)
        shutil.rmtree(folder, ignore_errors=True)
    seconds = max(sum(total for total, _ in each.values()) for each in ranks)
    return {
        "recipe": recipe,
        "ranks": 2,
        "steps": len(steps),
        "step_seconds": round(sum(steps), 2),
        "cpu_seconds_of_a_rank": round(seconds, 5),
        "share": seconds / sum(steps),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "microseconds": {name: round(1e6 * s / max(1, n), 1) for name, (s, n) in ranks[0].items()},
        "calls": {name: n for name, (_, n) in ranks[0].items()},
    }


MOST_PROVIDER = 0.005
"""Share of a step."""


IDLE_DRIVER = """
import logging, sys, time, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level=logging.ERROR, namespace="idle-driver")
actor = ray.remote(type("IdleActor", (), {"here": lambda self: True})).options(num_cpus=0).remote()
ray.get(actor.here.remote())
print("ready", flush=True)
time.sleep(3600)
"""
"""A driver that does nothing, with an actor that does nothing."""


def provider_cpu() -> dict[str, float]:
    """CPU seconds so far of this process and all below it, by part, without the ranks and what they start."""
    parts = {"idle-driver": "idle_driver", "IdleActor": "idle_actor", "NodeActor": "hosts"}
    used = {"driver": time.process_time(), "ray": 0.0} | dict.fromkeys(parts.values(), 0.0)
    waiting = psutil.Process().children()
    while waiting:
        process = waiting.pop()
        try:
            words, times, below = process.cmdline(), process.cpu_times(), process.children()
            role = role_of(process)
        except psutil.NoSuchProcess:
            continue
        if role != "guard" and {"lockstep", "train"} <= set(words):
            continue  # a rank
        part = next((part for name, part in parts.items() if name in " ".join(words)), "ray")
        used[part] += times.user + times.system
        waiting += below
    return used


@contextlib.contextmanager
def idle_driver(address: str) -> Iterator[None]:
    """Have it run."""
    command = [sys.executable, "-c", IDLE_DRIVER, address]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        try:
            yield
        finally:
            process.kill()


def provider(recipe: str = "demo") -> dict[str, Any]:
    """CPU seconds of a provider over the seconds of the steps."""
    from lockstep.cluster.launch import launch_on, local_cluster
    from lockstep.cluster.ray import RayProvider
    from lockstep.config.cluster import ClusterConfig
    from lockstep.protocols.cluster import Placement

    with tempfile.TemporaryDirectory(prefix="ls", dir="/tmp") as name:  # Ray's sockets need a short one
        metrics, used = Path(name, "run/metrics.jsonl"), {}

        class Counted(RayProvider):
            def watch(self, *arguments: Any) -> Any:
                done = metrics.read_text().count("\n") if metrics.exists() else 0
                if done in (1, OVERHEAD_STEPS) and done not in used:
                    used[done] = provider_cpu()
                return super().watch(*arguments)

        config = ClusterConfig(slots=2, temp_dir=Path(name, "ray"))
        flags = ["--steps", str(OVERHEAD_STEPS), "--train.backend", "fsdp2", "--train.device", "cpu"]
        flags += ["--eval.no-before", "--eval.no-after", "--eval.every", "0", "--checkpoint.no-save-at-end"]
        words = ["-m", "lockstep", "train", "grpo", "--recipe", recipe, "--run-dir", f"{name}/run", *flags]
        with local_cluster(config, ranks=2) as address, idle_driver(address):
            ray = Counted(address, config=config, log_dir=Path(name, "logs"))
            placement = Placement(nodes=1, per_node=2)
            status = launch_on(ray, words, placement=placement, log_dir=Path(name, "logs"), watch=1800.0)
            ray.close()
        if status != 0:
            raise RuntimeError(f"the run ended with status {status}")
        steps = [json.loads(line)["time/step"] for line in metrics.read_text().splitlines()][1:]
    parts = {part: used[OVERHEAD_STEPS][part] - cpu for part, cpu in used[1].items()}
    own = parts["driver"] + parts["hosts"] - parts["idle_driver"] - parts["idle_actor"]
    return {
        "recipe": recipe,
        "ranks": 2,
        "steps": len(steps),
        "step_seconds": round(sum(steps), 2),
        "cpu_seconds": {part: round(cpu, 3) for part, cpu in parts.items()},
        "share": (parts["driver"] + parts["hosts"]) / sum(steps),
        "share_of_an_idle_driver_and_actor": (parts["idle_driver"] + parts["idle_actor"]) / sum(steps),
        "share_of_ours": own / sum(steps),
        "share_of_ray_itself": parts["ray"] / sum(steps),
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "ray": importlib.metadata.version("ray"),
    }


# --- slow but living ----------------------------------------------------------------------------------------

SLOW_DEADLINE = 0.5
"""Seconds of the watchdog over slow steps, each of which computes for twice as long."""


def slow_main(toml: str, run: str, steps: str) -> int:
    """`lockstep train` of one rank, slow."""
    from lockstep.cli.main import main
    from lockstep.train.fsdp2.backend import FSDP2Backend

    original, calls, rank = FSDP2Backend.forward_backward, [0], int(os.environ["RANK"])

    def slow(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        if rank == 1 or calls[0] % 2:
            until = time.monotonic() + 2 * SLOW_DEADLINE
            while time.monotonic() < until:
                sum(range(10_000))
        return original(*args, **kwargs)

    FSDP2Backend.forward_backward = slow  # type: ignore[method-assign]
    flags = ["--steps", steps, "--checkpoint.every", steps]
    return main(["train", toml, "--run-dir", run, "--rank-timeout", str(SLOW_DEADLINE), *flags])


def slow(steps: int) -> dict[str, Any]:
    """Run so many slow steps; returns how many were done and whether the watchdog ended the run."""
    folder = Path(tempfile.mkdtemp(prefix="slow-"))
    try:
        (folder / "tiny.toml").write_text(TINY)
        words = [sys.executable, str(Path(__file__).resolve()), "slow-rank", "tiny.toml", "run", str(steps)]
        began = time.monotonic()
        ended = launched(folder, words, watch=SLOW_DEADLINE, timeout=10 * SLOW_DEADLINE * steps + 120)
        rows = map(json.loads, (folder / "run/metrics.jsonl").read_text().splitlines())
        times = [row["time/step"] for row in rows if "time/step" in row]
        return {
            "deadline_seconds": SLOW_DEADLINE,
            "steps": len(times),
            "step_seconds_median": round(sorted(times)[len(times) // 2], 2),
            "seconds": round(time.monotonic() - began, 1),
            "status": ended.returncode,
            "false_alarm": "no rank has made progress" in ended.stdout + ended.stderr,
            "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
            "torch": importlib.metadata.version("torch"),
        }
    finally:
        shutil.rmtree(folder, ignore_errors=True)


# --- the cases ----------------------------------------------------------------------------------------------


def case(kind: str, *, show: bool = False) -> dict[str, Any]:
    """Run one case in a folder of its own; returns what it was judged by."""
    folder = Path(tempfile.mkdtemp(prefix="hang-"))
    mounted = kind == "disk"
    try:
        run = folder / "run"
        toml = TINY
        if kind == "reward":
            (folder / "slow_reward.py").write_text(REWARD)
            toml = toml.replace('name = "ids"', 'name = "slow_reward:sleeping"\ntimeout_seconds = 600')
        if mounted:
            run.mkdir()
            subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "none", str(run)], check=True)
        (folder / "tiny.toml").write_text(toml)
        words = [sys.executable, str(Path(__file__).resolve()), "rank", kind, "tiny.toml", str(run)]
        began = time.monotonic()
        ended = launched(folder, words, watch=SECONDS, timeout=300)
        if show:
            sys.stdout.write(ended.stdout + ended.stderr)
        return judge(kind, folder / "logs", ended, seconds=time.monotonic() - began)
    finally:
        if mounted:
            subprocess.run(["umount", str(folder / "run")], check=False)
        shutil.rmtree(folder, ignore_errors=True)


def launched(
    folder: Path, words: Sequence[str], *, watch: float, timeout: float
) -> subprocess.CompletedProcess[str]:
    """Run a command as two watched ranks in a folder."""
    launcher = (
        "import sys; from pathlib import Path; from lockstep.ranks.launch import launch_command; "
        f"sys.exit(launch_command(sys.argv[2:], ranks=2, timeout={timeout}, watch={watch}, "
        "log_dir=Path(sys.argv[1]), graceful=True))"
    )
    path = os.pathsep.join([str(folder), os.environ.get("PYTHONPATH", "")])
    return subprocess.run(
        [sys.executable, "-c", launcher, str(folder / "logs"), *words],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
        timeout=timeout + 100,
    )


def judge(
    kind: str, logs: Path, ended: subprocess.CompletedProcess[str], *, seconds: float
) -> dict[str, Any]:
    """Compare what the run says with what was done to it."""
    words, rank = EXPECTED[kind]
    report = json.loads((logs / "hang.json").read_text()) if (logs / "hang.json").exists() else {}
    text = ended.stdout + ended.stderr
    by_watchdog = "no rank has made progress" in text
    named = report.get("cause") if "likely cause: " in text else None
    if named is not None:
        right = named in words and report["culprits"] == [rank]
    else:
        right = any(word in text for word in words) and (rank is None or f"rank {rank}" in text)
    beats = [each["heartbeat"].get("time", 0.0) for each in report.get("ranks", [])]
    return {
        "kind": kind,
        "right": ended.returncode != 0 and right,
        "cause": named or "error of the run",
        "culprits": report.get("culprits"),
        "by": "watchdog" if by_watchdog else "error",
        "status": ended.returncode,
        "seconds": round(seconds, 1),
        "seconds_after_last_sign": round(report["time"] - max(beats), 1) if by_watchdog and beats else None,
        "machine": f"{platform.machine()}, {os.cpu_count()} CPUs",
        "torch": importlib.metadata.version("torch"),
    }


def main(argv: Sequence[str]) -> int:
    """Exit status 0 when every case was right."""
    if argv[:1] == ["rank"]:
        return rank_main(*argv[1:])
    if argv[:1] == ["overhead-rank"]:
        return overhead_main(*argv[1:])
    if argv[:1] == ["slow-rank"]:
        return slow_main(*argv[1:])
    parser = argparse.ArgumentParser(description="Runs with one fault each; see the top of this file.")
    parser.add_argument("what", choices=["hangs", "overhead", "provider", "slow"])
    parser.add_argument(
        "--n", type=int, default=1, help="cases of each kind, those in --resume included; slow: steps"
    )
    parser.add_argument("--kind", choices=sorted(EXPECTED), help="only this kind")
    parser.add_argument("--resume", type=Path, metavar="FILE", help="add to this result")
    parser.add_argument("--show", action="store_true", help="show what the runs print")
    arguments = parser.parse_args(argv)
    known = arguments.resume is not None and arguments.resume.exists()
    result = (
        json.loads(gzip.decompress(arguments.resume.read_bytes()))
        if known
        else {"deadline_seconds": SECONDS, "cases": []}
    )
    if arguments.what == "overhead":
        result["overhead"] = overhead()
        print(
            f"faults: {result['overhead']['share']:.4%} of a step in the flight record: {result['overhead']}"
        )
        if arguments.resume is not None:
            arguments.resume.write_bytes(gzip.compress(json.dumps(result).encode(), mtime=0))
        return 0 if result["overhead"]["share"] <= MOST_OVERHEAD else 1
    if arguments.what == "provider":
        found = result["provider"] = provider()
        print(f"faults: {found['share']:.3%} of a step in the provider: {found}")
        if arguments.resume is not None:
            arguments.resume.write_bytes(gzip.compress(json.dumps(result).encode(), mtime=0))
        return 0 if found["share"] <= MOST_PROVIDER else 1
    if arguments.what == "slow":
        found = result["slow"] = slow(arguments.n)
        print(f"faults: {found}")
        if arguments.resume is not None:
            arguments.resume.write_bytes(gzip.compress(json.dumps(result).encode(), mtime=0))
        return 0 if found["status"] == 0 and found["steps"] == arguments.n else 1
    right = True
    for kind in [arguments.kind] if arguments.kind else EXPECTED:
        for number in range(sum(each["kind"] == kind for each in result["cases"]), arguments.n):
            one = case(kind, show=arguments.show)
            right &= one["right"]
            result["cases"].append(one)
            print(f"{kind} {number + 1}: {'right' if one['right'] else 'WRONG'}, {one}", flush=True)
            if arguments.resume is not None:
                arguments.resume.write_bytes(gzip.compress(json.dumps(result).encode(), mtime=0))
    total = len(result["cases"])
    good = sum(each["right"] for each in result["cases"])
    print(f"faults: {good} of {total} hangs with the right rank and cause")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
