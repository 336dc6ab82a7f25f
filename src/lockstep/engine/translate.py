"""From our config and sampling parameters to each engine's own arguments: pure functions, no engine's import.

Every field is either sent under the engine's name for it or refused with what to set instead; none is left
to an engine's default. docs/reference/engines.md is written from these functions.
"""

from lockstep.engine.sglang.translate import (
    sglang_constructor,
    sglang_environment,
    sglang_sampling,
    sglang_server_command,
)
from lockstep.engine.vllm.translate import (
    LogprobsMode,
    vllm_completion_body,
    vllm_constructor,
    vllm_environment,
    vllm_logprobs_mode,
    vllm_sampling,
    vllm_server_command,
)

__all__ = [
    "LogprobsMode",
    "sglang_constructor",
    "sglang_environment",
    "sglang_sampling",
    "sglang_server_command",
    "vllm_completion_body",
    "vllm_constructor",
    "vllm_environment",
    "vllm_logprobs_mode",
    "vllm_sampling",
    "vllm_server_command",
]
