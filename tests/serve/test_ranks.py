"""`lockstep serve --ranks 2` gives what one rank does, and ends as a whole."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from serving import PROMPT, SECONDS, Killable, datum, equal, forward, gap, sampled, tinker, types, weights

from lockstep.ranks.launch import launch_command
from lockstep.serve.losses import make_loss
from lockstep.serve.models import AdapterSpec, BaseModel, TrainingModel
from lockstep.serve.wire import Datum

ADAM = types.AdamParams(learning_rate=0.01, grad_clip_norm=1.0)


def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    """Rows are the same to the bit; sums of gradients but for the order in which they are added up."""
    worker = str(Path(__file__).with_name("rank_models_worker.py"))
    status = launch_command(
        [sys.executable, worker, str(tmp_path)], ranks=2, timeout=240, log_dir=tmp_path / "logs"
    )
    assert status == 0
    found = json.loads((tmp_path / "found.json").read_text())
    assert found["forward"] and found["forward_backward"] and found["replicas"]
    assert found["chunks"] and found["chunked weights"] == 0.0
    assert found["norm"] <= 1e-6 and found["weights"] <= 1e-6 < found["stepped"]
    assert all("rank 1" in found[f"failed, {first}"] for first in (True, False))
    assert found["after a failure"] == found["loaded"] == 0.0
    assert found["kept"] == 1


@pytest.fixture(scope="module")
def ranked(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Killable]:
    server = Killable(Path(tmp_path_factory.mktemp("ranked")) / "run", "--ranks", "2")
    yield server
    server.kill()


@pytest.fixture(scope="module")
def user(ranked: Killable) -> Any:
    return tinker.ServiceClient(base_url=ranked.url, api_key=ranked.tokens["ada"])


def rank_pid(server: Killable, rank: int) -> int:
    found = psutil.Process(server.process.pid).children(recursive=True)
    return next(p.pid for p in found if p.environ().get("RANK") == str(rank) and "serve" in p.cmdline())


@pytest.mark.exhaustive
def test_the_client_trains_on_two_ranks(ranked: Killable, user: Any) -> None:
    client, split = (user.create_lora_training_client("tiny", rank=4, seed=7).result() for _ in range(2))
    documents = [[*PROMPT, *range(20, 21 + number % 4), 40 + number] for number in range(5)]
    data = [datum(tokens, weights=[1.0] * (len(tokens) - 1)) for tokens in documents]
    output = client.forward_backward(data, "cross_entropy").result(SECONDS)
    base = BaseModel("tiny", "shape:tiny-qwen3", device=torch.device("cpu"))
    alone = TrainingModel(base, AdapterSpec(rank=4, seed=7))
    tensors = [torch.tensor(tokens) for tokens in documents]
    logprobs, metrics = alone.forward_backward(
        [Datum(inputs=t[:-1], targets=t[1:], floats={"weights": torch.ones(len(t) - 1)}) for t in tensors],
        make_loss("cross_entropy", {}),
    )
    assert output.metrics == metrics
    for one, expected in zip(output.loss_fn_outputs, logprobs, strict=True):
        assert torch.equal(one["logprobs"].to_torch(), expected)
    for part in (data[:1], data[1:]):
        split.forward_backward(part, "cross_entropy")
    for each in (client, split):
        each.optim_step(ADAM).result(SECONDS)
    assert equal(weights(ranked, client, "one"), weights(ranked, split, "one"))
    sampler = client.save_weights_and_get_sampling_client().result()
    assert gap(client, sampled(sampler).sequences[0]) == 0.0


@pytest.mark.exhaustive
def test_a_dead_rank_ends_the_server_and_a_restart_goes_on(ranked: Killable, user: Any) -> None:
    client = user.create_lora_training_client("tiny", rank=4, seed=1).result()
    client.forward_backward([datum(PROMPT, weights=[1.0] * 4)] * 2, "cross_entropy")
    client.optim_step(ADAM).result(SECONDS)
    client.save_state("kept").result(SECONDS)
    before = forward(client, PROMPT)
    os.kill(rank_pid(ranked, 1), signal.SIGKILL)
    assert ranked.process.wait(120) == 128 + signal.SIGKILL
    assert "rank 1 of 2 was killed by SIGKILL" in ranked.told()
    ranked.start()
    assert torch.equal(forward(client, PROMPT), before)


@pytest.mark.exhaustive
def test_ctrl_c_ends_all_ranks(ranked: Killable) -> None:
    pids = [rank_pid(ranked, rank) for rank in range(2)]
    ranked.process.send_signal(signal.SIGINT)
    assert ranked.process.wait(120) == 0
    assert not any(psutil.pid_exists(pid) for pid in pids)
