import random
from pathlib import Path

import pytest
from raising import raises
from transformers import PreTrainedTokenizerFast

from lockstep.engine.spec import Decoding, StopStrings, check_stop_strings, completion_text
from lockstep.errors import EngineError
from lockstep.schema.rollout import SamplingParams


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """A byte-level BPE trained here: tokens of several letters, and bytes that are parts of characters."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    text = Path(__file__).read_text() * 3
    trainer = trainers.BpeTrainer(
        vocab_size=600, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), special_tokens=["<|end|>"]
    )
    raw.train_from_iterator([text], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<|end|>")


def decode(tokenizer, ids):
    return decoding_of(tokenizer)(ids)


def decoding_of(tokenizer, **sampling):
    ends = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
    return Decoding.of(tokenizer, SamplingParams(max_tokens=1, **sampling), eos_token_ids=ends)


def check(tokenizer, *stop, **sampling):
    ends = [tokenizer.eos_token_id] if tokenizer is not None else []
    check_stop_strings(tokenizer, SamplingParams(max_tokens=1, stop=stop, **sampling), eos_token_ids=ends)


def first_hit(tokenizer, ids, stop):
    """The slow reference: after how many tokens the whole decoded text holds a stop string."""
    for n in range(1, len(ids) + 1):
        text = decode(tokenizer, ids[:n])
        if any(s in text for s in stop):
            return n
    return None


def incremental_hit(tokenizer, ids, stop):
    finder = StopStrings(decoding_of(tokenizer), stop)
    for n in range(1, len(ids) + 1):
        if finder.find(ids[:n]) is not None:
            return n
    return None


def test_random_tokens_stop_where_the_whole_text_says(tokenizer):
    generator = random.Random(0)
    letters = [i for i in range(len(tokenizer)) if i != tokenizer.eos_token_id]
    hits = 0
    for _ in range(300):
        ids = [generator.choice(letters) for _ in range(25)]
        text = decode(tokenizer, ids)
        at = generator.randrange(max(1, len(text) - 6))
        stop = [text[at : at + generator.randint(1, 6)] or "x", "nowhere"]
        if "\ufffd" in stop[0]:
            continue
        expected = first_hit(tokenizer, ids, stop)
        assert incremental_hit(tokenizer, ids, stop) == expected
        hits += expected is not None
    assert hits > 30


@pytest.mark.parametrize("stop", ["é", "日本", "née", "def find", "\n\n"])
def test_stop_strings_across_tokens_and_inside_characters(tokenizer, stop):
    ids = tokenizer.encode(f"before {stop} after", add_special_tokens=False)
    n = incremental_hit(tokenizer, ids, [stop])
    assert n == first_hit(tokenizer, ids, [stop])
    assert stop in decode(tokenizer, ids[:n]) and stop not in decode(tokenizer, ids[: n - 1])


def test_text_is_cut_at_the_stop_string_and_ids_are_not_needed_for_it(tokenizer):
    ids = tokenizer.encode("one two three", add_special_tokens=False)
    decoding = decoding_of(tokenizer)
    assert completion_text(decoding, ids, stop="two", keep=True) == "one two"
    assert completion_text(decoding, ids, stop="two", keep=False) == "one "
    assert completion_text(decoding, [*ids, tokenizer.eos_token_id], stop=None, keep=True) == "one two three"
    assert completion_text(None, ids, stop=None, keep=True) is None


def test_impossible_stop_strings_are_refused(tokenizer):
    with raises(EngineError, "unsupported-combination: sampling.stop"):
        check(tokenizer, "<|end|>")
    with raises(EngineError, "empty: sampling.stop"):
        check(tokenizer, "")
    with raises(EngineError, "no-tokenizer: sampling.stop"):
        check(None, "x")
