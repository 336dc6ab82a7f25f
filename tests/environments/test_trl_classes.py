"""One class file under TRL's GRPO trainer and under ours: schemas, token ids, results and rewards."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import trl_environment
from chats import smollm2
from hosting import hosted, run
from transformers.utils.chat_template_utils import get_json_schema

from lockstep.environments.author import EnvironmentClass
from lockstep.environments.delta import ConversationTokens, Reply
from lockstep.environments.tool_environment import _with_observation
from lockstep.observe.chat_template import ChatTemplate

pytest.importorskip("trl.trainer.grpo_trainer", reason="TRL is missing: pip install 'lockstep-rl[bench]'")

COMMON = Path(__file__).parents[1] / "common"
ROW = {"prompt": [{"role": "user", "content": ""}], "price": 1.5, "wanted": 3}
CALLS: list[tuple[str, dict[str, Any]]] = [
    ("price_of", {"count": 2}),
    ("now", {}),
    ("price_of", {}),
    ("buy", {"count": 3}),
    ("fail", {}),
    ("describe", {}),
]


def written(name: str, arguments: dict[str, Any]) -> str:
    call = json.dumps({"name": name, "arguments": arguments})
    return f"<tool_call>\n{call}\n</tool_call><|im_end|>"


SCRIPT = [*(written(*call) for call in CALLS), "Done.<|im_end|>"]


def of_trl(tokenizer: Any, folder: Path) -> Any:
    """A trainer of TRL that has made one step, with a policy that follows the script."""
    from datasets import Dataset
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl import GRPOConfig, GRPOTrainer

    class Scripted(GRPOTrainer):
        turn = 0

        def _generate_single_turn(self, prompt_ids: Any, *_: Any, **__: Any) -> Any:
            ids = tokenizer.encode(SCRIPT[self.turn], add_special_tokens=False)
            self.turn += 1
            return [list(ids) for _ in prompt_ids], None

        def _generate(self, prompts: Any) -> Any:
            self.generated = super()._generate(prompts)
            return self.generated

        def _calculate_rewards(self, *given: Any) -> Any:
            self.rewards = super()._calculate_rewards(*given)
            return self.rewards

    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), max_position_embeddings=4096, **sizes))
    settings = {"max_steps": 1, "per_device_train_batch_size": 2, "num_generations": 2, "bf16": False}
    settings |= {"max_completion_length": 2048, "report_to": "none", "use_cpu": True, "save_strategy": "no"}
    config = GRPOConfig(str(folder), **settings)
    trainer = Scripted(
        model,
        args=config,
        train_dataset=Dataset.from_list([ROW, ROW]),
        processing_class=tokenizer,
        environment_factory=trl_environment.Shop,
    )
    trainer.train()
    return trainer


async def of_ours(host: Any, tokens: ConversationTokens, encode: Any) -> Any:
    """Ids, the policy's spans, results and the reward of a trajectory that follows the script."""
    instance = await host.open(ROW, seed=0)
    ledger = tokens.start(_with_observation(list(ROW["prompt"]), await instance.reset()))
    texts, spans = [], []
    for number, text in enumerate(SCRIPT):
        begin = len(ledger.ids)
        turn = ledger.add_policy(encode(text))
        spans.append(range(begin, len(ledger.ids)))
        for place, call in enumerate(turn.made):
            result = await instance.call(call.name, call.arguments, turn=number, call=place)
            texts.append(result.text)
            reply = tokens.reply(ledger, [call.result(result.text)])
            assert isinstance(reply, Reply)
    reward = await instance.reward({})
    await instance.close()
    return list(ledger.ids), spans, texts, reward


@pytest.mark.slow
def test_one_class_file_under_both_trainers(tmp_path: Path) -> None:
    from trl import chat_template_utils

    tokenizer = smollm2()
    kept = tokenizer.chat_template, tokenizer.eos_token
    tokenizer.chat_template, tokenizer.eos_token = chat_template_utils.qwen2_5_chat_template, "<|im_end|>"
    try:
        trainer = of_trl(tokenizer, tmp_path)
        prompts, completions, masks, messages = trainer.generated[:4]
        template = trainer.chat_template or tokenizer.chat_template
        # In alphabetical order there, as they are defined here: the file has one order for both.
        theirs = [get_json_schema(tool) for tool in trainer._env_tools[None]]
        with hosted("trl_environment:Shop", COMMON, max_live=1) as host:
            assert host.tools == theirs
            tokens = ConversationTokens(ChatTemplate(tokenizer, template), tools=host.tools)
            encode = lambda text: tokenizer.encode(text, add_special_tokens=False)  # noqa: E731
            ids, spans, texts, reward = run(of_ours(host, tokens, encode))
    finally:
        tokenizer.chat_template, tokenizer.eos_token = kept
    told = [message["content"] for message in messages[0] if message["role"] == "tool"]
    assert texts[:4] == told[:4] == ["3.0", "noon", "1.5", "3 apples"]
    # Errors and content blocks are worded differently.
    assert (told[4], texts[4]) == ("{'error': 'by design'}", "error: fail raised LookupError: by design")
    assert (told[5][1]["text"], texts[5]) == ("fresh.", "Apples, fresh.")
    assert trainer.rewards[:, 0].tolist() == [reward, reward] == [0.75, 0.75]
    # Token for token up to the call that fails, with the policy's turns where their mask has them.
    until, begin = spans[4].stop, len(prompts[0])
    assert ids[:until] == [*prompts[0], *completions[0]][:until]
    ours = [int(any(i in span for span in spans)) for i in range(begin, until)]
    assert ours == masks[0][: until - begin] and 0 in ours


def test_functions_that_make_an_object() -> None:
    for name in ("shop", "partly"):
        found = EnvironmentClass.of(getattr(trl_environment, name), f"trl_environment:{name}")
        assert found.made is trl_environment.Shop
        assert found.tools == ("buy", "describe", "fail", "now", "price_of")
        assert found.make().currency == {"shop": "dollars", "partly": "yen"}[name]
