"""One forward on the device: a chunk of prefill, or one token for every running sample.

Whatever a forward reads and writes lies in static buffers, so that on CUDA a prefill is the replay of a
graph, and a step of two: tokens to logits, and logits to tokens. The next step takes its tokens from where
this one left them; the host may launch it before it has read them.

    host columns ─► pinned ─► device ─► [ layers ─► logits ] ─► [ tokens, logprobs ] ─► pinned ─► host
                                            ▲                        │
                                            └──── tokens of step t ──┘ are the input of step t + 1
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from lockstep import invariant
from lockstep.attention.cached import store_and_attend
from lockstep.attention.varlen import enable_cpu_reference
from lockstep.engine.native.draw import choose, scaled
from lockstep.engine.native.kv_cache import SCRATCH, KVCache, KVShape, upload
from lockstep.engine.native.peers import Chunk, Columns, Op, Peers, gather_logits, temperature_word
from lockstep.engine.sampling import SampleState, draw_logits
from lockstep.errors import ModelError
from lockstep.execution import compile_blocks, decoder_layers
from lockstep.models.architectures import Architecture, architecture_of, causal_lm, text_config
from lockstep.models.heads import head_of, head_options
from lockstep.models.load import share_parameters
from lockstep.models.tensor_parallel import TensorParallel
from lockstep.ops.logprobs import HeadOptions, head_logits, row_stats, stats_in_parts

SOURCE, TOKEN, POSITION, SLOT, START, USED, SEED = range(7)
"""Columns of a step, [7, R] int64. SOURCE: the row of the last step that this row's token comes from; -1: it
is TOKEN. POSITION: the token's. SLOT: where its keys and values go. START, USED: the sample's keys. SEED: of
the noise of the token that comes next."""
_COLUMNS = 7
# A row without a sample: it writes to the scratch row, and attends to nothing else.
_PAD = np.array([-1, 0, 0, SCRATCH, SCRATCH, 1, 0])
_IN_FLIGHT = 3
"""Pinned buffers, used in turn by the step that is read, the one that runs and the one that is prepared."""
_FEW_ROWS = (16, invariant.MOST_ROWS)
"""Numbers of rows of a batch-invariant decode step on CUDA, below those for which cuBLASLt is fast. A step of
one row takes hardly less time than one of 16."""
_MANY_ROWS = 128
"""The fewest rows, besides these, for which cuBLASLt without split-K has good kernels."""
_PREFILL_DOCUMENTS = 64
"""Documents of one compiled prefill forward."""
_TEMPERATURES = 4
"""Temperatures whose graphs are kept: training's, evaluation's and two more."""

_Key = tuple[str, int] | tuple[str, int, float]
"""Key of a graph: what it does, its size, the temperature."""


class Pending:
    """Tokens and logprobs that the device may still be computing."""

    def __init__(self, tokens: Tensor, logprobs: Tensor, event: torch.cuda.Event | None) -> None:
        self._tokens, self._logprobs, self._event = tokens, logprobs, event

    def wait(self) -> None:
        """Wait for the device. Call it before two more steps are launched."""
        if self._event is not None:
            self._event.synchronize()

    def read(self) -> tuple[list[int], list[float]]:
        """Wait, and read the results."""
        self.wait()
        return self._tokens.tolist(), self._logprobs.tolist()


class Runner:
    """Forwards of fixed sizes over a KV cache.

    Args:
        max_rows: rows of a decode step, at most.
        chunk: tokens of a prefill forward, at most.
        max_keys: keys of a sample, at most.
        compiled: layers are compiled, so that forwards come in few sizes.
        graphs: forwards are CUDA graphs; without them, a small forward spends its time on launches.
    """

    def __init__(  # the sizes of what it holds
        self, layers: Layers, *, max_rows: int, chunk: int, max_keys: int, compiled: bool, graphs: bool
    ) -> None:
        self._layers, self._max_keys = layers, max_keys
        self._compiled, self._graphs = compiled, graphs
        device = layers.shape.device
        static = compiled or graphs
        self.row_sizes = _sizes(max_rows, (64, 16, 4, 2, 1) if graphs else (8, 1)) if static else None
        if self.row_sizes is not None and layers.invariant and device.type == "cuda":
            self.row_sizes = invariant_sizes(self.row_sizes)
            max_rows = self.row_sizes[-1]
        self.chunk_sizes = _sizes(chunk, (16, 4, 1)) if static else None
        self._device, self.chunk = device, chunk
        self.documents = _PREFILL_DOCUMENTS
        self._kv_cache: KVCache | None = None
        self._captured: dict[_Key, torch.cuda.CUDAGraph] = {}
        self._temperatures: list[float] = []
        """Temperatures that have graphs, the last one used at the end."""
        self._plain = head_options(layers.module, temperature=1.0, compiled=compiled)
        self._memory: Any = None
        self._turn = 0
        pinned = device.type == "cuda"
        self._prompts = torch.zeros(3 * chunk, dtype=torch.int64, device=device)
        self._documents = torch.zeros(3 * (self.documents + 1), dtype=torch.int32, device=device)
        self._inputs = torch.zeros(_COLUMNS * max_rows, dtype=torch.int64, device=device)
        self._tokens = torch.zeros(max_rows, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(max_rows, device=device)
        self._logits = torch.empty(max_rows, layers.vocab_size, dtype=layers.weight.dtype, device=device)
        self._counting = torch.arange(max_rows + 1, dtype=torch.int32, device=device)
        shapes = ((_COLUMNS * max_rows, torch.int64), (max_rows, torch.int64), (max_rows, torch.float32))
        self._host = [
            [torch.zeros(size, dtype=dtype, pin_memory=pinned) for size, dtype in shapes]
            for _ in range(_IN_FLIGHT)
        ]

    def use(self, kv_cache: KVCache) -> None:
        """Store keys and values in this cache from now on."""
        self._tell(Op.USE, [kv_cache.capacity])
        if kv_cache is not self._kv_cache:
            self.forget()
            self._kv_cache = kv_cache

    def forget(self) -> None:
        """Drop the KV cache, and the graphs that hold its addresses."""
        self._captured.clear()
        self._temperatures.clear()
        self._memory = None  # it went with the last of its graphs: its handle must not be used again
        self._kv_cache = None

    def _tell(self, op: Op, *parts: Sequence[int] | Columns) -> None:
        """Let the ranks that share the engine do what this one is about to do."""
        if self._layers.peers is not None:
            self._layers.peers.send(op, *parts)

    @property
    def kv_cache(self) -> KVCache:
        assert self._kv_cache is not None, "a runner without a KV cache"
        return self._kv_cache

    # prefill

    def chunk_for(self, tokens: int) -> int:
        """Upper bound on the tokens of the next prefill forward: fewer than all where the size that has room
        for all would be mostly padding."""
        if self.chunk_sizes is None or tokens >= self.chunk:
            return self.chunk
        size = _fitting(self.chunk_sizes, tokens)
        smaller = [other for other in self.chunk_sizes if other < size]
        return smaller[-1] if smaller and 2 * tokens <= size else size

    def prefill(self, chunk: Chunk) -> None:
        """Compute keys and values of the chunk's tokens; its logits are not needed."""
        self._tell(Op.PREFILL, *chunk.as_words())
        tokens, documents = len(chunk.token_ids), len(chunk.lengths)
        size, rows = tokens, documents
        if self.chunk_sizes is not None:
            size, rows = _fitting(self.chunk_sizes, tokens), self.documents
        per_token = np.zeros((3, size), np.int64)
        per_token[:, :tokens] = chunk.token_ids, chunk.positions, chunk.slots
        per_token[2, tokens:] = SCRATCH
        per_document = np.zeros((3, rows + 1), np.int32)
        per_document[0, 1 : documents + 1] = chunk.lengths
        per_document[0].cumsum(out=per_document[0])
        per_document[1, :documents], per_document[2, :documents] = chunk.starts, chunk.used
        upload(per_token, self._prompts[: per_token.size])
        upload(per_document, self._documents[: per_document.size])
        self._replayed(("prefill", size), lambda: self._prefill(size, rows))

    def _prefill(self, size: int, documents: int) -> None:
        """Prefill from the static prompts into the KV cache."""
        token_ids, positions, slots = self._prompts[: 3 * size].view(3, size)
        cu_q, starts, used = self._documents[: 3 * (documents + 1)].view(3, documents + 1)
        metadata = AttentionMetadata(
            slots=slots,
            cu_q=cu_q,
            starts=starts,
            used=used[:-1],
            max_q=size,
            # The most of any sample, not of these documents: a graph has it as a number.
            max_k=self._max_keys,
            decode=False,
        )
        self._layers.run(token_ids, positions, self.kv_cache, metadata)

    # decode

    def step(
        self, columns: Columns, *, temperature: float | None, states: Sequence[SampleState] | None = None
    ) -> Pending:
        """Launch one token for each of n rows.

        Args:
            columns: [7, n].
            temperature: of all rows; None: `states` say how each row is sampled.
            states: the rows' samples, all their tokens included; of ranks that share the engine the first one
                has them.
        """
        count = columns.shape[1]
        self._tell(Op.STEP, [count, temperature_word(temperature)], columns)
        size = count if self.row_sizes is None else _fitting(self.row_sizes, count)
        host_inputs, host_tokens, host_logprobs = self._host[self._turn]
        self._turn = (self._turn + 1) % _IN_FLIGHT
        filled = host_inputs[: _COLUMNS * size]
        rows = filled.numpy().reshape(_COLUMNS, size)
        rows[:, :count], rows[:, count:] = columns, _PAD[:, None]
        self._inputs[: _COLUMNS * size].copy_(filled, non_blocking=True)
        self._replayed(("step", size), lambda: self._forward(size))
        if temperature is None:
            if states is not None:
                self._draw_one_by_one(size, states)
            if self._layers.peers is not None:
                dist.broadcast(self._tokens[:size], group=self._layers.peers.group, group_src=0)
        else:
            self._use_temperature(temperature)
            self._replayed(("draw", size, temperature), lambda: self._draw(size, temperature))
        host_tokens[:count].copy_(self._tokens[:count], non_blocking=True)
        host_logprobs[:count].copy_(self._logprobs[:count], non_blocking=True)
        event = None
        if self._device.type == "cuda":
            # Of this step alone: waiting for the device would wait for the next step as well.
            event = torch.cuda.Event()
            event.record()
        return Pending(host_tokens[:count], host_logprobs[:count], event)

    def _columns(self, size: int) -> Tensor:
        return self._inputs[: _COLUMNS * size].view(_COLUMNS, size)

    def _forward(self, size: int) -> None:
        """Run a decode step from the static inputs to the static logits."""
        columns = self._columns(size)
        source = columns[SOURCE]
        token_ids = torch.where(source < 0, columns[TOKEN], self._tokens[source.clamp(min=0)])
        starts = torch.zeros(size + 1, dtype=torch.int32, device=self._device)
        starts[:size] = columns[START]
        metadata = AttentionMetadata(
            slots=columns[SLOT],
            cu_q=self._counting[: size + 1],
            starts=starts,
            used=columns[USED].int(),
            max_q=1,
            max_k=self._max_keys,
            decode=True,
        )
        hidden = self._layers.norm(self._layers.run(token_ids, columns[POSITION], self.kv_cache, metadata))
        # Logits without temperature: the forward's graph serves all temperatures, and only the draw has one
        # for each.
        logits = self._logits[:size]
        if not self._layers.vocab_bounds:
            head_logits(hidden, self._layers.weight, self._plain, logits)
            return
        assert self._layers.peers is not None
        part = logits.new_empty(size, self._layers.weight.shape[0])
        head_logits(hidden, self._layers.weight, self._plain, part)
        gather_logits(part, logits, self._layers.vocab_bounds, self._layers.peers.group)

    def _draw(self, size: int, temperature: float) -> None:
        """Sample from the static logits into the static tokens and logprobs."""
        logits, head = self._logits[:size], self._head(temperature)
        if temperature == 0:
            tokens = logits.argmax(-1)
        else:
            columns = self._columns(size)
            tokens = choose(
                logits,
                columns[SEED],
                columns[POSITION] + 1,
                head,
                invariant=self._layers.invariant,
                compiled=self._compiled and logits.is_cuda,
            )
        self._tokens[:size] = tokens
        self._logprobs[:size] = self._stats(logits, tokens, head)

    def _draw_one_by_one(self, size: int, states: Sequence[SampleState]) -> None:
        """Like `_draw`, for rows that differ in temperature or in what may be drawn. An unshaped row is drawn
        from bitwise the same distribution as in `_draw`."""
        logits, columns = self._logits[:size], self._columns(size)
        drawn = torch.empty_like(logits, dtype=torch.float32)
        temperatures = [s.params.temperature for s in states] + [1.0] * (size - len(states))
        for temperature in set(temperatures):
            same = [i for i, t in enumerate(temperatures) if t == temperature]
            drawn[same] = scaled(logits[same], self._head(temperature))
        shaped = [i for i, state in enumerate(states) if state.shaped]
        if shaped:
            plain = scaled(logits[shaped], self._plain)
            drawn[shaped] = draw_logits(plain, [states[i] for i in shaped])
        seeds, positions = columns[SEED], columns[POSITION] + 1
        tokens = choose(drawn, seeds, positions, HeadOptions(), invariant=self._layers.invariant)
        greedy = torch.tensor([t == 0 for t in temperatures], device=self._device)
        tokens = torch.where(greedy, drawn.argmax(-1), tokens)
        self._tokens[:size] = tokens
        for temperature in set(temperatures):
            same = [i for i, t in enumerate(temperatures) if t == temperature]
            self._logprobs[same] = self._stats(logits, tokens, self._head(temperature))[same]

    def _stats(self, logits: Tensor, tokens: Tensor, head: HeadOptions) -> Tensor:
        """Logprobs [R] of the tokens, with the trainer's bits."""
        bounds = self._layers.vocab_bounds
        stats = stats_in_parts(logits, tokens, head, bounds) if bounds else row_stats(logits, tokens, head)
        return stats[0]

    def _head(self, temperature: float) -> HeadOptions:
        """The trainer's head options at this temperature."""
        return replace(self._plain, temperature=temperature)

    # graphs

    def _use_temperature(self, temperature: float) -> None:
        """Keep the graphs of the last few temperatures only."""
        if temperature in self._temperatures:
            self._temperatures.remove(temperature)
        self._temperatures.append(temperature)
        if len(self._temperatures) > _TEMPERATURES:
            oldest = self._temperatures.pop(0)
            self._captured = {key: graph for key, graph in self._captured.items() if key[2:] != (oldest,)}

    def _replayed(self, key: _Key, work: Callable[[], None]) -> None:
        if not self._graphs:
            work()
            return
        if key not in self._captured:
            self._captured[key] = self._captured_graph(work)
        self._captured[key].replay()

    def _captured_graph(self, work: Callable[[], None]) -> torch.cuda.CUDAGraph:
        """Capture a graph of `work`, which runs once before, so that kernels are compiled and chosen; none of
        its outputs may be one of its inputs."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            work()
        torch.cuda.current_stream().wait_stream(stream)
        if self._memory is None:
            self._memory = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        # NCCL's watchdog, a thread of its own, may look at events of earlier collectives meanwhile.
        mode = "global" if self._layers.peers is None else "thread_local"
        # one memory for all: they run one after the other, and what they leave is in the static buffers
        with torch.cuda.graph(graph, pool=self._memory, capture_error_mode=mode):
            work()
        return graph


def _sizes(most: int, parts: Sequence[int]) -> tuple[int, ...]:
    """The n-th parts of `most`, rounded up, ascending."""
    return tuple(sorted({-(-most // part) for part in parts}))


def invariant_sizes(sizes: Sequence[int]) -> tuple[int, ...]:
    """Numbers of rows of batch-invariant steps on CUDA that serve for `sizes`."""
    few = [next((few for few in _FEW_ROWS if few >= size), max(size, _MANY_ROWS)) for size in sizes]
    return tuple(sorted(set(few)))


def _fitting(sizes: Sequence[int], count: int) -> int:
    return next(size for size in sizes if size >= count)


# The generation skeleton: the trainer's layers over the trainer's Parameters, attending to the KV cache.
#
# Shapes as in lockstep.schema.batch: T tokens, C hidden size, N query heads, K key/value heads, H head dim.


IMPLEMENTATION = "lockstep_native"
"""Name in transformers' AttentionInterface. It has no mask function, so transformers builds no masks for
it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class AttentionMetadata:
    """Where the tokens of a forward are in the KV cache: the arguments of lockstep.attention.cached besides
    the caches."""

    slots: Tensor
    """[T] int64."""
    cu_q: Tensor
    """[D + 1] int32."""
    starts: Tensor
    """[D + 1] int32."""
    used: Tensor
    """[D] int32."""
    max_q: int
    max_k: int
    decode: bool


