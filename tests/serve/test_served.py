"""What the table of docs/how-to/serve.md says is served by the real client, and what is kept in memory."""

from __future__ import annotations

import dataclasses
import json
import threading
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from raising import raises
from serving import (
    PROMPT,
    SECONDS,
    datum,
    equal,
    forward,
    gap,
    message,
    post,
    result,
    sampled,
    tinker,
    types,
    weights,
)

from lockstep.cli.serve import main as serve_command
from lockstep.errors import ConfigError, DataError, EngineError, ModelError, TrainError
from lockstep.models.export import export_hf
from lockstep.serve import sessions, wire, work
from lockstep.serve.app import Server
from lockstep.serve.models import BaseModel
from lockstep.serve.service import Service
from lockstep.serve.sessions import Gone
from lockstep.serve.store import Store
from lockstep.serve.work import Answer, Busy, Job, Worker
from lockstep.view.look import look
from lockstep.view.runs import RunReader, find_runs

ADAM = types.AdamParams(learning_rate=0.01)


def test_all_weights_are_trained_and_sampled(served: Any, service: Any) -> None:
    """The client itself asks for adapters only."""
    session = service.holder.get_session_id()
    body = {"session_id": session, "model_seq_id": 1000, "base_model": "tiny"}
    created = result(served, post(served, "create_model", body)[1]["request_id"])
    info = types.GetInfoResponse(**post(served, "get_info", {"model_id": created["model_id"]})[1])
    client = tinker.TrainingClient(service.holder, 1000, created["model_id"], info=info)
    before = weights(served, client, "before")
    assert not info.is_lora and any(name.endswith("embed_tokens.weight") for name in before)
    base = sampled(service.create_sampling_client(base_model="tiny").result(), n=1).sequences[0]
    assert gap(client, base) == 0.0
    client.forward_backward([datum(PROMPT, weights=[1.0] * 4)], "cross_entropy")
    client.optim_step(ADAM).result(SECONDS)
    after = weights(served, client, "after")
    assert all(not torch.equal(after[name], tensor) for name, tensor in before.items())
    path = f"tinker://{client.model_id}/sampler_weights/after"
    sequence = sampled(service.create_sampling_client(model_path=path).result(), n=1).sequences[0]
    assert gap(client, sequence) == 0.0 and sequence.logprobs != base.logprobs
    saved = client.save_state("all").result(SECONDS).path
    client.load_state(saved).result(SECONDS)
    assert equal(weights(served, client, "loaded"), after)


def test_a_custom_loss_is_the_loss_that_it_computes(served: Any, service: Any) -> None:
    custom, plain = (service.create_lora_training_client("tiny", rank=2, seed=1).result() for _ in range(2))
    data, scale = [datum(PROMPT), datum([*PROMPT, 30])], torch.tensor([1.0, 2.0])

    def loss(data: Any, logprobs: Any) -> Any:
        total = -(torch.stack([one.sum() for one in logprobs]) * scale).sum()
        return total, {"mine": float(total.detach())}

    metrics = custom.forward_backward_custom(data, loss).result(SECONDS).metrics
    weighted = [datum(PROMPT, weights=[1.0] * 4), datum([*PROMPT, 30], weights=[2.0] * 5)]
    expected = plain.forward_backward(weighted, "cross_entropy").result(SECONDS).metrics
    assert metrics["mine"] == pytest.approx(expected["loss:sum"], rel=1e-6)
    for client in (custom, plain):
        client.optim_step(ADAM).result(SECONDS)
    assert equal(weights(served, custom, "custom"), weights(served, plain, "plain"))


def test_top_p_draws_from_the_likeliest(service: Any) -> None:
    client = service.create_lora_training_client("tiny", rank=2, seed=1).result()
    sampler = client.save_weights_and_get_sampling_client().result()
    greedy = sampled(sampler, n=1, temperature=0.0).sequences[0]
    narrow = sampled(sampler, n=1, top_p=1e-6).sequences[0]
    wide = sampled(sampler, n=1, top_p=0.9).sequences[0]
    assert narrow.tokens == greedy.tokens != wide.tokens
    assert gap(client, narrow) == gap(client, wide) == 0.0  # of the whole distribution


def test_the_last_logprobs_of_a_prompt(service: Any) -> None:
    client = service.create_lora_training_client("tiny", rank=2, seed=1).result()
    sampler = client.save_weights_and_get_sampling_client().result()
    last = sampler.compute_logprobs(types.ModelInput.from_ints(PROMPT), prompt_logprobs_last_n=2).result(
        SECONDS
    )
    assert last[:3] == [None] * 3
    assert torch.equal(torch.tensor(last[3:]), forward(client, PROMPT)[2:])


