"""A train backend's state as files: everything that decides how training goes on, bitwise.

model.safetensors       weights in the compute dtype, Hugging Face names (with LoRA: the adapters only)
optimizer.safetensors   "master/NAME" where the master is not the Parameter itself, "exp_avg/NAME", ...
rng.safetensors         torch, CUDA, Python and numpy generators
state.json              step, schedule, optimizer, versions, layout, which file holds which tensor, and size
                        and sha256 of the others

Tensors are whole, whatever the layout. With several ranks, each gathers and writes a share of them, into
model-00001-of-00004.safetensors and so on, and the ranks after the first list theirs in
files-00001-of-00004.json. So every backend on every mesh loads what any other has saved: it reads the slices
that it needs.
"""

from __future__ import annotations

import contextlib
import json
import math
import secrets
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lockstep.errors import CheckpointError, LockstepError
from lockstep.models.offload import CopySpace, PendingCopy
from lockstep.protocols.train import FinishSave
from lockstep.ranks.process_group import gather_objects
from lockstep.train.state.files import (
    MODEL,
    FileRecord,
    Layout,
    LiveTensors,
    TensorFile,
    TensorMeta,
    TensorParts,
    check_record,
    is_count,
    is_out_of_space,
    out_of_space,
    require_free_space,
    write_json,
    write_tensors,
)
from lockstep.train.state.index import (
    FORMAT,
    STATE,
    VERSION,
    StateIndex,
    Stored,
    StoredTensors,
    rank_file,
    read_index,
)
from lockstep.train.state.rng import (
    check_rng_state,
    derived_rng_state,
    read_rng,
    restore_rng_state,
    saved_rng_state,
)
from lockstep.version import library_versions

_MARGIN = 1 << 20  # headers, JSON, rng
_HELD = 1 << 28
"""Bytes of gathered tensors that a rank keeps before it writes them, so that ranks write at the same time."""


def save_state(
    directory: Path,
    *,
    parts: TensorParts,
    progress: Mapping[str, Any],
    layout: Layout,
    background: bool | CopySpace = False,
) -> FinishSave:
    """Write this rank's files into an existing directory. Collective over `parts.group`.

    Args:
        progress: JSON values (`state_parts.train_progress`), kept under "progress" in state.json.
        background: copy what this rank is to write into host memory (its share of all whole tensors) and
            leave the writing to the returned function, which any thread may call. A CopySpace: that is where
            the copies go; live tensors in host memory are then copied by a thread, and its `wait` must be
            called before they change. True: all is copied now.

    Returns:
        A function that finishes the save and returns the sha256 of this rank's files by name. Not
        collective; raises CheckpointError when the disk is full or failed in another way.

    Raises:
        CheckpointError: on every rank: the disk is full or failed in another way, on one of them.
    """
    ranks = StateRanks(parts.group)
    tensors = dict(sorted(parts.tensors().items(), key=lambda item: not item[0].startswith(MODEL)))
    # The same on every rank, and in every rank's list of files: loading tells files of two saves apart by it.
    save_id = ranks.gather(secrets.token_hex(8))[0]
    owners = share_out({name: meta.bytes for name, meta in tensors.items()}, ranks.size)
    needed = sum(meta.bytes for meta in tensors.values()) + _MARGIN * ranks.size
    with ranks.fail_together():
        require_free_space(directory, needed)
    own = {name: meta for name, meta in tensors.items() if owners[name] == ranks.rank}
    files = _RankFiles(directory, own, ranks=ranks, needed=needed)
    later = isinstance(background, CopySpace) or background
    files.held_limit = math.inf if later else 0 if ranks.size == 1 else _HELD
    if isinstance(background, CopySpace):
        background.begin()
        files.space, files.host_is_live = background, isinstance(parts, LiveTensors)
    for name in tensors:
        tensor = parts.whole(name, owner=owners[name])
        if owners[name] == ranks.rank:
            assert tensor is not None, f"the owner of {name} got no tensor"
            files.put(name, tensor)
    files.copied()
    # Now, not in `finish`: while a save in the background is written the loop draws on.
    files.rng = saved_rng_state(all_devices=ranks.size == 1)
    if ranks.rank == 0:
        files.document = {
            "format": FORMAT,
            "version": VERSION,
            "save_id": save_id,
            "progress": dict(progress),
            "versions": library_versions(),
            "backend": layout.backend,
            "mesh": dict(layout.mesh),
            "world_size": ranks.size,
            "tensors": {name: _file_of(name, owners[name], ranks.size) for name in tensors},
        }
    else:
        files.document = {"save_id": save_id}
    if not later:
        with ranks.fail_together():
            files.finish()
    return files.finish


