"""What a rank does in test_checkpoint_ranks.py: python checkpoint_worker.py. One line per case that held into
OUT/rank-N.txt; state is dealt out over the ranks by a backend of plain tensors."""

from __future__ import annotations

import errno
import json
import os
import random
import re
import shutil
import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from lockstep.config.train import CheckpointConfig
from lockstep.errors import CheckpointError
from lockstep.loop.checkpoint import CheckpointManager
from lockstep.loop.checkpoint_files import verify
from lockstep.loop.roles import ALGORITHM, Roles
from lockstep.processes.child import relax_gc
from lockstep.protocols.train import FinishSave
from lockstep.ranks import node_folders
from lockstep.ranks.context import RankContext, init_ranks
from lockstep.ranks.node_folders import NodeFolders
from lockstep.train.state import files
from lockstep.train.state.files import Layout, LiveTensors, Reader, TensorMeta, read_flat
from lockstep.train.state.rng import rng_state
from lockstep.train.state.save_load import load_state, save_state

OUT = Path(os.environ["OUT"])
SHAPES: dict[str, tuple[tuple[int, ...], int | None]] = {
    # whole shape, and the dimension that tp splits
    "embed.weight": ((37, 8), 0),
    "up.weight": ((16, 8), 0),
    "down.weight": ((8, 16), 1),
    "norm.weight": ((5,), None),
    "deep.weight": ((6, 4, 3), 1),
}


def truth(value: int) -> dict[str, Tensor]:
    """A whole state in bfloat16 with float32 masters; each `value` another one."""
    generator = torch.Generator().manual_seed(value)
    state: dict[str, Tensor] = {}
    for name, (shape, _) in SHAPES.items():
        master = torch.randn(shape, generator=generator)
        state |= {f"model/{name}": master.bfloat16(), f"master/{name}": master}
        state |= {
            f"{kind}/{name}": torch.randn(shape, generator=generator) for kind in ("exp_avg", "exp_avg_sq")
        }
        state[f"updates/{name}"] = torch.tensor(float(value))
    return state


