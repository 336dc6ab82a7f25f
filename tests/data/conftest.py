from __future__ import annotations

from typing import Any

import pytest
from transformers import AutoTokenizer

from lockstep.models.source import bundled_folder


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """SmolLM2's own tokenizer and chat template."""
    return AutoTokenizer.from_pretrained(bundled_folder("smollm2-135m"))


@pytest.fixture
def bos_tokenizer() -> Any:
    """A tokenizer that puts a beginning-of-sequence token before plain text, as Llama's and Gemma's do."""
    from tokenizers import Tokenizer, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    vocab = {"<unk>": 0, "<s>": 1, "</s>": 2, "a": 3, "b": 4, "c": 5, "U": 6, "A": 7}
    raw = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    raw.pre_tokenizer = pre_tokenizers.Split(" ", "removed")
    raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    return PreTrainedTokenizerFast(tokenizer_object=raw, unk_token="<unk>", bos_token="<s>", eos_token="</s>")
