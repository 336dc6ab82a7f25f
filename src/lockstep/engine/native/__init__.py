"""Engine `native`: the trainer's own modules and ops, with a KV cache and continuous batching."""

from lockstep.engine.native.engine import NativeEngine

__all__ = ["NativeEngine"]
