"""Checkpoints of a run: written whole or not at all, verified before use, thinned out.

    checkpoints/
      step-000010/
        model.safetensors, optimizer.safetensors, ...   what the train backend saves, each rank its own files
        value/model.safetensors, ...                    the same of the value model, where there is one
        run_state.json                                  what the loop saves: step, tokens, evaluations
        complete.json                                   step, optimizer steps, size and sha256 of every other
                                                        file; written last
      .saving-step-000020-1f3a9c02/                     a save that was interrupted; removed at the next start

A save goes to a hidden folder, every file is fsynced, and one rename makes it a checkpoint. A process that is
killed at any moment leaves the earlier checkpoints as they were. Of several ranks the first makes the folder
and, when all have written, completes and renames it.
"""

from __future__ import annotations

import contextlib
import copy
import json
import math
import re
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import JsonValue

from lockstep.config.train import CheckpointConfig
from lockstep.errors import CheckpointError
from lockstep.loop.checkpoint_files import (
    _NAME,
    COMPLETE,
    RUN_STATE,
    _Entry,
    _entry,
    _read_complete,
    _sort_key,
    read_run_state,
    verify,
    without_nan,
)
from lockstep.observe.files import file_errors, sync_folder
from lockstep.protocols.train import FinishSave, Saved
from lockstep.ranks.context import RankContext
from lockstep.ranks.node_folders import NodeFolders
from lockstep.train.state.files import (
    FileRecord,
    is_out_of_space,
    sha256_of,
    write_json,
)
from lockstep.train.state.index import STATE, read_index

_STALLED_SECONDS = 900.0
"""A save of which nothing reaches the disk for so long is given up by whoever waits for it."""
_SAY_SECONDS = 3.0
"""A wait that is longer is shown."""
_HIDDEN = re.compile(r"\.(saving|replaced|removing)-(step-\d{6,})-[0-9a-f]{8}")


@dataclass(kw_only=True, slots=True)
class _Saving:
    """A save that is under way on this rank."""

    temporary: Path
    path: Path
    run_state: dict[str, Any]
    metric: float | None
    finish: FinishSave
    """The backend's: writes this rank's files, or has written them."""
    thread: threading.Thread | None = None
    hashes: dict[str, str] = field(default_factory=dict)
    error: BaseException | None = None

    def run(self) -> None:
        """In the thread. Its error waits for the loop, which raises it on every rank."""
        try:
            self.hashes = self.finish()
        except BaseException as error:
            self.error = error


