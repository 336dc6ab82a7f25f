"""Tensor parallel: the ranks of a group share every matrix of the model.

Queries, keys, values, gate and up are split by outputs (whole heads), attention's output and down by inputs,
embedding and head by vocabulary. Norms are on every rank. A rank holds plain local tensors under the names of
the whole Parameters:

    plan = tensor_parallel_plan(module, size=2)                      # Parameter name -> Split | Replicated
    tp = apply_tensor_parallel(module, group=group, plan=plan)       # cut in place; meta Parameters stay meta
    dim, start, stop = tp.bounds("model.layers.0.mlp.up_proj.weight")
    whole = tp.gather("model.layers.0.mlp.up_proj.weight", local)    # collective over the group

Source: Megatron-LM (arXiv:1909.08053), section 3.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from lockstep.errors import ConfigError
from lockstep.invariant.modules import InvariantLinear, converted_class
from lockstep.models.architectures import architecture_of, causal_lm, is_moe, kv_heads, text_config
from lockstep.models.architectures.record import BY_INPUTS, BY_OUTPUTS, Replicated, Split
from lockstep.models.lora import adapter_place, is_adapter
from lockstep.models.source import aliases
from lockstep.ops.logprobs import VocabShard
from lockstep.ops.rank_sums import sum_in_backward

Plan = Mapping[str, Split | Replicated]
"""Parameter name, as in `named_parameters`, -> how it is split."""

_HF_STYLES: dict[str, Split | Replicated] = {
    "colwise": BY_OUTPUTS,
    "colwise_gather_output": BY_OUTPUTS,  # the head, whose logits nobody gathers here
    "colwise_rep": BY_OUTPUTS,  # its older name
    "embedding_rowwise": BY_OUTPUTS,
    "rowwise": BY_INPUTS,
    "replicated_with_grad_allreduce": Replicated(summed=True),
    "replicate": Replicated(),
}
"""transformers' name of a style (distributed/tensor_parallel.py) -> ours."""


def tensor_parallel_sizes(config: Any) -> tuple[int, ...]:
    """Every size of tensor parallel that a model can have, ascending.

    Args:
        config: its text config (transformers).
    """
    common = math.gcd(config.num_attention_heads, kv_heads(config))
    return tuple(size for size in range(1, common + 1) if common % size == 0)


def check_tensor_parallel_size(config: Any, size: int) -> None:
    """Refuse a size that does not divide the heads, and more than 1 for a model with experts.

    Raises:
        ConfigError: names heads, kv heads and the sizes that work; or the architecture.
    """
    if size > 1 and is_moe(config):
        raise ConfigError(
            f"unsupported-combination: train.tp = {size} with a model with experts ({config.model_type}): "
            "they are not split over ranks; set train.tp = 1"
        )
    sizes = tensor_parallel_sizes(config)
    if size not in sizes:
        raise ConfigError(
            f"not-divisible: train.tp = {size} does not divide the model's {config.num_attention_heads} "
            f"query heads and {kv_heads(config)} key/value heads, and a head cannot be split; "
            f"sizes that work: {', '.join(map(str, sizes))}"
        )


def resolve_tp_plan(plan: str, *, tp: int, others: int) -> Literal["hf", "lockstep"]:
    """Resolve the tensor parallel plan of a mesh.

    Args:
        plan: auto (which is lockstep), hf or lockstep.
        others: ranks on the other axes of the mesh, dp * ring.

    Raises:
        ConfigError: hf on a mesh of more than tensor parallel.
    """
    if plan == "hf" and tp > 1 and others > 1:
        raise ConfigError(
            f"unsupported-combination: train.tp_plan = 'hf' with tp = {tp} cannot be used on {tp * others} "
            "ranks: transformers' plan supports only tensor parallelism over all ranks and would treat all "
            f"{tp * others} as one group; set train.tp_plan = 'lockstep', or start {tp} ranks"
        )
    return "hf" if plan == "hf" else "lockstep"


def tensor_parallel_plan(
    module: nn.Module, *, size: int, plan: str = "auto"
) -> dict[str, Split | Replicated]:
    """Plan how every Parameter of a supported causal LM is split over `size` ranks.

    Args:
        plan: hf reads transformers' plan, as far as that goes: an embedding that it leaves out is on every
            rank, unless it is tied to a head that is split. auto and lockstep split all matrices.

    Raises:
        ConfigError: sizes that do not divide, or a module or style that is not known.
    """
    check_tensor_parallel_size(text_config(module), size)
    by_module = _hf_modules(module) if plan == "hf" else _lockstep_modules(module)
    splits: dict[str, Split | Replicated] = {}
    for alias, name in aliases(module).items():
        path, _, kind = alias.rpartition(".")
        how = by_module[path]
        how = Replicated() if kind == "bias" and how == BY_INPUTS else how
        if splits.get(name, Replicated()) == Replicated():  # of tied ones, split wins
            splits[name] = how
    return splits


