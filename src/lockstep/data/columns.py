"""Columns and keys that the formats of TRL, OpenAI and verl give a meaning."""

from __future__ import annotations

from lockstep.config.data import DataConfig

_TOKENS = "texts are tokenised here"
_TEXT = "only text is read"
_LOGPS = "the reference computes them here"
UNREAD = {
    **dict.fromkeys(("image", "images", "video", "videos", "audio", "audios"), _TEXT),
    **dict.fromkeys(
        ("input_ids", "attention_mask", "position_ids", "seq_lengths", "labels", "loss_mask"), _TOKENS
    ),
    **dict.fromkeys(("assistant_masks", "completion_mask", "prompt_ids", "completion_ids"), _TOKENS),
    **dict.fromkeys(("chosen_ids", "rejected_ids", "raw_prompt_ids"), _TOKENS),
    **dict.fromkeys(("ref_chosen_logps", "ref_rejected_logps", "reference_chosen_logps"), _LOGPS),
    "reference_rejected_logps": _LOGPS,
    "completions": "a reward for each step of an answer is not supported",
    "functions": "write it as tools = [{type = 'function', function = ...}]",
    "function_call": "write it as tool_calls of a message",
    "parallel_tool_calls": "samples are not limited to one call",
    "response_format": "samples are free text",
    "data_source": "the rewards of the config score every row; they see the column in `row`",
    "agent_name": "a prompt has one answer; no agent loop is run",
    "tools_kwargs": "no tools are run while sampling",
    "interaction_kwargs": "no interaction is run while sampling",
}
"""Column to the reason for which it is ignored. Not in it: what has no effect in its own format."""


def named_columns(config: DataConfig) -> frozenset[str]:
    """Return the columns that a setting names: they mean what the setting says."""
    return frozenset(
        {
            config.prompt_column,
            config.messages_column,
            config.completion_column,
            config.chosen_column,
            config.rejected_column,
            config.margin_column,
            config.label_column,
            config.text_column,
            config.answer_column,
            *config.columns,
        }
    )


def rendered_columns(config: DataConfig) -> frozenset[str]:
    """Return the columns, by their names in the source, whose values a chat template may get."""
    names = {
        config.prompt_column,
        config.messages_column,
        config.completion_column,
        config.chosen_column,
        config.rejected_column,
        "tools",
        "chat_template_kwargs",
    }
    return frozenset(config.columns.get(name, name) for name in names)
