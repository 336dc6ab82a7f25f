"""Weight updates, sleep and the prefix cache of SGLangServer, against a FAKE SGLang server."""

import base64
import os
import pickle
import subprocess
import sys
import threading
import time
import types
from dataclasses import replace

import pytest
import torch
from raising import raises

from lockstep.engine.sglang.weights import Expected, check_no_padding, tensor_payload
from lockstep.errors import EngineError
from lockstep.schema.weights import WeightBucket, WeightUpdate
from lockstep.transfer import make_transfer
from lockstep.wire.receive import Rendezvous, announce, connect_group, host_store

from .fakes import (
    asked,
    file_bucket,
    layout_of,
    model_folder,
    push,
    request,
    session,
    weights,
)

UPDATES = (
    "/begin_weight_update",
    "/update_weights_from_disk",
    "/end_weight_update",
    "/flush_cache",
    "/update_weight_version",
)
NAMES = ["model.norm.weight", "model.layers.0.self_attn.k_proj.weight"]
PUSHED = {"weights": "pushed"}


def paths(folder):
    return [path for path, _ in asked(folder, *UPDATES)]


@pytest.mark.parametrize("sessions", [False, True])
def test_an_update_is_one_session_and_flushes_and_names_its_version(engines, tmp_path, sessions):
    engine = engines({"sessions": sessions}, spec=PUSHED)
    assert engine.dirty
    with raises(EngineError, "wrong-state: dirty"):
        engine.generate([request(10)])
    push(engine, tmp_path, version=3)
    rest = ["/update_weights_from_disk", *["/end_weight_update"] * sessions, "/flush_cache"]
    assert paths(tmp_path) == ["/begin_weight_update", *rest, "/update_weight_version"]
    assert not any(body.get("flush_cache") for _, body in asked(tmp_path, "/update_weights_from_disk"))
    (row,) = engine.generate([request(10)])
    assert row[0].policy_version == 3 and not engine.dirty
    push(engine, tmp_path, version=4)
    # without sessions, their absence is asked for once
    assert paths(tmp_path).count("/begin_weight_update") == (2 if sessions else 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_sent_can_be_read_back_to_the_bit(engines, tmp_path, dtype):
    engine = engines(spec=PUSHED)
    sent = {name: value.to(dtype) for name, value in weights().items()}
    push(engine, tmp_path, tensors=sent)
    found = engine.read_back(NAMES)
    assert list(found) == NAMES
    for name in NAMES:
        assert torch.equal(found[name], sent[name].float().flatten()[:64])


def test_a_model_that_cannot_be_read_says_so_instead_of_failing(engines, tmp_path):
    engine = engines({"reads": False}, spec=PUSHED)
    push(engine, tmp_path)
    assert engine.read_back(NAMES) is None


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda t: t | {"model.typo.weight": torch.zeros(3)}, "wrong-weights: model.typo.weight"),
        (
            lambda t: t | {"model.norm.weight": torch.zeros(17)},
            "wrong-shape: model.norm.weight",
        ),
        (
            lambda t: {k: v for k, v in t.items() if "v_proj" not in k},
            "wrong-weights: model.layers.0.self_attn.v_proj.weight",
        ),
    ],
)
def test_wrong_weights_are_refused_and_leave_the_engine_dirty(engines, tmp_path, change, match):
    engine = engines({"sessions": True}, spec=PUSHED)
    push(engine, tmp_path)
    one = session(2)
    engine.begin_update(one)
    with raises(EngineError, match):
        engine.receive(file_bucket(tmp_path, change(weights())))
        engine.finish_update(one)
    engine.fail_update("it failed")
    assert engine.dirty
    with raises(EngineError, "wrong-state: dirty"):
        engine.generate([request(10)])
    push(engine, tmp_path, version=2)  # the session of the failed one is not in the way
    assert engine.generate([request(10)])[0][0].policy_version == 2


def test_nothing_is_sent_of_a_bucket_with_a_wrong_name(engines, tmp_path):
    engine = engines(spec=PUSHED)
    engine.begin_update(session())
    with raises(EngineError, "wrong-weights: x"):
        engine.receive(file_bucket(tmp_path, weights() | {"x": torch.zeros(1)}))
    assert "/update_weights_from_disk" not in paths(tmp_path)


def test_the_tied_head_may_come_and_may_stay_out(engines, tmp_path):
    engine = engines(spec=PUSHED)
    tied = {k: v for k, v in weights().items() if k != "lm_head.weight"}
    push(engine, tmp_path, tensors=tied)
    push(engine, tmp_path, version=2)
    assert not engine.dirty


