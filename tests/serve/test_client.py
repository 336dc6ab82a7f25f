"""The real `tinker` client against a server, unmodified."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from serving import PROMPT, SECONDS, datum, forward, gap, sampled, tinker, types


def test_sampled_logprobs_are_the_trainers_to_the_bit(service: Any) -> None:
    client = service.create_lora_training_client("tiny", rank=4, seed=1).result()
    before = client.save_weights_and_get_sampling_client().result()
    sequence = sampled(before).sequences[0]
    assert len(sequence.tokens) == len(sequence.logprobs) > 0
    assert gap(client, sequence) == 0.0

    tokens = [*PROMPT, 20, 21, 22]
    client.forward_backward([datum(tokens, weights=[1.0] * 7)], "cross_entropy").result(SECONDS)
    metrics = client.optim_step(types.AdamParams(learning_rate=0.01)).result(SECONDS).metrics
    assert metrics["grad_norm"] > 0
    assert gap(client, sequence) > 1e-3  # the weights that sampled it are not the trainer's any more

    after = client.save_weights_and_get_sampling_client().result()
    answer = sampled(after, temperature=0.7, top_k=20)
    assert gap(client, answer.sequences[1]) == 0.0  # at temperature 1, whatever it was drawn at
    again = sampled(before).sequences[0]
    assert again.tokens == sequence.tokens and again.logprobs == sequence.logprobs


def test_prompt_logprobs_and_stops(service: Any) -> None:
    sampler = service.create_sampling_client(base_model="tiny").result()
    params = types.SamplingParams(max_tokens=6, seed=1, stop=[])
    answer = sampler.sample(
        types.ModelInput.from_ints(PROMPT), 1, params, include_prompt_logprobs=True
    ).result(SECONDS)
    sequence = answer.sequences[0]
    assert answer.prompt_logprobs[0] is None and all(x < 0 for x in answer.prompt_logprobs[1:])
    assert (len(sequence.tokens), sequence.stop_reason) == (6, "length")
    stopped = sampler.sample(
        types.ModelInput.from_ints(PROMPT),
        1,
        types.SamplingParams(max_tokens=6, seed=1, stop=[sequence.tokens[2]]),
    ).result(SECONDS)
    assert stopped.sequences[0].stop_reason == "stop"
    assert stopped.sequences[0].tokens == sequence.tokens[: len(stopped.sequences[0].tokens)]


def test_state_saved_and_loaded_goes_on_to_the_bit(service: Any) -> None:
    def step(client: Any) -> None:
        data = [datum([*PROMPT, 30 + i], weights=[0.0, 0.0, 0.0, 0.0, 1.0]) for i in range(2)]
        client.forward_backward(data, "cross_entropy")
        client.optim_step(types.AdamParams(learning_rate=0.01)).result(SECONDS)

    client = service.create_lora_training_client("tiny", rank=4, seed=1).result()
    step(client)
    path = client.save_state("one").result(SECONDS).path
    step(client)
    loaded = service.create_training_client_from_state_with_optimizer(path).result()
    anew = service.create_training_client_from_state(path).result()
    step(loaded)
    step(anew)
    expected = forward(client, [*PROMPT, 30])
    assert torch.equal(forward(loaded, [*PROMPT, 30]), expected)
    assert not torch.equal(forward(anew, [*PROMPT, 30]), expected)  # Adam's moments began anew


def test_unserved_losses_are_refused_by_name_and_the_client_goes_on(service: Any) -> None:
    client = service.create_lora_training_client("tiny", rank=2, seed=1).result()
    with pytest.raises(tinker.RequestFailedError, match="stable_reinforce") as caught:
        client.forward_backward([datum(PROMPT)], "stable_reinforce").result(SECONDS)
    assert caught.value.category == types.RequestErrorCategory.User
    floats = {"logprobs": [-5.0] * 4, "advantages": [1.0] * 4, "sequence_ratio_mask": [0.0] * 4}
    with pytest.raises(tinker.RequestFailedError, match="marks no token"):
        client.forward_backward([datum(PROMPT, **floats)], "gspo").result(SECONDS)
    floats["sequence_ratio_mask"] = [0.0, 1.0, 1.0, 1.0]
    answer = client.forward_backward([datum(PROMPT, **floats)], "gspo").result(SECONDS)
    assert answer.metrics["loss:sum"] != 0.0
    with pytest.raises(tinker.RequestFailedError, match="not in the vocabulary"):
        client.forward([datum([5, 6, 10**6])], "cross_entropy").result(SECONDS)
    assert len(forward(client, PROMPT)) == 4


def test_two_users_do_not_see_each_other(served: Any, service: Any) -> None:
    client = service.create_lora_training_client("tiny", rank=2, seed=1).result()
    path = client.save_weights_for_sampler("mine").result(SECONDS).path
    bob = tinker.ServiceClient(base_url=served.url, api_key=served.tokens["bob"])
    with pytest.raises(tinker.NotFoundError):
        bob.create_sampling_client(model_path=path).result()
    mine = service.create_sampling_client(model_path=path).result()
    assert sampled(mine, n=1).sequences[0].tokens
    client.save_weights_for_sampler("other").result(SECONDS)
    gone = service.create_sampling_client(model_path=path.replace("mine", "other")).result()
    service.create_rest_client().delete_checkpoint_from_tinker_path(path.replace("mine", "other")).result()
    with pytest.raises(tinker.RequestFailedError, match="no longer kept"):
        sampled(gone, n=1)