def _with_parameters(module: nn.Module) -> list[str]:
    return [path for path, part in module.named_modules() if part._parameters]


def _lockstep_modules(module: nn.Module) -> dict[str, Split | Replicated]:
    """Path of every module with Parameters of its own -> how they are split, by our plan."""
    how_of = functools.partial(_lookup, plan=_own_plan(module))
    return {path: _adapted(path, how_of) for path in _with_parameters(module)}


def _own_plan(module: nn.Module) -> Plan:
    """Return the plan of the module's architecture. Raises ConfigError if it has none."""
    config = text_config(module)
    record = architecture_of(config)
    if record is None or not record.tensor_parallel:
        raise ConfigError(
            f"unsupported-model: train.tp: architecture {config.model_type!r} has no tensor-parallel plan; "
            "set train.tp = 1"
        )
    return record.tensor_parallel


def _adapted(path: str, how_of: Callable[[str], Split | Replicated]) -> Split | Replicated:
    """Return how a module is split, given how the linears of a module without LoRA layers are.

    B A is split as the matrix that it is added to: B by outputs, or A by inputs. The other factor is on every
    rank. An A whose outputs go into parts of B has a gradient of these parts only.
    """
    place, adapter = adapter_place(path)
    how = how_of(place)
    if adapter is None or isinstance(how, Replicated):
        return how
    if how == BY_OUTPUTS:
        return Replicated(summed=True) if adapter == "A" else how
    return how if adapter == "A" else Replicated()


def _lookup(path: str, plan: Plan) -> Split | Replicated:
    for suffix, how in plan.items():
        if path == suffix or path.endswith("." + suffix):
            return how
    raise ConfigError(
        f"unsupported-model: train.tp: the tensor-parallel plan does not know the module {path!r}; set "
        "train.tp = 1"
    )


def _hf_modules(module: nn.Module) -> dict[str, Split | Replicated]:
    """The same, by transformers' plan: the config's for the decoder, the class's for the head."""
    model = causal_lm(module)
    base = model.base_model_prefix
    styles = {f"{base}.{key}": style for key, style in (text_config(module).base_model_tp_plan or {}).items()}
    # Private, in transformers 5.17 to 5.23: the class's plan is of what is outside of the decoder.
    styles |= getattr(type(model), "_tp_plan", None) or {}
    if not styles:
        raise _no_hf_plan(f"has no plan for {type(model).__name__}")
    splits: dict[str, Split | Replicated] = {}
    for path in _with_parameters(module):
        splits[path] = _adapted(path, functools.partial(_hf_style, styles=styles, plan=_own_plan(module)))
    _check_blocks({adapter_place(path)[0]: how for path, how in splits.items() if not is_adapter(path)})
    return splits


def _hf_style(path: str, styles: Mapping[str, str], plan: Plan) -> Split | Replicated:
    """Return how transformers' styles (pattern of paths -> style) split a module. Raises ConfigError."""
    style = styles.get(re.sub(r"\.\d+\.", ".*.", path), "replicate")
    if style not in _HF_STYLES:
        known = ", ".join(_HF_STYLES)
        raise _no_hf_plan(f"wants {path!r} in style {style!r}, which Lockstep does not know (known: {known})")
    ours, how = _lookup(path, plan), _HF_STYLES[style]
    if how == Replicated() and ours == Replicated(summed=True):
        return ours  # transformers 5.17 leaves q_norm and k_norm out, whose gradients are partial
    if how not in (ours, Replicated()):
        raise _no_hf_plan(f"wants {path!r} in style {style!r}, which does not fit Lockstep's plan")
    return how


def _check_blocks(by_module: Plan) -> None:
    """Attention and MLP are split as a whole or not at all."""
    blocks: dict[str, set[bool]] = {}
    for path, how in by_module.items():
        parent, _, name = path.rpartition(".")
        if name.endswith("_proj"):
            blocks.setdefault(parent, set()).add(isinstance(how, Split))
    if torn := [parent for parent, split in blocks.items() if len(split) > 1]:
        raise _no_hf_plan(f"splits some matrices of {torn[0]!r} but not others")


def _no_hf_plan(why: str) -> ConfigError:
    text = f"train.tp_plan = 'hf': transformers {why}; set train.tp_plan = 'lockstep'"
    return ConfigError(f"unsupported-model: {text}")


def part_bounds(length: int, *, rank: int, size: int) -> tuple[int, int]:
    """start, stop of the rank-th of `size` parts that differ by at most 1.

    Example:
        >>> [part_bounds(8, rank=r, size=3) for r in range(3)]
        [(0, 2), (2, 5), (5, 8)]
    """
    return length * rank // size, length * (rank + 1) // size


