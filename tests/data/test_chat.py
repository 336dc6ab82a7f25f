from raising import raises

from lockstep.config.data import DataConfig
from lockstep.data.chat import ChatFormat, clean_messages, fill_template
from lockstep.data.documents import Request, tokenised
from lockstep.errors import ConfigError, DataError

USER = [{"role": "user", "content": "a b"}]
WITH_BOS = "{{ bos_token + ' ' }}{% for m in messages %}{{ m.content }}{% endfor %}"


def test_fill_template_keeps_latex_and_escapes():
    values = {"prompt": "p{x}", "hint": 3}
    filled = fill_template("{prompt} in \\boxed{{}}, {} or {hint}", values, where="row 1")
    assert filled == "p{x} in \\boxed{}, {} or 3"


def test_a_template_that_reads_no_column_names_row_and_columns():
    with raises(ConfigError, "unknown-name: promt, line 4", setting="data.prompt_template") as refused:
        fill_template("{promt}", {"prompt": "x", "hint": 3}, where="rows.jsonl, line 4")
    assert "did you mean 'prompt'? Columns: prompt, hint." in str(refused.value)


def test_plain_text_gets_one_bos(bos_tokenizer):
    chat = ChatFormat(DataConfig(chat_template="none"), bos_tokenizer)
    assert chat.encode("a b") == [1, 3, 4]
    assert chat.encode("<s> a b") == [1, 3, 4]


def test_a_template_that_writes_bos_gets_no_second(bos_tokenizer):
    chat = ChatFormat(DataConfig(chat_template=WITH_BOS), bos_tokenizer)
    assert chat.encode(chat.render(USER, generate=True, where="row 0").text) == [1, 3, 4]


def test_a_template_without_bos_is_left_as_it_is(bos_tokenizer):
    chat = ChatFormat(
        DataConfig(chat_template="{% for m in messages %}{{ m.content }}{% endfor %}"), bos_tokenizer
    )
    assert chat.encode(chat.render(USER, generate=True, where="row 0").text) == [3, 4]


def test_auto_without_a_template_is_plain_text_of_one_turn(bos_tokenizer):
    chat = ChatFormat(DataConfig(), bos_tokenizer)
    assert chat.template is None
    assert chat.render(USER, generate=True, where="x").text == "a b"
    with raises(DataError, "no-chat-template: row 3"):
        chat.render(USER * 2, generate=True, where="row 3")
    with raises(ConfigError, "no-effect: data.system_prompt"):
        ChatFormat(DataConfig(system_prompt="Be brief."), bos_tokenizer)


def test_a_template_from_a_file_and_its_switches(tokenizer, tmp_path):
    path = tmp_path / "t.jinja"
    path.write_text("{{ messages[0].content }}{% if enable_thinking %}<think>{% endif %}")
    for value, text in ((True, "a b<think>"), (False, "a b")):
        config = DataConfig(chat_template=str(path), chat_template_kwargs={"enable_thinking": value})
        assert ChatFormat(config, tokenizer).render(USER, generate=True, where="x").text == text
    typo = DataConfig(chat_template=str(path), chat_template_kwargs={"enable_thnking": True})
    with raises(ConfigError, "no-effect: data.chat_template_kwargs.enable_thnking"):
        ChatFormat(typo, tokenizer)
    with raises(ConfigError, "wrong-format: data.chat_template"):
        ChatFormat(DataConfig(chat_template="missing.jinja"), tokenizer)


def test_a_template_that_refuses_names_the_row(tokenizer):
    config = DataConfig(chat_template="{{ raise_exception('no system role') }}")
    with raises(DataError, "refused: row 9"):
        ChatFormat(config, tokenizer).render(USER, generate=True, where="row 9")


def test_messages_are_cleaned():
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    assert clean_messages([{"role": "user", "content": parts, "tool_calls": None}], where="r") == [
        {"role": "user", "content": "xy"}
    ]
    user = {"role": "user", "content": "x"}
    for more in ({"tool_calls": [{}]}, {"reasoning_content": "x"}):
        assistant = {"role": "assistant", "content": None, **more}
        assert clean_messages([user, assistant], where="r")[1] == {**assistant, "content": ""}
    assert clean_messages([{"role": "tool", "content": None}], where="r")[0]["content"] == ""
    for bad, name, turn in (
        ([], "messages", None),
        ("text", "messages", None),
        ([{"content": "x"}], "role", 1),
        ([user, {"content": "x"}], "role", 2),
        ([user, {"role": "user", "content": [{"type": "image", "url": "u"}]}], "content", 2),
        ([{"role": "user", "contents": "x"}], "content", 1),
        ([user, {"role": "assistant", "content": None}], "content", 2),
    ):
        where = {} if turn is None else {"turn": turn}  # counted from 1, as rows and lines are
        with raises(DataError, f"wrong-row: {name}, row 2", **where) as refused:
            clean_messages(bad, where="row 2")
        assert turn is None or f"row 2, message {turn}: " in str(refused.value)


def test_a_text_may_have_letters_that_the_tokenizer_lacks():
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({"1": 0, "2": 1, "=": 2, "</s>": 3}))  # of sums; nothing for the unknown
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    digits = PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="</s>")
    chat = ChatFormat(DataConfig(chat_template="none"), digits)
    (document,) = tokenised([Request(content=("1=", "1"), chat=chat, where="row 1")])
    assert (document.ids, document.trained) == ([0, 2, 0, 3], [(2, 4)])
