"""Remote roles: calls arrive whole, are executed once, and cost no bit."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from loop_runs import TINY, everything
from resolving import resolved_on
from role_worker_kills import kill_at
from starting import succeeds

from lockstep import loops
from lockstep.config.load import build, parse_toml
from lockstep.config.run import GRPORun
from lockstep.engine.remote.http import HttpClient, Reply, Timeout, Unreachable
from lockstep.engine.remote.server import ServerProcess
from lockstep.errors import ModelError, TrainError
from lockstep.loop import role_server, role_worker
from lockstep.loop.remote_roles import RemoteCritic, RemoteScorer
from lockstep.loop.role_server import Calls, RoleHost, serving
from lockstep.loop.role_worker import RoleWorker, packed, unpacked
from lockstep.loops.online import build_online
from lockstep.observe.metrics import Spans
from lockstep.packing import Planner
from lockstep.protocols.reward import RewardInput
from lockstep.ranks.context import RankContext
from lockstep.schema.batch import PlannedRows, RolloutSample, TrainSample

KL = "[algorithm.kl]\ncoef = 0.1\n"
GRPO = TINY + KL
PPO = GRPO.replace('kind = "grpo"', 'kind = "ppo"') + "[value]\nlr = 1e-2\n"


def run_of(toml: str, run_dir: Path, *apart: str, **cluster: Any) -> GRPORun:
    values = parse_toml(toml.encode(), origin="test") | {"steps": 3, "run_dir": str(run_dir)}
    values["train"] |= {"device": "cpu", "minibatches": 2}
    values["checkpoint"] |= {"every": 1}
    values["log"] |= {"display": "off"}
    if apart:
        with_policy = [role for role in ("policy", "ref", "value") if role not in apart]
        values["cluster"] = {"colocate": [[r for r in with_policy if r in toml or r != "value"], apart]}
    if cluster:
        values["cluster"] = cluster
    run = build(values, origin="test")
    assert isinstance(run, GRPORun)
    return run


# --- messages -----------------------------------------------------------------------------------------------


def rollout(length: int, sample_id: int = 0) -> RolloutSample:
    mask = torch.ones(length, dtype=torch.bool)
    mask[-1] = False
    return RolloutSample(
        token_ids=torch.arange(length), loss_mask=mask, sample_id=sample_id, rollout_logprobs=mask * -0.5
    )


def bits(tensor: torch.Tensor) -> list[int]:
    return tensor.reshape(-1).view(torch.uint8).tolist()


def assert_same(found: Any, sent: Any) -> None:
    if isinstance(sent, torch.Tensor):
        assert found.dtype == sent.dtype and found.shape == sent.shape
        assert bits(found) == bits(sent)
    elif isinstance(sent, dict):
        assert found.keys() == sent.keys()
        for name in sent:
            assert_same(found[name], sent[name])
    elif isinstance(sent, list | tuple):
        assert isinstance(found, tuple) and len(found) == len(sent)
        for one, other in zip(found, sent, strict=True):
            assert_same(one, other)
    elif hasattr(sent, "__dataclass_fields__"):
        assert type(found) is type(sent)
        for name in sent.__dataclass_fields__:
            assert_same(getattr(found, name), getattr(sent, name))
    else:
        assert found == sent and type(found) is type(sent)


def test_records_and_tensors_arrive_as_they_were_sent():
    plan = Planner(token_budget=32, static_capacity=False, layout="shared", max_seqlen=9, max_documents=4)
    samples: list[TrainSample] = [rollout(9, i) for i in range(4)]
    text = RewardInput(
        prompt="p",
        completion="\u00e9",
        row={},
        prompt_token_ids=(),
        completion_token_ids=(1,),
        finish_reason="stop",
        conversation=[{"role": "user", "content": "\n"}],
    )
    odd = [torch.tensor(1.5, dtype=torch.bfloat16), torch.zeros(0, 3), torch.tensor([float("nan"), -0.0])]
    sent = {"batches": plan(samples, [s.loss_mask.float() for s in samples]), "odd": odd, "text": text}
    sent |= {"numbers": [1, 0.1, True, None, "", {"dict": {"tensor": 0}}], "tied": [samples, samples[0]]}
    planned = sent["batches"]
    assert all(isinstance(batch.shared, PlannedRows) for batch in planned)
    assert_same(unpacked(packed(sent)), sent | {"batches": [batch.with_rows() for batch in planned]})


def test_what_is_no_message_is_refused(monkeypatch):
    good = packed({"a": torch.arange(4)})
    head = good[4:].replace(b'"num_bytes": 32', b'"num_bytes": 99')
    later = good[4:].replace(b'"offset": 0', b'"offset": 16')
    for bad in (b"", good[:-1], good[:9], good[:4] + head, good[:4] + later, b"\x02\0\0\0[]"):
        with pytest.raises(TrainError) as refused:
            unpacked(bad)
        assert refused.value.code == "bad-reply"
    other = packed(rollout(3)).replace(b'"record": "RolloutSample"', b'"record": "RolloutSampl_"')
    with pytest.raises(TrainError, match="RolloutSampl_"):
        unpacked(other)
    with pytest.raises(TypeError, match="of type Event cannot be sent"):
        packed([threading.Event()])
    monkeypatch.setattr(role_worker, "MOST_BYTES", 31)
    with pytest.raises(TrainError) as large:
        packed(torch.arange(4))
    assert large.value.data == {"code": "too-large", "setting": "rollout.prompts_per_step"}


# --- calls --------------------------------------------------------------------------------------------------


class Host(RoleHost):
    """Roles that note what they were asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.answers: dict[str, Any] = {}

    def call(self, name: str) -> Callable[..., Any]:
        def answer(**arguments: Any) -> Any:
            self.asked.append(name)
            found = self.answers[name]
            if isinstance(found, Exception):
                raise found
            return found

        return answer