class TensorParallel:
    """This rank's part of each Parameter in a tensor parallel group."""

    def __init__(
        self, module: nn.Module, *, group: dist.ProcessGroup, plan: Plan, vocab: VocabShard | None
    ) -> None:
        self.group, self.plan, self.vocab = group, dict(plan), vocab
        self.size, self.rank = group.size(), dist.get_rank(group)
        self._shapes = {name: tuple(p.shape) for name, p in module.named_parameters()}

    def bounds(self, name: str, *, rank: int | None = None) -> tuple[int, int, int] | None:
        """dim, start, stop of a rank's part (None: this rank's); None: every rank has all of it."""
        how = self.plan[name]
        if isinstance(how, Replicated):
            return None
        rank = self.rank if rank is None else rank
        return how.dim, *part_bounds(self._shapes[name][how.dim], rank=rank, size=self.size)

    @property
    def vocab_bounds(self) -> list[tuple[int, int]]:
        """start, stop of each rank's part of the vocabulary; empty: every rank has all of it."""
        whole = 0 if self.vocab is None else self.vocab.whole
        return [part_bounds(whole, rank=rank, size=self.size) for rank in range(self.size)] if whole else []

    def install(self, twin: nn.Module) -> None:
        """Insert the sums of forward into a second skeleton over the module's Parameters, for an engine."""
        _install(twin, self, aliases(twin), trains=False)

    def whole_shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of all ranks' parts together."""
        return self._shapes[name]

    def gather(self, name: str, local: Tensor) -> Tensor:
        """The whole tensor on every rank; collective over the group.

        Args:
            local: this rank's part, of a Parameter or of anything that has its shape (gradient, optimizer
                state).
        """
        own = self.bounds(name)
        if own is None:
            return local
        dim = own[0]
        sizes = [stop - start for _, start, stop in (self._part(name, r) for r in range(self.size))]
        rows = local.detach().movedim(dim, 0).contiguous()
        longest = max(sizes)
        if rows.shape[0] < longest:  # collectives want equal parts
            rows = torch.cat([rows, rows.new_zeros(longest - rows.shape[0], *rows.shape[1:])])
        gathered = rows.new_empty(self.size * longest, *rows.shape[1:])
        parts = list(gathered.split(longest))
        dist.all_gather(parts, rows, group=self.group)
        if min(sizes) < longest:
            gathered = torch.cat([part[:n] for part, n in zip(parts, sizes, strict=True)])
        return gathered.movedim(0, dim).contiguous()

    def _part(self, name: str, rank: int) -> tuple[int, int, int]:
        bounds = self.bounds(name, rank=rank)
        assert bounds is not None
        return bounds

    def add_up(self, gradients: Mapping[str, Tensor]) -> None:
        """Add up over the group, in place, the gradients of `Replicated(summed=True)` Parameters; others are
        left alone. Collective: one, whatever their number.

        Args:
            gradients: Parameter name -> gradient, the same names and shapes on all ranks.
        """
        mine = [g for n, g in gradients.items() if self.plan[n] == Replicated(summed=True)]
        if not mine:
            return
        # A sum over ranks in bfloat16 would be rounded once per rank; this way it is rounded once.
        wide = torch.promote_types(mine[0].dtype, torch.float32)
        flat = torch.cat([g.reshape(-1).to(wide) for g in mine])
        dist.all_reduce(flat, group=self.group)
        for gradient, total in zip(mine, flat.split([g.numel() for g in mine]), strict=True):
            gradient.copy_(total.view_as(gradient))


def apply_tensor_parallel(module: nn.Module, *, group: dist.ProcessGroup, plan: Plan) -> TensorParallel:
    """Cut the Parameters of a causal LM down to this rank's parts, in place, and insert the sums.

    Names stay. Parameters on the meta device stay there; others keep the values of their part, in memory of
    their own. Call it before the module is wrapped or compiled.

    Args:
        plan: of `tensor_parallel_plan` for the size of the group; the same on all ranks.
    """
    known = aliases(module)
    tp = TensorParallel(module, group=group, plan=plan, vocab=None)
    cut: dict[str, nn.Parameter] = {}
    for name, parameter in module.named_parameters():
        bounds = tp.bounds(name)
        if bounds is not None:
            dim, start, stop = bounds
            # A view would keep the memory of the whole Parameter alive.
            part = parameter.detach().narrow(dim, start, stop - start).clone()
            cut[name] = nn.Parameter(part, requires_grad=parameter.requires_grad)
    for alias, name in known.items():
        if name in cut:
            path, _, kind = alias.rpartition(".")
            module.get_submodule(path)._parameters[kind] = cut[name]
    tp.vocab = _install(module, tp, known, trains=True)
    return tp


