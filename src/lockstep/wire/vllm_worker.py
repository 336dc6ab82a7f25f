"""Our extension of vLLM's worker: a session that loads weights, reads them back, and counts memory.

`--worker-extension-cls lockstep.wire.vllm_worker.LockstepWorker` mixes the class into vLLM's worker, in this
process or in vLLM's own, whose environment has no lockstep installed: only the standard library, torch,
safetensors and vLLM are imported here. Every method takes one JSON text and returns a dict, because vLLM's
HTTP route carries nothing else; what goes wrong comes back as {"error": text}, since an exception in a
worker of several processes stops the engine.

A session is vLLM's layerwise reload: it keeps the tensors of a layer until all parts of it have come, then
runs vLLM's own loaders (which fuse q, k and v, and gate and up, and pad vocabularies) and post-processing
(which packs weights for CPU kernels), and copies the result into the storage that captured graphs read.
"""

from __future__ import annotations

import contextlib
import json
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from lockstep.wire.buckets import HEAD_VALUES, specs_from_json, unpack
from lockstep.wire.receive import Receiver

DEFAULT_SECONDS = 300.0
"""Default deadline to receive one bucket, when its description has no "seconds"."""


class LockstepWorker:
    """Mixed into vLLM's worker, whose `model_runner`, `device`, `rank` and `vllm_config` it uses."""

    def lockstep_begin(self, text: str) -> dict[str, Any]:
        """Open a session; an open one is given up."""
        return _answer(lambda: _begin(self))

    def lockstep_receive(self, text: str) -> dict[str, Any]:
        """Load one bucket that comes by disk, ipc or collective; on return its memory may be reused."""
        return _answer(lambda: _receive(self, json.loads(text)))

    def lockstep_receive_memory(self, text: str, data: Tensor) -> dict[str, Any]:
        """Load one bucket from `data` [num_bytes] uint8 of this process; on return it may be reused."""
        return _answer(lambda: _load(self, unpack(data, specs_from_json(json.loads(text)["specs"]))))

    def lockstep_finish(self, text: str) -> dict[str, Any]:
        """Close the session. Answers with an error, and leaves it open, when weights are missing."""
        return _answer(lambda: _finish(self))

    def lockstep_fail(self, text: str) -> dict[str, Any]:
        """Give the session up: layers that are half loaded get their old weights back."""
        return _answer(lambda: _give_up(self))

    def lockstep_read(self, text: str) -> dict[str, Any]:
        """The first values of each weight by Hugging Face name, as {"dtype", "hex": bytes}; those that vLLM
        holds in no readable form are left out."""
        return _answer(lambda: _read(self, json.loads(text)))

    def lockstep_memory(self, text: str) -> dict[str, Any]:
        """Bytes of weights, KV cache, allocator and device."""
        return _answer(lambda: _memory(self))


class _Session:
    """The tensors received since `lockstep_begin`."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.expected = {name for name, _ in model.named_parameters()}
        self.all_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
        self.sent: set[str] = set()
        self.loaded: set[str] = set()


def _answer(work: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    try:
        return work()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}" if str(error) else _last_line(error)}


def _last_line(error: BaseException) -> str:
    """The source line of an error: vLLM checks shapes with assertions without a message."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__} at {frame.name}: {frame.line}"


# sessions


def _begin(worker: Any) -> dict[str, Any]:
    # vLLM's own module for reloading, in 0.26 to 0.33. model.load_weights alone passes by the
    # post-processing, so weights that are packed for a CPU or quantised would be wrong or refused.
    from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

    if getattr(worker, "lockstep_session", None) is not None:
        _give_up(worker)
    model = worker.model_runner.get_model()
    session = _Session(model)
    with _placed(worker):
        initialize_layerwise_reload(model)
    worker.lockstep_session = session
    return {"ok": True}


