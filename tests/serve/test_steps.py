"""Steps by the API are the train backend's own, and clients do not change each other's."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from serving import SECONDS, equal, tinker, types, weights

STEPS = 20
ADAM = {"learning_rate": 0.003, "beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.01}


def rollouts(step: int) -> list[tuple[list[int], list[float], list[float]]]:
    """Tokens, and for each but the first a logprob and an advantage; 3 tokens are the prompt."""
    generator = torch.Generator().manual_seed(step)
    found = []
    for length in (9, 12):
        tokens = torch.randint(3, 256, (length,), generator=generator).tolist()
        logprobs = [0.0, 0.0, *(-5.5 - torch.rand(length - 3, generator=generator)).tolist()]
        advantage = float(torch.randn((), generator=generator))
        found.append((tokens, logprobs, [0.0, 0.0, *[advantage] * (length - 3)]))
    return found


def datums(step: int) -> list[Any]:
    return [
        types.Datum(
            model_input=types.ModelInput.from_ints(tokens[:-1]),
            loss_fn_inputs={
                "target_tokens": types.TensorData(data=tokens[1:], dtype="int64", shape=[len(tokens) - 1]),
                "logprobs": types.TensorData(data=logprobs, dtype="float32", shape=[len(logprobs)]),
                "advantages": types.TensorData(data=advantages, dtype="float32", shape=[len(advantages)]),
            },
        )
        for tokens, logprobs, advantages in rollouts(step)
    ]


def train(client: Any, steps: range) -> list[float]:
    """Returns the gradient norms."""
    norms = []
    for step in steps:
        client.forward_backward(datums(step), "ppo")
        answer = client.optim_step(types.AdamParams(**ADAM, grad_clip_norm=1.0)).result(SECONDS)
        norms.append(answer.metrics["grad_norm"])
    return norms


def by_the_backend() -> tuple[dict[str, torch.Tensor], list[float]]:
    """The same steps by LocalBackend and the loss of `lockstep train`: GRPO's PPO clip over completion tokens
    alone, advantages given, every token with weight 1."""
    from lockstep.algorithms.policy_loss import PolicyLoss
    from lockstep.config.algorithm import GRPOConfig
    from lockstep.packing import pack
    from lockstep.schema.batch import PolicyBatch, RolloutSample, policy_samples
    from lockstep.serve.models import AdapterSpec, BaseModel
    from lockstep.train.local import LocalBackend

    base = BaseModel("tiny", "shape:tiny-qwen3", device=torch.device("cpu"), dtype="float32")
    model = base.copy(AdapterSpec(rank=4, seed=7), trains=True)
    config = base.train_config.model_copy(
        update={
            "lr": ADAM["learning_rate"],
            "betas": (ADAM["beta1"], ADAM["beta2"]),
            "eps": ADAM["eps"],
            "weight_decay": ADAM["weight_decay"],
            "max_grad_norm": 1.0,
        }
    )
    backend = LocalBackend(config, model=model, total_steps=STEPS)
    loss, norms = PolicyLoss(GRPOConfig(name="grpo", clip_low=0.2, clip_high=0.2).resolved()), []
    for step in range(STEPS):
        batches = []
        for tokens, logprobs, advantages in rollouts(step):
            mask = torch.tensor([False, False, *[True] * (len(tokens) - 3), False])
            old = torch.tensor([*logprobs, 0.0])
            rollout = RolloutSample(token_ids=torch.tensor(tokens), loss_mask=mask, rollout_logprobs=old)
            sample = policy_samples([rollout], [torch.tensor([*advantages, 0.0])])
            packed = PolicyBatch.of(pack(sample, [torch.ones(len(tokens))]))
            batches.append(with_old(packed, old))
        backend.forward_backward(batches, loss)
        norms.append(backend.optimizer_step()["grad_norm"])
    named = {n: p.detach() for n, p in model.module.named_parameters() if p.requires_grad}
    return named, norms


def with_old(batch: Any, old: torch.Tensor) -> Any:
    import dataclasses

    return dataclasses.replace(batch, old_logprobs=old)


def test_twenty_steps_are_the_backends_to_the_bit(served: Any, service: Any) -> None:
    client = service.create_lora_training_client("tiny", rank=4, seed=7).result()
    norms = train(client, range(STEPS))
    expected, expected_norms = by_the_backend()
    assert norms == expected_norms and all(norm > 0 and math.isfinite(norm) for norm in norms)
    assert equal(weights(served, client, "twenty"), expected)


def test_four_clients_at_once_train_as_each_alone(served: Any, service: Any) -> None:
    other = tinker.ServiceClient(base_url=served.url, api_key=served.tokens["bob"])
    specs = [(service, 4, 7), (other, 8, 7), (service, 4, 8), (other, 2, 1)]

    def made(number: int) -> Any:
        user, rank, seed = specs[number]
        return user.create_lora_training_client("tiny", rank=rank, seed=seed).result()

    def step(client: Any, number: int, step: int) -> Any:
        client.forward_backward(datums(step + 10 * number), ("ppo", "cispo", "importance_sampling")[step])
        return client.optim_step(types.AdamParams(**ADAM, grad_clip_norm=1.0))

    alone = []
    for number in range(4):
        client = made(number)
        for count in range(3):
            step(client, number, count).result(SECONDS)
        alone.append(weights(served, client, "alone"))
    together = [made(number) for number in range(4)]
    for count in range(3):
        for future in [step(client, number, count) for number, client in enumerate(together)]:
            future.result(SECONDS)
    for number, client in enumerate(together):
        assert equal(weights(served, client, "together"), alone[number])


def test_chunks_of_a_call_never_change_bits(served: Any, service: Any) -> None:
    whole, split = (service.create_lora_training_client("tiny", rank=4, seed=7).result() for _ in range(2))
    data = [*datums(0), *datums(1)]
    whole.forward_backward(data, "cispo")
    for one in data:
        split.forward_backward([one], "cispo")
    for client in (whole, split):
        client.optim_step(types.AdamParams(**ADAM)).result(SECONDS)
    assert equal(weights(served, whole, "whole"), weights(served, split, "split"))


def test_a_call_that_fails_leaves_the_gradients_of_earlier_ones(served: Any, service: Any) -> None:
    good, failed = (service.create_lora_training_client("tiny", rank=4, seed=7).result() for _ in range(2))
    broken = datums(1)
    # The last of two documents: the gradients of the first have been added by then.
    broken[1].loss_fn_inputs["advantages"] = types.TensorData(data=[3e38] * 11, dtype="float32", shape=[11])
    for client in (good, failed):
        client.forward_backward(datums(0), "cispo").result(SECONDS)
    with pytest.raises(tinker.RequestFailedError, match="finite"):
        failed.forward_backward(broken, "cispo").result(SECONDS)
    for client in (good, failed):
        client.forward_backward(datums(2), "cispo")
        client.optim_step(types.AdamParams(**ADAM)).result(SECONDS)
    assert equal(weights(served, good, "good"), weights(served, failed, "failed"))


def test_adapters_are_beside_the_linears_of_the_architecture() -> None:
    from lockstep.config.model import ModelConfig
    from lockstep.models.load import meta_module
    from lockstep.serve.models import AdapterSpec

    module = meta_module(ModelConfig(name="shape:tiny-phi3"), dtype=torch.float32)
    names = [
        AdapterSpec(rank=2, seed=0, attention=attention, mlp=not attention).config(module).target_modules
        for attention in (True, False)
    ]
    assert names == [("qkv_proj", "o_proj"), ("gate_up_proj", "down_proj")]
