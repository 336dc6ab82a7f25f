"""What a user finds again: training runs and checkpoints, also of sessions that have ended."""

from __future__ import annotations

import json
import time
import urllib.request
from datetime import datetime
from typing import Any

import pytest
from serving import PROMPT, SECONDS, datum, post, tinker

NOTES = {"renderer_name": "role_colon"}


def get(served: Any, path: str, user: str = "ada") -> Any:
    request = urllib.request.Request(
        f"{served.url}/api/v1/{path}", headers={"X-API-Key": served.tokens[user]}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.loads(answer.read())


def test_training_runs(served: Any) -> None:
    """`tinker-cookbook` looks up the base model and the renderer of a checkpoint in its training run."""
    cleo = "cleo"  # no other test has runs of hers
    own = tinker.ServiceClient(base_url=served.url, api_key=served.tokens[cleo])
    rest = own.create_rest_client()
    assert rest.list_training_runs().result().cursor.total_count == 0
    client = own.create_lora_training_client("tiny", rank=3, seed=1, user_metadata=NOTES).result()
    other = own.create_lora_training_client("worded", rank=2, seed=1).result()
    state, sampler = client.save_state("one").result(SECONDS), client.save_weights_for_sampler("two").result()
    client.save_weights_and_get_sampling_client().result()  # unnamed ones are not listed

    runs = rest.list_training_runs().result()
    assert [run.training_run_id for run in runs.training_runs] == [client.model_id, other.model_id]
    assert runs.cursor.total_count == 2
    run = rest.get_training_run_by_tinker_path(state.path).result()
    assert run == runs.training_runs[0]
    assert (run.base_model, run.is_lora, run.lora_rank, run.corrupted) == ("tiny", True, 3, False)
    assert (run.model_owner, run.user_metadata) == (cleo, NOTES)
    assert run.last_checkpoint.tinker_path == state.path
    assert run.last_sampler_checkpoint.tinker_path == sampler.path
    page = rest.list_training_runs(limit=1, offset=1).result()
    assert [run.training_run_id for run in page.training_runs] == [other.model_id]
    assert (page.cursor.limit, page.cursor.offset, page.cursor.total_count) == (1, 1, 2)

    loaded = own.create_training_client_from_state(state.path, user_metadata={"a": "b"}).result()
    assert rest.get_training_run(loaded.model_id).result().user_metadata == {"a": "b"}
    listed = rest.list_user_checkpoints().result()
    assert [one.tinker_path for one in listed.checkpoints] == [sampler.path, state.path]
    page = rest.list_user_checkpoints(limit=1, offset=1).result()
    assert [one.tinker_path for one in page.checkpoints] == [state.path] and page.cursor.total_count == 2
    with pytest.raises(tinker.BadRequestError, match="must be KIND/NAME"):
        rest.delete_checkpoint(client.model_id, "one").result()
    with pytest.raises(tinker.BadRequestError, match="projects are not served"):
        rest.list_training_runs(project_id="p").result()

    bob = tinker.ServiceClient(base_url=served.url, api_key=served.tokens["bob"]).create_rest_client()
    with pytest.raises(tinker.NotFoundError, match="there is no training run"):
        bob.get_training_run(client.model_id).result()
    assert client.model_id not in str(bob.list_training_runs(limit=1000).result())
    assert state.path not in str(bob.list_user_checkpoints(limit=1000).result())

    own.close("success").result()  # runs stay as long as their checkpoints
    found = get(served, "training_runs", cleo)["training_runs"]
    assert [one["training_run_id"] for one in found] == [client.model_id]
    kept = get(served, f"training_runs/{client.model_id}", cleo)
    assert (kept["base_model"], kept["lora_rank"], kept["user_metadata"]) == ("tiny", 3, NOTES)
    assert kept["last_checkpoint"]["tinker_path"] == state.path


@pytest.mark.parametrize("query", ["limit=0", "limit=1001", "limit=x", "offset=-1", "offset=10000000000000"])
def test_bad_pages(served: Any, query: str) -> None:
    for path in ("training_runs", "checkpoints"):
        with pytest.raises(urllib.error.HTTPError, match="400") as caught:
            get(served, f"{path}?{query}")
        answer = json.loads(caught.value.read())
        assert (answer["code"], answer["field"]) == ("out-of-range", query.partition("=")[0])


def test_large_metadata_is_refused(served: Any, service: Any) -> None:
    body = {"session_id": service.holder.get_session_id(), "model_seq_id": 2000, "base_model": "tiny"}
    notes = {"user_metadata": {"a": "x" * 2**16}}
    status, answer = post(served, "create_model", {**body, **notes})
    assert (status, answer["code"], answer["field"]) == (413, "too-large", "user_metadata")


def test_cross_entropy_is_returned_token_by_token(service: Any) -> None:
    client = service.create_lora_training_client("tiny", rank=2, seed=1).result()
    weights = [0.0, 0.5, 1.0, 2.0]
    for verb in (client.forward, client.forward_backward):
        output = verb([datum(PROMPT, weights=weights), datum([*PROMPT, 30])], "cross_entropy").result(SECONDS)
        first, second = output.loss_fn_outputs
        expected = [-w * x for w, x in zip(weights, first["logprobs"].data, strict=True)]
        assert first["elementwise_loss"].data == expected  # products with powers of two: exact
        assert second["elementwise_loss"].data == [-x for x in second["logprobs"].data]
        total = sum(first["elementwise_loss"].data) + sum(second["elementwise_loss"].data)
        assert output.metrics["loss:sum"] == pytest.approx(total, rel=1e-6)


def test_the_time_to_live_of_a_checkpoint(served: Any) -> None:
    rest = tinker.ServiceClient(base_url=served.url, api_key=served.tokens["ada"])
    client = rest.create_lora_training_client("tiny", rank=2, seed=1).result()
    path = client.save_state("kept", ttl_seconds=3600).result(SECONDS).path
    rest, listing = rest.create_rest_client(), f"training_runs/{client.model_id}/checkpoints"

    def seconds_left() -> float | None:
        (one,) = get(served, listing)["checkpoints"]
        at = one["expires_at"]
        return None if at is None else datetime.fromisoformat(at).timestamp() - time.time()

    assert 3000 < (seconds_left() or 0.0) <= 3600
    rest.set_checkpoint_ttl_from_tinker_path(path, 86400).result()
    assert 86000 < (seconds_left() or 0.0) <= 86400
    rest.set_checkpoint_ttl_from_tinker_path(path, None).result()
    assert seconds_left() is None
    with pytest.raises(tinker.BadRequestError, match="ttl_seconds = 60; use 3600 to"):
        rest.set_checkpoint_ttl_from_tinker_path(path, 60).result()
    bob = tinker.ServiceClient(base_url=served.url, api_key=served.tokens["bob"]).create_rest_client()
    with pytest.raises(tinker.NotFoundError, match="there is no checkpoint"):
        bob.set_checkpoint_ttl_from_tinker_path(path, 3600).result()
    assert seconds_left() is None