def _receive(worker: Any, bucket: Mapping[str, Any]) -> dict[str, Any]:
    receiver: Receiver | None = getattr(worker, "lockstep_receiver", None)
    if receiver is None:
        receiver = worker.lockstep_receiver = Receiver(worker.device, rank=worker.rank)
    deadline = time.monotonic() + float(bucket.get("seconds", DEFAULT_SECONDS))
    return _load(worker, receiver.tensors(bucket, deadline=deadline))


def _load(worker: Any, tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Any]:
    session = _open_session(worker)
    names: list[str] = []

    def copies() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in tensors:
            if name in session.sent:
                raise ValueError(f"{name} was sent twice in one session")
            session.sent.add(name)
            names.append(name)
            # vLLM keeps it until the whole layer has come, and the bucket's memory is reused before that.
            yield name, tensor.clone()

    with _placed(worker):
        loaded = session.model.load_weights(copies())  # type: ignore[operator]
    # Before the answer: with it the sender fills the bucket's memory again.
    _synchronize(worker.device)
    session.loaded |= set(loaded or ())
    _refuse_ignored(session, names)
    return {"ok": True}


def _refuse_ignored(session: _Session, names: Iterable[str]) -> None:
    """Refuse names that vLLM would skip silently, such as biases of layers without one."""
    mapper = getattr(session.model, "hf_to_vllm_mapper", None)
    # By either name: vLLM's versions from 0.26 to 0.33 do not agree on one.
    rename = getattr(mapper, "map_name", None) or getattr(mapper, "_map_name", None) or (lambda name: name)
    for name in names:
        own = {name, rename(name)} - {None}
        own |= {located[0] for each in own if (located := _locate(session.model, each)) is not None}
        # Experts are let through: vLLM stacks them into tensors with names of their own.
        if not own & session.all_names and ".experts." not in name:
            raise ValueError(f"the model that vLLM serves has no weight {name}")


def _finish(worker: Any) -> dict[str, Any]:
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

    session = _open_session(worker)
    missing = _missing(worker, session)
    if missing:
        some = ", ".join(missing[:5]) + (f" and {len(missing) - 5} more" if len(missing) > 5 else "")
        raise ValueError(f"the session lacks weights: {some}")
    with _placed(worker):
        finalize_layerwise_reload(session.model, worker.vllm_config.model_config)
    # They hold results of the old weights; not every version of the runner has all three.
    for name in ("reset_lora_state", "reset_encoder_cache", "reset_mm_cache"):
        reset = getattr(worker.model_runner, name, None)
        if reset is not None:
            reset()
    _synchronize(worker.device)
    worker.lockstep_session = None
    return {"loaded": len(session.sent)}