@pytest.fixture
def host() -> Host:
    return Host()


def worker_in(folder: Path) -> RoleWorker:
    """Not started."""
    run = run_of(PPO, folder / "run", "ref", "value")
    alone, work_dir = RankContext.alone(), folder / "remote"
    return RoleWorker(
        run.remote_groups[0], resolved_on(run), ranks=alone, work_dir=work_dir, folder=folder / "run"
    )


@pytest.fixture
def worker(host: Host, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[RoleWorker]:
    """Whose process is a thread of this one."""
    calls = Calls(host)
    threading.Thread(target=calls.work, daemon=True).start()

    def post(self: RoleWorker, body: bytes, *, deadline: float) -> Reply:
        return Reply(status=200, body=calls.answer(body), what="a call")

    monkeypatch.setattr(RoleWorker, "_post", post)
    monkeypatch.setattr(ServerProcess, "wait_ended", lambda self, seconds: None)
    yield worker_in(tmp_path)


def test_what_was_done_before_its_answer_was_lost_is_not_done_again(worker, host, monkeypatch):
    post, lost = RoleWorker._post, [True, True, False]
    host.answers["update"] = {"loss": 0.5}

    def losing(self: RoleWorker, *args: Any, **more: Any) -> Reply:
        reply = post(self, *args, **more)
        if lost.pop(0):
            raise Unreachable("lost", code="unreachable")
        return reply

    monkeypatch.setattr(RoleWorker, "_post", losing)
    assert worker.call("update") == {"loss": 0.5} and host.asked == ["update"]
    lost[:] = [True, True, True]
    with pytest.raises(TrainError, match="broke the connection 3 times") as ended:
        worker.call("update")
    assert ended.value.code == "unreachable" and host.asked == ["update"] * 2


def test_an_answer_that_is_kept_no_more_is_not_made_again(host):
    calls = Calls(host)
    threading.Thread(target=calls.work, daemon=True).start()
    host.answers["update"] = 1.0
    number = role_server._KEPT + 2
    asked = [
        packed({"call": "update", "key": str(i), "seconds": 9.0, "arguments": {}}) for i in range(number)
    ]
    assert [unpacked(calls.answer(body)) for body in asked] == [{"value": 1.0}] * number
    assert unpacked(calls.answer(asked[1])) == {"value": 1.0} and len(host.asked) == number
    assert unpacked(calls.answer(asked[0]))["data"] == {"code": "wrong-state"} and len(host.asked) == number


def test_an_error_comes_back_as_what_it_was_with_the_roles(worker, host):
    host.answers["score"] = ModelError("no such folder", code="no-such-file", path="/nowhere")
    with pytest.raises(
        ModelError, match=r"remote process of ref \+ value, at score: no such folder"
    ) as raised:
        worker.call("score")
    roles = ["ref", "value"]
    assert raised.value.data == {"code": "no-such-file", "path": "/nowhere", "roles": roles}
    host.answers["score"] = ZeroDivisionError("by zero")
    with pytest.raises(TrainError, match=r"by zero \(ZeroDivisionError\)") as unknown:
        worker.call("score")
    assert unknown.value.data == {"code": "bad-reply", "roles": roles}


def test_a_call_has_a_deadline(worker, monkeypatch):
    def silent(self: RoleWorker, body: bytes, *, deadline: float) -> Reply:
        assert 1199 < deadline - time.monotonic() <= 1200
        raise Timeout("nothing", code="deadline")

    monkeypatch.setattr(RoleWorker, "_post", silent)
    with pytest.raises(TrainError, match="did not answer within") as late:
        worker.call("score")
    assert late.value.data["code"] == "deadline" and late.value.data["setting"] == "cluster.remote_seconds"


def test_scores_of_another_shape_are_refused(worker, host):
    plan = Planner(token_budget=32, static_capacity=False, max_seqlen=9, max_documents=4)
    batches = plan([rollout(9)], [torch.ones(9)])
    for wrong in ([], [torch.zeros(8)], [torch.zeros(9, dtype=torch.float64)], [0.0]):
        host.answers |= {"logprobs": wrong, "score": wrong}
        value = RemoteCritic(worker=worker, backend=None, config=None, spans=Spans())  # type: ignore[arg-type]
        for ask in (lambda: RemoteScorer(worker).logprobs(batches), lambda v=value: v.score([rollout(9)])):
            with pytest.raises(TrainError) as refused:
                ask()
            assert refused.value.code == "wrong-result"


def test_a_rank_learns_that_the_process_of_another_one_is_dead(tmp_path, monkeypatch):
    """Its own would wait for that one, and never answer."""
    worker = worker_in(tmp_path)
    monkeypatch.setattr(worker, "_grouped", True)
    monkeypatch.setattr(role_worker, "_LOOK_SECONDS", 0.02)
    monkeypatch.setattr(ServerProcess, "wait_ended", lambda self, seconds: "was killed by SIGKILL")
    died = worker._ask("score", {}, seconds=60.0).death  # nothing listens
    assert died is not None and died.data == {"code": "process-died", "roles": ["ref", "value"]}
    with socket.create_server(("127.0.0.1", int(worker.describe()["url"].rpartition(":")[2]))):
        lost = worker._ask("score", {}, seconds=60.0).death
    assert lost is not None and lost.code == "peer-failed"


def test_a_server_answers_its_token_alone(host, monkeypatch):
    host.answers["score"] = [torch.ones(2)]
    calls = Calls(host)
    threading.Thread(target=calls.work, daemon=True).start()
    body = packed({"call": "score", "key": "k", "seconds": 9.0, "arguments": {}})
    with serving(calls, token="secret") as server:
        url = f"http://127.0.0.1:{server.server_port}"
        stranger, other = (
            HttpClient(url, name="test", headers={"Authorization": t}) for t in ("", "Bearer s")
        )
        for client in (stranger, other):
            assert client.post("/call", body, seconds=9.0).status == 401
            assert client.get("/health", seconds=9.0).status == 401
        ours = HttpClient(url, name="test", headers={"Authorization": "Bearer secret"})
        assert host.asked == [] and ours.get("/health", seconds=9.0).status == 200
        assert unpacked(ours.post("/call", body, seconds=9.0).body)["value"][0].tolist() == [1.0, 1.0]
        assert ours.post("/calls", body, seconds=9.0).status == 404
        assert unpacked(ours.post("/call", b"{}", seconds=9.0).body)["kind"] == "TrainError"
        monkeypatch.setattr(role_server._Handler, "most_bytes", 9)
        assert ours.post("/call", body, seconds=9.0).status == 413


# --- processes ----------------------------------------------------------------------------------------------


def lose_answer(monkeypatch: pytest.MonkeyPatch, name: str) -> list[str]:
    """Lose the first answer to a call of this name, after the process has done it."""
    post, lost = RoleWorker._post, []

    def losing(self: RoleWorker, body: bytes, *, deadline: float) -> Reply:
        reply = post(self, body, deadline=deadline)
        if not lost and unpacked(body)["call"] == name:
            lost.append(name)
            raise Unreachable("lost", code="unreachable")
        return reply

    monkeypatch.setattr(RoleWorker, "_post", losing)
    return lost


@pytest.mark.slow
def test_a_reference_that_is_killed_in_a_step_costs_no_bit(tmp_path, monkeypatch):
    loops.train(run_of(GRPO, tmp_path / "together"))
    killed = kill_at(monkeypatch, "logprobs", 3)  # two minibatches a step: the first of the second step
    loops.train(run_of(GRPO, tmp_path / "apart", "ref"))
    assert len(killed) == 1
    assert everything(tmp_path / "apart") == everything(tmp_path / "together")
    assert "was killed by SIGKILL, at logprobs" in (tmp_path / "apart" / "logs" / "rank-0.log").read_text()


@pytest.mark.exhaustive
def test_a_value_model_that_is_killed_ends_the_run_which_goes_on_to_the_same_bits(tmp_path, monkeypatch):
    """And on the way an update whose answer is lost is not done twice."""
    loops.train(run_of(PPO, tmp_path / "together"))
    folder = tmp_path / "apart"
    with monkeypatch.context() as patch:
        killed = kill_at(patch, "update", 2)
        with pytest.raises(TrainError, match="killed by SIGKILL, at update") as died:
            loops.train(run_of(PPO, folder, "ref", "value"))
    assert len(killed) == 1 and died.value.data["code"] == "process-died"
    assert died.value.data["roles"] == ["ref", "value"]
    assert died.value.from_outside  # type: ignore[attr-defined]
    assert f"lockstep train --resume {folder}" in str(died.value)
    lost = lose_answer(monkeypatch, "update")
    loops.train(run_of(PPO, folder, "ref", "value"), resume=folder)
    assert lost == ["update"]
    assert everything(folder) == everything(tmp_path / "together")


APART = {"colocate": [["policy"], ["ref"], ["value"]], "dedicated_gpus": True}
TOGETHER = {"colocate": [["policy"], ["ref", "value"]], "dedicated_gpus": True}


@pytest.mark.exhaustive
def test_remote_roles_with_devices_of_their_own_work_at_the_same_time_and_keep_the_bits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops.train(run_of(PPO, tmp_path / "shared"))
    asked = {}
    for run, cluster in (("apart", APART), ("together", TOGETHER)):
        with monkeypatch.context() as patch:
            if run == "apart":  # while the value model scores
                killed = kill_at(patch, "logprobs", 3)
            asked[run] = noted(patch)
            loops.train(run_of(PPO, tmp_path / run, **cluster))
        assert everything(tmp_path / run) == everything(tmp_path / "shared")
    assert len(killed) == 1
    step = [("logprobs", False), ("logprobs", False), ("score", True), ("update", True)]
    assert sorted(asked["apart"]) == sorted([*step * 3, ("logprobs", False)])
    # Two calls of one worker have one order on all ranks: the reference's are over before the scores begin.
    assert asked["together"] == [*step[:2], ("score", False), step[3]] * 3


def noted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, bool]]:
    """The calls that score or train, and whether the loop goes on meanwhile."""
    ask, names = RoleWorker._ask, list[tuple[str, bool]]()

    def noting(self: RoleWorker, name: str, *args: Any, **more: Any) -> Any:
        if name in ("logprobs", "score", "update"):
            names.append((name, threading.current_thread() is not threading.main_thread()))
        return ask(self, name, *args, **more)

    monkeypatch.setattr(RoleWorker, "_ask", noting)
    return names


