"""A real Ray: ranks that it starts train as those of --ranks, to the bit, and nothing of them is left.

Starting Ray takes about 15 s of CPU, so each run answers several questions.
"""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from starting import ray_nodes

from lockstep.processes.programs import role_of
from lockstep.ranks.environment import TURN
from lockstep.ranks.hang import examine, find_records

if importlib.util.find_spec("ray") is None:
    pytest.skip("Ray is not installed: pip install 'lockstep-rl[cluster]'", allow_module_level=True)

CANARY = "canary-" + secrets.token_hex(8)
SECONDS = 400
SETTINGS = {
    "WANDB_MODE": "offline",
    "WANDB_BASE_URL": "http://127.0.0.1:1",
    "HF_ENDPOINT": "http://127.0.0.1:1",
    "HF_HUB_DISABLE_XET": "1",
    "HTTPS_PROXY": "http://127.0.0.1:1",
    "HTTP_PROXY": "http://127.0.0.1:1",
    "http_proxy": "http://127.0.0.1:1",
    "NO_PROXY": "127.0.0.1",
    "REQUESTS_CA_BUNDLE": "/etc/ssl/certs/ca-certificates.crt",
    "SSL_CERT_FILE": "/etc/ssl/certs/ca-certificates.crt",
}
"""What a rank needs to reach the hub and wandb as the shell of the run does."""
RUN = """
kind = "{kind}"
name = "tiny"
steps = 2
[model]
name = "shape:tiny-llama"
dtype = "float32"
[data]
source = "ids"
max_prompt_tokens = 16
[rollout]
prompts_per_step = 4
group_size = 4
[rollout.sampling]
max_tokens = 8
ignore_eos = true
[[rewards]]
name = "ids"
[train]
backend = "fsdp2"
lr = 3e-3
token_budget = 512
[eval]
before = false
after = false
[cluster]
nodes = 1
slots = 2
"""


@pytest.fixture(scope="module")
def cache() -> Iterator[Path]:
    """A folder with a short name, as Ray's sockets need."""
    with tempfile.TemporaryDirectory(prefix="ls", dir="/tmp") as folder:
        yield Path(folder)


def environment(cache: Path, **more: str) -> dict[str, str]:
    return {**os.environ, "LOCKSTEP_CACHE": str(cache), "OMP_NUM_THREADS": "1", "MY_TOKEN": CANARY, **more}


def command(kind: str, out: Path, *flags: str, cluster: str = "") -> list[str]:
    """Args:
    cluster: more lines of that table.
    """
    file = out.parent / f"{kind}.toml"
    file.write_text(RUN.format(kind=kind) + cluster)
    return [sys.executable, "-m", "lockstep", "train", str(file), "--run-dir", str(out), *flags]


def train(
    kind: str, out: Path, *flags: str, env: dict[str, str], cluster: str = ""
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command(kind, out, *flags, cluster=cluster),
        env=env,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )


def numbers(run: Path) -> list[dict[str, object]]:
    """The metrics but for those of time and memory."""
    lines = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    left_out = re.compile(r"world/.*|timestamp|time/.*|memory/.*|throughput/.*|.*per_second")
    return [{k: v for k, v in line.items() if not left_out.fullmatch(k)} for line in lines]


