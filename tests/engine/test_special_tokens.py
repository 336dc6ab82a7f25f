"""The text of completions whose tags are special tokens, as rewards and stop strings get it."""

import pytest
import torch
from raising import raises
from scripted import THINKING, save_scripted

from lockstep.config.engine import EngineConfig
from lockstep.config.model import ModelConfig
from lockstep.engine.hf.engine import HFEngine
from lockstep.engine.native.engine import NativeEngine
from lockstep.engine.remote.driver import Job, Sample, check_sample
from lockstep.engine.sglang.translate import Partial
from lockstep.engine.spec import Decoding, EngineSpec, StopStrings, check_stop_strings
from lockstep.engine.vllm.translate import vllm_sampling
from lockstep.errors import EngineError
from lockstep.models.load import load_model
from lockstep.schema.rollout import GenerationRequest, SamplingParams


@pytest.fixture(scope="module")
def folder(tiny_folder, tmp_path_factory):
    return save_scripted(tiny_folder, tmp_path_factory.mktemp("scripted"))


@pytest.fixture(scope="module", params=["hf", "native"])
def engine(request, folder):
    attention = {"hf": "sdpa", "native": "varlen"}[request.param]
    model = load_model(
        ModelConfig(name=str(folder), dtype="float32"), attention=attention, device=torch.device("cpu")
    )
    kind = {"hf": HFEngine, "native": NativeEngine}[request.param]
    return kind(EngineConfig(name=request.param, max_batch=4), model=model)


# (settings, text, tokens of THINKING that were sampled), worked out by hand
ENDINGS = [
    ({}, "<think>a</think><answer>7</answer>", 7),
    ({"skip_special_tokens": True}, "a7", 7),
    ({"stop": ("</think>",)}, "<think>a</think>", 3),
    ({"stop": ("</think>",), "keep_stop": False}, "<think>a", 3),
    ({"stop": ("a</think><ans",)}, "<think>a</think><ans", 4),
    ({"stop": ("a7",), "skip_special_tokens": True}, "a7", 5),
    ({"ignore_eos": True, "max_tokens": 7}, "<think>a</think><answer>7</answer>", 7),
]


@pytest.mark.parametrize(("settings", "text", "count"), ENDINGS)
def test_an_engine_keeps_special_tokens_in_text(engine, settings, text, count):
    tokenizer = engine._tokenizer
    prompt = tuple(tokenizer.encode("<|user|>x<|end|><|assistant|>", add_special_tokens=False))
    sampling = SamplingParams(**({"max_tokens": 20, "temperature": 0.0} | settings))
    asked = GenerationRequest(prompt_token_ids=prompt, sampling=sampling, seeds=(1,))
    ((completion,),) = engine.generate([asked])
    assert completion.text == text
    assert list(completion.token_ids) == tokenizer.convert_tokens_to_ids(list(THINKING))[:count]
    ended = None if "ignore_eos" in settings else settings.get("stop", (2,))[0]
    assert completion.stop_reason == ended


# (tokens, eos ids' tokens, settings, text). <|im_end|> is what ends a turn in the chat template.
TEXTS = [
    (["7", "<|im_end|>"], ["<|im_end|>", "<|end|>"], {}, "7"),
    (["7", "<|pad|>", "<|end|>"], ["<|end|>"], {}, "7<|pad|>"),
    (["7", "<|pad|>", "<|end|>"], ["<|end|>", "<|pad|>"], {}, "7"),
    (["7", "<|end|>", "8"], ["<|end|>"], {"ignore_eos": True}, "78"),
    (["7", "<|im_end|>"], ["<|end|>"], {}, "7<|im_end|>"),
    (["7", "<|im_end|>"], ["<|end|>"], {"stop_token_ids": ["<|im_end|>"]}, "7"),
    (["7", "</answer>"], ["<|end|>"], {"stop_token_ids": ["</answer>"]}, "7</answer>"),
    (["7", "</answer>"], ["<|end|>"], {"skip_special_tokens": True}, "7"),
]


@pytest.fixture(scope="module")
def tokenizer(folder):
    from transformers import AutoTokenizer

    made = AutoTokenizer.from_pretrained(folder)
    made.add_tokens(["<|im_end|>"], special_tokens=True)
    made.chat_template = made.chat_template.replace("<|end|>", "<|im_end|>")
    return made


@pytest.mark.parametrize(("tokens", "ends", "settings", "text"), TEXTS)
def test_text_holds_everything_but_the_end(tokenizer, tokens, ends, settings, text):
    ids = tokenizer.convert_tokens_to_ids
    if "stop_token_ids" in settings:
        settings = {"stop_token_ids": tuple(ids(settings["stop_token_ids"]))}
    decoding = Decoding.of(tokenizer, SamplingParams(max_tokens=9, **settings), eos_token_ids=ids(ends))
    assert decoding(ids(tokens)) == text


def test_vllm_is_asked_for_the_same_text():
    sampling = SamplingParams(max_tokens=9, stop=("</think>",))
    sent = vllm_sampling(sampling, seed=1, eos_token_ids=(2,), logprobs_mode="raw_logprobs")
    assert sent["skip_special_tokens"] is False and sent["detokenize"] is True


def test_a_server_may_end_a_sample_at_a_special_token(tokenizer, tmp_path):
    spec = EngineSpec(
        folder=tmp_path,
        weights="folder",
        model_name="m",
        dtype="float32",
        vocab_size=len(tokenizer),
        max_model_len=64,
        eos_token_ids=(2,),
        tokenizer=tokenizer,
        device="cpu",
        shares_device=False,
        temperatures=frozenset({1.0}),
        work_dir=tmp_path,
    )
    ids = tokenizer.convert_tokens_to_ids(["<think>", "a", "</think>"])
    sample = Sample(
        token_ids=ids, logprobs=[-1.0] * 3, finish_reason="stop", stop_reason="</think>", cached_tokens=0
    )
    sampling = SamplingParams(max_tokens=9, stop=("</think>",))
    asked = GenerationRequest(prompt_token_ids=(5,), sampling=sampling, seeds=(1,))
    assert check_sample(sample, asked, spec, engine="vllm") == "</think>"
    # SGLang has no tokenizer: the sample is cut here, at the token that completes the stop string
    decoding = Decoding.of(tokenizer, sampling, eos_token_ids=(2,))
    partial = Partial(
        job=Job(id="a", request=asked, index=0, sample=0),
        incremental=True,
        stops=StopStrings(decoding, sampling.stop),
    )
    sent = [*ids, tokenizer.convert_tokens_to_ids("7")]
    meta = {
        "completion_tokens": 4,
        "finish_reason": None,
        "output_token_logprobs": [[-1.0, i, None] for i in sent],
        "prompt_tokens": 1,
        "cached_tokens": 0,
    }
    cut = partial.add({"output_ids": sent, "meta_info": meta}, aborting=False, weight_version=None)
    assert cut is not None and (cut.token_ids, cut.stop_reason) == (ids, "</think>")


# (a stop string, settings, code)
REFUSED = [
    ("<|end|>", {}, "unsupported-combination: sampling.stop"),
    ("</think>", {"skip_special_tokens": True}, "unsupported-combination: sampling.stop"),
]


@pytest.mark.parametrize(("stop", "settings", "code"), REFUSED)
def test_a_stop_string_that_no_text_holds_is_refused(tokenizer, stop, settings, code):
    sampling = SamplingParams(max_tokens=9, stop=(stop,), **settings)
    with raises(EngineError, code):
        check_stop_strings(tokenizer, sampling, eos_token_ids=(2,))