class Layers:
    """Embedding, decoder layers and final norm of a causal LM.

    Args:
        tp: the module is this rank's part.
    """

    def __init__(
        self, module: nn.Module, *, dtype: torch.dtype, compiled: bool, tp: TensorParallel | None = None
    ) -> None:
        _register()
        self.module = share_parameters(module, attention=f"hf:{IMPLEMENTATION}")
        self.invariant = invariant.is_converted(module)
        if self.invariant:
            # Before the sums are inserted the linears have the sizes of whole matrices: tested afterwards.
            invariant.convert(self.module, device=None if tp is None else torch.device("meta"))
        self.peers = None if tp is None else Peers(tp.group)
        self.vocab_bounds = [] if tp is None else tp.vocab_bounds
        if tp is not None:
            tp.install(self.module)
            if self.invariant:
                invariant.self_test(self.module, split=True)
        if self.invariant:
            invariant.few_rows_test(self.module)
        self.layers = decoder_layers(self.module)
        self._decoder: Any = causal_lm(self.module).get_decoder()
        config = text_config(self.module)
        record = decodable(config)
        self._embedding_scale = record.embedding_scale(config)
        self._positions_in_layers = record.positions_in_layers
        self._kinds: tuple[str, ...] | None = tuple(config.layer_types) if record.rotation_by_kind else None
        self.weight = head_of(self.module).weight
        self.vocab_size = self.vocab_bounds[-1][1] if self.vocab_bounds else self.weight.shape[0]
        attention: Any = self.layers[0].self_attn
        self.shape = KVShape(
            layers=len(self.layers),
            heads=config.num_key_value_heads // (1 if tp is None else tp.size),
            head_dim=attention.head_dim,
            dtype=dtype,
            device=self.weight.device,
        )
        if self.shape.device.type == "cpu":
            enable_cpu_reference()  # before any layer is traced: a compiled layer cannot register ops
        if compiled:
            options = None
            if self.invariant:
                from lockstep.invariant.merge import MergeProducts

                options = invariant.inductor_options()
                options["post_grad_custom_pre_pass"] = MergeProducts()
            compile_blocks(self.module, options=options)

    def run(
        self, token_ids: Tensor, positions: Tensor, kv_cache: KVCache, metadata: AttentionMetadata
    ) -> Tensor:
        """[1, T, C] of [T] tokens, before the final norm; writes their keys and values into the cache."""
        embedding = self._decoder.embed_tokens
        if type(embedding) is nn.Embedding and self.peers is None:  # else it has a part of the rows
            # The same copy; F.embedding's kernel for at most 16 rows takes 14 us on an H100.
            hidden: Tensor = embedding.weight[token_ids[None]]
        else:
            hidden = embedding(token_ids[None])
        if self._embedding_scale != 1.0:
            hidden = hidden * self._embedding_scale
        positional = {"position_ids": positions[None]} if self._positions_in_layers else {}
        rotation = self._rotations(hidden, positions[None])
        for index, layer in enumerate(self.layers):
            # Not the decoder's forward: its keyword arguments are the same for all layers, and each layer has
            # a part of the cache of its own.
            hidden = layer(
                hidden,
                attention_mask=None,
                position_embeddings=rotation[None if self._kinds is None else self._kinds[index]],
                keys=kv_cache.keys[index],
                values=kv_cache.values[index],
                slots=metadata.slots,
                cu_q=metadata.cu_q,
                starts=metadata.starts,
                used=metadata.used,
                max_q=metadata.max_q,
                max_k=metadata.max_k,
                decode=metadata.decode,
                **positional,
            )
        return hidden

    def norm(self, hidden: Tensor) -> Tensor:
        """The final norm: [T, C] of `run`'s result, what the head is applied to."""
        normed: Tensor = self._decoder.norm(hidden)
        return normed[0]

    def _rotations(self, hidden: Tensor, positions: Tensor) -> dict[str | None, tuple[Tensor, Tensor]]:
        rotary = self._decoder.rotary_emb
        if self._kinds is None:
            return {None: rotary(hidden, positions)}
        return {kind: rotary(hidden, positions, kind) for kind in dict.fromkeys(self._kinds)}


