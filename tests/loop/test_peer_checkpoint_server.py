"""Copies that go from node to node: real servers on loopback, and what their ranks do with them."""

from __future__ import annotations

import errno
import http.client
import io
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from raising import raises
from starting import until

from lockstep.errors import CheckpointError, ConfigError
from lockstep.loop import peer_checkpoint, peer_checkpoint_server
from lockstep.loop.peer_checkpoint import PeerCheckpointClient, PeerCheckpoints, ServerAddress
from lockstep.loop.peer_checkpoint_server import PeerCheckpointServer
from lockstep.protocols.train import FinishSave
from lockstep.ranks.context import RankContext
from lockstep.ranks.environment import COPIES, PEER_SERVER
from lockstep.ranks.in_memory_checkpoint import part_files, whole_parts
from lockstep.wire.server_token import bearer

SECONDS = 120
STEP = "step-000001"


class Node:
    """A server, its folder, and what its ranks know of it."""

    def __init__(self, place: Path) -> None:
        place.mkdir()
        self.place, self.process = place, PeerCheckpointServer(place, "127.0.0.1")
        self.begin()

    def begin(self) -> None:
        """A generation of ranks."""
        environment = self.process.environment()
        self.folder = Path(environment[COPIES])
        self.server = ServerAddress(**json.loads(environment[PEER_SERVER]))

    def lose(self) -> None:
        """What is in its memory is gone."""
        for path in self.folder.iterdir():
            shutil.rmtree(path)


@pytest.fixture(scope="module")
def started(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[Node]]:
    """Three, which take seconds to start."""
    made = [Node(tmp_path_factory.mktemp("nodes") / "memory") for _ in range(3)]
    yield made
    for node in made:
        node.process.close()
        assert not list(node.place.iterdir()), "nothing is left"


@pytest.fixture
def nodes(started: list[Node]) -> list[Node]:
    """Three, of one rank each, with nothing in their memory."""
    for node in started:
        node.lose()
        node.begin()
    return started


def client(nodes: list[Node], rank: int, **changed: Any) -> PeerCheckpointClient:
    """changed: of the server of the node after the rank's."""
    servers = [node.server for node in nodes]
    after = (rank + 1) % len(nodes)
    servers[after] = replace(servers[after], **changed)
    return PeerCheckpointClient(servers, rank, seconds=SECONDS, fetch_seconds=SECONDS)


def write(node: Node, rank: int) -> Path:
    """A rank's files of step 1 on its node: the folder of the step."""
    path = node.folder / STEP
    (path / "value").mkdir(parents=True, exist_ok=True)
    (path / f"model-{rank}.safetensors").write_bytes(bytes([rank]) * 3_000_001)
    (path / f"value/model-{rank}.safetensors").write_bytes(b"")
    return path


def names(rank: int) -> list[str]:
    return [f"model-{rank}.safetensors", f"value/model-{rank}.safetensors"]


def test_a_part_is_whole_at_the_next_node_and_only_there(nodes):
    for rank in range(3):
        files = client(nodes, rank).send(write(nodes[rank], rank), names(rank))
        there = nodes[(rank + 1) % 3].folder / STEP
        assert part_files(there, rank) == files
        assert files[names(rank)[0]].sha256 == sha256(bytes([rank]) * 3_000_001).hexdigest()
        assert (there / names(rank)[0]).read_bytes() == bytes([rank]) * 3_000_001
    assert [whole_parts(node.folder, 3) for node in nodes] == [{1: [2]}, {1: [0]}, {1: [1]}]
    assert [client(nodes, rank).kept for rank in range(3)] == [{0, 2}, {0, 1}, {1, 2}]


