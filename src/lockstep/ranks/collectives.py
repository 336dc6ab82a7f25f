"""Every collective that Python starts, in the flight recorder of its process (lockstep.observe.flight).

All functions of torch.distributed, and with them FSDP2, DeepSpeed and our own, call a method of
`dist.ProcessGroup`, whichever backend the group has: there each is seen with its shapes, and from there comes
the `Work` whose `wait` ends it. Collectives that C++ starts by itself (the functional ones inside a compiled
graph) are not seen.

Symptom: torch has no hook there for gloo, and its own flight recorder lies in the process, so nobody can read
that of a process which is stopped. Remove this when c10d calls hooks of every backend.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch import Tensor

from lockstep.observe import flight

_OPS = {
    "allreduce": "all_reduce",
    "allreduce_coalesced": "all_reduce",
    "broadcast": "broadcast",
    "allgather": "all_gather",
    "allgather_coalesced": "all_gather",
    "_allgather_base": "all_gather_single",
    "all_gather_single": "all_gather_single",
    "all_gather_single_coalesced": "all_gather_single",
    "allgather_into_tensor_coalesced": "all_gather_single",
    "reduce": "reduce",
    "reduce_scatter": "reduce_scatter",
    "_reduce_scatter_base": "reduce_scatter_single",
    "reduce_scatter_single": "reduce_scatter_single",
    "reduce_scatter_single_coalesced": "reduce_scatter_single",
    "reduce_scatter_tensor_coalesced": "reduce_scatter_single",
    "alltoall": "all_to_all",
    "alltoall_base": "all_to_all_single",
    "all_to_all_single": "all_to_all_single",
    "gather": "gather",
    "scatter": "scatter",
    "barrier": "barrier",
    "monitored_barrier": "monitored_barrier",
    "send": "send",
    "recv": "recv",
}
"""Method of ProcessGroup -> the name that is recorded. torch 2.11 has not all of those of 2.13."""
_REQUIRED = ("allreduce", "broadcast", "allgather", "barrier")
_open: dict[int, int] = {}
"""id of a Work -> its number, until it was waited for. Of works that nobody waits for, the newest stay."""
_MOST_OPEN = flight.SLOTS
_labels: dict[Any, flight.Label] = {}
"""What a collective is -> as the recorder wants it: most come again in each step."""
_groups: dict[int, weakref.ref[Any]] = {}
"""Groups that labels know by their id."""
_MOST_LABELS = 2000


def record_collectives() -> None:
    """Have every later collective of this process recorded; does nothing the second time.

    Raises:
        RuntimeError: this torch has other methods than those that are known.
    """
    group: Any = dist.ProcessGroup
    if getattr(group.allreduce, "records", False):
        return
    missing = [name for name in _REQUIRED if not hasattr(group, name)]
    if missing:
        raise RuntimeError(
            f"torch's ProcessGroup has no {', '.join(missing)}: collectives cannot be recorded"
        )
    for method, op in _OPS.items():
        if hasattr(group, method):
            setattr(group, method, _recorded(getattr(group, method), op))
    work: Any = dist.Work
    work.wait = _ended_by(work.wait)


def _recorded(call: Callable[..., Any], op: str) -> Callable[..., Any]:
    position = 1 if op == "gather" else 0  # what all ranks have, not only the root
    running, labels, waited_for = flight.running, _labels, _open

    @functools.wraps(call)
    def collective(group: Any, *args: Any, **kwargs: Any) -> Any:
        recorder = running.recorder
        if recorder is None:
            return call(group, *args, **kwargs)
        value = args[position] if len(args) > position else None
        if type(value) is list and len(value) == 1:
            value = value[0]
        # Most are of one tensor. Half of what is recorded costs is the key, so it is made without a call.
        kind = (value.shape, value.dtype) if isinstance(value, Tensor) else _key(value)
        key = (id(recorder), id(group), op, kind)
        label = labels.get(key)
        if label is None:
            label = _new_label(recorder, group, key, value)
        number = recorder.enter(label)
        work = call(group, *args, **kwargs)
        if work is None:  # it has waited itself
            recorder.leave(number)
            return None
        if len(waited_for) >= _MOST_OPEN:
            del waited_for[next(iter(waited_for))]
        waited_for[id(work)] = number
        return work

    vars(collective)["records"] = True
    return collective


def _ended_by(wait: Callable[..., Any]) -> Callable[..., Any]:
    running, taken = flight.running, _open.pop

    @functools.wraps(wait)
    def waited(work: Any, *args: Any, **kwargs: Any) -> Any:
        result = wait(work, *args, **kwargs)
        number = taken(id(work), None)
        if number is not None and (recorder := running.recorder) is not None:
            recorder.leave(number)
        return result

    return waited


def _key(value: Any) -> Any:
    """Tells apart what `_shapes` does."""
    if isinstance(value, Tensor):
        return value.shape, value.dtype
    if not isinstance(value, list | tuple):
        return None
    return len(value), *map(_key, value[:4])


def _new_label(recorder: flight.FlightRecorder, group: Any, key: Any, value: Any) -> flight.Label:
    op, name = key[2], group.group_name
    if op in ("send", "recv"):  # between two ranks: no sequence that all have in common
        name = f"{name}{flight.PAIRS}"
    recorder.introduce(name, dist.get_process_group_ranks(group))
    if len(_labels) >= _MOST_LABELS:
        _labels.clear()
    # Another group may get the id of one that is gone.
    _groups[id(group)] = weakref.ref(group, lambda _: _labels.clear())
    label = _labels[key] = recorder.label(op, group=name, shapes=_shapes(value))
    return label


def _shapes(value: Any) -> str:
    """Such as "[4096] float32" or "2 x [8] int64"; of lists of different tensors the first few."""
    if isinstance(value, Tensor):
        return f"{list(value.shape)} {str(value.dtype)[6:]}"
    if not isinstance(value, list | tuple) or not value:
        return ""
    if isinstance(value[0], list | tuple):
        return _shapes(value[0])
    if len(value) == 1:
        return _shapes(value[0])
    texts = [_shapes(each) for each in value[:4]]
    if len(set(texts)) == 1:
        return f"{len(value)} x {texts[0]}"
    return ", ".join(texts) + (f" and {len(value) - 4} more" if len(value) > 4 else "")
