"""What a dumped dict means: the names that OpenRLHF, TRL and verl use, and which tokens their columns are of.

Alignment. Frameworks store per-token values in [B, W] with W <= L columns: of the whole sequence, of all but
its first token, or of the response only. One rule covers them: entry j is about token L - W + j. Documents
keep it as lockstep.schema.batch has it: entry t is about predicting token t + 1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch import Tensor

from lockstep.errors import RecordingError
from lockstep.recording.calls import CU_SEQLENS, Layout, find_documents
from lockstep.schema.batch import IGNORE_LABEL

IDS = ("input_ids", "sequences", "sequence", "token_ids", "tokens")
HALVES = (
    ("prompts", "responses"),
    ("prompt_ids", "completion_ids"),
    ("prompt_ids", "response_ids"),
    ("queries", "responses"),
    ("query_tensors", "response_tensors"),
)
"""Prompt and response apart; the whole is one beside the other."""
_HALF_MASKS = (("prompt_mask", "completion_mask"), ("prompt_attention_mask", "response_attention_mask"))
MASK = ("attention_mask", "attn_mask")
POSITIONS = ("position_ids", "positions")
LENGTHS = ("packed_seq_lens", "seq_lens", "sequence_lengths")
TRAINED = ("action_mask", "response_mask", "completion_mask", "loss_mask", "experience_mask", "labels")
FLOATS: Mapping[str, tuple[str, ...]] = {
    "advantages": ("advantages", "advantage"),
    "rollout_logprobs": (
        "rollout_log_probs",
        "rollout_logprobs",
        "sampling_per_token_logps",
        "vllm_logprobs",
        "inference_logprobs",
    ),
    "old_logprobs": (
        "old_log_probs",
        "old_logprobs",
        "old_action_log_probs",
        "action_log_probs",
        "old_per_token_logps",
        "log_probs",
        "logprobs",
    ),
    "ref_logprobs": (
        "ref_log_prob",
        "ref_log_probs",
        "ref_logprobs",
        "base_action_log_probs",
        "ref_per_token_logps",
    ),
}
"""Field of PolicyBatch -> names for it."""
REWARDS = ("rewards", "reward", "scores", "score")
NESTED = ("batch", "inputs", "input", "kwargs", "model_inputs", "forward_inputs", "experience", "data")
"""Dicts of these names are read as if their entries were at the top level."""


@dataclass(kw_only=True, slots=True)
class DumpedInput:
    """One dict of a dump, its documents found."""

    token_ids: Tensor
    """[N] int64, documents end to end."""
    layout: Layout
    shape: tuple[int, int]
    """(B, L) of the ids as dumped."""
    trained: Tensor
    """[N] bool, aligned as in a batch."""
    floats: dict[str, Tensor]
    """Field of PolicyBatch -> [N] float32, aligned as in a batch, 0 where not trained."""
    rewards: list[float] | None
    """Per document."""
    scalars: dict[str, Any]
    """Numbers, flags and text by name."""
    extras: dict[str, Tensor]
    """Tensors without a known meaning."""
    mapped: dict[str, str] = field(default_factory=dict)
    """Name in the dump -> what it became."""
    dropped: dict[str, str] = field(default_factory=dict)
    """Name in the dump -> why nothing is kept of it."""
    assumptions: list[str] = field(default_factory=list)
    """Assumptions of the import."""


def find_inputs(value: Any) -> list[Mapping[str, Any]]:
    """The dicts of a dump that hold token ids, in order."""
    if isinstance(value, dict):
        flat = _flat(value)
        if has_ids(flat):
            return [flat]
        return [ids for item in value.values() for ids in find_inputs(item)]
    if isinstance(value, list | tuple):
        return [ids for item in value for ids in find_inputs(item)]
    return []


def has_ids(named: Mapping[str, Any]) -> bool:
    """Whether there are token ids under a name that is known."""
    return any(name in named for name in IDS) or any(a in named and b in named for a, b in HALVES)


def _flat(value: Mapping[Any, Any]) -> dict[str, Any]:
    """Entries by name; those of NESTED dicts beside the others, and the first of "args" as the ids."""
    named = {str(name)[:150]: item for name, item in value.items() if item is not None}
    for name in NESTED:
        if isinstance(named.get(name), dict):
            inner = named.pop(name)
            named |= {str(k)[:150]: item for k, item in inner.items() if item is not None}
    arguments = named.get("args")
    if not has_ids(named) and isinstance(arguments, list | tuple) and arguments:
        first = arguments[0]
        if isinstance(first, Tensor) and not first.is_floating_point() and first.ndim == 2:
            named["input_ids"] = first
            named["args"] = list(arguments[1:])
    return named


class DumpReader:
    """Builds a DumpedInput from one dict.

    Args:
        named: the dict, flat.
        where: file and place in it, for errors.
    """

    def __init__(self, named: Mapping[str, Any], where: str) -> None:
        self.left, self.where = dict(named), where
        self.mapped: dict[str, str] = {}
        self.assumptions: list[str] = []
        self.documents: list[int] | None = None
        """Lengths, where they are dumped as such."""

    def read(self) -> DumpedInput:
        """Raises RecordingError: masks and lengths that do not fit the ids; names file and field."""
        ids = self._ids()
        mask = self._mask(ids)
        positions = self._take(POSITIONS, "position_ids", shape=ids.shape)
        bounds = self._bounds(ids)
        if bounds is not None and mask is None and int(bounds[-1]) < ids.shape[1]:
            mask = torch.arange(ids.shape[1])[None] < bounds[-1]
            self.assumptions.append(
                "the documents' lengths end before the row does: what is behind them is padding"
            )
        bounding = {"attention_mask": mask, "position_ids": positions, "cu_seqlens": bounds}
        try:
            layout = find_documents(ids, {n: t for n, t in bounding.items() if t is not None})
        except RecordingError as error:
            text = str(error).removeprefix("record: ")
            raise error.with_message(f"{self.where}: {text}") from error
        if layout.offset_positions and positions is not None:
            self.left["position_ids"] = positions
            self.assumptions.append("position_ids do not start at 0 in every document: kept as they were")
        if "inside" in layout.padding:
            self.assumptions.append("an attention mask has holes inside documents: those slots are left out")
        tokens = ids.flatten()[layout.slots]
        trained = self._trained(ids, layout)
        floats = self._floats(ids, layout, trained)
        rewards = self._rewards(ids, layout)
        scalars, extras, dropped = self._rest()
        return DumpedInput(
            token_ids=tokens,
            layout=layout,
            shape=(ids.shape[0], ids.shape[1]),
            trained=trained,
            floats=floats,
            rewards=rewards,
            scalars=scalars,
            extras=extras,
            mapped=self.mapped,
            dropped=dropped,
            assumptions=self.assumptions,
        )

    # --- ids and documents ----------------------------------------------------------------------------------

    def _ids(self) -> Tensor:
        for name in IDS:
            if name in self.left:
                return self._rows(name, self.left.pop(name))
        for first, second in HALVES:
            if first in self.left and second in self.left:
                halves = [self._rows(name, self.left.pop(name)) for name in (first, second)]
                if self.documents is not None or halves[0].shape[0] != halves[1].shape[0]:
                    self._bad(second, f"must have as many rows as {first!r}, all of one width")
                self._default_response(halves[1])
                return torch.cat(halves, dim=1)
        raise RecordingError(
            f"missing-field: {self.where} has no token ids; in a dump they must be called {', '.join(IDS)}"
        )

    def _default_response(self, response: Tensor) -> None:
        """The response is what is trained, and masks come in halves, unless the dump says otherwise."""
        for first, second in _HALF_MASKS:
            if first in self.left and second in self.left and not any(n in self.left for n in MASK):
                halves = [self._grid(name, self.left[name]) for name in (first, second)]
                self.left["attention_mask"] = torch.cat([half.to(torch.int64) for half in halves], dim=1)
                self.mapped[first] = "attention_mask"
                del self.left[first]
        if not any(name in self.left for name in TRAINED):
            self.left["response_mask"] = torch.ones_like(response)
            self.assumptions.append("no mask of the response: all of it is trained")

    def _rows(self, name: str, value: Any) -> Tensor:
        """[B, L] int64; documents of several lengths become one row."""
        self.mapped[name] = "token_ids"
        if _ragged(value) and _tensor(value) is None:
            parts = [self._vector(name, part) for part in value]
            self.documents = [part.shape[0] for part in parts]
            ids = torch.cat(parts)[None]
        else:
            ids = self._grid(name, value)
        if ids.is_floating_point() or ids.dtype == torch.bool or not ids.numel():
            self._bad(name, f"is {list(ids.shape)} {ids.dtype}; token ids are [B, L] of an integer dtype")
        return ids.to(torch.int64)

    def _mask(self, ids: Tensor) -> Tensor | None:
        name = next((name for name in MASK if name in self.left), None)
        if name is None:
            if self.documents is None and ids.shape[0] > 1:
                self.assumptions.append("no attention_mask: every slot is taken for a token")
            return None
        value = self.left.pop(name)
        self.mapped[name] = "documents"
        mask = self._joined(name, value) if self.documents is not None else self._grid(name, value)
        if self.documents is not None and not bool(mask.all()):
            self._bad(name, "masks tokens in a list of documents of several lengths; leave its pads out")
        if mask.shape != ids.shape:
            self._bad(name, f"is {list(mask.shape)}, but the ids are {list(ids.shape)}; dump the 2-D mask")
        if mask.is_floating_point():
            if not bool(((mask == 0) | (mask == 1)).all()):
                self._bad(name, "is a float mask that is not made of 0 and 1; dump the mask of tokens")
            mask = mask != 0
        return mask

    def _bounds(self, ids: Tensor) -> Tensor | None:
        """Cumulative lengths, if documents are dumped as such."""
        lengths = self.documents
        for name in LENGTHS:
            if lengths is None and ids.shape[0] == 1 and name in self.left:
                lengths = self._counts(name, self.left.pop(name))
                self.mapped[name] = "documents"
        for name in CU_SEQLENS:
            if name in self.left and lengths is None:
                self.mapped[name] = "documents"
                return torch.tensor(self._counts(name, self.left.pop(name)))
        return None if lengths is None else torch.tensor([0, *lengths]).cumsum(0)

    # --- values of tokens -----------------------------------------------------------------------------------

    def _trained(self, ids: Tensor, layout: Layout) -> Tensor:
        for name in TRAINED:
            if name not in self.left:
                continue
            value = self._per_token(name, self.left.pop(name), ids, layout)
            if name == "labels":
                self.mapped[name] = "loss_mask"
                return self._labels(value, ids, layout)
            self.mapped[name] = "loss_mask"
            return _shifted(value, layout) != 0
        actions = self.left.get("num_actions")
        if actions is None:
            self.assumptions.append("nothing says which tokens are trained: all of them")
            return _ends(layout, torch.ones(sum(layout.lengths), dtype=torch.bool))
        self.mapped["num_actions"] = "loss_mask"
        counts = self._action_counts(layout)
        if isinstance(counts, int):
            if counts > ids.shape[1]:
                self._bad("num_actions", f"is {counts}, more than the {ids.shape[1]} columns of the ids")
            columns = torch.zeros(ids.shape, dtype=torch.bool)
            columns[:, ids.shape[1] - counts :] = True
            return _shifted(columns, layout) != 0
        return _shifted(self._last_of_each(torch.ones(sum(counts)), counts, ids, layout), layout) != 0

    def _labels(self, labels: Tensor, ids: Tensor, layout: Layout) -> Tensor:
        """Labels of the tokens themselves (as transformers has them), or already shifted by one."""
        tokens = ids.flatten()[layout.slots]
        labelled = labels.flatten()[layout.slots]
        following = torch.roll(tokens, -1)
        has_label = labelled != IGNORE_LABEL
        own, shifted = has_label & (labelled != tokens), has_label & (labelled != following)
        if bool(own.any()) and not bool(_ends(layout, shifted).any()):
            self.assumptions.append("labels are those of the next token already")
            return _ends(layout, has_label)
        if bool(own.any()):
            count = int(own.sum())
            self.assumptions.append(
                f"{count} labels are not the input's own tokens: the tokens are trained on"
            )
        return _shifted(labels != IGNORE_LABEL, layout) != 0

    def _floats(self, ids: Tensor, layout: Layout, trained: Tensor) -> dict[str, Tensor]:
        floats = {}
        for target, names in FLOATS.items():
            name = next((name for name in names if name in self.left), None)
            if name is None:
                continue
            value = self.left.pop(name)
            self.mapped[name] = target
            per_document = self._per_document(value, ids, layout)
            if per_document is not None:
                self.mapped[name] = f"{target}, one per document"
                values = torch.repeat_interleave(per_document.float(), torch.tensor(layout.lengths))
            else:
                values = _shifted(self._per_token(name, value, ids, layout).float(), layout)
            floats[target] = torch.where(trained, values, 0.0)
        return floats

    def _per_token(self, name: str, value: Any, ids: Tensor, layout: Layout) -> Tensor:
        """[B, L]: the value about each token, 0 where there is none; see the module."""
        rows, width = ids.shape
        if _ragged(value, of=len(layout.lengths)) and (self.documents is not None or _tensor(value) is None):
            parts = [self._vector(name, part) for part in value]
            return self._last_of_each(torch.cat(parts), [p.shape[0] for p in parts], ids, layout)
        values = self._grid(name, value)
        counts = (
            self._action_counts(layout) if layout.layout == "packed" and "num_actions" in self.left else 0
        )
        if isinstance(counts, list) and values.shape == (1, sum(counts)) and sum(counts) != width:
            return self._last_of_each(values[0], counts, ids, layout)
        if values.shape[0] != rows or values.shape[1] > width:
            self._bad(name, f"is {list(values.shape)}, which does not fit within the ids' {list(ids.shape)}")
        padded = torch.zeros(ids.shape, dtype=values.dtype)
        if name == "labels":
            padded.fill_(IGNORE_LABEL)
        padded[:, width - values.shape[1] :] = values
        return padded

    def _last_of_each(self, values: Tensor, counts: Sequence[int], ids: Tensor, layout: Layout) -> Tensor:
        """[B, L]: `counts[d]` of `values` are about the last tokens of document d."""
        flat = torch.zeros(ids.numel(), dtype=values.dtype)
        if len(counts) != len(layout.lengths):
            self._bad("num_actions", f"has {len(counts)} entries for {len(layout.lengths)} documents")
        end = first = 0
        for count, length in zip(counts, layout.lengths, strict=True):
            end += length
            if not 0 <= count <= length:
                self._bad("num_actions", f"has {count} actions in a document of {length} tokens")
            flat[layout.slots[end - count : end]] = values[first : first + count]
            first += count
        return flat.view(ids.shape)

    def _action_counts(self, layout: Layout) -> int | list[int]:
        """num_actions: of all rows, or per document."""
        value = self.left["num_actions"]
        single = type(value) is int or (isinstance(value, Tensor) and value.ndim == 0)
        counts = self._counts("num_actions", [int(value)] if single else value)
        of_rows = layout.layout == "padded" or len(layout.lengths) > 1
        return counts[0] if len(counts) == 1 and of_rows else counts

    def _per_document(self, value: Any, ids: Tensor, layout: Layout) -> Tensor | None:
        """[D] values, if there is one per document."""
        if _ragged(value):
            return None
        if isinstance(value, list | tuple) and value and not all(isinstance(x, int | float) for x in value):
            return None
        values = _tensor(value)
        if values is None or values.ndim not in (1, 2) or (values.ndim == 2 and values.shape[1] != 1):
            return None
        return _of_documents(values.flatten(), ids.shape[0], layout)

    def _rewards(self, ids: Tensor, layout: Layout) -> list[float] | None:
        for name in REWARDS:
            value = self.left.get(name)
            rewards = None if value is None else self._per_document(value, ids, layout)
            if rewards is not None:
                del self.left[name]
                self.mapped[name] = "reward of each document"
                return [float(x) for x in rewards]
        return None

    # --- the rest -------------------------------------------------------------------------------------------

    def _rest(self) -> tuple[dict[str, Any], dict[str, Tensor], dict[str, str]]:
        scalars: dict[str, Any] = {}
        extras: dict[str, Tensor] = {}
        dropped: dict[str, str] = {}
        for name, value in self.left.items():
            if isinstance(value, Tensor) and value.ndim:
                extras[name] = value
            elif isinstance(value, Tensor):
                scalars[name] = value.item()
            elif _is_scalar(value):
                scalars[name] = value
            elif (tensor := _tensor(value)) is not None:
                extras[name] = tensor
            elif name not in self.mapped:
                dropped[name] = f"a {type(value).__name__}, not a tensor"
        return scalars, extras, dropped

    def _take(self, names: Sequence[str], target: str, *, shape: torch.Size) -> Tensor | None:
        """A [B, L] tensor; one of another shape stays among the extras."""
        for name in names:
            value = self.left.get(name)
            if value is None:
                continue
            if self.documents is not None and _ragged(value, of=len(self.documents)):
                grid = self._joined(name, value)
            else:
                tensor = _tensor(value)
                if tensor is None or tensor.ndim not in (1, 2):
                    continue
                grid = tensor if tensor.ndim == 2 else tensor[None]
            if grid.is_floating_point() or grid.dtype == torch.bool:
                continue
            grid = _wide(grid)
            if grid.shape[-1] == shape[1] and grid.shape[0] in (1, shape[0]):
                del self.left[name]
                self.mapped[name] = target
                return grid
        return None

    def _joined(self, name: str, value: Any) -> Tensor:
        if not _ragged(value, of=len(self.documents or ())):
            self._bad(name, "must be a list with one entry per document, as the ids are")
        return torch.cat([self._vector(name, part) for part in value])[None]

    def _grid(self, name: str, value: Any) -> Tensor:
        """[B, W]; a vector is one row."""
        tensor = _tensor(value)
        if tensor is None or tensor.ndim not in (1, 2):
            what = type(value).__name__ if tensor is None else f"{list(tensor.shape)}"
            self._bad(name, f"is {what}; it must be [B, L], or [L] of one document")
        return _wide(tensor if tensor.ndim == 2 else tensor[None])

    def _counts(self, name: str, value: Any) -> list[int]:
        vector = self._vector(name, value)
        if vector.is_floating_point() or not vector.numel() or int(vector.min()) < 0:
            self._bad(name, "must contain non-negative integers")
        return [int(n) for n in vector]

    def _vector(self, name: str, value: Any) -> Tensor:
        tensor = _tensor(value)
        if tensor is not None and tensor.ndim == 2 and tensor.shape[0] == 1:
            tensor = tensor[0]
        if tensor is None or tensor.ndim != 1:
            self._bad(name, "must contain vectors of numbers")
        return _wide(tensor)

    def _bad(self, name: str, what: str) -> NoReturn:
        raise RecordingError(f"wrong-field: {self.where}: field {name[:80]!r} {what}")


def _tensor(value: Any) -> Tensor | None:
    """The value as a tensor of numbers; None if it cannot be one."""
    if isinstance(value, Tensor):
        return None if value.is_complex() else value
    if isinstance(value, list | tuple) and value:
        try:
            if all(isinstance(part, Tensor) and part.ndim for part in value):
                return torch.stack(list(value))
            return torch.tensor(value)
        except (TypeError, ValueError, RuntimeError, OverflowError):
            return None
    return None


def _wide(tensor: Tensor) -> Tensor:
    """Of a dtype that arithmetic is done in."""
    if tensor.is_floating_point():
        return tensor if tensor.itemsize > 1 else tensor.float()
    return tensor if tensor.dtype == torch.bool else tensor.to(torch.int64)


def _of_documents(values: Tensor, rows: int, layout: Layout) -> Tensor | None:
    """[D] of values per document, or per row of which some may be all padding; None: of neither."""
    if values.numel() == len(layout.lengths):
        return values
    if values.numel() == rows and layout.layout == "padded":
        return values[torch.tensor([row for row, _ in layout.starts])]
    return None


def _is_scalar(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= 200
    return isinstance(value, bool | float) or (type(value) is int and abs(value) < 2**63)


def _ragged(value: Any, of: int | None = None) -> bool:
    """A list of vectors, one per document."""
    if not isinstance(value, list | tuple) or not value or (of is not None and len(value) != of):
        return False
    return all(isinstance(part, list | tuple) or (isinstance(part, Tensor) and part.ndim) for part in value)


def _shifted(about: Tensor, layout: Layout) -> Tensor:
    """[N]: of each token, what `about` [B, L] has for the token after it; 0 at ends of documents."""
    values = about.flatten()[layout.slots]
    return _ends(layout, torch.roll(values, -1))


def _ends(layout: Layout, values: Tensor) -> Tensor:
    """`values` [N] with 0 at the last token of each document."""
    values = values.clone()
    values[torch.tensor(layout.lengths).cumsum(0) - 1] = 0
    return values
