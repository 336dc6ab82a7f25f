"""vLLM's own server, started by VLLMServer: the conformance suite, and what can go wrong with a server.

One start for all (30 s on two cores), one more for the kill in mid-batch.
"""

import dataclasses
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from conformance import *  # noqa: F403
from conformance import LONG, VOCAB, Subject, conformance_model, gaps, prompt, request, sharpen
from inprocess import KV_BYTES, spec_of
from raising import raises

from lockstep.config.engine import EngineConfig
from lockstep.engine.remote.http import HttpClient
from lockstep.engine.vllm.server import VLLMServer
from lockstep.errors import EngineError
from lockstep.schema.weights import WeightBucket, WeightUpdate
from lockstep.transfer import make_transfer
from lockstep.wire.buckets import Layout

TOLERANCE = 1e-4
WRONG = 0.05
"""Nats: weights that are not the trainer's are off by more."""


class Trainer:
    """What a transfer asks of one: all weights by name, whole."""

    def __init__(self, model):
        self.module = model.module

    def weights(self, *, policy_version):
        return WeightUpdate(
            policy_version=policy_version,
            tensors=lambda: iter(self.module.state_dict().items()),
            shared_module=self.module,
        )


def config_of(**changes):
    settings = {
        "name": "vllm",
        "python": sys.executable,
        "eager": True,
        "max_batch": 64,
        "bucket_mb": 1,
        "verify": "always",
        "start_seconds": 240.0,
        "request_seconds": 60.0,
        "options": {"kv_cache_memory_bytes": KV_BYTES},
    }
    return EngineConfig(**(settings | changes))


class Served:
    """A server, its trainer and the way between them."""

    def __init__(self, folder):
        self.model = conformance_model()
        self.spec = spec_of(self.model, folder)
        self.engine = VLLMServer(config_of(), spec=self.spec)
        self.version = 0
        self._ways = {}

    def push(self, version, *, way="disk"):
        self.version = version
        if way not in self._ways:
            self._ways[way] = make_transfer(config_of(transfer=way), self.engine, device="cpu")
        transfer = self._ways[way]
        transfer.push(Trainer(self.model), self.engine, policy_version=version)
        assert transfer.check(self.engine)

    def gap(self, length=LONG, seeds=range(2), **sampling):
        (row,) = self.engine.generate([request(prompt(length), seeds, **sampling)])
        assert {c.policy_version for c in row} == {self.version}
        return max(float(gaps(self.model, c, 1.0).max()) for c in row)

    def close(self):
        for transfer in self._ways.values():
            transfer.close()
        self.engine.close()


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    served = Served(tmp_path_factory.mktemp("served"))
    yield served
    served.close()


@pytest.fixture(scope="module")
def subject(served):
    served.push(served.version + 1)
    subject = Subject(
        engine=served.engine,
        model=served.model,
        push=served.push,
        version=served.version,
        temperatures=(0.0, 1.0),
        refuses=frozenset({"min_tokens with stop"}),
        sleeps=False,  # vLLM has no sleep mode on a CPU
        tolerance=TOLERANCE,
    )
    yield subject


@pytest.fixture
def healed(served):
    """Holds the trainer's weights, whatever the last test left."""
    served.push(served.version + 1)
    return served


# weights


@pytest.mark.parametrize("way", ["disk", "collective"])
def test_weights_arrive_by(healed, way):
    sharpen(healed.model.module, seed=50 + len(way))
    assert healed.gap() > WRONG  # the engine's are the old ones still
    healed.push(healed.version + 1, way=way)
    assert healed.gap() <= TOLERANCE


def sent(served, tensors):
    """One session with these tensors, by file."""
    from inprocess import session
    from safetensors.torch import save_file

    path = served.spec.work_dir / "bucket.safetensors"
    save_file(dict(tensors), path)
    layout = Layout(1 << 30)
    for name, tensor in tensors:
        layout.place(name, tensor)
    opened = session(served.version + 1)
    served.engine.begin_update(opened)
    bucket = WeightBucket(
        index=0,
        specs=tuple(layout.specs),
        num_bytes=layout.num_bytes,
        transport="disk",
        handle={"path": str(path)},
    )
    try:
        served.engine.receive(bucket)
        served.engine.finish_update(opened)
    except EngineError as error:
        served.engine.fail_update(str(error))
        raise


@pytest.mark.parametrize(
    ("change", "message", "missing"),
    [
        (
            lambda w: w | {"model.norm.weight": torch.ones(3)},
            "refused: 0, lockstep_receive",
            "torch.Size([3])",
        ),
        (lambda w: w | {"model.layers.9.x": torch.ones(3)}, "refused: 0, lockstep_receive", ""),
        (
            lambda w: {k: v for k, v in w.items() if "0.self_attn.k_proj" not in k},
            "refused: 0, lockstep_finish",
            "lacks weights",
        ),
        (
            lambda w: {k: v for k, v in w.items() if "lm_head" not in k},
            "refused: 0, lockstep_finish",
            "lm_head",
        ),
    ],
    ids=["shape", "name", "part of a fused group", "tied or last layer"],
)
def test_wrong_weights_are_refused_and_the_next_session_is_right(healed, change, message, missing):
    weights = {k: v.clone() for k, v in healed.model.module.state_dict().items()}
    with raises(EngineError, message) as caught:
        sent(healed, list(change(weights).items()))
    assert missing in str(caught.value)
    assert healed.engine.dirty
    with raises(EngineError, "wrong-state: dirty"):
        healed.gap()
    healed.push(healed.version + 1)
    assert healed.gap() <= TOLERANCE


