"""Data files, their documents and their prompts as texts, for tests of what is rendered."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from transformers import AutoTokenizer

from lockstep.config.data import DataConfig
from lockstep.data.preferences import load_preferences, load_scored_pairs, load_unpaired
from lockstep.data.prompts import load_prompts
from lockstep.data.sft import load_sft
from lockstep.models.source import bundled_folder

Row = dict[str, Any]


@functools.cache
def smollm2(*special: str) -> Any:
    """SmolLM2's tokenizer, with more special tokens."""
    tokenizer = AutoTokenizer.from_pretrained(bundled_folder("smollm2-135m"))
    more = [AddedToken(text, special=True, normalized=False) for text in special]
    tokenizer.add_special_tokens({"extra_special_tokens": more})
    return tokenizer


TOOLS_TEMPLATE = """{% if tools %}{{ '<|im_start|>tools\n' }}{% for tool in tools %}\
{{ tool | tojson + '\n' }}{% endfor %}{{ '<|im_end|>\n' }}{% endif %}\
{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}\
{% for call in m.tool_calls %}{{ call.function | tojson }}{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}\
{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}\
{% if enable_thinking is defined and not enable_thinking %}{{ '<think></think>' }}{% endif %}{% endif %}"""
"""Reads tools, tool_calls and enable_thinking, as Qwen3's does."""


def write_rows(path: Path, rows: list[Row], *, kind: str) -> Path:
    """Write rows as .jsonl or .parquet, or as a folder of datasets; the path."""
    if kind == "jsonl":
        file = path / "rows.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return file
    if kind == "parquet":
        import pyarrow
        import pyarrow.parquet

        file = path / "rows.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), file)
        return file
    import datasets

    folder = path / "rows"
    datasets.Dataset.from_list(rows).save_to_disk(str(folder))
    return folder


def document_texts(source: Path, tokenizer: Any, *, run: str, **settings: Any) -> list[str]:
    """The texts of all documents (of pairs: chosen, rejected, chosen, ...) or prompts of a kind of run."""
    config = DataConfig(source=str(source), **settings)
    if run == "grpo":
        prompts = load_prompts(config, tokenizer=tokenizer)
        return [tokenizer.decode(list(prompts[i].token_ids)) for i in range(len(prompts))]
    if run in ("dpo", "rm"):
        pairs = (
            load_preferences(config, tokenizer=tokenizer)
            if run == "dpo"
            else load_scored_pairs(config, tokenizer=tokenizer, pad_id=None)
        )
        return [tokenizer.decode(sample.token_ids) for i in range(len(pairs)) for sample in pairs[i]]
    load = load_unpaired if run == "kto" else load_sft
    documents = load(config, tokenizer=tokenizer)
    return [tokenizer.decode(documents[i].token_ids) for i in range(len(documents))]


def trained_text(source: Path, tokenizer: Any, *, row: int = 0, **settings: Any) -> str:
    """The text of the tokens of an SFT document that carry loss."""
    sample = load_sft(DataConfig(source=str(source), **settings), tokenizer=tokenizer)[row]
    return str(tokenizer.decode([int(sample.token_ids[t + 1]) for t in sample.loss_mask.nonzero().flatten()]))