def test_an_untied_head_must_come(engines, tmp_path):
    model_folder(tmp_path / "model", tied=False)
    engine = engines(spec=PUSHED)
    tied = {k: v for k, v in weights().items() if k != "lm_head.weight"}
    with raises(EngineError, "wrong-weights", missing=["lm_head.weight"]):
        push(engine, tmp_path, tensors=tied)


def test_a_prefix_cache_that_is_not_flushed_is_an_error(engines, tmp_path):
    engine = engines({"flush": False}, spec=PUSHED)
    with raises(EngineError, "refused: prefix cache"):
        push(engine, tmp_path)
    engine.fail_update("not flushed")
    assert engine.dirty


def test_the_first_prompt_after_an_update_is_not_cached(engines, tmp_path):
    engine = engines()
    engine.generate([request(10)])
    assert engine.generate([request(10)])[0][0].cached_tokens == 3
    push(engine, tmp_path)
    assert engine.generate([request(10)])[0][0].cached_tokens == 0


def test_an_update_waits_for_running_samples(engines, tmp_path):
    engine = engines({"token_seconds": 0.01})
    rows = []
    thread = threading.Thread(target=lambda: rows.extend(engine.generate([request(10, max_tokens=60)])))
    thread.start()
    time.sleep(0.2)
    with raises(EngineError, "deadline", samples=1):
        engine.begin_update(session(seconds=0.1))
    push(engine, tmp_path)
    thread.join(10.0)
    assert rows[0][0].policy_version == 0 and len(rows[0][0].token_ids) == 60


def test_a_server_that_died_while_samples_ran_gets_the_weights_again(engines, tmp_path):
    engine = engines({"die_at_token": 10}, {}, spec=PUSHED)
    pushed = []

    def recover(*_):
        pushed.append(engine.stats().restarts)
        push(engine, tmp_path, version=7)

    engine.recover = recover
    push(engine, tmp_path, version=7)
    (row,) = engine.generate([request(10, max_tokens=50)])
    assert pushed == [1] and row[0].policy_version == 7
    assert row[0].token_ids == tuple(range(11, 61))


class Trainer:
    """As much of a train backend as a push needs."""

    scale = 1.0

    def weights(self, *, policy_version):
        return WeightUpdate(
            policy_version=policy_version,
            tensors=lambda: iter([(n, x * self.scale) for n, x in weights().items()]),
            shared_module=torch.nn.Linear(1, 1),  # whole weights: they can be sent at any time
        )


def test_pushes_are_compared_and_come_again_after_a_death(engines, tmp_path):
    """The transfer that a loop uses, in buckets of 1 MiB, with files."""
    spec = {**PUSHED, "device": "cpu", "shares_device": False}
    engine = engines({"die_at_token": 30}, {}, spec=spec, verify="always", bucket_mb=1)
    transfer, trainer = make_transfer(engine._config, engine, device="cpu", work_dir=tmp_path), Trainer()
    transfer.push(trainer, engine, policy_version=1)
    assert transfer.check(engine)
    trainer.scale = 2.0
    transfer.push(trainer, engine, policy_version=2)
    assert transfer.check(engine)
    (row,) = engine.generate([request(10, samples=2, max_tokens=100)])
    assert {c.policy_version for c in row} == {2} and {len(c.token_ids) for c in row} == {100}
    assert engine.stats().restarts == 1 and transfer.check(engine)
    transfer._heads[0][1][4:8] = 1  # the second value of the first weight
    with raises(EngineError, "values-differ"):
        transfer.check(engine)
    transfer.close()


def test_weights_of_another_run_are_noticed(engines, tmp_path):
    engine = engines(spec=PUSHED)
    push(engine, tmp_path, version=3, run_id="mine")
    other = engine._sglang
    other._done("/update_weight_version", {"new_version": "theirs/3", "abort_all_requests": False}, seconds=5)
    with raises(EngineError, "values-differ: mine/3"):
        engine.generate([request(10)])


def test_a_server_that_does_not_answer_an_update_is_ended(engines, tmp_path):
    engine = engines({"slow_update": 60.0}, {}, spec=PUSHED)
    server = engine._server
    one = session(seconds=1.5)
    engine.begin_update(one)
    with raises(EngineError, "deadline"):
        engine.receive(file_bucket(tmp_path, weights()))
    engine.fail_update("no answer")
    assert server.ended() is not None
    push(engine, tmp_path, version=2)  # on a server that was started again
    assert engine.generate([request(10)])[0][0].policy_version == 2


# sleep


