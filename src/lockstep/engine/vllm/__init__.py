"""Engine `vllm`: in this process, or vLLM's own server."""

from __future__ import annotations

from lockstep.config.engine import EngineConfig
from lockstep.engine.spec import EngineSpec
from lockstep.protocols.engine import ReceivesWeights

# `engine.name = "vllm"`: in this process, or as a server in an environment of its own.


class VLLMFactory:
    """Called like an engine class: picks one of two and imports only that."""

    external = True

    def __call__(self, config: EngineConfig, *, spec: EngineSpec) -> ReceivesWeights:
        """In process unless `python` starts a server or `url` names one."""
        if config.python is None and config.url is None:
            from lockstep.engine.vllm.engine import VLLMEngine

            return VLLMEngine(config, spec=spec)
        from lockstep.engine.vllm.server import VLLMServer

        return VLLMServer(config, spec=spec)


VLLM = VLLMFactory()
