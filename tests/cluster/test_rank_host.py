"""A rank's host, without a cluster around it."""

import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import psutil
import pytest
from raising import raises
from starting import until

from lockstep.cluster import launch
from lockstep.cluster.rank_host import CHUNK, NodeHost, RankHost, check_submitter, submitter
from lockstep.errors import ConfigError
from lockstep.loop import peer_checkpoint_server
from lockstep.ranks.environment import COPIES, COPY_PLACE, WARM_SPARES


def followed(host: RankHost) -> tuple[bytes, bytes, int]:
    out, err, status = b"", b"", None
    while status is None:
        more, errors, status = host.follow(30.0)
        assert len(more) <= CHUNK and len(errors) <= CHUNK
        out, err = out + more, err + errors
    return out, err, status


def test_output_and_status_come_whole_and_the_environment_is_the_given_one(tmp_path, monkeypatch):
    monkeypatch.setenv("MY_TOKEN", "canary")
    host = RankHost()
    script = "import os, sys; print('x' * 200_000, sorted(os.environ)); sys.stderr.write('bad'); sys.exit(3)"
    host.start(["-c", script], {"RANK": "1"}, cwd=str(tmp_path))
    out, err, status = followed(host)
    assert (err, status) == (b"bad", 3) and out.startswith(b"x" * 200_000)
    assert b"'RANK'" in out and b"MY_TOKEN" not in out


def test_a_signal_reaches_the_rank(tmp_path):
    host = RankHost()
    host.start(["-c", "import time; print('up', end=''); time.sleep(600)"], {}, cwd=str(tmp_path))
    assert host.follow(30.0)[0] == b"up"
    host.send_signal(signal.SIGTERM)
    assert followed(host)[2] == -signal.SIGTERM


def test_ctrl_c_reaches_a_rank_whose_host_has_it_blocked(tmp_path):
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        host = RankHost()
        host.start(["-c", "import time; print('up', end=''); time.sleep(600)"], {}, cwd=str(tmp_path))
        assert host.follow(30.0)[0] == b"up"
        host.send_signal(signal.SIGINT)
        assert followed(host)[2] == -signal.SIGINT
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def test_copies_stay_from_one_generation_of_ranks_to_the_next(tmp_path, monkeypatch):
    host = NodeHost(1, address="127.0.0.1")
    script = "import os; print(os.environ['LOCKSTEP_COPIES'], os.environ['LOCKSTEP_PEER_CHECKPOINT_SERVER'])"

    def generation() -> tuple[Path, dict[str, Any]]:
        host.start(["-c", script], [{COPY_PLACE: str(tmp_path)}], cwd=str(tmp_path))
        out, err, status = followed(host._hosts[0])
        assert status == 0, err
        folder, _, server = out.decode().partition(" ")
        return Path(folder), json.loads(server)

    folder, server = generation()
    again, server_again = generation()
    assert again == folder and server_again["port"] == server["port"]
    assert server_again["token"] != server["token"]
    (killed,) = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in (p.info["cmdline"] or [])]
    killed.kill()
    new, _ = generation()
    assert new != folder and [*tmp_path.iterdir()] == [new], "what nobody keeps any more is removed"
    (stuck,) = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path) in (p.info["cmdline"] or [])]
    stuck.suspend()
    assert host._checkpoints is not None
    monkeypatch.setattr(host._checkpoints, "_seconds", 0.5)
    newest, _ = generation()
    assert newest != new and [*tmp_path.iterdir()] == [newest], "nor does one that is stuck hold its memory"
    host.close()
    assert not [*tmp_path.iterdir()]


def test_what_a_node_still_runs_is_ended_before_it_starts_anew(tmp_path):
    """The driver may have taken it for dead."""
    host = NodeHost(1, address="127.0.0.1")
    sleep = ["-c", "import time; time.sleep(600)"]
    host.start(sleep, [{}], cwd=str(tmp_path))
    before = host._hosts[0].child
    host.start(sleep, [{}], cwd=str(tmp_path))
    after = host._hosts[0].child
    assert before is not None and before.poll() is not None and after is not None and after.poll() is None
    after.end()


def test_a_node_starts_one_generation_after_the_other(tmp_path, monkeypatch):
    host, order = NodeHost(1, address="127.0.0.1"), []

    def start(*_: Any, **__: Any) -> None:
        order.append("begin")
        time.sleep(0.2)
        order.append("end")

    monkeypatch.setattr(RankHost, "start", start)
    threads = [threading.Thread(target=host.start, args=([], [{}])) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert order == ["begin", "end"] * 2


def test_a_checkpoint_server_answers_or_is_given_up_before_the_driver_gives_the_node_up():
    assert (
        peer_checkpoint_server._START_SECONDS + peer_checkpoint_server._ANSWER_SECONDS
        < 0.75 * launch.START_SECONDS
    )


def test_a_node_without_the_folder_refuses(tmp_path):
    with raises(ConfigError, "no-such-file"):
        RankHost().start(["-c", ""], {}, cwd=str(tmp_path / "gone"))


def test_the_driver_of_a_job_refuses_what_another_version_submitted(monkeypatch):
    check_submitter()  # of no job
    for name, value in submitter().items():
        monkeypatch.setenv(name, value)
    check_submitter()
    monkeypatch.setenv(*next(iter((name, "0.0.9 abc") for name in submitter())))
    with pytest.raises(ConfigError) as refusal:
        check_submitter()
    assert "submitted by lockstep 0.0.9 abc" in str(refusal.value)


WAITS = """
import os
from pathlib import Path
from lockstep.ranks.warm_spares import await_promotion
waited = "LOCKSTEP_TURN" in os.environ
await_promotion()
print(waited, os.environ["GENERATION"], "LOCKSTEP_WARM_SPARES" in os.environ)
step = Path(os.environ["LOCKSTEP_COPIES"], "step-" + os.environ["GENERATION"])
step.mkdir()
(step / "complete-0.json").touch()
"""


def test_who_waits_on_a_node_is_its_next_rank_unless_the_copies_are_elsewhere(tmp_path):
    host, places = NodeHost(1, address="127.0.0.1"), [tmp_path / name for name in ("a", "b")]
    for place in places:
        place.mkdir()
    said = []
    for generation, place in enumerate([places[0], places[0], places[1]]):
        more = {
            COPIES: str(place),
            "GENERATION": str(generation),
            "PYTHONPATH": os.environ.get("PYTHONPATH", ""),
        }
        host.start(["-c", WAITS], [more | {WARM_SPARES: "1"}], cwd=str(tmp_path))
        said.append(followed(host._hosts[0])[0].decode().split())
        until(lambda: host._next and host._next[0].child, seconds=60.0)
    waiting = host._next[0].child
    host.close()
    assert said == [["False", "0", "False"], ["True", "1", "False"], ["False", "2", "False"]]
    assert waiting.poll() is not None