class CheckpointManager:
    """The checkpoints of one run.

    Leftovers of interrupted saves are removed when it is made. On several ranks all of them make it and call
    `save`, `poll`, `finish`, `find` and `load` together; an error of one is an error of all.

    Args:
        directory: the run's checkpoints folder; made when it is first needed.
        config: retention, and whether saves are written in the background.
        ranks: None: this process is alone.
        folders: which ranks see rank 0's; None: all. On the nodes of the others the folder holds only what a
            save is about to send, and what a resumed run has been sent.
        say: shows a line for the user; None: nothing is shown.
    """

    def __init__(
        self,
        directory: Path,
        config: CheckpointConfig,
        *,
        ranks: RankContext | None = None,
        folders: NodeFolders | None = None,
        say: Callable[[str], None] | None = None,
    ) -> None:
        self.directory = Path(directory)
        self.config = config
        self._say = say
        self._ranks = RankContext.alone() if ranks is None else ranks
        self._folders = NodeFolders(directory, ranks=RankContext.alone()) if folders is None else folders
        self._saving: _Saving | None = None
        self._ranks.on_rank_zero(self._remove_leftovers, what="removing leftovers of interrupted saves")
        self._clear_node()

    def save(
        self,
        step: int,
        backend: Saved,
        run_state: Mapping[str, Any],
        *,
        metric: float | None = None,
        wait: bool = False,
    ) -> Path:
        """Save the state after `step` steps, then remove the checkpoints that need not be kept.

        With `config.background` it returns when the state has been copied to host memory: a thread of each
        rank writes, and `poll`, `finish` or the next save make a checkpoint of it. A save that is still under
        way is finished first.

        Args:
            run_state: JSON values that the loop needs to go on; "step" is added.
            metric: the value of `config.metric` for these weights, if it is known; see `keep_best`.
            wait: write it now, whatever `config.background` says.

        Returns:
            The checkpoint's folder. An older checkpoint of the same step is replaced.

        Raises:
            CheckpointError: the disk is full or fails, here or on another rank, or run_state is not JSON.
                Earlier checkpoints are as they were.
        """
        # One save at a time: the copies of a background save
        # lie in the one space that the backend has for them.
        self.finish()
        background = self.config.background and not wait
        path = self.directory / f"step-{step:06d}"
        # A copy: the loop goes on with its own before a background save writes this one.
        state = {**copy.deepcopy(dict(run_state)), "step": step}
        temporary = self._ranks.on_rank_zero(
            lambda: self._make_temporary(path, state), Path, what="beginning a checkpoint"
        )
        with self._removed_on_error(temporary):
            self._folders.make(temporary)
            try:
                finish = backend.save(temporary, background=background)
            except OSError as error:
                raise self._disk_error(path, error) from error
        saving = _Saving(temporary=temporary, path=path, run_state=state, metric=metric, finish=finish)
        self._saving = saving
        if background:
            saving.thread = threading.Thread(target=saving.run, name=f"save-{path.name}", daemon=True)
            saving.thread.start()
        else:
            saving.run()
            self._commit(saving)
        return path

    @property
    def busy(self) -> bool:
        """Whether this rank still writes a save in the background."""
        saving = self._saving
        return saving is not None and saving.thread is not None and saving.thread.is_alive()

    def poll(self) -> Path | None:
        """Make a checkpoint of a background save that all ranks have written; called on every rank at each
        step boundary. Ranks communicate only while a save is under way.

        Returns:
            The new checkpoint.

        Raises:
            CheckpointError: it could not be written on one of the ranks.
        """
        saving = self._saving
        if saving is None or saving.thread is None:
            return None
        # All or none: a rank whose disk is slower would miss the collective calls of a commit.
        if self._ranks.any(saving.thread.is_alive(), what="asking whether a checkpoint is written"):
            return None
        return self._commit(saving)

    def finish(self) -> Path | None:
        """Wait for a background save, if there is one, and show after a few seconds what is waited for.

        Returns and raises as `poll`; also raises CheckpointError when nothing was written for a quarter of an
        hour: what is there is then removed at the next start.
        """
        saving = self._saving
        if saving is None or saving.thread is None:
            return None
        # Well below the deadline of the ranks' exchange, in which
        # the others wait while a slow rank joins its thread.
        wait = min(self._ranks.seconds / 4, _SAY_SECONDS)
        began = grown = time.monotonic()
        size, said = -1, 0.0
        # Disks differ: a rank that is ready asks again and again rather than wait beyond the ranks' deadline.
        while self._ranks.any(_alive(saving.thread, wait), what="waiting for a checkpoint"):
            now, before = time.monotonic(), size
            size = _size_of(saving.temporary)
            grown = grown if size == before else now
            if self._say is not None and now - said >= 10 * _SAY_SECONDS:
                self._say(
                    f"waiting for checkpoint {saving.path.name}, which is written in the background: "
                    f"{size / 2**30:.2f} GiB so far, {now - began:.0f} s"
                )
                said = now
            stalled = now - grown > _STALLED_SECONDS
            if self._ranks.any(stalled, what="looking whether a checkpoint still grows"):
                self._saving = None
                raise CheckpointError(
                    f"deadline: {saving.path} was not saved: {size} bytes were written, then nothing for "
                    f"{_STALLED_SECONDS:.0f} s; the disk of {self.directory} does not respond. Earlier "
                    "checkpoints are unchanged",
                    path=saving.path,
                )
        return self._commit(saving)

    def steps(self) -> list[int]:
        """Steps of the undamaged checkpoints (names and sizes), in the order in which they were saved."""
        return [entry.step for entry in self._entries() if entry.damage is None]

    def find(self, step: int | None = None) -> Path | None:
        """Return the checkpoint of `step`; None: the one saved last, or None where there is none.

        Raises:
            CheckpointError: there is no checkpoint of that step, or it is damaged (names and sizes; `load`
                checks the contents). Names the newest undamaged one, which is used only when asked for.
        """
        path, damage = self._ranks.on_rank_zero(
            lambda: self._select(step), tuple[Path | None, str | None], what="finding a checkpoint"
        )
        if path is not None and damage is not None:
            raise CheckpointError(
                self._damage_message(path, damage), code="damaged-file", path=path, reason=damage
            )
        return path

    def _select(self, step: int | None) -> tuple[Path | None, str | None]:
        entries = self._entries()
        if step is None:
            return (entries[-1].path, entries[-1].damage) if entries else (None, None)
        for entry in entries:
            if entry.step == step:
                return entry.path, entry.damage
        steps = sorted(entry.step for entry in entries)
        raise CheckpointError(
            f"no-such-file: {self.directory} has no checkpoint of step {step}; available: {steps or 'none'}",
            name=str(step),
            steps=steps,
        )

    def check(self, path: Path) -> dict[str, Any]:
        """Verify every file of a checkpoint, and return its run_state. Of several ranks each verifies a
        share.

        Raises:
            CheckpointError: a file is missing or damaged, or the files do not belong together. Names the
                newest undamaged checkpoint, if there is one.
        """
        try:
            self._verify(path)
            return self._ranks.on_rank_zero(
                lambda: read_run_state(path), dict[str, JsonValue], what="reading a checkpoint"
            )
        except CheckpointError as error:
            raise error.with_message(self._damage_message(path, str(error)), checkpoint=path) from error

    def load(self, path: Path, backend: Saved) -> dict[str, Any]:
        """Check a checkpoint, load it into the backend, and return its run_state.

        Raises:
            CheckpointError: as `check`; also where it belongs to another model or optimizer. The backend is
                as it was.
        """
        run_state = self.check(path)
        backend.load(path, verified=True)
        return run_state

    def prune(self) -> None:
        """Remove all but the last `keep_last` and the best `keep_best` checkpoints.

        Damaged ones do not count, and go only when `keep_last` undamaged ones were saved after them; if there
        is an undamaged checkpoint, one remains.
        """
        entries = self._entries()
        good = [entry for entry in entries if entry.damage is None]
        if not good:
            return
        last = good[-self.config.keep_last :]
        kept = {*last, *self._best(good)[: self.config.keep_best]}
        for index, entry in enumerate(entries):
            if entry not in kept and (entry.damage is None or index < entries.index(last[0])):
                self._remove(entry.path)

    def _best(self, entries: Sequence[_Entry]) -> list[_Entry]:
        """Return the checkpoints that have a metric, best first; of equals the later one is better."""
        sign = 1 if self.config.mode == "max" else -1
        known = [
            (sign * entry.metric, entry.sequence, entry) for entry in entries if entry.metric is not None
        ]
        return [entry for _, _, entry in sorted(known, key=lambda item: item[:2], reverse=True)]

    # --- writing --------------------------------------------------------------------------------------------

    def _make_temporary(self, path: Path, state: Mapping[str, Any]) -> Path:
        """The hidden folder of a save of `path`."""
        try:
            json.dumps(without_nan(state), allow_nan=False)
        except (TypeError, ValueError) as error:
            raise CheckpointError(
                f"wrong-type: run_state cannot be written as JSON: {error}", name="run_state"
            ) from error
        temporary = self._hidden("saving", path)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            temporary.mkdir()
        except OSError as error:
            raise self._disk_error(path, error) from error
        return temporary

    @contextlib.contextmanager
    def _removed_on_error(self, temporary: Path) -> Iterator[None]:
        """Remove the folder when the body raises, which it does on every rank, so that none still writes."""
        try:
            yield
        except BaseException:
            if self._ranks.is_first or self._folders.leads:
                shutil.rmtree(temporary, ignore_errors=True)
            raise

    def _commit(self, saving: _Saving) -> Path:
        """Make a checkpoint of what every rank has written, or raise on every rank."""
        self._saving = None
        with self._removed_on_error(saving.temporary):
            hashes: dict[str, str] = {}
            written = self._ranks.gather_results(
                lambda: self._written(saving), dict[str, str], what="writing a checkpoint"
            )
            for own in written:
                hashes |= own
            self._folders.collect(saving.temporary)
            self._ranks.on_rank_zero(lambda: self._finalize(saving, hashes), what="completing a checkpoint")
        self._clear_node()
        return saving.path

    def _clear_node(self) -> None:
        """Remove all that a node has here for a while only, because rank 0's folder is elsewhere."""
        if self._folders.leads:
            shutil.rmtree(self.directory, ignore_errors=True)

    def _written(self, saving: _Saving) -> dict[str, str]:
        """sha256 of this rank's files by name."""
        if isinstance(saving.error, OSError):
            raise self._disk_error(saving.path, saving.error) from saving.error
        if saving.error is not None:
            raise saving.error
        return saving.hashes

    def _finalize(self, saving: _Saving, hashes: Mapping[str, str]) -> None:
        try:
            self._write_complete(saving, hashes)
            self._publish(saving.temporary, saving.path)
        except OSError as error:
            raise self._disk_error(saving.path, error) from error
        self.prune()

    def _write_complete(self, saving: _Saving, hashes: Mapping[str, str]) -> None:
        folder = saving.temporary
        own = write_json(folder / RUN_STATE, without_nan(saving.run_state))
        # Hashes come from the writers where they made them:
        # reading everything back would double the save's I/O.
        hashes = {**hashes, RUN_STATE: own.sha256}
        files = sorted(p for p in folder.rglob("*") if p.is_file())
        records = {}
        for file in files:
            name = file.relative_to(folder).as_posix()
            records[name] = FileRecord(bytes=file.stat().st_size, sha256=hashes.get(name) or sha256_of(file))
        if unseen := sorted(hashes.keys() - records.keys()):
            raise CheckpointError(
                f"no-such-file: {folder}: rank 0 does not see {unseen[:3]}, which other ranks have written; "
                "is run_dir on a file system where new files become visible late?"
            )
        metric = saving.metric if saving.metric is not None and math.isfinite(saving.metric) else None
        complete = {
            "step": saving.run_state["step"],
            "optimizer_steps": read_index(folder).progress.get("step") if STATE in records else None,
            "sequence": 1 + max((entry.sequence for entry in self._entries()), default=0),
            "metric": metric,
            "metric_name": self.config.metric,
            "files": {name: asdict(record) for name, record in records.items()},
        }
        # Entries before complete.json: after a crash, what it lists must be there.
        for directory in {file.parent for file in files}:
            sync_folder(directory)
        write_json(folder / COMPLETE, complete)
        sync_folder(folder)

    def _publish(self, temporary: Path, path: Path) -> None:
        """Rename the folder, which makes it a checkpoint; an existing one of the same name is moved aside
        first."""
        aside = self._hidden("replaced", path)
        if path.exists():
            path.rename(aside)
        temporary.rename(path)
        # The rename is in the parent folder, which has to reach the disk for it to last.
        sync_folder(self.directory)
        if aside.exists():
            shutil.rmtree(aside)

    def _remove(self, path: Path) -> None:
        """Rename first: a half-removed checkpoint must not look like a damaged one."""
        # The link goes, not what it leads to, which belongs to somebody else.
        if path.is_symlink():
            path.unlink()
            return
        hidden = self._hidden("removing", path)
        path.rename(hidden)
        sync_folder(self.directory)
        shutil.rmtree(hidden)

    def _hidden(self, purpose: str, path: Path) -> Path:
        return path.with_name(f".{purpose}-{path.name}-{secrets.token_hex(4)}")

    def _remove_leftovers(self) -> None:
        """Remove what a killed process left; a complete checkpoint that was only moved aside is put back."""
        if not self.directory.is_dir():
            return
        for path in sorted(self.directory.iterdir()):
            match = _HIDDEN.fullmatch(path.name)
            if match is None or path.is_symlink() or not path.is_dir():
                continue
            place = self.directory / match[2]
            with file_errors(path, CheckpointError, "remove"):
                if match[1] == "replaced" and not place.exists():
                    path.rename(place)
                else:
                    shutil.rmtree(path)

    # --- reading --------------------------------------------------------------------------------------------

    def _entries(self) -> list[_Entry]:
        """All checkpoints, in the order in which they were saved."""
        if not self.directory.is_dir():
            return []
        entries = []
        for path in self.directory.iterdir():
            match = _NAME.fullmatch(path.name)
            if match and path.is_dir():
                entries.append(_entry(path, int(match[1])))
        known = [entry for entry in entries if entry.sequence >= 0]
        # One whose complete.json is gone cannot tell when it was saved: right after its predecessor by step.
        return sorted(entries, key=lambda e: (_sort_key(e, known), e.step))

    def _verify(self, path: Path) -> None:
        """Raises CheckpointError on every rank."""
        self._folders.spread(path)
        rank, size = self._ranks.rank, self._ranks.world_size
        self._ranks.gather_results(lambda: verify(path, part=rank, of=size), what="verifying a checkpoint")

    def _damage_message(self, path: Path, damage: str) -> str:
        """The message, with the newest undamaged checkpoint. Collective."""
        others = self._ranks.on_rank_zero(
            lambda: [(e.path, e.step) for e in self._entries() if e.damage is None and e.path != path],
            list[tuple[Path, int]],
            what="looking for an undamaged checkpoint",
        )
        for other, step in reversed(others):
            with contextlib.suppress(CheckpointError):
                self._verify(other)
                return (
                    f"checkpoint {path} is damaged: {damage}. The newest undamaged one is {other}; to "
                    f"continue from it, add --checkpoint {step}"
                )
        return f"checkpoint {path} is damaged: {damage}. There is no undamaged one in {self.directory}"

    def _disk_error(self, path: Path, error: OSError) -> CheckpointError:
        if not is_out_of_space(error):
            return CheckpointError(
                f"cannot-write: {path} could not be saved: {error}; earlier checkpoints are unchanged"
            )
        good = [e.path for e in self._entries() if e.damage is None]
        sizes = [sum(r["bytes"] for r in _read_complete(p)["files"].values()) for p in good]
        needed = f"needs about {sizes[-1]} bytes" if sizes else "is the run's first checkpoint"
        free = shutil.disk_usage(self.directory).free
        return CheckpointError(
            f"no-space: {path} could not be saved: {error}. It {needed}, and {self.directory} has {free} "
            "bytes free; free some space or lower checkpoint.keep_last. Earlier checkpoints are unchanged",
            free=free,
        )


def _size_of(folder: Path) -> int:
    """Bytes in a folder to which others are writing."""
    size = 0
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):
            size += path.stat().st_size
    return size


def _alive(thread: threading.Thread, seconds: float) -> bool:
    thread.join(seconds)
    return thread.is_alive()
