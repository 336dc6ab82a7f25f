"""A short name for the bits of a set of weights: equal names, dtypes, shapes and bits give an equal name.

The bytes of a tensor are read as int64 words, 256 to a row, 256 rows to a block. Every row and every column
of every block is summed up modulo 2**64, where the tensor is: integer sums are the same in any order, on any
device and for any number of threads. The sums, 1/128 of the tensor, go through blake2b on the host.

Flipping one bit changes a row's sum. Swapping two different elements changes a word, a row's sum or a
column's sum. It is no protection against somebody who wants two sets of weights to look alike.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable

import torch
from torch import Tensor, nn

PREFIX = "lsw1-"
_SIDE = 256
"""Words of a row, and rows of a block."""
_BLOCK = _SIDE * _SIDE
_CPU_BLOCKS = 2
"""Blocks that are summed up together on a CPU: rows, then columns out of its cache."""


@torch.no_grad()
def fingerprint(tensors: Iterable[tuple[str, Tensor]]) -> str:
    """ "lsw1-" and 32 hexadecimal digits. The order of the tensors does not matter.

    Raises:
        ValueError: two tensors have one name, or one is on the meta device, where it has no bits.
    """
    heads: list[tuple[str, bytes]] = []
    sums: list[Tensor] = []
    for name, tensor in tensors:  # one at a time: they may be read from a file
        heads.append((name, json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode()))
        sums.append(_sums(name, tensor))
    names = [name for name, _ in heads]
    if len(set(names)) != len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"two tensors are called {twice!r}")
    digest = hashlib.blake2b(digest_size=16)
    for (_, head), part in sorted(zip(heads, _on_host(sums), strict=True), key=lambda item: item[0]):
        digest.update(len(head).to_bytes(8, "little"))
        digest.update(head)
        digest.update(part.numpy().data)
    return PREFIX + digest.hexdigest()


def module_tensors(module: nn.Module) -> dict[str, Tensor]:
    """The live Parameters and persistent buffers of a module by name, detached, each once: tied weights under
    their first name, LoRA layers unmerged. What is fingerprinted, and stored for replay."""
    tensors = {name: p.detach() for name, p in module.named_parameters()}
    seen: set[int] = set()
    for path, owner in module.named_modules():
        for key, buffer in owner._buffers.items():
            if buffer is None or key in owner._non_persistent_buffers_set or id(buffer) in seen:
                continue
            seen.add(id(buffer))
            tensors[f"{path}.{key}" if path else key] = buffer.detach()
    return tensors


def _sums(name: str, tensor: Tensor) -> Tensor:
    """[S] int64, where the tensor is: rows' sums, then columns', of the full blocks and of the one that is
    not; then the last, unfinished row, filled up with zeros."""
    if tensor.is_meta:
        raise ValueError(f"{name!r} is on the meta device and has no bits")
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    # A view as int64 must begin at a whole word; a slice of a shard need not.
    if flat.storage_offset() % 8:
        flat = flat.clone()
    row_bytes = 8 * _SIDE
    whole = flat.numel() // row_bytes * row_bytes
    rows = flat[:whole].view(torch.int64).view(-1, _SIDE)
    full = rows.shape[0] // _SIDE
    parts = [_block_sums(rows[: full * _SIDE].view(full, _SIDE, _SIDE))]
    if full * _SIDE < rows.shape[0]:
        rest = rows[full * _SIDE :]
        parts += [rest.sum(1), rest.sum(0)]
    if whole < flat.numel():
        last = flat.new_zeros(row_bytes)
        last[: flat.numel() - whole] = flat[whole:]
        parts.append(last.view(torch.int64))
    return torch.cat(parts)


def _block_sums(blocks: Tensor) -> Tensor:
    """[2 * n * 256]: of n full blocks, [n, 256, 256]."""
    count = blocks.shape[0]
    sums = blocks.new_empty(2, count, _SIDE)
    step = _CPU_BLOCKS if blocks.device.type == "cpu" else max(count, 1)
    for start in range(0, count, step):
        part = slice(start, start + step)
        torch.sum(blocks[part], 2, out=sums[0, part])
        torch.sum(blocks[part], 1, out=sums[1, part])
    return sums.view(-1)


def _on_host(sums: list[Tensor]) -> list[Tensor]:
    """The same on the CPU, with one copy per device."""
    digests: dict[int, Tensor] = {}
    for device in dict.fromkeys(part.device for part in sums):
        here = [index for index, part in enumerate(sums) if part.device == device]
        if device.type == "cpu":
            digests |= {index: sums[index] for index in here}
            continue
        flat = torch.cat([sums[index] for index in here]).cpu()
        digests |= dict(zip(here, flat.split([sums[index].numel() for index in here]), strict=True))
    return [digests[index] for index in range(len(sums))]