def test_candidates_of_prompts_and_samples(service: Any) -> None:
    client = service.create_lora_training_client("tiny", rank=2, seed=1).result()
    client.forward_backward([datum(PROMPT, weights=[1.0] * 4)], "cross_entropy")
    client.optim_step(ADAM)
    sampler = client.save_weights_and_get_sampling_client().result()
    prompt, params = types.ModelInput.from_ints(PROMPT), types.SamplingParams(max_tokens=3, seed=1, stop=[])
    targets = [[token, -1] for token in PROMPT[1:]]
    answer = sampler.sample(
        prompt,
        1,
        params,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=256,
        topk_sample_logprobs=2,
        target_prompt_logprobs=types.TensorData.from_torch(torch.tensor(targets)),
    )
    with pytest.raises(tinker.BadRequestError, match="topk_prompt_logprobs = 256"):
        answer.result(SECONDS)
    answer = sampler.sample(
        prompt,
        1,
        params,
        include_prompt_logprobs=True,
        topk_prompt_logprobs=64,
        topk_sample_logprobs=2,
        target_prompt_logprobs=types.TensorData.from_torch(torch.tensor(targets)),
    ).result(SECONDS)
    own = forward(client, PROMPT)
    assert torch.equal(answer.target_prompt_logprobs.to_torch(), torch.stack([own, torch.zeros(4)], 1))
    assert answer.topk_prompt_logprobs[0] is None
    for position, top in enumerate(answer.topk_prompt_logprobs[1:], start=1):
        values = [logprob for _, logprob in top]
        assert len(top) == 64 and values == sorted(values, reverse=True)
        for token, logprob in top[:2]:  # of the trainer too, with this token in place of the prompt's
            assert float(forward(client, [*PROMPT[:position], token])[-1]) == logprob
    sequence = answer.sequences[0]
    for token, logprob, top in zip(sequence.tokens, sequence.logprobs, sequence.topk_logprobs, strict=True):
        assert len(top) == 2 and top[0][1] >= top[1][1]
        assert dict(top).get(token, logprob) == logprob <= top[0][1]


def test_stop_strings(served: Any, service: Any) -> None:
    sampler = service.create_sampling_client(base_model="worded").result()
    tokenizer = served.bases[1].loaded.tokenizer
    whole = sampled(sampler, n=1, max_tokens=24, stop=[])
    tokens = whole.sequences[0].tokens
    at, stop = next(
        (at, text)
        for at, token in enumerate(tokens)
        if at > 1 and (text := tokenizer.decode([token])).isascii() and text.strip() and token > 16
    )
    first = next(n for n in range(1, len(tokens) + 1) if stop in tokenizer.decode(tokens[:n]))
    ended = sampled(sampler, n=1, max_tokens=24, stop=stop).sequences[0]
    assert first <= at + 1 and (ended.tokens, ended.stop_reason) == (tokens[:first], "stop")
    without = service.create_sampling_client(base_model="tiny").result()
    with pytest.raises(tinker.RequestFailedError, match="no-tokenizer"):
        sampled(without, n=1, stop=stop)


def test_a_model_that_cannot_be_served_is_refused_at_the_start() -> None:
    with raises(ModelError, "not-batch-invariant: no row-invariant form"):
        BaseModel("neox", "shape:tiny-gpt-neox", device=torch.device("cpu"), dtype="float32")


def test_a_closed_client_frees_what_it_had(served: Any) -> None:
    with tinker.ServiceClient(base_url=served.url, api_key=served.tokens["ada"]) as service:
        client = service.create_lora_training_client("tiny", rank=2, seed=1).result()
        path = client.save_weights_for_sampler("kept").result(SECONDS).path
    assert post(served, "get_info", {"model_id": client.model_id})[0] == 404
    later = tinker.ServiceClient(base_url=served.url, api_key=served.tokens["ada"])
    assert sampled(later.create_sampling_client(model_path=path).result(), n=1).sequences[0].tokens