def weights(run: Path) -> dict[str, str]:
    files = [*sorted(run.glob("checkpoints/*/**/*.safetensors")), run / "export/model.safetensors"]
    return {str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


def left(folder: Path) -> list[str]:
    """Processes that name a folder in their command line."""
    found = []
    for process in psutil.process_iter(["cmdline", "status"]):
        words = process.info["cmdline"] or []
        if str(folder) in " ".join(words) and process.info["status"] != psutil.STATUS_ZOMBIE:
            found.append(f"{process.pid}: {' '.join(words)[:200]}")
    return found


@contextlib.contextmanager
def cluster(cache: Path, kind: str) -> Iterator[tuple[str, Path]]:
    """A cluster that ray_nodes.py runs: its address, and its token."""
    env = environment(cache)
    del env["MY_TOKEN"]  # of the driver's shell only
    with ray_nodes(cache / kind, kind, env=env, seconds=SECONDS) as address:
        yield address, cache / kind / "token"


@pytest.fixture(scope="module")
def two_nodes(cache: Path) -> Iterator[dict[str, str]]:
    """A cluster of two nodes: the environment that finds it."""
    with cluster(cache, "two") as (address, token):
        yield environment(cache, RAY_ADDRESS=address, RAY_AUTH_TOKEN_PATH=str(token))


@pytest.fixture(scope="module", params=["grpo", pytest.param("ppo", marks=pytest.mark.exhaustive)])
def plain(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """A run by --ranks 2, with the cluster's table ignored."""
    out = tmp_path_factory.mktemp(request.param) / "ranks"
    done = train(request.param, out, "--ranks", "2", "--cluster", "none", env=environment(cache))
    assert done.returncode == 0, done.stderr
    return out


ATTACK = """
echo
while :; do
    for folder in "$1"/ray "$1"/ray/* "$1"/ray/*/r; do
        [ -d "$folder" ] || continue
        for name in address token head.log; do
            (echo 127.0.0.1:1 > "$folder/$name") 2>/dev/null && echo "wrote $folder/$name"
            (cat "$folder/$name") 2>/dev/null >/dev/null && echo "read $folder/$name"
        done
    done
    sleep 0.3
done
"""


@contextlib.contextmanager
def stranger(cache: Path) -> Iterator[list[str]]:
    """Another user of the machine, who writes and reads in the folders of local clusters wherever the system
    lets him; afterwards the list says what he did."""
    did: list[str] = []
    if os.geteuid() != 0:  # only root can be another user
        yield did
        return
    cache.chmod(0o755)
    command = ["/bin/sh", "-c", ATTACK, "sh", str(cache)]
    with subprocess.Popen(
        command, user=54321, group=54321, extra_groups=(), stdout=subprocess.PIPE
    ) as process:
        try:
            assert process.stdout is not None and process.stdout.readline()
            yield did
        finally:
            process.kill()
            did += process.stdout.read().decode().splitlines()
            cache.chmod(0o700)


@pytest.mark.exhaustive
def test_one_node_with_two_ranks_trains_as_two_ranks_do(plain: Path, cache: Path) -> None:
    """Those of PPO with the value model's processes in slots of their own, which Ray is asked for. Nobody
    else gets at the folder with the cluster's token meanwhile."""
    kind, out = plain.parent.name.rstrip("0123456789"), plain.with_name("one")
    apart = 'colocate = [["policy"], ["value"]]\ndedicated_gpus = true\n' if kind == "ppo" else ""
    with stranger(cache) as did:
        done = train(kind, out, "--cluster", "local", env=environment(cache), cluster=apart)
    assert did == []
    assert done.returncode == 0, done.stderr
    assert numbers(out) == numbers(plain) and weights(out) == weights(plain)
    assert list((cache / "ray").iterdir()) == [] and left(cache / "ray") == []
    logs = next((out / "logs/ranks").iterdir())
    assert {path.name for path in logs.iterdir()} >= {"rank-0.log", "rank-1.err.log"}
    assert "step 2/2" in (logs / "rank-0.log").read_text()
    assert (out / "remote" / "value" / "rank-1").exists() == (kind == "ppo")
    assert CANARY.encode() not in b"".join(p.read_bytes() for p in out.rglob("*") if p.is_file())


def test_two_nodes_with_one_rank_each_train_as_two_ranks_do(plain: Path, two_nodes: dict[str, str]) -> None:
    """Those of PPO with a remote value model, whose processes meet across nodes."""
    kind, out = plain.parent.name.rstrip("0123456789"), plain.with_name("two")
    flags = ("--cluster", "auto", "--cluster.nodes", "2", "--cluster.slots", "1")
    apart = 'colocate = [["policy"], ["value"]]\n' if kind == "ppo" else ""
    done = train(kind, out, *flags, env=two_nodes, cluster=apart)
    assert done.returncode == 0, done.stderr
    assert (out / "remote" / "value" / "rank-1").exists() == (kind == "ppo")
    assert numbers(out) == numbers(plain) and weights(out) == weights(plain)


@pytest.mark.exhaustive
def test_a_killed_rank_ends_the_world_by_name(tmp_path: Path, two_nodes: dict[str, str]) -> None:
    flags = ("--cluster", "auto", "--cluster.nodes", "2", "--cluster.slots", "1", "--steps", "1000000")
    with subprocess.Popen(
        command("grpo", tmp_path / "run", *flags),
        env=two_nodes,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        ranks = ranks_of(tmp_path / "run", process)
        os.kill(ranks[1], signal.SIGKILL)
        _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 128 + signal.SIGKILL
    assert b"rank 1 of 2 was killed by SIGKILL" in err
    assert left(tmp_path) == []


@pytest.mark.exhaustive
def test_a_rank_that_hangs_ends_the_world_with_the_report(tmp_path: Path, two_nodes: dict[str, str]) -> None:
    flags = ("--cluster", "auto", "--cluster.nodes", "2", "--cluster.slots", "1", "--steps", "1000000")
    with subprocess.Popen(
        command("grpo", tmp_path / "run", *flags, "--rank-timeout", "10"),
        env=two_nodes,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        ranks = ranks_of(tmp_path / "run", process)
        os.kill(ranks[1], signal.SIGSTOP)
        _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 1, err
    assert "lockstep: no rank has made progress for 10 s; the run was ended" in err
    assert f"rank 1 (pid {ranks[1]}) is stopped by a signal" in err
    (file,) = (tmp_path / "run").glob("logs/ranks/*/hang.json")
    report = json.loads(file.read_text())
    assert (report["cause"], report["culprits"]) == ("stopped process", [1])
    assert any("gather" in frame or "reduce" in frame for frame in report["ranks"][0]["stack"])
    # As `lockstep hang` does. If rank 1 was stopped inside a collective, two dead ranks have like records.
    assert 1 in examine(find_records(tmp_path / "run")).culprits
    assert left(tmp_path) == []


def test_a_killed_rank_is_healed_and_ctrl_c_then_saves_and_leaves_nothing(
    tmp_path: Path, cache: Path
) -> None:
    out, said, memory = tmp_path / "run", tmp_path / "said", tmp_path / "memory"
    memory.mkdir()
    flags = ("--cluster", "local", "--steps", "1000000", "--cluster.peer-copy", "--cluster.copy-dir", memory)
    with (
        said.open("wb") as file,
        subprocess.Popen(
            command("grpo", out, *map(str, flags)),
            env=environment(cache, **SETTINGS),
            stdout=file,
            stderr=file,
        ) as process,
    ):
        try:
            ranks = ranks_of(out, process)
            assert {n: psutil.Process(ranks[0]).environ().get(n) for n in SETTINGS} == SETTINGS
            os.kill(ranks[1], signal.SIGKILL)
            until = time.monotonic() + SECONDS
            while "restart 1 of 3: " not in said.read_text():
                assert process.poll() is None and time.monotonic() < until
                time.sleep(0.1)
            process.send_signal(signal.SIGINT)
            process.wait(SECONDS)
        finally:
            process.kill()  # else a run of a million steps is waited for
    text = said.read_text()
    assert process.returncode == 130 and "train: interrupted" in text
    assert "rank 1 of 2 was killed by SIGKILL" in text
    assert "; the run is restarted from host memory at step " in text
    steps = [row["step"] for row in numbers(out)]
    assert steps == list(range(len(steps))), "none is there twice"
    assert json.loads((out / "summary.json").read_text())["restored_from"] == "memory"
    assert list(out.glob("checkpoints/*/complete.json")), text[-3000:]
    assert left(tmp_path) == [] and list(memory.iterdir()) == []
    assert list((cache / "ray").iterdir()) == [] and left(cache / "ray") == []


def ranks_of(out: Path, process: subprocess.Popen[Any]) -> list[int]:
    """The pids of both ranks, once they have taken a step."""
    until = time.monotonic() + SECONDS
    metrics = out / "metrics.jsonl"
    while not metrics.exists() or metrics.stat().st_size == 0:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.1)
    found: dict[int, int] = {}
    for each in psutil.process_iter(["cmdline"]):
        words = each.info["cmdline"] or []
        if (
            words[1:4] == ["-u", "-m", "lockstep"]
            and str(out) in words
            and role_of(each) != "guard"
            and TURN not in each.environ()  # it waits to be a rank
        ):
            found[int(each.environ()["RANK"])] = each.pid
    return [found[rank] for rank in sorted(found)]


REWARD = """
def score(prompt, completion, row, **more):
    return float(len(completion) % 3)
"""


@pytest.fixture(scope="module")
def head(cache: Path) -> Iterator[dict[str, str]]:
    """A head with a dashboard: the environment that may submit to it, and its ADDRESS."""
    with cluster(cache, "head") as (address, token):
        yield environment(cache, RAY_AUTH_TOKEN_PATH=str(token), ADDRESS=address)


def lockstep(*words: str, env: dict[str, str], cwd: Path, cluster: bool = True) -> tuple[int, str]:
    """Status and output of a command about the cluster of `head`."""
    more = ["--cluster", env["ADDRESS"]] if cluster else []
    done = subprocess.run(
        [sys.executable, "-m", "lockstep", *words, *more],
        cwd=cwd,
        env=env,
        capture_output=True,
        text=True,
        timeout=SECONDS,
        check=False,
    )
    return done.returncode, done.stdout + done.stderr


def test_a_submitted_run_trains_as_two_ranks_do_and_takes_its_module_along(
    tmp_path: Path, head: dict[str, str]
) -> None:
    (tmp_path / "my_reward.py").write_text(REWARD)
    (tmp_path / "run.toml").write_text(
        RUN.format(kind="grpo").replace('name = "ids"\n[train]', 'name = "my_reward:score"\n[train]')
    )
    here, there = tmp_path / "here", tmp_path / "there"
    flags = ("--run-dir", str(here), "--ranks", "2", "--cluster", "none")
    status, said = lockstep("train", "run.toml", *flags, env=head, cwd=tmp_path, cluster=False)
    assert status == 0, said
    status, said = lockstep("submit", "run.toml", "--run-dir", str(there), "--follow", env=head, cwd=tmp_path)
    assert status == 0 and "step 2/2" in said and ": finished, " in said, said
    assert numbers(there) == numbers(here) and weights(there) == weights(here)
    for words in (("status",), ("status", str(there)), ("logs", str(there))):
        status, said = lockstep(*words, env=head, cwd=tmp_path)
        assert status == 0 and str(there) in said
    for folder in (there, Path(head["RAY_AUTH_TOKEN_PATH"]).parent):
        files = [path for path in folder.rglob("*") if path.is_file() and not path.is_symlink()]
        assert [path for path in files if CANARY.encode() in path.read_bytes()] == []


def test_a_submitted_run_is_stopped_with_a_checkpoint_and_goes_on(
    tmp_path: Path, head: dict[str, str]
) -> None:
    out = tmp_path / "run"
    (tmp_path / "run.toml").write_text(RUN.format(kind="grpo"))
    submit = ("submit", "run.toml", "--run-dir", str(out), "--steps", "1000000")
    status, said = lockstep(*submit, env=head, cwd=tmp_path)
    assert status == 0 and said.startswith("submit: lockstep-") and said.count("\n") == 1, said
    status, said = lockstep(*submit, env=head, cwd=tmp_path)
    assert status == 2 and "choose another folder" in said
    until = time.monotonic() + SECONDS
    while not (out / "metrics.jsonl").exists() or not (out / "metrics.jsonl").stat().st_size:
        assert time.monotonic() < until, lockstep("logs", str(out), env=head, cwd=tmp_path)
        time.sleep(0.1)
    status, said = lockstep("stop", str(out), env=head, cwd=tmp_path)
    assert status == 0 and ": stopped, " in said
    done = len(numbers(out))
    assert [path.name for path in out.glob("checkpoints/*")] == [f"step-{done:06d}"]
    status, said = lockstep("stop", str(out), env=head, cwd=tmp_path)
    assert status == 1 and "nothing to stop" in said
    more = ("submit", "--resume", "run", "--steps", str(done + 1), "--follow")
    status, said = lockstep(*more, env=head, cwd=tmp_path)
    assert status == 0 and len(numbers(out)) == done + 1, said


@pytest.mark.parametrize(
    ("change", "flags", "wanted"),
    [
        ({"ADDRESS": "http://127.0.0.1:1"}, ("--run-dir", "/tmp/run"), "no Ray head answers"),
        ({"ADDRESS": "ray://head:10001"}, ("--run-dir", "/tmp/run"), "http://HEAD:8265"),
        ({"RAY_AUTH_TOKEN_PATH": "bad"}, ("--run-dir", "/tmp/run"), "RAY_AUTH_TOKEN_PATH"),
        ({"RAY_AUTH_TOKEN_PATH": "none"}, ("--run-dir", "/tmp/run"), "no token"),
        ({}, (), "--run-dir with an absolute path"),
        ({}, ("--run-dir", "run"), "--run-dir with an absolute path"),
        ({}, ("--run-dir", "/tmp/run", "--model.name", "./bad"), "--include"),
        (
            {},
            ("--run-dir", "/tmp/run", "--data.source", "data/no.jsonl"),
            "data.source = 'data/no.jsonl' is a rel",
        ),
        ({}, ("--run-dir", "/tmp/run", "--cluster.slots", "3"), "2 CPUs"),
        ({}, ("--run-dir", "/tmp/run", "--cluster.nodes", "2"), "the cluster has only 1 such node"),
        ({}, ("--run-dir", "/tmp/run", "--include", ".."), "below the working directory"),
        ({}, ("--run-dir", "/tmp/run", "--include", "no"), "no such file or folder"),
        (
            {},
            ("--run-dir", "/tmp/run", "--include", "no", "--data.system-prompt", "b" * 300 + "/"),
            "no such file",
        ),
        ({}, ("--run-dir", "/tmp/run", "--ranks", "3"), "1 * 2 = 2 ranks"),
    ],
)
def test_what_cannot_be_submitted_is_refused(
    change: dict[str, str], flags: tuple[str, ...], wanted: str, head: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(RUN.format(kind="grpo"))
    (tmp_path / "bad").write_text("no token")
    (tmp_path / "bad").chmod(0o600)
    status, said = lockstep("submit", "run.toml", *flags, env={**head, **change}, cwd=tmp_path)
    assert status == 2 and wanted in said and "Traceback" not in said


def test_a_cluster_without_a_token_is_refused(tmp_path: Path, cache: Path) -> None:
    env = environment(cache, HOME=str(tmp_path), RAY_ADDRESS="127.0.0.1:1")
    env.pop("RAY_AUTH_TOKEN_PATH", None)
    done = train("grpo", tmp_path / "run", "--cluster", "auto", env=env)
    assert done.returncode == 2 and "no token" in done.stderr
