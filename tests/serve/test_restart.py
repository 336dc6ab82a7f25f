"""A server that is killed and started again: what was saved is there, and nothing is trained twice."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from serving import PROMPT, SECONDS, Killable, datum, forward, message, post, result, sampled, tinker, types


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killable]:
    server = Killable(Path(tmp_path_factory.mktemp("killed")) / "run")
    yield server
    server.kill()


@pytest.fixture(scope="module")
def user(server: Killable) -> Any:
    return tinker.ServiceClient(base_url=server.url, api_key=server.tokens["ada"])


def step(client: Any, number: int) -> None:
    client.forward_backward([datum([*PROMPT, 30 + number], weights=[1.0] * 5)], "cross_entropy")
    client.optim_step(types.AdamParams(learning_rate=0.01)).result(SECONDS)


def test_clients_and_samplers_go_on_after_a_kill(server: Killable, user: Any) -> None:
    assert "error[locked]" in server.another()
    notes = {"renderer_name": "role_colon"}
    alone, saved, unsaved = (
        user.create_lora_training_client("tiny", rank=4, seed=1, user_metadata=notes).result()
        for _ in range(3)
    )
    for number in range(3):
        step(alone, number)
    expected = forward(alone, PROMPT)

    for client in (saved, unsaved):
        step(client, 0)
    path = saved.save_state("one").result(SECONDS).path
    sampler = saved.save_weights_and_get_sampling_client().result()
    before = sampled(sampler).sequences
    unsaved_path = unsaved.save_state("one").result(SECONDS).path
    step(unsaved, 1)
    server.restart()

    for number in (1, 2):  # the same client, whose state was saved after its last step
        step(saved, number)
    assert torch.equal(forward(saved, PROMPT), expected)
    again = sampled(sampler).sequences
    assert [one.tokens for one in again] == [one.tokens for one in before]
    assert (
        user.create_rest_client().list_checkpoints(saved.model_id).result().checkpoints[0].tinker_path == path
    )

    runs = [user.create_rest_client().get_training_run(one.model_id).result() for one in (saved, unsaved)]
    assert [(run.user_metadata, run.corrupted) for run in runs] == [(notes, False), (notes, True)]

    with pytest.raises(tinker.RequestFailedError, match="are lost; go on with load_state_with_optimizer"):
        step(unsaved, 1)
    unsaved.load_state_with_optimizer(unsaved_path).result(SECONDS)
    for number in (1, 2):
        step(unsaved, number)
    assert torch.equal(forward(unsaved, PROMPT), expected)


def test_a_client_never_goes_on_from_what_another_saved_since(server: Killable, user: Any) -> None:
    first = user.create_lora_training_client("tiny", rank=4, seed=1).result()
    path = first.save_state("shared").result(SECONDS).path
    second = user.create_training_client_from_state(path)
    before = forward(second, PROMPT)
    step(first, 0)
    first.save_state("shared", overwrite=True).result(SECONDS)
    assert torch.equal(forward(second, PROMPT), before)
    server.restart()
    with pytest.raises(tinker.RequestFailedError, match="was overwritten since"):
        forward(second, PROMPT)
    second.load_state_with_optimizer(path).result(SECONDS)
    assert torch.equal(forward(second, PROMPT), forward(first, PROMPT))


def test_a_load_behind_a_save_loads_what_that_saved(server: Killable, user: Any) -> None:
    """Neither waits for the other's answer; the client goes on from the second one after a restart, too."""
    client = user.create_lora_training_client("tiny", rank=4, seed=1).result()
    path = client.save_state("latest").result(SECONDS).path
    step(client, 0)
    trained = forward(client, PROMPT)
    for _ in range(8):  # so that the save waits, too
        client.forward([datum([*PROMPT, 30], weights=[1.0] * 5)] * 8, "cross_entropy")
    saved = client.save_state("latest", overwrite=True)
    loaded = client.load_state(path)
    assert saved.result(SECONDS).path == path and loaded.result(SECONDS).path == path
    assert torch.equal(forward(client, PROMPT), trained)
    server.restart()
    assert torch.equal(forward(client, PROMPT), trained)