def test_adapters_are_downloaded_as_peft_reads_them(served: Any, service: Any, tmp_path: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    client = service.create_lora_training_client("tiny", rank=2, seed=1).result()
    client.forward_backward([datum(PROMPT, weights=[1.0] * 4)], "cross_entropy")
    client.optim_step(ADAM)
    path = client.save_weights_external("others").result(SECONDS).path
    assert path == f"tinker://{client.model_id}/external_weights/others"
    urls = service.create_rest_client().get_external_weights_urls(path).result().urls
    assert sorted(urls) == ["adapter_config.json", "adapter_model.safetensors"]
    for name, url in urls.items():
        urllib.request.urlretrieve(url, tmp_path / name)
    for wrong in (url.replace(name, "about.json"), url.replace("/others/", "/mine/")):
        with pytest.raises(urllib.error.HTTPError, match=r"40[14]"):
            urllib.request.urlopen(wrong)
    export_hf(served.bases[0].loaded.module, None, tmp_path / "base")
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path)
    logits = model(torch.tensor([PROMPT])).logits[0, :-1].log_softmax(-1)
    theirs = logits.gather(1, torch.tensor(PROMPT[1:])[:, None])[:, 0]
    assert float((theirs - forward(client, PROMPT)).abs().max()) < 1e-5


def test_a_client_is_a_run_of_its_own(served: Any) -> None:
    with tinker.ServiceClient(base_url=served.url, api_key=served.tokens["ada"]) as service:
        client = service.create_lora_training_client("tiny", rank=2, seed=1).result()
        folder = served.store.folder(client.model_id)
        for _ in range(2):
            done = client.forward_backward([datum(PROMPT, weights=[1.0] * 4)], "cross_entropy")
            adam = client.optim_step(ADAM).result(SECONDS)
        seen, row = look(folder), RunReader(folder).row()
        assert (seen.state, seen.steps, row.state, row.kind, row.model) == (
            "running",
            2,
            "training",
            "serve",
            "tiny",
        )
        assert seen.last["loss"] == done.result(SECONDS).metrics["loss:sum"]
        assert seen.last["grad_norm"] == adam.metrics["grad_norm"]
    assert (look(folder).state, look(folder).steps, look(folder).gaps) == ("finished", 2, ())
    assert find_runs([served.store.directory / "models"])
    assert "start lockstep serve again" in dataclasses.replace(look(folder), state="died").text()


def test_a_sampling_session_never_gets_other_weights(service: Any) -> None:
    client = service.create_lora_training_client("tiny", rank=2, seed=1).result()
    path = client.save_weights_for_sampler("again").result(SECONDS).path
    old = service.create_sampling_client(model_path=path).result()
    service.create_rest_client().delete_checkpoint_from_tinker_path(path).result()
    client.forward_backward([datum(PROMPT, weights=[1.0] * 4)], "cross_entropy")
    client.optim_step(ADAM)
    client.save_weights_for_sampler("again").result(SECONDS)
    new = service.create_sampling_client(model_path=path).result()
    assert gap(client, sampled(new, n=1).sequences[0]) == 0.0
    with pytest.raises(tinker.RequestFailedError, match="no longer kept"):
        sampled(old, n=1)


