"""engine.url: is the server there the one that this run needs? Against fakes, which load no model."""

import json
import socket
import threading
import time
from contextlib import contextmanager

import pytest
from raising import raises

from lockstep.config.engine import EngineConfig
from lockstep.engine.vllm.server import VLLMServer, check_version, installed_vllm
from lockstep.errors import ConfigError, EngineError

from .servers import answers, asked, process, requests_of, spec_in, write_plan

CONFIG = {"model_type": "llama", "hidden_size": 8, "num_hidden_layers": 2}


@contextmanager
def connected(folder, *, spec=None, **plan):
    """An engine at the url of a fake that runs already, and the fake."""
    (folder / "config.json").write_text(json.dumps(CONFIG))
    write_plan(folder, {"root": str(folder)} | plan)
    server = process(folder)
    server.start(answers(server))
    try:
        config = EngineConfig(name="vllm", url=server.spec.url, request_seconds=10.0)
        yield VLLMServer(config, spec=spec_in(folder, **(spec or {}))), server
    finally:
        server.stop()


def test_a_server_at_a_url_is_used_and_never_stopped(tmp_path):
    with connected(tmp_path, id="fake") as (engine, server):
        assert engine.generate(requests_of(5))[0][0].token_ids == (5, 6, 7, 8)
        assert engine.describe()["url"] == server.spec.url and "command" not in engine.describe()
        assert asked(tmp_path)[-1]["model"] == "fake"
        engine.close()
        assert server.ended() is None


OTHER = CONFIG | {"hidden_size": 16}


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"version": "0.25.1"}, "unsupported-version: 0.25.1"),
        ({"version": "0.34.0"}, "unsupported-version: 0.34.0"),
        ({"version": None}, "unsupported-version: None"),
        ({"root": "meta/other"}, "other-model: meta/other"),
        ({"root": "other"}, "other-model: hidden_size"),
        ({"max_model_len": 63}, "server-settings: --max-model-len"),
        ({"vocab": 99}, "other-model"),
        ({"vocab": 101}, "other-model"),
        ({"info": {"dtype": "torch.bfloat16"}}, "server-settings: --dtype"),
        (
            {"info": {"dtype": "torch.float32", "logprobs_mode": "raw_logits"}},
            "server-settings: --logprobs-mode",
        ),
        ({"raw": "{}", "status": 403}, "server-settings: --enable-scale-out"),
        ({"raw": "{}", "status": 404}, "unsupported-version: /inference/v1/generate"),
        ({"health": 503}, "unreachable: engine.url"),
    ],
)
def test_another_server_is_refused(tmp_path, plan, message):
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "config.json").write_text(json.dumps(OTHER))
    if plan.get("root") == "other":
        plan = {"root": str(tmp_path / "other")}
    if plan.get("health"):
        pytest.importorskip("sys")
        write_plan(tmp_path, plan)
        server = process(tmp_path)
        server.start(lambda: None if (tmp_path / "plan.starts").exists() else "starting")
        time.sleep(0.5)
        config = EngineConfig(name="vllm", url=server.spec.url)
        with raises(EngineError, message):
            VLLMServer(config, spec=spec_in(tmp_path))
        server.stop()
        return
    with raises(EngineError, message), connected(tmp_path, **plan):
        pass


def test_the_same_model_in_another_folder_is_accepted(tmp_path):
    other = tmp_path / "copy"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(CONFIG | {"transformers_version": "0"}))
    with connected(tmp_path, root=str(other)) as (engine, _):
        assert engine.generate(requests_of(1))


def test_kind_of_logprobs_without_dev_mode(tmp_path, caplog):
    """One candidate is left: its processed logprob is 0, its raw one is not."""
    hot = {"temperatures": frozenset([0.7])}
    with (
        raises(EngineError, "server-settings"),
        connected(tmp_path, info=None, spec=hot),
    ):
        pass
    with connected(tmp_path, info=None, logprob=0.0, spec=hot) as (engine, _):
        assert engine.generate(requests_of(1, temperature=0.7))
    assert "does not say its dtype" in caplog.text


def test_processed_logprobs_do_for_temperature_one_without_truncation(tmp_path):
    info = {"dtype": "torch.float32", "logprobs_mode": "processed_logprobs"}
    with connected(tmp_path, info=info) as (engine, _):
        assert engine.generate(requests_of(1))
        with raises(EngineError, "unsupported-sampling: sampling.top_p"):
            engine.generate(requests_of(1, top_p=0.5))


def test_a_server_without_our_worker_takes_no_weights(tmp_path):
    from lockstep.schema.weights import UpdateSession

    with connected(tmp_path, worker="", spec={"weights": "pushed"}) as (engine, _):
        session = UpdateSession(policy_version=1, run_id="t", deadline=time.monotonic() + 10)
        with raises(EngineError, "server-settings", flag="--worker-extension-cls"):
            engine.begin_update(session)
        assert engine.dirty


def test_nothing_at_the_url(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with raises(EngineError, "unreachable: engine.url"):
        VLLMServer(EngineConfig(name="vllm", url=url), spec=spec_in(tmp_path))


def test_a_url_that_accepts_and_never_answers(tmp_path):
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        with raises(EngineError, "unreachable: engine.url"):
            VLLMServer(EngineConfig(name="vllm", url=url), spec=spec_in(tmp_path))


def test_a_server_at_a_url_that_goes_away(tmp_path):
    with connected(tmp_path, seconds={"1": 30.0, "2": 30.0}) as (engine, server):
        threading.Timer(0.5, server.stop).start()
        with raises(EngineError, "unreachable: engine.url"):
            engine.generate(requests_of(1, 2))


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0", "0.33.1.dev3+cpu"])
def test_versions_that_are_known(version):
    check_version(version, where="here")


def test_an_environment_without_vllm(tmp_path):
    import sys
    from pathlib import Path

    with raises(EngineError, "missing-package: engine.python"):
        installed_vllm(Path(sys.executable))
    config = EngineConfig(name="vllm", python=tmp_path / "no")
    with raises(ConfigError, "not-a-file: engine.python"):
        VLLMServer(config, spec=spec_in(tmp_path))
