"""Base of the engines with weights of their own, which come in sessions."""

from __future__ import annotations

from collections.abc import Callable

from lockstep.engine.spec import EngineSpec
from lockstep.engine.streaming import ModelEngine
from lockstep.errors import EngineError
from lockstep.schema.weights import UpdateSession


def dirty(engine: str) -> EngineError:
    """Return the error of an engine that cannot sample before a weight update."""
    return EngineError(
        f"wrong-state: engine {engine} is dirty: it has no complete policy (it was never updated, its last "
        "update failed, it slept without its weights, or its server was restarted); send it a full update "
        "first"
    )


class ReceivingEngine(ModelEngine):
    """An engine with weights of its own, which come in sessions."""

    external = True

    def __init__(self, name: str, *, spec: EngineSpec) -> None:
        super().__init__(
            name,
            vocab_size=spec.vocab_size,
            max_positions=spec.max_model_len,
            tokenizer=spec.tokenizer,
            eos_token_ids=spec.eos_token_ids,
        )
        self._spec = spec
        self._session: UpdateSession | None = None
        self.dirty = spec.weights == "pushed"
        """Whether the weights are not a whole update: the engine then refuses to generate."""
        self.recover: Callable[..., None] | None = None
        """Sends the current weights to a restarted server; set by the sender of the weights."""

    def _require_no_session(self, what: str) -> None:
        if self._session is not None:
            raise EngineError(
                f"wrong-state: engine {self.name} is being updated to policy version "
                f"{self._session.policy_version}; {what} after finish_update or fail_update"
            )

    def _require_clean(self) -> None:
        if self.dirty:
            raise dirty(self.name)

    def _require_ready(self) -> None:
        super()._require_ready()
        self._require_no_session("generate")
        self._require_clean()

    def _open_session(self) -> UpdateSession:
        self._require_open()
        if self._session is None:
            raise EngineError(f"wrong-state: engine {self.name}: no update is open; call begin_update first")
        return self._session