def test_a_client_that_found_no_room_can_ask_again(served: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    session = post(served, "create_session", {"tags": [], "user_metadata": None, "sdk_version": "0"})[1]
    body = {"session_id": session["session_id"], "model_seq_id": 0, "base_model": "tiny"}
    body |= {"lora_config": {"rank": 2, "seed": 1}}
    with monkeypatch.context() as patch:
        patch.setattr(work, "MOST_WAITING", 0)
        assert post(served, "create_model", body)[0] == 429
    created = result(served, post(served, "create_model", body)[1]["request_id"])
    assert created["model_id"].endswith(":train:0")


def test_sessions_that_nobody_uses_make_room(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = Service(served.bases, Store(tmp_path), most_clients=1)

    def create(session: Any) -> None:
        adapters = types.LoraConfig(rank=2, seed=1)
        request = types.CreateModelRequest(
            session_id=session.id, model_seq_id=0, base_model="tiny", lora_config=adapters
        )
        service.create_model(request, "ada")

    first, second = (service.sessions.create("ada", None) for _ in range(2))
    assert service.sessions.create("ada", "key") is service.sessions.create("ada", "key")
    create(first)
    with raises(DataError, "too-large: 1 training clients"):
        create(second)
    first.used -= sessions.IDLE_SECONDS + 1
    create(second)
    with raises(Gone, "unknown-name: there is no session"):
        service.sessions.get(first.id, "ada")
    monkeypatch.setattr(sessions, "MOST_SESSIONS", 1)
    with raises(Busy, "too-large: 1 sessions"):
        service.sessions.create("ada", None)


def test_too_little_memory_and_late_samples_are_errors_of_their_own(served: Any, tmp_path: Path) -> None:
    def full() -> Answer:
        raise torch.OutOfMemoryError("CUDA out of memory")

    worker = Worker(lambda jobs: [], most_together=1)
    job = Job("client:0", "lane", run=full)
    worker.submit(job)
    worker.start()
    with raises(TrainError, "out-of-memory: close clients that are done"):
        job.future.result(60)
    worker.close()

    service = Service(served.bases, Store(tmp_path), sample_seconds=0.05)
    session = service.sessions.create("ada", None)
    opened = types.CreateSamplingSessionRequest(
        session_id=session.id, sampling_session_seq_id=0, base_model="tiny"
    )
    body = {
        "sampling_session_id": service.create_sampling(opened, "ada").id,
        "seq_id": 0,
        "prompt": {"chunks": [{"type": "encoded_text", "tokens": PROMPT}]},
        "sampling_params": {"max_tokens": 3000, "stop": []},
    }
    request_id, _ = service.sample(wire.sample_request(json.dumps(body).encode()), "ada")
    service.worker.start()
    with raises(EngineError, "deadline: not done after 0.05 s"):
        service.job(request_id, "ada").future.result(60)
    service.worker.close()


def test_a_server_for_other_machines_has_the_tokens_of_a_file(
    served: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = ["--model", "tiny=shape:tiny-qwen3", "--host", "0.0.0.0"]
    with raises(ConfigError, "missing-setting: lets other machines in"):
        serve_command(model)
    with raises(ConfigError, "contradiction: leave --user out"):
        serve_command([*model, "--tokens", "tokens.json", "--user", "ada"])
    server = Server(Service(served.bases, Store(tmp_path)), {"ada": "tml-x"}, port=0, host="0.0.0.0")
    ready = threading.Event()
    thread = threading.Thread(target=server.run, args=(ready.set,), daemon=True)
    thread.start()
    assert ready.wait(60)
    here = SimpleNamespace(url=f"http://127.0.0.1:{server.port}", tokens={"ada": "tml-x", "bob": "tml-y"})
    body = {"tags": [], "user_metadata": None, "sdk_version": "0"}
    assert post(here, "create_session", body, Host="any.example")[0] == 200
    assert post(here, "create_session", body, user="bob")[0] == 401
    server.stop()
    thread.join(60)


def test_requests_are_limited_in_bytes_and_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(work, "MOST_WAITING_BYTES", 100)
    worker = Worker(lambda jobs: [Answer(b"")] * len(jobs), most_together=2)
    jobs = [
        Job("a", "lane", run=lambda: Answer(b"a"), size=60),
        Job("b", "lane", batch="b", payload=1, size=40),
    ]
    for job in jobs:
        worker.submit(job)
    with raises(Busy, "too-large: 2 requests are waiting"):
        worker.submit(Job("c", "lane", run=lambda: Answer(b"c"), size=1))
    worker.start()
    assert [job.future.result(60).body for job in jobs] == [b"a", b""]
    worker.submit(Job("d", "lane", run=lambda: Answer(b"d"), size=100))
    kept = worker.find("d")
    assert kept is not None and kept.future.result(60).body == b"d"
    worker.close()
    assert all(job.run is None and job.payload is None for job in [*jobs, kept])


def test_a_request_of_a_session_that_has_ended_leaves_no_log_open(served: Any, tmp_path: Path) -> None:
    service = Service(served.bases, Store(tmp_path))
    session = service.sessions.create("ada", None)
    body = {"session_id": session.id, "model_seq_id": 0, "base_model": "tiny", "lora_config": {"rank": 2}}
    service.create_model(types.CreateModelRequest(**body), "ada")
    model_id = f"{session.id}:train:0"
    request_id = service.train(wire.train_request(message(model_id)), "ada")
    job = service.worker.find(request_id)
    assert job is not None
    service.sessions.finish(session.id, "ada")  # both wait
    service.worker.start()
    try:
        job.future.result(SECONDS)
    finally:
        service.worker.close()
    assert not service.store.folder(model_id).exists()


def test_a_user_may_have_any_name(served: Any) -> None:
    user = tinker.ServiceClient(base_url=served.url, api_key=served.tokens["group/../eve %"])
    client = user.create_lora_training_client("tiny", rank=2, seed=1).result()
    path = client.save_weights_external("hers").result(SECONDS).path
    urls = user.create_rest_client().get_external_weights_urls(path).result().urls
    with urllib.request.urlopen(urls["adapter_config.json"]) as answer:
        assert json.loads(answer.read())["r"] == 2