class _RankFiles:
    """The files of one rank: tensors are written as they come, or later from copies."""

    def __init__(
        self, directory: Path, tensors: Mapping[str, TensorMeta], *, ranks: StateRanks, needed: int
    ) -> None:
        self._directory, self._ranks, self._needed = directory, ranks, needed
        self._left: dict[str, dict[str, TensorMeta]] = {}
        for name, meta in tensors.items():
            file = _file_of(name, ranks.rank, ranks.size)
            self._left.setdefault(file, {})[name.removeprefix(MODEL)] = meta
        self._open: dict[str, TensorFile] = {}
        self._held: list[tuple[str, Tensor]] = []
        self._beside: PendingCopy | None = None
        """Copies the held tensors that are live."""
        self._live: list[int] = []
        self.space: CopySpace | None = None
        self.host_is_live = False
        """Whether tensors in host memory stay as they are until `space.wait`."""
        self._held_bytes = 0
        self._failure: OSError | None = None
        self._records: dict[str, FileRecord] | None = None
        self.held_limit: float = 0
        """Bytes of copies in host memory before anything is written."""
        self.rng: dict[str, Tensor] = {}
        self.document: dict[str, Any] = {}

    def put(self, name: str, tensor: Tensor) -> None:
        """Write or keep the next tensor. An OSError is kept for `finish`: the other ranks are in the middle
        of their collectives."""
        if self.held_limit == 0:
            self._write([(name, tensor)])
            return
        self._held.append((name, self._copy(tensor.detach())))
        self._held_bytes += tensor.numel() * tensor.element_size()
        if self._held_bytes >= self.held_limit:
            self._write_held()

    def _copy(self, tensor: Tensor) -> Tensor:
        if self.space is not None and tensor.device.type == "cuda":
            return self.space.copy(tensor)
        if self.host_is_live and tensor.device.type == "cpu":
            self._live.append(len(self._held))
            return tensor
        return tensor.to("cpu", copy=True)

    def copied(self) -> None:
        """Called after the last `put`: begin the copies of live tensors, and wait for those of a GPU."""
        if self.space is None:
            return
        if self._live:
            self._beside = self.space.copy_beside([self._held[index][1] for index in self._live])
        self.space.synchronize()

    def _take_copies(self) -> None:
        if self._beside is None:
            return
        copies, self._beside = self._beside.take(), None
        for index, copy in zip(self._live, copies, strict=True):
            self._held[index] = (self._held[index][0], copy)

    def _write_held(self) -> None:
        self._take_copies()
        held, self._held, self._held_bytes = self._held[::-1], [], 0
        while held:  # each copy is freed as soon as it is written
            self._write([held.pop()])

    def _write(self, pairs: Sequence[tuple[str, Tensor]]) -> None:
        if self._failure is not None:
            return
        for name, tensor in pairs:
            file = _file_of(name, self._ranks.rank, self._ranks.size)
            try:
                if file not in self._open:
                    path, left = self._directory / file, self._left[file]
                    self._open[file] = TensorFile(path, left)
                self._open[file].write(name.removeprefix(MODEL), tensor)
            except OSError as error:
                self._failure = error
                return

    def finish(self) -> dict[str, str]:
        """Write what is left, wait until all of it is on the disk, and return the sha256 of each file by
        name."""
        if self._records is None:
            self._write_held()
            try:
                self._records = self._finish()
            except OSError as error:
                raise self._explained(error) from error
            finally:
                for opened in self._open.values():
                    opened.abandon()
        return {name: record.sha256 for name, record in self._records.items()}

    def _finish(self) -> dict[str, FileRecord]:
        if self._failure is not None:
            raise self._failure
        records = {}
        for file in list(self._open):
            records[file] = self._open.pop(file).close()
        rank, size = self._ranks.rank, self._ranks.size
        rng = rank_file("rng", "safetensors", rank=rank, size=size)
        records[rng] = write_tensors(self._directory / rng, self.rng)
        self.document["files"] = {name: asdict(record) for name, record in records.items()}
        name = STATE if rank == 0 else rank_file("files", "json", rank=rank, size=size)
        records[name] = write_json(self._directory / name, self.document)
        return records

    def _explained(self, error: OSError) -> CheckpointError:
        if not is_out_of_space(error):
            return CheckpointError(f"cannot-write: {self._directory} could not be written: {error}")
        free = shutil.disk_usage(self._directory).free
        return CheckpointError(
            f"no-space: {error}: {out_of_space(self._directory, needed=self._needed, free=free)}"
        )


