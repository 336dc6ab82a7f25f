"""engine.url: is the server there the one that this run needs? Against fakes, which load no model."""

import json
import socket
import threading
import time
from contextlib import contextmanager

import pytest

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
        ({"version": "0.25.1"}, r"has vLLM 0\.25\.1; Lockstep knows .* 0\.26 up to, not including, 0\.34"),
        ({"version": "0.34.0"}, r"has vLLM 0\.34\.0"),
        ({"version": None}, "has vLLM None"),
        ({"root": "meta/other"}, "serves 'meta/other', and this run's model is 'fake-model'"),
        ({"root": "other"}, "another model than this run's .* differ in hidden_size"),
        ({"max_model_len": 63}, "takes prompts and completions of 63 tokens.*--max-model-len 64"),
        ({"vocab": 99}, "a smaller vocabulary .* refuses token id 99"),
        ({"vocab": 101}, "a larger vocabulary .* takes token id 100"),
        ({"info": {"dtype": "torch.bfloat16"}}, "computes in bfloat16, and this run in float32"),
        (
            {"info": {"dtype": "torch.float32", "logprobs_mode": "raw_logits"}},
            "gives raw_logits, and temperatures .1.0. need raw_logprobs",
        ),
        ({"raw": "{}", "status": 403}, "token route switched off.*--enable-scale-out"),
        ({"raw": "{}", "status": 404}, "since 0.26"),
        ({"health": 503}, "cannot be used: .* answered 503"),
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
        with pytest.raises(EngineError, match=message):
            VLLMServer(config, spec=spec_in(tmp_path))
        server.stop()
        return
    with pytest.raises(EngineError, match=message), connected(tmp_path, **plan):
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
        pytest.raises(EngineError, match=r"gives raw_logprobs, and temperatures .0\.7."),
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
        with pytest.raises(EngineError, match="top_p"):
            engine.generate(requests_of(1, top_p=0.5))


def test_a_server_without_our_worker_takes_no_weights(tmp_path):
    from lockstep.schema.weights import UpdateSession

    with connected(tmp_path, worker="", spec={"weights": "pushed"}) as (engine, _):
        session = UpdateSession(policy_version=1, run_id="t", deadline=time.monotonic() + 10)
        with pytest.raises(EngineError, match=r"VLLM_SERVER_DEV_MODE=1 and --worker-extension-cls"):
            engine.begin_update(session)
        assert engine.dirty


def test_nothing_at_the_url(tmp_path):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{probe.getsockname()[1]}"
    with pytest.raises(EngineError, match=r"engine\.url = .* cannot be used: .*refused"):
        VLLMServer(EngineConfig(name="vllm", url=url), spec=spec_in(tmp_path))


def test_a_url_that_accepts_and_never_answers(tmp_path):
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        deaf.listen()
        url = f"http://127.0.0.1:{deaf.getsockname()[1]}"
        with pytest.raises(EngineError, match="not answered in time"):
            VLLMServer(EngineConfig(name="vllm", url=url), spec=spec_in(tmp_path))


def test_a_server_at_a_url_that_goes_away(tmp_path):
    with connected(tmp_path, seconds={"1": 30.0, "2": 30.0}) as (engine, server):
        threading.Timer(0.5, server.stop).start()
        with pytest.raises(EngineError, match=r"server at engine\.url went away"):
            engine.generate(requests_of(1, 2))


@pytest.mark.parametrize("version", ["0.26.0", "0.32.0", "0.33.1.dev3+cpu"])
def test_versions_that_are_known(version):
    check_version(version, where="here")


def test_an_environment_without_vllm(tmp_path):
    import sys
    from pathlib import Path

    with pytest.raises(EngineError, match="has no vLLM"):
        installed_vllm(Path(sys.executable))
    config = EngineConfig(name="vllm", python=tmp_path / "no")
    with pytest.raises(ConfigError, match="not an executable file"):
        VLLMServer(config, spec=spec_in(tmp_path))