@pytest.mark.exhaustive
def test_a_value_model_that_dies_while_the_policy_learns_ends_the_run_which_goes_on_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loops.train(run_of(PPO, tmp_path / "shared"))
    folder = tmp_path / "apart"
    with monkeypatch.context() as patch:
        killed = kill_at(patch, "update", 2)
        with pytest.raises(TrainError, match="killed by SIGKILL, at update") as died:
            loops.train(run_of(PPO, folder, **APART))
    assert len(killed) == 1 and died.value.data["code"] == "process-died"
    loops.train(run_of(PPO, folder), resume=folder)
    assert everything(folder) == everything(tmp_path / "shared")


@pytest.mark.slow
def test_a_role_that_cannot_be_loaded_ends_the_run_before_it_begins(tmp_path):
    run = run_of(PPO + f'name = "{tmp_path / "nowhere"}"\n', tmp_path / "run", "value")
    with pytest.raises(
        ModelError, match=r"remote process of value, at build: the value model .*nowhere"
    ) as refused:
        build_online(run, work_dir=tmp_path / "engine")  # train_online looks for the folder before
    assert refused.value.data["roles"] == ["value"]


@pytest.mark.slow
def test_the_remote_roles_of_two_ranks_keep_the_bits(tmp_path):
    toml = PPO.replace("[train]", '[train]\nbackend = "fsdp2"\ndevice = "cpu"')
    toml = toml.replace("steps = 4", "steps = 3").replace("background = false", "background = true")
    for name, placed in (("together", ""), ("apart", '[["policy"], ["value", "ref"]]')):
        cluster = f"[cluster]\ncolocate = {placed}\n" if placed else ""
        (tmp_path / f"{name}.toml").write_text(toml + cluster)
        argv = ("train", f"{name}.toml", "--ranks", "2", "--run-dir", name)
        succeeds(*argv, cwd=tmp_path)
    assert everything(tmp_path / "apart") == everything(tmp_path / "together")