def load_state(
    directory: Path,
    *,
    parts: TensorParts,
    progress: Mapping[str, Any],
    layout: Layout,
    verified: bool = False,
) -> dict[str, Any]:
    """Check everything, then fill the live tensors and restore the generators. Collective over `parts.group`.

    Ranks in the same layout as the checkpoint's get their own generators' states back; on another layout all
    get those of the first rank, and torch's are seeded anew from them where `layout.stream` is not 0.

    Args:
        progress: this run's: "optimizer" and "lora" must be the checkpoint's.
        verified: the caller has compared the files' hashes already.

    Returns:
        The `progress` that was saved.

    Raises:
        CheckpointError: on every rank: a file is missing, damaged or belongs to something else; nothing was
            changed.
    """
    ranks = StateRanks(parts.group)
    needed = parts.tensors()
    with ranks.fail_together():
        index = read_index(directory)
        restored = checked_progress(index, progress)
        _check_files(index, ranks, contents=not verified)
    with ranks.fail_together():
        stored = StoredTensors(index)
    with stored:
        with ranks.fail_together():
            sources = stored.resolve(needed, optimizer=progress.get("total_steps") != 0)
            rng = _rng(index, layout, ranks)
        with ranks.fail_together():
            _fill(parts, needed, stored, sources)
    restore_rng_state(rng)
    return restored


def _fill(
    parts: TensorParts,
    needed: Mapping[str, TensorMeta],
    stored: StoredTensors,
    sources: Mapping[str, Stored],
) -> None:
    for name, meta in needed.items():
        parts.fill(name, stored.reader(sources[name], meta))


def checked_progress(index: StateIndex, own: Mapping[str, Any]) -> dict[str, Any]:
    """The checkpoint's progress. Raises CheckpointError: of another optimizer, or without a step."""
    path, progress = index.directory / STATE, index.progress
    for key in ("optimizer", "lora"):
        if key in own and progress.get(key) != own[key]:
            raise CheckpointError(
                f"other-model: {path}: field 'progress.{key}' is {progress.get(key)!r}, but this run has "
                f"{own[key]!r}"
            )
    if not is_count(progress.get("step")):
        raise CheckpointError(
            f"wrong-field: {path}: field 'progress.step' is {progress.get('step')!r}, not a number of steps"
        )
    return progress


def _check_files(index: StateIndex, ranks: StateRanks, *, contents: bool) -> None:
    """Check the sizes of all files on every rank, and the hash of each file on one rank."""
    owners = share_out({name: record.bytes for name, record in index.files.items()}, ranks.size)
    for name, record in index.files.items():
        check_record(index.directory / name, record, contents=contents and owners[name] == ranks.rank)


def _rng(index: StateIndex, layout: Layout, ranks: StateRanks) -> dict[str, Tensor]:
    """The generators' states of this rank, checked."""
    same = index.world_size == ranks.size and index.mesh == dict(layout.mesh)
    path = index.rng_file(ranks.rank if same else 0)
    state = read_rng(path)
    check_rng_state(path, state)
    return state if same else derived_rng_state(state, stream=layout.stream)


def share_out(sizes: Mapping[str, int], parts: int) -> dict[str, int]:
    """Assign each item to one of `parts`: the largest first, each to the part that has least. Deterministic.

    Example:
        >>> share_out({"a": 3, "b": 5, "c": 2, "d": 2}, 2)
        {'b': 0, 'a': 1, 'c': 1, 'd': 0}
    """
    filled = [0] * parts
    owners = {}
    for name, size in sorted(sizes.items(), key=lambda item: (-item[1], item[0])):
        owner = filled.index(min(filled))
        owners[name] = owner
        filled[owner] += size
    return owners


def _file_of(name: str, owner: int, size: int) -> str:
    stem = "model" if name.startswith(MODEL) else "optimizer"
    return rank_file(stem, "safetensors", rank=owner, size=size)


# Ranks that save and load together: if one of them fails, all stop.


class StateRanks:
    """The ranks of a group. None: this process only, without collectives."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self._group = group
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    def gather(self, value: str | None) -> list[str | None]:
        """Gather every rank's value on every rank."""
        if self.size == 1:
            return [value]
        return gather_objects(value, str | None, group=self._group)

    @contextlib.contextmanager
    def fail_together(self) -> Iterator[None]:
        """Make the body, which must not use collectives, fail on every rank if it fails on one.

        Raises:
            CheckpointError: on every rank that did not fail itself; names the ranks that did. A failed rank
                raises its own error, with its number if it is a CheckpointError.
        """
        failure: Exception | None = None
        try:
            yield
        # Any error must reach the others, which would otherwise wait in the next collective.
        except Exception as error:
            failure = error
        if self.size == 1:
            if failure is not None:
                raise failure
            return
        data = failure.data if isinstance(failure, LockstepError) else {"code": "peer-failed"}
        errors = self.gather(None if failure is None else json.dumps([f"{failure}", data]))
        messages = [None if text is None else json.loads(text)[0] for text in errors]
        failed = [f"rank {rank} of {self.size}: {m}" for rank, m in enumerate(messages) if m is not None]
        if failure is not None and not isinstance(failure, (CheckpointError, OSError)):
            raise failure
        if failed:
            # Often all ranks find the same fault: report it once.
            text = failed[0] if len(set(messages)) > 1 or len(failed) == 1 else f"every rank: {messages[0]}"
            first = next(json.loads(text)[1] for text in errors if text is not None)
            raise CheckpointError(text, **first) from failure