def _missing(worker: Any, session: _Session) -> list[str]:
    """Weights that were not received, and fused ones that were received only in part."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    # A quantised model has parameters, such as scales, that need not come with the weights.
    quantized = worker.vllm_config.model_config.quantization is not None
    missing = set() if quantized else session.expected - session.loaded
    # A tied output layer may hold a packed copy of its own, which only its own name reaches.
    tied = session.all_names - session.expected
    missing |= {name for name in tied if name not in session.loaded | session.sent}
    for path, layer in session.model.named_modules():
        info = get_layerwise_info(layer)
        # The rows that pad a vocabulary are never loaded, so that the count stays below the total.
        if not info.can_load() or hasattr(layer, "num_embeddings_padded"):
            continue
        if 0 < info.load_numel < (info.load_numel_total or 0):
            missing.add(f"{path} ({info.load_numel} of {info.load_numel_total} values)")
    return sorted(missing)


def _give_up(worker: Any) -> dict[str, Any]:
    """Forget the tensors of incomplete layers: a later session would count them as its own and take a layer
    for complete too early. vLLM puts the old tensors of layers with nothing loaded back."""
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    session: _Session | None = getattr(worker, "lockstep_session", None)
    receiver: Receiver | None = getattr(worker, "lockstep_receiver", None)
    worker.lockstep_session = worker.lockstep_receiver = None
    if receiver is not None:
        receiver.close()
    if session is None:
        return {"ok": True}
    for layer in session.model.modules():
        info = get_layerwise_info(layer)
        if info.can_load():
            info.load_numel = 0
            info.loaded_weights.clear()
    with _placed(worker):
        finalize_layerwise_reload(session.model, worker.vllm_config.model_config)
    return {"ok": True}


def _open_session(worker: Any) -> _Session:
    session: _Session | None = getattr(worker, "lockstep_session", None)
    if session is None:
        raise RuntimeError("no weight session is open; call lockstep_begin first")
    return session


@contextlib.contextmanager
def _placed(worker: Any) -> Iterator[None]:
    """A context as in vLLM's own loading: new tensors on the worker's device, its config current, no
    gradients."""
    from vllm.config import set_current_vllm_config

    with torch.device(worker.device), set_current_vllm_config(worker.vllm_config), torch.no_grad():
        yield


def _synchronize(device: torch.device) -> None:
    if torch.device(device).type == "cuda":
        torch.cuda.synchronize(device)


# reading


def _read(worker: Any, names: Iterable[str]) -> dict[str, Any]:
    model = worker.model_runner.get_model()
    parameters = dict(model.named_parameters(remove_duplicate=False))
    split = worker.vllm_config.parallel_config.tensor_parallel_size > 1
    heads: dict[str, Any] = {}
    for name in names:
        located = _locate(model, name)
        if located is None or located[0] not in parameters:
            continue
        weight: Tensor = parameters[located[0]].data
        if weight.numel() == 0:  # packed for a CPU kernel, and the plain one is gone
            continue
        values = weight[located[1]] if located[1] is not None else weight
        # Worker 0 holds the first rows, and of a row at least its beginning.
        values = values.reshape(-1, values.shape[-1])[0] if split and values.ndim > 1 else values
        first = values.flatten()[:HEAD_VALUES].contiguous().cpu()
        heads[name] = {
            "dtype": str(first.dtype).removeprefix("torch."),
            "hex": bytes(first.view(torch.uint8).tolist()).hex(),
        }
    return heads


def _locate(model: nn.Module, name: str) -> tuple[str, slice | None] | None:
    """vLLM's parameter that holds a Hugging Face weight, and which of its rows; None: there is none."""
    path, _, kind = name.rpartition(".")
    parent, _, leaf = path.rpartition(".")
    packed: Mapping[str, list[str]] = getattr(model, "packed_modules_mapping", {})
    for fused, parts in packed.items():
        if leaf not in parts or len(parts) == 1:
            continue
        at = f"{parent}.{fused}" if parent else fused
        try:
            sizes: list[int] = getattr(model.get_submodule(at), "output_partition_sizes")  # noqa: B009
        except AttributeError:
            continue
        start = sum(sizes[: parts.index(leaf)])
        return f"{at}.{kind}", slice(start, start + sizes[parts.index(leaf)])
    return name, None


def _memory(worker: Any) -> dict[str, Any]:
    model = worker.model_runner.get_model()
    caches = getattr(worker.model_runner, "kv_caches", ())
    memory = {
        "weights_bytes": sum(p.numel() * p.element_size() for p in model.parameters()),
        "kv_cache_bytes": sum(_storage_bytes(caches).values()),
    }
    if torch.device(worker.device).type == "cuda":
        free, total = torch.cuda.mem_get_info(worker.device)
        memory |= {
            "allocated_bytes": torch.cuda.memory_allocated(worker.device),
            "reserved_bytes": torch.cuda.memory_reserved(worker.device),
            "device_free_bytes": free,
            "device_total_bytes": total,
        }
    return memory


def _storage_bytes(caches: Any) -> dict[int, int]:
    """Bytes of the storages by address: layers may share one."""
    if isinstance(caches, Tensor):
        storage = caches.untyped_storage()
        return {storage.data_ptr(): storage.nbytes()}
    sizes: dict[int, int] = {}
    for cache in caches.values() if isinstance(caches, Mapping) else caches:
        sizes |= _storage_bytes(cache)
    return sizes