def test_ranks_of_one_node_send_to_the_next_node():
    servers = [ServerAddress(address="10.0.0.1", port=1 + rank // 2, token="") for rank in range(6)]
    made = [PeerCheckpointClient(servers, rank, seconds=1.0, fetch_seconds=1.0) for rank in range(6)]
    assert [each._next.port for each in made] == [2, 2, 3, 3, 1, 1]
    assert [each.is_first_of_node for each in made] == [True, False] * 3
    assert [each.kept for each in made[::2]] == [{0, 1, 4, 5}, {0, 1, 2, 3}, {2, 3, 4, 5}]


def test_what_a_node_does_not_take_is_an_error_and_no_part(nodes, monkeypatch):
    path = write(nodes[0], 0)
    with raises(CheckpointError, "not-authenticated"):
        client(nodes, 0, token="0" * 64).send(path, names(0))
    with raises(CheckpointError, "unreachable"):
        client(nodes, 0, port=1).send(path, names(0))
    earlier = client(nodes, 0)
    nodes[1].begin()  # whoever knows only the token of the ranks before changes nothing
    with raises(CheckpointError, "not-authenticated"):
        earlier.send(path, names(0))
    with raises(CheckpointError, "incomplete"):  # no place for a file
        client(nodes, 0)._put("step-000001/../../a", (path / names(0)[0]).open("rb"), 10, until=1e12)
    monkeypatch.setattr(PeerCheckpointClient, "_room", lambda *_: 3_000_000)
    with raises(CheckpointError, "no-space", free=3_000_000):
        client(nodes, 0).send(path, names(0))
    assert whole_parts(nodes[1].folder, 3) == {}


def test_a_file_that_changes_on_its_way_is_no_part(nodes, monkeypatch):
    path, write_piece = write(nodes[0], 0), peer_checkpoint._Request.write

    def damaged(self: peer_checkpoint._Request, data: memoryview) -> None:
        write_piece(self, bytes([data[0] ^ 1]) + bytes(data[1:]))

    with monkeypatch.context() as patch, raises(CheckpointError, "hash-differs"):
        patch.setattr(peer_checkpoint._Request, "write", damaged)
        client(nodes, 0).send(path, names(0))
    assert whole_parts(nodes[1].folder, 3) == {1: []}


def test_a_node_whose_memory_is_full_says_so(tmp_path, monkeypatch):
    """Also where most of the file has not been sent yet."""
    size = 64 * 2**20  # more than sockets hold

    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(peer_checkpoint_server, "copied", full)  # the server's; the client has its own
    own = {"folder": tmp_path, "authorization": bearer("t")}
    with peer_checkpoint_server._server(
        "127.0.0.1", type("Handler", (peer_checkpoint_server._Handler,), own)
    ) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            address = ServerAddress(address="127.0.0.1", port=server.server_address[1], token="t")
            with raises(CheckpointError, "no-space"):
                to = PeerCheckpointClient([address], 0, seconds=SECONDS, fetch_seconds=SECONDS)
                to._put(f"{STEP}/a", io.BytesIO(bytes(size)), size, until=1e12)
        finally:
            server.shutdown()
            thread.join(SECONDS)
    assert list((tmp_path / STEP).iterdir()) == []


def test_half_a_file_is_not_kept(nodes):
    server = nodes[1].server
    connection = http.client.HTTPConnection(server.address, server.port, timeout=SECONDS)
    connection.putrequest("PUT", f"/{STEP}/model.safetensors")
    connection.putheader("Authorization", f"Bearer {server.token}")
    connection.putheader("Content-Length", "1000")
    connection.endheaders()
    connection.send(b"x" * 10)
    until(lambda: list(nodes[1].folder.glob("*/.*")), seconds=SECONDS)
    connection.close()
    until(lambda: not list(nodes[1].folder.glob("*/.*")), seconds=SECONDS)
    assert list((nodes[1].folder / STEP).iterdir()) == []


@pytest.fixture
def kept(nodes: list[Node]) -> Path:
    """Node 2 has nothing; the part of rank 0 is on the nodes 0 and 1: the file on node 0."""
    path = write(nodes[0], 0)
    files = client(nodes, 0).send(path, names(0))
    (path / "complete-0.json").write_bytes((nodes[1].folder / STEP / "complete-0.json").read_bytes())
    assert part_files(path, 0) == files
    return path / names(0)[0]


def fetched(nodes: list[Node], have: list[list[int]]) -> bool:
    client(nodes, 2).fetch(nodes[2].folder / STEP, have)
    return part_files(nodes[2].folder / STEP, 0) is not None


EVERYWHERE_ELSE = [[0, 1, 2], [0, 1, 2], [1, 2]]


def test_a_node_fetches_what_it_lacks(nodes, kept):
    assert fetched(nodes, EVERYWHERE_ELSE)
    assert (nodes[2].folder / STEP / names(0)[0]).read_bytes() == bytes([0]) * 3_000_001


@pytest.mark.parametrize("damage", ["truncated", "damaged", "gone"])
def test_a_damaged_part_is_fetched_from_the_other_node_that_has_it(nodes, kept, damage):
    codes = {"truncated": "damaged-file", "damaged": "hash-differs", "gone": "incomplete"}
    if damage == "truncated":
        os.truncate(kept, 3_000_000)
    elif damage == "damaged":
        kept.write_bytes(b"\1" + bytes(3_000_000))
    else:
        kept.unlink()
    with raises(CheckpointError, codes[damage], rank=0):
        fetched(nodes, [[0, 1, 2], [1, 2], [1, 2]])
    assert list((nodes[2].folder / STEP).glob("**/*model*")) == []
    assert fetched(nodes, EVERYWHERE_ELSE)


def test_a_list_of_files_that_leads_elsewhere_is_refused(nodes, kept):
    kept.with_name("complete-0.json").write_text('{"../../a": [1, ""]}')
    with raises(CheckpointError, "damaged-file", rank=0):
        fetched(nodes, [[0, 1, 2], [1, 2], [1, 2]])


def test_a_part_that_nobody_has_is_named(nodes):
    with raises(CheckpointError, "incomplete", rank=1):
        fetched(nodes, [[0, 2], [0, 2], [0, 2]])


def test_the_folder_goes_with_the_process_that_hosts_the_ranks(tmp_path):
    script = (
        "import sys, time; from pathlib import Path;"
        "from lockstep.loop.peer_checkpoint_server import PeerCheckpointServer as Server;"
        f"k = Server(Path({str(tmp_path)!r}), '127.0.0.1'); k.environment(); print('up', flush=True);"
        "time.sleep(600)"
    )
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as host:
        assert host.stdout is not None and host.stdout.readline() == b"up\n"
        (folder,) = tmp_path.iterdir()
        (folder / STEP).mkdir()
        host.send_signal(signal.SIGKILL)
    until(lambda: not folder.exists(), seconds=SECONDS)


def test_a_place_that_cannot_be_used_is_refused_by_the_host(tmp_path):
    with PeerCheckpointServer(tmp_path / "none", "127.0.0.1") as server, raises(ConfigError, "no-such-file"):
        server.environment()
    with PeerCheckpointServer(tmp_path, "no.such.host.invalid") as server, raises(ConfigError, "unreachable"):
        server.environment()


# --- the rule of commitment ---------------------------------------------------------------------------------


class Ranks:
    """Ranks in threads of this process, with the small collectives of RankContext."""

    def __init__(self, size: int) -> None:
        self.size, self.barrier = size, threading.Barrier(size, timeout=SECONDS)
        self.values: list[Any] = [None] * size

    def context(self, rank: int) -> Any:
        def gather(value: Any, *_: Any, what: str) -> list[Any]:
            self.values[rank] = value
            self.barrier.wait()
            values = list(self.values)
            self.barrier.wait()
            return values

        made = SimpleNamespace(rank=rank, world_size=self.size, is_first=rank == 0, gather=gather)
        made.fail_together = lambda what: Together(gather, what)
        return made


class Together:
    def __init__(self, gather: Callable[..., list[Any]], what: str) -> None:
        self.gather, self.what = gather, what

    def __enter__(self) -> None: ...

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        first = next((each for each in self.gather(error, what=self.what) if each is not None), None)
        if first is not None and first is not error:
            raise first


class Backend:
    """A rank's, whose state is one value."""

    def __init__(self, rank: int, value: object) -> None:
        self.rank, self.value = rank, value

    def save(self, directory: Path, *, background: bool = False) -> FinishSave:
        def finish() -> dict[str, str]:
            (directory / names(self.rank)[0]).write_text(str(self.value))
            return {names(self.rank)[0]: ""}

        return finish


class World:
    """All ranks' copies, one per node; `reach` is whether the node after a rank's can be reached."""

    def __init__(self, nodes: list[Node], *, reach: bool = True) -> None:
        self.said: list[str] = []
        ranks, more = Ranks(len(nodes)), {} if reach else {"port": 1}
        self.copies = [
            PeerCheckpoints(
                node.folder,
                ranks=ranks.context(rank),
                say=self.said.append if rank == 0 else lambda _: None,
                client=client(nodes, rank, **(more if rank == 0 else {})),
            )
            for rank, node in enumerate(nodes)
        ]

    def each(self, call: Callable[[int, PeerCheckpoints], Any]) -> list[Any]:
        """Call something on every rank at once; the results, or errors, by rank."""
        results: list[Any] = [None] * len(self.copies)
        unexpected: list[BaseException] = []

        def run(rank: int) -> None:
            try:
                results[rank] = call(rank, self.copies[rank])
            except (CheckpointError, ConfigError) as error:
                results[rank] = error
            except BaseException as error:
                unexpected.append(error)

        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(len(self.copies))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(SECONDS)
            assert not thread.is_alive()
        for error in unexpected:
            raise error
        return results

    def save(self, step: int) -> None:
        self.each(lambda rank, copies: copies.save(step, Backend(rank, step), {}, busy=False))  # type: ignore[arg-type]
        self.each(lambda _, copies: copies.wait())

    def newest(self) -> list[str | None]:
        """The step that each rank finds, and what all parts of it hold."""
        found = self.each(lambda _, copies: copies.newest())
        return [
            None
            if each is None
            else f"{each[0].name}: {' '.join((each[0] / names(r)[0]).read_text() for r in range(len(found)))}"
            for each in found
        ]


@pytest.fixture(autouse=True)
def no_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of these ranks are no train state."""
    monkeypatch.setattr(peer_checkpoint, "read_index", lambda _: None)


def steps(nodes: list[Node]) -> list[dict[int, list[int]]]:
    return [whole_parts(node.folder, len(nodes)) for node in nodes]


def test_a_step_counts_when_every_part_is_on_two_nodes(nodes):
    world = World(nodes)
    world.save(1)
    world.save(2)
    assert steps(nodes) == [
        {n: [0, 2] for n in (1, 2)},
        {n: [0, 1] for n in (1, 2)},
        {n: [1, 2] for n in (1, 2)},
    ]
    world.save(3)
    assert [sorted(of) for of in steps(nodes)] == [[2, 3]] * 3, "no more than is needed"
    assert world.said == [] and [copies.left_out for copies in world.copies] == [0, 0, 0]
    assert World(nodes).newest() == ["step-000003: 3 3 3"] * 3


def test_a_node_whose_memory_is_lost_gets_all_from_the_others(nodes):
    World(nodes).save(1)
    nodes[1].lose()
    world = World(nodes)
    assert world.newest() == ["step-000001: 1 1 1"] * 3
    world.save(2)
    # What was fetched to be loaded goes, and each part of both steps is on two nodes again.
    assert steps(nodes) == [
        {n: [0, 2] for n in (1, 2)},
        {n: [0, 1] for n in (1, 2)},
        {n: [1, 2] for n in (1, 2)},
    ]


def test_all_parts_are_fetched_within_one_deadline(nodes, monkeypatch):
    """The others wait for them, with a deadline of their own."""
    World(nodes).save(1)
    nodes[1].lose()
    clock, fetch_file = [0.0], PeerCheckpointClient._fetch_file

    def slow(*args: Any, **how: Any) -> None:
        clock[0] += 0.3 * SECONDS
        fetch_file(*args, **how)

    monkeypatch.setattr(PeerCheckpointClient, "_fetch_file", slow)
    monkeypatch.setattr(peer_checkpoint, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    with raises(CheckpointError, "unreachable", rank=2):
        client(nodes, 1).fetch(nodes[1].folder / STEP, [[0, 2], [], [1, 2]])


def test_what_a_rank_waits_for_the_nodes_is_less_than_what_others_wait_for_it():
    server = ServerAddress(address="10.0.0.1", port=1, token="")
    assert (
        PeerCheckpointClient.join(server, RankContext.alone(), seconds=1.0)._fetch_seconds
        < RankContext.alone().seconds
    )


def test_two_neighbours_lost_leave_no_copy(nodes):
    World(nodes).save(1)
    nodes[0].lose()
    nodes[1].lose()
    assert World(nodes).newest() == [None] * 3


def test_a_step_whose_next_node_is_not_reached_does_not_count(nodes, monkeypatch):
    World(nodes).save(1)
    world = World(nodes, reach=False)
    assert world.newest() == ["step-000001: 1 1 1"] * 3
    world.save(2)
    assert [of[2] for of in steps(nodes)] == [[2], [1], [1, 2]], "the part of rank 0 is nowhere"
    world.save(3)
    assert [copies.left_out for copies in world.copies] == [1, 1, 1] and len(world.said) == 1
    assert [sorted(of) for of in steps(nodes)] == [[1, 3]] * 3, "the last step that counts stays"
    fetch, there = PeerCheckpointClient.fetch, []

    def look(self: PeerCheckpointClient, path: Path, have: list[list[int]]) -> None:
        there.append(sorted(other.name for other in path.parent.glob("step-*")))
        fetch(self, path, have)

    monkeypatch.setattr(PeerCheckpointClient, "fetch", look)
    assert World(nodes).newest() == ["step-000001: 1 1 1"] * 3
    assert there == [[STEP]] * 3, "a node has no room for what is not needed beside the whole state"


def test_room_for_the_whole_state_is_asked_for_before_the_first_step(nodes, monkeypatch):
    """Node 1 keeps the small parts of ranks 0 and 1; to heal it would need the large one of rank 2."""
    usage, free = shutil.disk_usage(nodes[0].folder), {nodes[1].folder: 5_000}
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free.get(path, 20_000)))

    def begin(rank: int, copies: PeerCheckpoints) -> None:
        copies.begin(0, Backend(rank, "x" * 10_000 if rank == 2 else "x"), {})  # type: ignore[arg-type]

    errors = World(nodes).each(begin)
    assert [type(error) for error in errors] == [ConfigError] * 3
    assert {error.code for error in errors} == {"no-space"}
    free.clear()
    assert World(nodes).each(begin) == [None] * 3