def _install(
    module: nn.Module, tp: TensorParallel, known: Mapping[str, str], *, trains: bool
) -> VocabShard | None:
    """Lookups, row-parallel linears and, for backward, hooks; returns the head's part of the vocabulary, if
    it is split."""
    group_name = str(tp.group.group_name)
    model = causal_lm(module)
    embedding: Any
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    split: dict[str, Split] = {}
    for path in _with_parameters(module):
        weight = f"{path}.weight"
        if weight in known and isinstance(how := tp.plan[known[weight]], Split):
            split[path] = how
    vocab = None
    for path, how in split.items():
        part: Any = module.get_submodule(path)
        if part is embedding or part is head:
            _, start, stop = tp._part(known[f"{path}.weight"], tp.rank)
            if part is embedding:
                part.forward = VocabLookup(part, start=start, stop=stop, group_name=group_name)
            else:
                whole = tp.whole_shape(known[f"{path}.weight"])[0]
                vocab = VocabShard(group=tp.group, start=start, stop=stop, whole=whole)
        elif how == BY_INPUTS:
            original: type = type(part)
            part.__class__ = converted_class(RowParallelLinear, original)
            part.group_name = group_name
        if isinstance(part, nn.Linear):
            part.out_features, part.in_features = part.weight.shape
    for parent in _parents(split, model) if trains else ():
        share_input(module.get_submodule(parent), group_name)
    return vocab


def _parents(split: Mapping[str, Split], model: Any) -> Sequence[str]:
    """Modules (attention, MLP) whose input goes into projections that are split by outputs."""
    ends = {path for path, part in model.named_modules() if part is model.get_output_embeddings()}
    ends |= {path for path, part in model.named_modules() if part is model.get_input_embeddings()}
    parents = (
        adapter_place(path)[0].rpartition(".")[0]
        for path, how in split.items()
        if how == BY_OUTPUTS and path not in ends and adapter_place(path)[1] is None
    )
    return list(dict.fromkeys(parents))


# The modules that tensor parallel puts in place of transformers'. Names of Parameters stay as they are.


class RowParallelLinear(nn.Linear):
    """A linear of which each rank has some input columns: the products are added up, then the bias once.

    It is swapped in as the class of a linear whose weight is cut already, row-invariant or not: of a
    row-invariant one the sum is, too.
    """

    group_name: str

    @property
    def product_bias(self) -> None:
        """See InvariantLinear."""
        return None

    def forward(self, input: Tensor) -> Tensor:
        """[..., this rank's part of the inputs] -> [..., all outputs], the same on all ranks."""
        ops: Any = torch.ops.lockstep
        if isinstance(self, InvariantLinear):
            total: Tensor = ops.tp_ordered_sum(self.product(input), self.group_name)
        else:
            total = ops.tp_all_reduce(F.linear(input, self.weight), self.group_name)
        return total if self.bias is None else total + self.bias


class VocabLookup:
    """The forward of an embedding of which each rank has the rows start:stop: rows of ids that are elsewhere
    count as 0, and the ranks' results are added up, which is exact."""

    def __init__(self, embedding: nn.Embedding, *, start: int, stop: int, group_name: str) -> None:
        self._lookup: Callable[[Tensor], Tensor] = embedding.forward
        self._start, self._stop, self._group_name = start, stop, group_name
        pad = embedding.padding_idx
        # The row that gets no gradient, here or on another rank.
        embedding.padding_idx = pad - start if pad is not None and start <= pad < stop else None
        embedding.num_embeddings = stop - start

    def __call__(self, input_ids: Tensor) -> Tensor:
        """ids [...] -> [..., C], the same on all ranks."""
        here = (input_ids >= self._start) & (input_ids < self._stop)
        # Row 0 stands in for ids of other ranks. It may hold anything, so it is selected away below, not
        # multiplied by 0.
        rows = self._lookup(torch.where(here, input_ids - self._start, 0))
        total: Tensor = torch.ops.lockstep.tp_all_reduce(
            torch.where(here[..., None], rows, 0.0), self._group_name
        )
        return total


def share_input(block: nn.Module, group_name: str) -> None:
    """Add up the gradient of the input of `block` (attention or MLP) over the ranks: once, however many of
    its projections read it."""

    def hook(
        module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            # transformers passes the hidden states to an MLP by position, to attention by keyword.
            return (sum_in_backward(args[0], group_name), *args[1:]), kwargs
        return args, kwargs | {"hidden_states": sum_in_backward(kwargs["hidden_states"], group_name)}

    block.register_forward_pre_hook(hook, with_kwargs=True)
