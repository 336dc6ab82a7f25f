"""An engine on the ranks of a tensor parallel group: the first decides, the others run the same forwards.

    first rank    scheduler ─► command ─► runner ─┐ sums over ranks, inside of the forward
    other ranks               command ─► runner ─┘ and the logits of all parts of the vocabulary

Only the first rank has samples. A command holds what a forward reads from the host, so the others need no
scheduler, and what depends on time (turns that arrive, an abort) cannot make ranks differ. Commands are
broadcast over the host; a GPU still runs the step before, so it does not wait for them.
"""

from __future__ import annotations

import enum
import struct
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from lockstep.ops.rank_sums import gather_rows
from lockstep.ranks.process_group import group_device

Columns = npt.NDArray[np.int64]
"""Integers of a forward, on the host."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Chunk:
    """Tokens of one prefill forward: parts of documents, end to end."""

    token_ids: Columns
    positions: Columns
    slots: Columns
    lengths: Columns
    """[D]: new tokens of each document."""
    starts: Columns
    used: Columns
    """[D]: keys of each document, those of its new tokens included."""

    def as_words(self) -> list[Sequence[int] | Columns]:
        """The chunk as integers; `of_words` is the inverse."""
        sizes = [len(self.token_ids), len(self.lengths)]
        return [sizes, self.token_ids, self.positions, self.slots, self.lengths, self.starts, self.used]

    @classmethod
    def of_words(cls, words: Columns) -> Chunk:
        """See `as_words`."""
        tokens, documents = words[:2].tolist()
        per_token = words[2 : 2 + 3 * tokens].reshape(3, tokens)
        lengths, starts, used = words[2 + 3 * tokens :].reshape(3, documents)
        token_ids, positions, slots = per_token
        return cls(
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            lengths=lengths,
            starts=starts,
            used=used,
        )


class Op(enum.IntEnum):
    """What a command asks for."""

    END = 0
    """The first rank is done."""
    USE = 1
    """Store keys and values in a cache of this capacity: Runner.use."""
    MOVE = 2
    """KVCache.move: source, target and count of each move."""
    PREFILL = 3
    """Runner.prefill."""
    STEP = 4
    """Runner.step: rows, the bits of the temperature or -1, and the columns."""


_AT_ONCE = 4096
"""Columns of a command that come in one message; the columns of some 500 rows."""


class Peers:
    """The ranks that run one engine together.

    Args:
        group: its rank 0 is the first.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.size = group.size()
        self.leads = dist.get_rank(group) == 0
        self._device = group_device(group)

    def send(self, op: Op, *parts: Sequence[int] | Columns) -> None:
        """Send a command to the other ranks; nothing happens on one of those."""
        if not self.leads:
            return
        body = np.concatenate(
            [np.asarray(part, np.int64).ravel() for part in parts] or [np.empty(0, np.int64)]
        )
        message = np.zeros(_AT_ONCE, np.int64)
        message[:2] = op, len(body)
        head = body[: _AT_ONCE - 2]
        message[2 : 2 + len(head)] = head
        self._broadcast(message)
        if len(body) > len(head):
            self._broadcast(body[len(head) :])

    def receive(self) -> tuple[Op, Columns]:
        """The next command of the first rank.

        Raises:
            RuntimeError: torch's, when none comes within the group's deadline, or the first rank is gone.
        """
        message = self._broadcast(np.zeros(_AT_ONCE, np.int64))
        op, length = Op(int(message[0])), int(message[1])
        body = message[2 : 2 + length]
        rest = length - len(body)
        if rest > 0:
            body = np.concatenate([body, self._broadcast(np.zeros(rest, np.int64))])
        return op, body

    def _broadcast(self, words: Columns) -> Columns:
        tensor = torch.from_numpy(np.ascontiguousarray(words)).to(self._device)
        dist.broadcast(tensor, group=self.group, group_src=0)
        return tensor.cpu().numpy()


def temperature_word(temperature: float | None) -> int:
    """A temperature, which is at least 0, as an integer; None: -1."""
    return -1 if temperature is None else struct.unpack("<q", struct.pack("<d", temperature))[0]


def temperature_of(word: int) -> float | None:
    """The inverse of `temperature_word`."""
    return None if word == -1 else struct.unpack("<d", struct.pack("<q", word))[0]


def gather_logits(
    part: Tensor, logits: Tensor, bounds: Sequence[tuple[int, int]], group: dist.ProcessGroup
) -> None:
    """Fill logits [R, V] with the parts [R, stop - start] of all ranks; collective."""
    longest = max(stop - start for start, stop in bounds)
    if part.shape[1] < longest:  # collectives want equal parts
        part = F.pad(part, (0, longest - part.shape[1]))
    for (start, stop), found in zip(bounds, gather_rows(part[None], group), strict=True):
        logits[:, start:stop] = found[:, : stop - start]