def test_pushed_weights_are_given_back_and_must_come_again(engines, tmp_path):
    engine = engines(offload=True, spec=PUSHED)
    push(engine, tmp_path)
    engine.sleep()
    with raises(EngineError, "wrong-state: asleep"):
        engine.generate([request(10)])
    with raises(EngineError, "wrong-state: asleep"):
        engine.begin_update(session(2))
    engine.wake()
    assert engine.dirty
    with raises(EngineError, "wrong-state: dirty"):
        engine.generate([request(10)])
    push(engine, tmp_path, version=2)
    assert engine.generate([request(10)])[0][0].policy_version == 2
    tags = [body["tags"] for _, body in asked(tmp_path, "/release_memory_occupation")]
    assert tags == [["kv_cache", "weights"]]


def test_weights_of_a_folder_stay(engines, tmp_path):
    engine = engines(offload=True)
    engine.sleep()
    engine.wake()
    assert engine.generate([request(10)])[0][0].token_ids == (11, 12, 13, 14)
    tags = [body["tags"] for _, body in asked(tmp_path, "/release_memory_occupation")]
    assert tags == [["kv_cache"]]


def test_an_engine_that_works_does_not_sleep(engines):
    engine = engines({"token_seconds": 0.01}, offload=True)
    thread = threading.Thread(target=lambda: engine.generate([request(10, max_tokens=60)]))
    thread.start()
    time.sleep(0.2)
    with raises(EngineError, "wrong-state: already generating"):
        engine.sleep()
    thread.join(10.0)


# CUDA IPC


def ipc_bucket(tensors):
    """What the IPC sender makes, with a handle that no GPU gave."""
    layout = layout_of(tensors)
    memory = {
        "torch": torch.__version__,
        "device": "1234-uuid",
        "dtype": "uint8",
        "shape": [4096],
        "storage_offset": 0,
        "handle": {"base64": base64.b64encode(b"c" * 64).decode()},
        "size": 4096,
        "offset": 512,
        "counter": {"base64": base64.b64encode(b"/torch_1").decode()},
        "counter_offset": 5,
        "event": {"base64": base64.b64encode(b"e" * 64).decode()},
        "event_sync": True,
    }
    return WeightBucket(
        index=0,
        specs=tuple(layout.specs),
        num_bytes=layout.num_bytes,
        transport="ipc",
        handle={"key": "a/0/0", "memory": memory},
    )


def test_ipc_payload_calls_what_torch_would_call(monkeypatch):
    """Read as SGLang does: rebuild_cuda_tensor replaced by one that takes a UUID."""
    bucket = ipc_bucket({"a": torch.zeros(3, dtype=torch.bfloat16), "b": torch.zeros(2, 2)})
    payload = base64.b64decode(tensor_payload(bucket), validate=True)
    called = []
    monkeypatch.setattr(
        torch.multiprocessing.reductions, "rebuild_cuda_tensor", lambda *args: called.append(args) or "flat"
    )
    value = pickle.loads(payload)
    assert value["flattened_tensor"] == "flat"
    assert called == [
        (
            torch.Tensor, (4096,), (1,), 0, torch.storage.TypedStorage, torch.uint8, "1234-uuid", b"c" * 64,
            4096, 512, False, b"/torch_1", 5, b"e" * 64, True,
        )
    ]  # fmt: skip
    metadata = [vars(m) for m in value["metadata"]]
    assert metadata == [
        {"name": "a", "shape": (3,), "dtype": torch.bfloat16, "start_idx": 0, "end_idx": 6, "numel": 6},
        {"name": "b", "shape": (2, 2), "dtype": torch.float32, "start_idx": 16, "end_idx": 32, "numel": 16},
    ]
    assert all(isinstance(m, types.SimpleNamespace) for m in value["metadata"])


def test_ipc_buckets_are_accepted_and_their_copies_waited_for(engines, tmp_path):
    engine = engines(spec=PUSHED, cuda_devices=(0, 1), tp=2)
    one = session()
    engine.begin_update(one)
    engine.receive(ipc_bucket(weights()))
    engine.finish_update(one)
    (body,) = [body for _, body in asked(tmp_path, "/update_weights_from_tensor")]
    assert len(body["serialized_named_tensors"]) == 2 and body["load_format"] == "flattened_bucket"
    order = [
        path
        for path, _ in asked(tmp_path)
        if path in ("/update_weights_from_tensor", "/get_weights_by_name", "/flush_cache")
    ]
    assert order == ["/update_weights_from_tensor", "/get_weights_by_name", "/flush_cache"]