def decodable(config: Any) -> Architecture:
    """Return the record of a config's architecture.

    Raises:
        ModelError: it has none, or its layers are not what the engine calls.
    """
    record = architecture_of(config)
    if record is None or not record.native:
        why = "has no record" if record is None else "has layers that it cannot call"
        raise ModelError(
            f"unsupported-model: engine 'native' cannot decode architecture {config.model_type!r}, which "
            f"{why}; set engine.name = 'hf'"
        )
    return record


def _register() -> None:
    from transformers import AttentionInterface

    AttentionInterface.register(IMPLEMENTATION, _attention)


def _attention(  # signature: transformers' AttentionInterface
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    scaling: float,
    keys: Tensor,
    values: Tensor,
    slots: Tensor,
    cu_q: Tensor,
    starts: Tensor,
    used: Tensor,
    max_q: int,
    max_k: int,
    decode: bool,
    sliding_window: int | None = None,
    s_aux: Tensor | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """query [1, N, T, H], key and value [1, K, T, H] -> [1, T, N, H]; the rest is what `Layers.run` passes
    on."""
    q, k, v = (x[0].transpose(0, 1) for x in (query, key, value))
    where = (slots, cu_q, starts, used, max_q, max_k)
    out = store_and_attend(q, k, v, keys, values, *where, scaling, sliding_window, decode, s_aux)
    return out[None], None