def cut(length: int, *, part: int, of: int) -> tuple[int, int]:
    """As FSDP2 does: equal parts, the last ones shorter or empty."""
    each = -(-length // of)
    return min(length, part * each), min(length, (part + 1) * each)


class Sharded:
    """TensorParts: columns or rows by tp, what is left by rows over dp; counts on every rank."""

    backend = "sharded"

    def __init__(self, state: Mapping[str, Tensor], *, dp: int, tp: int, group: Any) -> None:
        self.group, self.mesh = group, {"dp": dp, "tp": tp}
        self.dp, self.tp = divmod(dist.get_rank(group), tp)
        self.metas = {name: TensorMeta(tuple(t.shape), t.dtype) for name, t in state.items()}
        self.local = {name: t[self.index(name)].clone() for name, t in state.items()}
        self.read: list[str] = []
        """Names of tensors that were read whole."""

    def index(self, name: str, rank: int | None = None) -> tuple[slice, ...]:
        dp, tp = (self.dp, self.tp) if rank is None else divmod(rank, self.mesh["tp"])
        shape, split = self.metas[name].shape, SHAPES[name.partition("/")[2]][1]
        bounds = [[0, length] for length in shape]
        if bounds and split is not None:
            bounds[split] = list(cut(shape[split], part=tp, of=self.mesh["tp"]))
        if bounds:
            start, stop = bounds[0]
            first, last = cut(stop - start, part=dp, of=self.mesh["dp"])
            bounds[0] = [start + first, start + last]
        return tuple(slice(*b) for b in bounds)

    def tensors(self) -> Mapping[str, TensorMeta]:
        return self.metas

    def whole(self, name: str, *, owner: int) -> Tensor | None:
        parts: list[Any] | None = [None] * dist.get_world_size(self.group)
        mine = dist.get_rank(self.group) == owner
        dist.gather_object(self.local[name], parts if mine else None, group=self.group, group_dst=owner)
        if not mine:
            return None
        whole = torch.full(self.metas[name].shape, 99.0, dtype=self.metas[name].dtype)
        assert parts is not None
        for rank, part in enumerate(parts):
            whole[self.index(name, rank)] = part
        return whole

    def fill(self, name: str, read: Reader) -> None:
        assert (read.shape, read.dtype) == self.metas[name]
        self.local[name].copy_(read(*self.index(name)))

    def expected(self, state: Mapping[str, Tensor]) -> bool:
        return all(torch.equal(t, state[name][self.index(name)]) for name, t in self.local.items())


class Flat(Sharded):
    """As ZeRO does: a run of each tensor's elements, wherever that cuts a row."""

    def __init__(self, state: Mapping[str, Tensor], *, group: Any) -> None:
        super().__init__(state, dp=dist.get_world_size(group), tp=1, group=group)
        self.local = {name: t.reshape(-1)[slice(*self.span(name))].clone() for name, t in state.items()}

    def span(self, name: str, rank: int | None = None) -> tuple[int, int]:
        size = torch.Size(self.metas[name].shape).numel()
        return cut(size, part=self.dp if rank is None else rank, of=self.mesh["dp"])

    def whole(self, name: str, *, owner: int) -> Tensor | None:
        parts: list[Any] = [None] * self.mesh["dp"]
        dist.all_gather_object(parts, self.local[name], group=self.group)
        return torch.cat(parts).reshape(self.metas[name].shape) if self.dp == owner else None

    def fill(self, name: str, read: Reader) -> None:
        self.local[name].copy_(read_flat(read, *self.span(name)))

    def expected(self, state: Mapping[str, Tensor]) -> bool:
        return all(
            torch.equal(t, state[name].reshape(-1)[slice(*self.span(name))]) for name, t in self.local.items()
        )


class Backend:
    """Only what a checkpoint asks of a backend."""

    def __init__(self, parts: Any, *, step: int = 0, stream: int = 0) -> None:
        self.parts, self.step = parts, step
        self.layout = Layout(backend="sharded", mesh=getattr(parts, "mesh", {}), stream=stream)

    def save(self, directory: Path, *, background: bool = False) -> FinishSave:
        return save_state(
            directory, parts=self.parts, progress=self.progress(), layout=self.layout, background=background
        )

    def load(self, directory: Path, *, verified: bool = False) -> None:
        found = load_state(
            directory, parts=self.parts, progress=self.progress(), layout=self.layout, verified=verified
        )
        self.step = found["step"]

    def progress(self) -> dict[str, Any]:
        return {"step": self.step, "total_steps": 10, "optimizer": "adamw", "lora": False}


def folder(ranks: RankContext, name: str) -> Path:
    path = OUT / name
    ranks.on_rank_zero(lambda: path.mkdir(), what="a folder")
    return path


def manager(ranks: RankContext, name: str, **options: Any) -> CheckpointManager:
    return CheckpointManager(OUT / name, CheckpointConfig(**{"background": False} | options), ranks=ranks)


def seed(value: int) -> None:
    torch.manual_seed(value)
    random.seed(value)
    np.random.seed(value)


def draw() -> tuple[float, float, float]:
    return float(torch.rand(())), random.random(), float(np.random.random())


@contextmanager
def fails(ranks: RankContext, pattern: str) -> Iterator[None]:
    """The same CheckpointError on every rank."""
    try:
        yield
    except CheckpointError as error:
        text = str(error)
    else:
        text = "nothing was raised"
    texts = ranks.gather(text, what="errors")
    assert len(set(texts)) == 1, texts
    assert re.search(pattern, text), (pattern, text)


# --- cases --------------------------------------------------------------------------------------------------


def every_layout_loads_every_other(ranks: RankContext) -> None:
    everyone = dist.group.WORLD
    pair = dist.new_group([0, 1])
    made: dict[str, Path] = {}
    for number, (name, make) in enumerate(
        {
            "dp4": lambda state: Sharded(state, dp=4, tp=1, group=everyone),
            "dp2xtp2": lambda state: Sharded(state, dp=2, tp=2, group=everyone),
            "flat4": lambda state: Flat(state, group=everyone),
            "dp1xtp4": lambda state: Sharded(state, dp=1, tp=4, group=everyone),
        }.items()
    ):
        state = truth(number + 1)
        for other, path in made.items():
            backend = Backend(make(truth(0)))
            backend.load(path)
            assert backend.parts.expected(truth(backend.step)), (other, name)
        made[name] = folder(ranks, name)
        backend = Backend(make(state), step=number + 1)
        names = backend.save(made[name])()
        assert all(re.search(rf"0000{ranks.rank}-of-00004|^state.json$", file) for file in names), names
    ranks.gather(None, None, what="all saved")
    for name, path in made.items():
        if ranks.rank in (0, 1):  # fewer ranks, and the others take no part
            backend = Backend(Sharded(truth(0), dp=1, tp=2, group=pair))
            backend.load(path)
            assert backend.parts.expected(truth(backend.step)), name
        if ranks.rank == 3:  # one process, in spite of the process group
            live = truth(0)
            backend = Backend(LiveTensors(live))
            backend.load(path)
            assert all(torch.equal(t, live[n]) for n, t in truth(backend.step).items()), name
    if ranks.is_first:
        state = json.loads((made["dp2xtp2"] / "state.json").read_text())
        assert (state["world_size"], state["mesh"], state["version"]) == (4, {"dp": 2, "tp": 2}, 2)
        sizes = [
            sum(p.stat().st_size for p in made["dp4"].glob(f"*-0000{r}-*.safetensors")) for r in range(4)
        ]
        assert max(sizes) < 1.5 * min(sizes), sizes


def one_process_is_loaded_by_four(ranks: RankContext) -> None:
    path = folder(ranks, "alone")
    if ranks.rank == 2:
        Backend(LiveTensors(truth(5)), step=5).save(path)()
    ranks.gather(None, None, what="saved")
    backend = Backend(Sharded(truth(0), dp=2, tp=2, group=dist.group.WORLD))
    backend.load(path)
    assert backend.parts.expected(truth(5)) and backend.step == 5


def random_numbers_go_on(ranks: RankContext) -> None:
    """On the same layout each rank's own; on another those of rank 0, with torch's by stream."""
    everyone = dist.group.WORLD
    seed(100 + ranks.rank)
    path = folder(ranks, "rng")
    Backend(Sharded(truth(1), dp=4, tp=1, group=everyone)).save(path)()
    expected = draw()
    seed(7)
    Backend(Sharded(truth(1), dp=4, tp=1, group=everyone), stream=ranks.rank).load(path)
    assert draw() == expected
    firsts = ranks.gather(expected, tuple[float, float, float], what="numbers")
    assert len(set(firsts)) == 4
    numbers = []
    for _ in range(2):
        Backend(Sharded(truth(1), dp=2, tp=2, group=everyone), stream=ranks.rank // 2).load(path)
        numbers.append(ranks.gather(draw(), tuple[float, float, float], what="numbers"))
    assert numbers[0] == numbers[1]
    torchs = [drawn[0] for drawn in numbers[0]]
    assert torchs[0] == torchs[1] == firsts[0][0] != torchs[2] == torchs[3]
    assert {drawn[1:] for drawn in numbers[0]} == {firsts[0][1:]}


def damage_is_named_on_every_rank(ranks: RankContext) -> None:
    """Each file in turn: a flipped byte, cut short, gone; files of two checkpoints."""
    good = OUT / "dp4"
    names = ranks.on_rank_zero(lambda: sorted(p.name for p in good.iterdir()), what="files")
    assert len(names) == 4 * 4  # model, optimizer, rng; state.json or files-...json
    path = OUT / "damaged"
    backend = Backend(Sharded(truth(8), dp=2, tp=2, group=dist.group.WORLD))
    before = rng_state()

    def damaged(name: str, data: bytes | None) -> Iterator[Path]:
        def change() -> None:
            shutil.rmtree(path, ignore_errors=True)
            shutil.copytree(good, path)
            if data is None:
                (path / name).unlink()
            else:
                (path / name).write_bytes(data)

        ranks.on_rank_zero(change, what="damage")
        yield path

    for name in names:
        data = bytearray((good / name).read_bytes())
        data[-2] ^= 1
        for changed, complaint in (
            (bytes(data), "damaged|not valid JSON|mixed|names|says|field"),
            (bytes(data[: len(data) // 2]), "damaged|not valid JSON"),
            (b"", "damaged|not valid JSON"),
            (None, "is missing"),
        ):
            for bad in damaged(name, changed):
                with fails(ranks, rf"{re.escape(name)}.*({complaint})"):
                    backend.load(bad)
    other = OUT / "flat4"
    for name in names:  # a file of another save, whole in itself
        for bad in damaged(name, (other / name).read_bytes()):
            if (
                name.startswith(("rng", "model"))
                and (other / name).read_bytes() == (good / name).read_bytes()
            ):
                continue
            with fails(ranks, r"damaged|another save"):
                backend.load(bad)
    again = folder(ranks, "again")
    Backend(Sharded(truth(1), dp=4, tp=1, group=dist.group.WORLD), step=1).save(again)()

    def mix() -> None:
        """All of rank 2's files: whole, of the same tensors, and of another save."""
        shutil.rmtree(path)
        shutil.copytree(good, path)
        for file in again.glob("*-00002-of-*"):
            shutil.copyfile(file, path / file.name)

    ranks.on_rank_zero(mix, what="mixing")
    with fails(ranks, r"files-00002-of-00004\.json belongs to another save .* two checkpoints are mixed"):
        backend.load(path)
    assert backend.parts.expected(truth(8)) and backend.step == 0
    after = rng_state()
    assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
    backend.load(good)
    assert backend.parts.expected(truth(1)) and backend.step == 1


def the_manager_verifies_in_shares(ranks: RankContext) -> None:
    checkpoints = manager(ranks, "verified")
    parts = Sharded(truth(1), dp=4, tp=1, group=dist.group.WORLD)
    first = checkpoints.save(1, Backend(parts, step=1), {"tokens": 11})
    second = checkpoints.save(2, Backend(Sharded(truth(2), dp=4, tp=1, group=parts.group), step=2), {})
    assert checkpoints.find() == second and checkpoints.steps() == [1, 2]
    hashed: list[Path] = []
    real, files.sha256_of = files.sha256_of, lambda path: (hashed.append(path), real(path))[1]
    backend = Backend(Sharded(truth(0), dp=2, tp=2, group=parts.group))
    assert checkpoints.load(first, backend) == {"tokens": 11, "step": 1}
    files.sha256_of = real
    assert backend.parts.expected(truth(1)) and backend.step == 1
    everything = [path for share in ranks.gather(hashed, list[Path], what="hashed") for path in share]
    assert len(everything) == len(set(everything)) == 4 * 4 + 1  # run_state.json too
    if ranks.is_first:
        victim = second / "optimizer-00002-of-00004.safetensors"
        data = bytearray(victim.read_bytes())
        data[len(data) // 2] ^= 1
        victim.write_bytes(data)
    ranks.gather(None, None, what="damaged")
    with fails(
        ranks,
        r"optimizer-00002-of-00004\.safetensors is damaged.*newest undamaged one is .*step-000001",
    ):
        checkpoints.load(second, backend)
    assert backend.parts.expected(truth(1))


def a_full_disk_of_one_rank_is_an_error_of_all(ranks: RankContext) -> None:
    """In the foreground at once, in the background at the next step boundary."""
    real = files._HashingFile.write

    def full(self: Any, data: bytes | memoryview) -> None:
        if len(data) > 300 and "saving-step-000002" in str(self._path):
            raise OSError(errno.ENOSPC, "No space left on device")
        real(self, data)

    for background in (False, True):
        name = f"full-{background}"
        checkpoints = manager(ranks, name, keep_last=1, background=background)
        parts = Sharded(truth(1), dp=4, tp=1, group=dist.group.WORLD)
        checkpoints.save(1, Backend(parts, step=1), {})
        checkpoints.finish()
        if ranks.rank == 2:
            files._HashingFile.write = full  # type: ignore[method-assign]
        with fails(ranks, rf"rank 2.*No space left.*{name}.*bytes free"):
            checkpoints.save(2, Backend(Sharded(truth(2), dp=4, tp=1, group=parts.group)), {})
            while checkpoints.poll() is None:
                time.sleep(0.01)
        files._HashingFile.write = real  # type: ignore[method-assign]
        ranks.gather(None, None, what="removed")
        assert [p.name for p in (OUT / name).iterdir()] == ["step-000001"]
        backend = Backend(Sharded(truth(0), dp=4, tp=1, group=parts.group))
        checkpoints.load(checkpoints.find() or Path(), backend)
        assert backend.parts.expected(truth(1))
        checkpoints.save(3, backend, {})
        checkpoints.finish()
        assert checkpoints.steps() == [3]


def a_missing_algorithm_state_of_one_rank_is_an_error_of_all(ranks: RankContext) -> None:
    """And none is left waiting in the collectives of the weights."""
    path = folder(ranks, "roles")
    if ranks.is_first:
        (path / ALGORITHM).write_text("{}")
    ranks.gather(None, None, what="written")
    algorithm = SimpleNamespace(load_state=lambda state: None)
    policy = Backend(Sharded(truth(0), dp=4, tp=1, group=dist.group.WORLD))
    roles = Roles(policy=policy, others={}, algorithm=algorithm, ranks=ranks)  # type: ignore[arg-type]
    with fails(ranks, r"rank 3.*algorithm\.json"):
        roles.load(path / "elsewhere" if ranks.rank == 3 else path)


def a_background_save_holds_what_was_there(ranks: RankContext) -> None:
    """Training goes on before anything is written; a slow rank does not hold up the others' steps."""
    checkpoints = manager(ranks, "background", background=True)
    may_write = threading.Event()
    real = files._HashingFile.write

    def slow(self: Any, data: bytes | memoryview) -> None:
        if "step-000001" in str(self._path) and self._path.suffix == ".safetensors":
            assert threading.current_thread() is not threading.main_thread()
        if ranks.rank == 1:
            assert may_write.wait(20)
        real(self, data)

    files._HashingFile.write = slow  # type: ignore[method-assign]
    parts = Sharded(truth(1), dp=2, tp=2, group=dist.group.WORLD)
    state: dict[str, Any] = {"evaluations": {"before": 1}}
    path = checkpoints.save(1, Backend(parts, step=1), state)
    for tensor in parts.local.values():
        tensor.zero_()
    state["evaluations"]["after"] = 2
    for _ in range(3):
        assert checkpoints.poll() is None and checkpoints.steps() == []
    may_write.set()
    while (committed := checkpoints.poll()) is None:
        time.sleep(0.01)
    assert committed == path and checkpoints.steps() == [1] and checkpoints.poll() is None
    backend = Backend(Sharded(truth(0), dp=2, tp=2, group=parts.group))
    assert checkpoints.load(path, backend) == {"evaluations": {"before": 1}, "step": 1}
    assert backend.parts.expected(truth(1))
    # one after the other, the second without a poll in between
    checkpoints.save(2, Backend(Sharded(truth(2), dp=2, tp=2, group=parts.group), step=2), {})
    checkpoints.save(3, Backend(Sharded(truth(3), dp=2, tp=2, group=parts.group), step=3), {}, wait=True)
    assert checkpoints.steps() == [2, 3] and checkpoints.finish() is None
    files._HashingFile.write = real  # type: ignore[method-assign]


def ranks_see_one_folder(ranks: RankContext) -> None:
    """Rank 0 does not find what rank 3 has written, on a disk that was found to be shared."""
    checkpoints = manager(ranks, "apart")
    backend = Backend(Sharded(truth(1), dp=4, tp=1, group=dist.group.WORLD))
    if ranks.rank == 3:
        inner = backend.save

        def elsewhere(directory: Path, *, background: bool = False) -> FinishSave:
            own = OUT / "elsewhere" / directory.name
            own.mkdir(parents=True)
            return inner(own, background=background)

        backend.save = elsewhere  # type: ignore[method-assign]
    with fails(ranks, r"rank 0 does not see \['files-00003.*new files become visible late"):
        checkpoints.save(1, backend, {})
    assert checkpoints.find() is None


@contextmanager
def on_two_nodes(ranks: RankContext) -> Iterator[NodeFolders]:
    """Two ranks on each of two nodes, which have different folders under the same path, "run"."""
    node, before = ranks.rank // 2, dict(os.environ)
    os.environ["LOCAL_WORLD_SIZE"] = "2"
    here = OUT / f"node-{node}"
    (here / "run").mkdir(exist_ok=True, parents=True)
    os.chdir(here)
    chunk, node_folders._CHUNK = node_folders._CHUNK, 100
    try:
        yield NodeFolders(Path("run"), ranks=replace(ranks, local_rank=ranks.rank % 2))
    finally:
        node_folders._CHUNK = chunk
        os.chdir(OUT)
        os.environ.clear()
        os.environ.update(before)


def nodes_without_a_common_folder(ranks: RankContext) -> None:
    """Checkpoints are whole on rank 0's node; the other one has what it needs to load one, and no more."""
    parts = Sharded(truth(1), dp=4, tp=1, group=dist.group.WORLD)
    with on_two_nodes(ranks) as folders:
        assert folders.leaders == {2: 2, 3: 2} and folders.leads == (ranks.rank == 2)
        ranks.gather(None, None, what="looked")
        assert list(Path("run").iterdir()) == [], "the mark is gone"
        for background in (False, True):
            config = CheckpointConfig(background=background)
            made = CheckpointManager(Path("run/checkpoints"), config, ranks=ranks, folders=folders)
            made.save(1 + background, Backend(parts, step=1), {"seen": 5})
            made.finish()
            path = made.find()
            assert path is not None and path.is_dir() == (ranks.rank < 2)
            backend = Backend(Sharded(truth(0), dp=4, tp=1, group=dist.group.WORLD))
            assert made.load(path, backend) == {"seen": 5, "step": 1 + background}
            assert backend.parts.expected(truth(1))
            verify(path)  # all of it, on every node
        ranks.gather(None, None, what="verified")
        resumed = CheckpointManager(Path("run/checkpoints"), config, ranks=ranks, folders=folders)
        ranks.gather(None, None, what="cleared")
        assert resumed.steps() == ([1, 2] if ranks.rank < 2 else [])


def a_full_disk_while_nodes_send_is_an_error_of_all(ranks: RankContext) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    backend = Backend(Sharded(truth(1), dp=4, tp=1, group=dist.group.WORLD))
    with on_two_nodes(ranks) as folders:
        config = CheckpointConfig(background=False)
        made = CheckpointManager(Path("run/full"), config, ranks=ranks, folders=folders)
        write = node_folders._write
        node_folders._write = full
        with fails(ranks, r"rank 0: .*cannot be copied \(No space left on device\)"):
            made.save(1, backend, {})
        node_folders._write = write
        assert made.find() is None and not any(Path("run/full").glob("*"))
        ranks.gather(None, None, what="looked")
        made.save(1, backend, {})
        assert made.find() == Path("run/full/step-000001")
        sizes, node_folders._sizes = node_folders._sizes, lambda _: {"../elsewhere": 5}
        with fails(ranks, r"rank 2 sent a file named '../elsewhere', which points outside run"):
            folders.collect(Path("run"))
        node_folders._sizes = sizes


def killed(ranks: RankContext) -> None:
    """Rank 1 is killed while it writes its second checkpoint, and never gets to the end of this."""
    checkpoints = manager(ranks, "killed", background=True)
    parts = Sharded(truth(1), dp=2, tp=1, group=dist.group.WORLD)
    checkpoints.save(1, Backend(parts, step=1), {})
    checkpoints.finish()
    if ranks.rank == 1:
        real = files._HashingFile.write

        def write(self: Any, data: bytes | memoryview) -> None:
            if self._path.name.startswith("optimizer"):
                os.kill(os.getpid(), signal.SIGKILL)
            real(self, data)

        files._HashingFile.write = write  # type: ignore[method-assign]
    checkpoints.save(2, Backend(Sharded(truth(2), dp=2, tp=1, group=parts.group), step=2), {})
    checkpoints.finish()
    (OUT / "rank-9.txt").write_text("nobody was killed")


CASES = (
    every_layout_loads_every_other,
    one_process_is_loaded_by_four,
    random_numbers_go_on,
    damage_is_named_on_every_rank,
    the_manager_verifies_in_shares,
    a_full_disk_of_one_rank_is_an_error_of_all,
    a_missing_algorithm_state_of_one_rank_is_an_error_of_all,
    a_background_save_holds_what_was_there,
    ranks_see_one_folder,
    nodes_without_a_common_folder,
    a_full_disk_while_nodes_send_is_an_error_of_all,
)

if __name__ == "__main__":
    relax_gc()
    chosen = CASES if len(sys.argv) == 1 else [globals()[name] for name in sys.argv[1:]]
    with init_ranks(seconds=30.0) as context:
        for case in chosen:
            began = time.monotonic()
            case(context)
            with (OUT / f"rank-{context.rank}.txt").open("a") as held:
                held.write(f"{case.__name__} {time.monotonic() - began:.1f}\n")