def test_copies_into_a_model_that_cannot_be_read_are_waited_for_with_a_sample(engines, tmp_path):
    engine = engines({"reads": False}, spec=PUSHED)
    one = session()
    engine.begin_update(one)
    engine.receive(ipc_bucket(weights()))
    engine.finish_update(one)
    assert [b["input_ids"] for _, b in asked(tmp_path, "/generate")] == [[0]]


# collectives


def test_a_group_is_joined_once_and_left_for_a_new_one(engines, tmp_path):
    engine = engines(spec={**PUSHED, "shares_device": False}, cuda_devices=(1,))
    assert engine.transports == ("collective", "disk") and engine.receivers == 1
    store = host_store()
    handle = {
        "group": "g1",
        "number": 0,
        "address": "127.0.0.1",
        "port": store.port,
        "world_size": 2,
        "first_rank": 1,
        "backend": "nccl",
    }
    halves = list(weights().items())
    for version, group in ((1, "g1"), (2, "g1"), (3, "g2")):
        one = session(version)
        engine.begin_update(one)
        for part in (dict(halves[:6]), dict(halves[6:])):
            made = file_bucket(tmp_path, part)
            engine.receive(replace(made, transport="collective", handle={**handle, "group": group}))
        engine.finish_update(one)
    joins = asked(tmp_path, "/init_weights_update_group", "/destroy_weights_update_group")
    assert [(path, body["group_name"]) for path, body in joins] == [
        ("/init_weights_update_group", "g1"),
        ("/destroy_weights_update_group", "g1"),
        ("/init_weights_update_group", "g2"),
    ]
    assert joins[0][1]["rank_offset"] == 1
    assert store.check(["g2/marks/0/1"])  # the trainer waits for this
    body = asked(tmp_path, "/update_weights_from_distributed")[0][1]
    assert body["dtypes"] == ["float32"] * 6 and body["shapes"][0] == [256, 16]


def test_padding_between_tensors_cannot_be_broadcast():
    bucket = ipc_bucket({"a": torch.zeros(3), "b": torch.zeros(4)})
    with raises(EngineError, "unsupported-combination: engine.transfer, b", offset=12):
        check_no_padding(bucket)


SGLANGS_SIDE = """
import os, sys, torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import (
    Backend, PrefixStore, _new_process_group_helper, default_pg_timeout, rendezvous,
)
dist.init_process_group("gloo", init_method=sys.argv[2], rank=0, world_size=1)  # of its own tp ranks
store, rank, size = next(rendezvous(sys.argv[1], 1, 2))
group, _ = _new_process_group_helper(
    size, rank, [], Backend("gloo"), PrefixStore("grp", store), group_name="grp", timeout=default_pg_timeout
)
dist.distributed_c10d._world.pg_group_ranks[group] = {i: i for i in range(size)}
received = torch.empty(4, dtype=torch.uint8)
dist.broadcast(received, src=0, group=group)
print(received.tolist(), flush=True)
os._exit(0)  # a thread of gloo that is not done with the tensor would abort Python's shutdown
"""


def test_a_group_made_as_sglang_makes_it_meets_ours(tmp_path):
    """The other side is another process with a default group of its own, and torch's helper."""
    store = host_store()
    child = subprocess.Popen(
        [sys.executable, "-c", SGLANGS_SIDE, f"tcp://127.0.0.1:{store.port}", f"file://{tmp_path}/store"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    try:
        group = connect_group(
            Rendezvous(name="grp", address="127.0.0.1", port=store.port, world_size=2, backend="gloo"),
            rank=0,
            seconds=30.0,
            store=store,
        )
        handle = {"group": "grp", "address": "127.0.0.1", "port": store.port, "first_rank": 1, "number": 0}
        announce(handle, receivers=1)
        group.broadcast(torch.tensor([1, 2, 3, 4], dtype=torch.uint8), deadline=time.monotonic() + 30.0)
        assert child.communicate(timeout=30.0)[0].strip() == "[1, 2, 3, 4]"
    finally:
        child.kill()
        child.wait()


# what is read


def test_weights_that_are_too_large_to_read_are_left_out(tmp_path):
    expected = Expected(model_folder(tmp_path / "model"))
    names = list(weights())
    expected.shapes["model.embed_tokens.weight"] = (128_256, 2048)
    assert "model.embed_tokens.weight" not in expected.readable(names)
    assert "model.norm.weight" in expected.readable(names)
    assert expected.readable(["unknown"]) == []
    assert expected.rows_to_read("model.layers.0.self_attn.q_proj.weight") == 4  # of 16 values
    assert expected.rows_to_read("model.norm.weight") == 64
    assert expected.smallest() == "model.layers.0.input_layernorm.weight"
