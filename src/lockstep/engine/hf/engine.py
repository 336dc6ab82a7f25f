"""Engine `hf`: a decode loop of ours over a transformers model that shares the trainer's Parameters.

requests ──► prefill (packed, once per prompt) ──► running samples ──► one forward per token ──► completions
                                                         ▲                      │
                                                         └── gaps are closed ◄──┘ when 1/8 have finished
"""

from __future__ import annotations

import torch

from lockstep.config.engine import EngineConfig
from lockstep.engine.embedded import EmbeddedEngine, EndedSample
from lockstep.engine.hf.generation import Generation
from lockstep.engine.hf.kv_cache import SampleCache
from lockstep.engine.hf.skeleton import Skeleton
from lockstep.engine.sampling import Sampler
from lockstep.models.load import LoadedModel
from lockstep.schema.contract import KernelContract

NAME = "hf"


class HFEngine(EmbeddedEngine):
    """See EmbeddedEngine. A sample depends on its batch only through rounding: in float32 on CPU tokens are
    equal alone and in a batch."""

    contract: KernelContract | None = None

    def __init__(self, config: EngineConfig, *, model: LoadedModel) -> None:
        self._skeleton = Skeleton(model.module)
        self._module = self._skeleton.module
        super().__init__(NAME, config, model=model, vocab_size=self._skeleton.vocab_size)
        self._generation: Generation | None = None
        self._cache = SampleCache()
        self._sampler = Sampler()

    @torch.inference_mode()
    def _run(self) -> list[EndedSample]:
        if self._generation is None:
            self._skeleton.linears.refresh()
            self._generation = Generation(
                self._skeleton,
                self._cache,
                sampler=self._sampler,
                model=self._model,
                max_batch=self._config.max_batch,
                on_token=self.on_token,
            )
        return self._generation.advance(self._inbox, abort=self._abort)

    def _out_of_memory(self) -> tuple[str, str]:
        return (
            "engine.max_batch",
            f"engine {NAME} ran out of memory with a KV cache of {self._cache.num_bytes} bytes "
            f"(engine.max_batch = {self._config.max_batch}); lower engine.max_batch or sampling.max_tokens",
        )

    def _end(self) -> None:
        self._generation = None
        self._kv_bytes = max(self._kv_bytes, self._cache.num_bytes)
        self._cache.clear()

    def _give_back(self) -> None:
        self._end()
        self._skeleton.linears.clear()
        self._sampler = Sampler()

    def _weights_changed(self) -> None:
        # Only these: the cache is empty between streams.
        self._skeleton.linears.clear()