def test_a_load_that_is_sent_again_needs_no_checkpoint(server: Killable, user: Any) -> None:
    """Its answer was lost, and then its checkpoint was deleted."""
    body = {"tags": [], "user_metadata": None, "sdk_version": "0"}
    session = post(server, "create_session", body)[1]["session_id"]
    create = {"session_id": session, "model_seq_id": 0, "base_model": "tiny"}
    model_id = result(server, post(server, "create_model", create)[1]["request_id"])["model_id"]
    save = {"model_id": model_id, "seq_id": 1, "path": "gone"}
    path = result(server, post(server, "save_weights", save)[1]["request_id"])["path"]
    into = {"model_id": model_id, "seq_id": 2, "path": path, "optimizer": True}
    new = {"session_id": session, "model_seq_id": 1, "path": path, "optimizer": True}
    asked = [post(server, "load_weights", load)[1]["request_id"] for load in (into, new)]
    answers = [result(server, one) for one in asked]
    user.create_rest_client().delete_checkpoint_from_tinker_path(path).result()
    for load, one, answer in zip((into, new), asked, answers, strict=True):
        assert post(server, "load_weights", load)[1]["request_id"] == one
        assert result(server, one) == answer


def test_a_request_that_is_sent_again_after_a_kill_does_not_train_again(server: Killable) -> None:
    body = {"tags": [], "user_metadata": None, "sdk_version": "0"}
    key = {"X-Idempotency-Key": "one"}
    session = post(server, "create_session", body, **key)[1]["session_id"]
    create = {
        "session_id": session,
        "model_seq_id": 0,
        "base_model": "tiny",
        "lora_config": {"rank": 2, "seed": 1},
    }
    creation = post(server, "create_model", create)[1]["request_id"]
    model_id = result(server, creation)["model_id"]
    save = {"model_id": model_id, "seq_id": 1, "path": "start"}
    answer = result(server, post(server, "save_weights", save)[1]["request_id"])
    adam = {"model_id": model_id, "seq_id": 2, "adam_params": {"learning_rate": 0.1}}
    asked = post(server, "optim_step", adam)[1]["request_id"]
    assert result(server, asked)["error"].startswith("no-gradients")
    forward_backward = {"Content-Type": "application/x-protobuf"}
    trained = post(server, "forward_backward", message(model_id, 3), **forward_backward)[1]["request_id"]
    server.restart()  # the step may have been executed, and nobody has its answer

    assert post(server, "create_session", body, **key)[1]["session_id"] == session
    assert post(server, "create_model", create)[1]["request_id"] == creation
    assert result(server, creation)["model_id"] == model_id
    assert result(server, post(server, "save_weights", save)[1]["request_id"]) == answer
    assert (
        post(server, "forward_backward", message(model_id, 3), **forward_backward)[1]["request_id"] == trained
    )
    assert "are lost" in result(server, trained)["error"]
    load = {"model_id": model_id, "seq_id": 4, "path": answer["path"], "optimizer": True}
    assert result(server, post(server, "load_weights", load)[1]["request_id"])["path"] == answer["path"]
    left = post(server, "optim_step", adam | {"seq_id": 5})[1]["request_id"]
    assert result(server, left)["error"].startswith("no-gradients")  # request 3 did not run again


@pytest.mark.exhaustive
def test_what_was_acknowledged_as_saved_survives_kills_at_any_moment(server: Killable, user: Any) -> None:
    client = user.create_lora_training_client("tiny", rank=2, seed=3).result()
    acknowledged: list[str] = []
    for round_ in range(6):
        with contextlib.suppress(tinker.RequestFailedError):
            futures = []
            for number in range(8):
                client.forward_backward([datum([*PROMPT, 30 + number], weights=[1.0] * 5)], "cross_entropy")
                client.optim_step(types.AdamParams(learning_rate=0.01))
                futures.append(client.save_state(f"{round_}-{number}"))
            acknowledged.append(futures[0].result(SECONDS).path)
            time.sleep(0.05 * round_)
        server.restart()
        client.load_state_with_optimizer(acknowledged[-1]).result(SECONDS)
    for path in acknowledged:
        loaded = user.create_training_client_from_state_with_optimizer(path).result()
        assert len(forward(loaded, PROMPT)) == 4