# url: the server of these tests, used as somebody else's


@pytest.fixture
def guest(healed, monkeypatch):
    """Settings of an engine at its url."""
    monkeypatch.setenv("TOKEN_OF_THE_SERVER", healed.engine._server.spec.token)
    return {"url": healed.engine.describe()["url"], "token_env": "TOKEN_OF_THE_SERVER"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"dtype": "bfloat16"}, "server-settings: --dtype"),
        ({"max_model_len": 4096}, "server-settings: --max-model-len"),
        ({"vocab_size": VOCAB + 1}, "other-model: smaller"),
        ({"temperatures": frozenset({0.7})}, "server-settings: --logprobs-mode"),
        ({"folder": Path("/nowhere"), "model_name": "other"}, "other-model: hidden_size"),
    ],
)
def test_a_server_that_is_another_is_refused(healed, guest, changes, message):
    spec = dataclasses.replace(healed.spec, **changes)
    with raises(EngineError, message):
        VLLMServer(EngineConfig(name="vllm", **guest), spec=spec)


@pytest.mark.parametrize(
    "path",
    ["/health", "/v1/models", "/inference/v1/generate", "/collective_rpc", "/sleep", "/pause", "/metrics"],
)
def test_nothing_is_answered_without_the_token(healed, path):
    client = HttpClient(healed.engine.describe()["url"], name="stranger")
    assert client.get(path, seconds=30.0).status == 401
    assert client.post(path, {}, seconds=30.0).status == 401


def test_a_server_at_a_url_takes_weights_and_is_not_stopped(healed, guest):
    guest = VLLMServer(EngineConfig(name="vllm", **guest, transfer="disk"), spec=healed.spec)
    assert guest.dirty
    transfer = make_transfer(guest._config, guest, device="cpu")
    sharpen(healed.model.module, seed=77)
    transfer.push(Trainer(healed.model), guest, policy_version=5)
    (row,) = guest.generate([request(prompt(LONG), range(2))])
    assert max(float(gaps(healed.model, c, 1.0).max()) for c in row) <= TOLERANCE
    transfer.close()
    guest.close()
    assert healed.engine.memory()["weights_bytes"] > 0  # it still answers


# the process


def test_environment_and_command_are_said(served):
    said = served.engine.describe()
    assert said["command"][0] == sys.executable and "--logprobs-mode" in said["command"]
    assert said["environment"]["VLLM_SERVER_DEV_MODE"] == "1"
    log = Path(said["log"]).read_text()
    assert "=== environment: VLLM_SERVER_DEV_MODE=1" in log
    assert "127.0.0.1" in said["command"] and said["url"].rpartition(":")[2] in said["command"]


def children(pid):
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                state, parent = (entry / "stat").read_text().rpartition(")")[2].split()[:2]
            except OSError:
                continue
            if int(parent) == pid and state != "Z":
                found.append(int(entry.name))
    return found


def family(pid):
    return [pid, *(p for child in children(pid) for p in family(child))]


def test_killed_in_mid_batch(healed):
    """vLLM's engine process is killed; the server behind it ends, another one starts and gets the trainer's
    weights, and only the samples that were missing are asked for again."""
    engine = healed.engine
    watcher = engine.describe()["pid"]
    before = family(watcher)
    (server,) = children(watcher)
    victim = next(p for p in children(server) if "EngineCore" in Path(f"/proc/{p}/cmdline").read_text())
    # 64 at a time: the last four are sent when the short ones are there, and cannot be done before the kill
    asked = [request(prompt(20), range(4), max_tokens=2), request(prompt(30), range(64), max_tokens=400)]
    seen = []

    def note(index, sample, completion):
        if not seen:
            os.kill(victim, signal.SIGKILL)
        seen.append((index, sample))

    results = engine.generate(asked, on_completion=note)
    assert sorted(seen) == [(0, i) for i in range(4)] + [(1, i) for i in range(64)]  # once each
    assert [len(row) for row in results] == [4, 64] and engine.stats().restarts == 1
    for row in results:
        for completion in row[::4]:
            assert completion.policy_version == healed.version
            assert float(gaps(healed.model, completion, 1.0).max()) <= TOLERANCE
    assert not any(Path(f"/proc/{p}").exists() for p in before)  # no orphan
    assert healed.gap() <= TOLERANCE


def test_death_at_start_shows_vllms_own_reason(healed, tmp_path):
    config = config_of(options={"kv_cache_memory_bytes": KV_BYTES, "attention_backend": "NO_SUCH_BACKEND"})
    spec = dataclasses.replace(healed.spec, work_dir=tmp_path)
    with raises(EngineError, "process-died", reason="exited with status 1") as caught:
        VLLMServer(config, spec=spec)
    assert "NO_SUCH_BACKEND" in str(caught.value)  # of its log


def test_start_deadline(healed, tmp_path):
    spec = dataclasses.replace(healed.spec, work_dir=tmp_path)
    began = time.monotonic()
    with raises(EngineError, "deadline: engine.start_seconds") as caught:
        VLLMServer(config_of(start_seconds=2.0), spec=spec)
    assert time.monotonic() - began < 40.0
    assert "vllm.log" in str(caught.value)
