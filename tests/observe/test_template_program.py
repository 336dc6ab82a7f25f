"""Where turns begin in the text of a conversation: found by two renderings as by three for each turn."""

from __future__ import annotations

import json
import signal
import time

import pytest
from raising import raises

from lockstep.errors import DataError
from lockstep.observe import template_program, template_renderer
from lockstep.observe.template_program import Conversation, Program, common_length
from lockstep.observe.template_renderer import RenderJob, render_chats

CHATML = (
    "{% for m in messages %}{% if loop.first and messages[0]['role'] != 'system' %}<s>system: none\n"
    "{% endif %}"
    "<s>{{ m.role }}\n{{ m.content | trim }}</s>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
ONE_AFTER_THE_OTHER = {
    "chatml": CHATML,
    # Llama's: the system's text is written with the first turn of the user.
    "system apart": (
        "{% if messages[0].role == 'system' %}{% set rest = messages[1:] %}"
        "{% set system = messages[0].content %}{% else %}{% set rest = messages %}{% endif %}"
        "{% for m in rest %}"
        "{% if loop.index0 == 0 and system is defined %}<<{{ system }}>>{% endif %}"
        "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('roles') }}{% endif %}"
        "[{{ m.role }}] {{ m.content }}{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"
    ),
    # Phi-3's.
    "an end instead of a header": (
        "{% for m in messages %}<{{ m.role }}>{{ m.content }}<end>\n{% endfor %}"
        "{% if add_generation_prompt %}<assistant>{% else %}<eos>{% endif %}"
    ),
    "counts": (
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}"
        "{{ m.role }}{{ ns.n }}{{ messages[loop.index0].content }}{% if loop.index0 > 0 %}"
        "{{ messages[loop.index0 - 1].role }}{% endif %};{% endfor %}"
    ),
    "a macro for each": (
        "{% macro turn(m) %}<{{ m.role }}>{{ m.content }}{% endmacro %}{% for m in messages %}"
        "{% set text = turn(m) %}{{ text }}\n{% endfor %}{% if add_generation_prompt %}<{% endif %}"
    ),
    "a loop in a message": (
        "{% for m in messages %}{{ m.role }}{% for w in m.content.split(' ') %}-{{ w }}"
        "{% if loop.last %}!{% endif %}{% endfor %}{% endfor %}"
    ),
    "no header": "{% for m in messages %}{{ m.content }}{% endfor %}",
}
OTHERS = {
    "the last is otherwise": (
        "{% for m in messages %}{{ m.role }}:{% if loop.last %}<think></think>{% endif %}{{ m.content }};"
        "{% endfor %}{% if add_generation_prompt %}assistant:{% endif %}"
    ),
    "the length": "{% for m in messages %}{{ m.content }}{{ messages | length }}{% endfor %}",
    "the next": "{% for m in messages %}{{ m.content }}{% if loop.nextitem %},{% endif %}{% endfor %}",
    "the next by number": (
        "{% for m in messages %}{{ m.content }}{% if messages[loop.index0 + 1] %},{% endif %}{% endfor %}"
    ),
    "from the end": "{% for m in messages %}{{ m.content }}{{ messages[-1].role }}{% endfor %}",
    "backwards first": (
        "{% set ns = namespace(last=0) %}{% for m in messages[::-1] %}{% if m.role == 'user' "
        "and not ns.last %}{% set ns.last = messages | length - loop.index %}{% endif %}{% endfor %}"
        "{% for m in messages %}{% if loop.index0 < ns.last %}old {% endif %}{{ m.content }};{% endfor %}"
    ),
    "read behind the loop": (
        "{% set ns = namespace(role='') %}{% for m in messages %}{{ m.content }};{% set ns.role = m.role %}"
        "{% endfor %}{% if ns.role == 'user' %}!{% endif %}{% if add_generation_prompt %}header{% endif %}"
    ),
    "in a macro": (
        "{% macro all(turns) %}{% for m in turns %}{{ m.role }}:{{ m.content }};{% endfor %}{% endmacro %}"
        "{{ all(messages) }}{% if add_generation_prompt %}assistant:{% endif %}"
    ),
    "in a block": (
        "{% set text %}{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}{% endset %}{{ text }}"
    ),
    "in a filter": "{% filter upper %}{% for m in messages %}{{ m.content }};{% endfor %}{% endfilter %}",
    "as a list": "{% for m in messages | list %}{{ m.content }};{% endfor %}",
    "selected": "{% for m in messages if m.role != 'system' %}{{ m.content }};{% endfor %}",
    "selected by a filter": (
        "{% for m in messages | rejectattr('role', 'equalto', 'system') %}{{ m.content }};{% endfor %}"
    ),
    "twice": (
        "{% for m in messages %}{{ m.role }}{% endfor %}{% for m in messages %}{{ m.content }}{% endfor %}"
    ),
    "a joiner": (
        "{% set comma = joiner(',') %}{% for m in messages %}{{ comma() }}{{ m.content }}{% endfor %}"
        "{{ comma() }}"
    ),
    "whole": "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages }}",
    "whole, as JSON": "{% for m in messages %}{{ m.content }}{% endfor %}{{ messages | tojson }}",
    "left early": (
        "{% for m in messages %}{{ m.content }}{% if loop.index0 == 0 %}{% break %}{% endif %}{% endfor %}end"
    ),
    "by a filter's attribute": (
        "{% for m in messages %}{{ m.content }}{% if loop | attr('last') %}!{% endif %}{% endfor %}"
    ),
    "a header in the loop": (
        "{% for m in messages %}{% if add_generation_prompt %}?{% endif %}{{ m.content }};{% endfor %}"
    ),
}
CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi"},
    {"role": "assistant", "content": "Hello there"},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "[assistant] It is\n"},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": ""},
]


@pytest.mark.parametrize("messages", [CHAT, CHAT[1:], CHAT[:3], CHAT[1:3]], ids=len)
@pytest.mark.parametrize("name", [*ONE_AFTER_THE_OTHER, *OTHERS])
def test_two_renderings_find_what_three_of_each_turn_find(name, messages):
    conversation = Conversation(Program((ONE_AFTER_THE_OTHER | OTHERS)[name]), {}, messages)
    turns = [number for number, message in enumerate(messages) if message["role"] == "assistant"]
    text, spans = conversation.rendered(len(messages), generate=False)
    found = conversation.watched()
    assert (found is not None) == (name in ONE_AFTER_THE_OTHER)
    if found is not None:
        assert found[0] == text and not spans
        assert [found[1](number) for number in turns] == [conversation.place(text, n) for n in turns]


@pytest.mark.parametrize("name", [*ONE_AFTER_THE_OTHER, *OTHERS])
def test_a_tail_that_is_known_saves_a_rendering_and_changes_nothing(name, monkeypatch):
    program, texts, tails = Program((ONE_AFTER_THE_OTHER | OTHERS)[name]), [], {}
    text = program.text
    monkeypatch.setattr(program, "text", lambda *args: texts.append(text(*args)) or texts[-1])
    for messages in (CHAT[1:3], CHAT, CHAT[:3]):
        known = bool(tails)
        texts.clear()
        found = Conversation(program, {}, messages, tails=tails).watched()
        if found is None:
            continue
        assert len(texts) == 2 - known
        alone = Conversation(program, {}, messages).watched()
        assert found[0] == alone[0]
        assert [found[1](n) for n in range(1, len(messages))] == [
            alone[1](n) for n in range(1, len(messages))
        ]
    constant = ("chatml", "an end instead of a header", "counts", "a loop in a message", "no header")
    assert bool(tails) == (name in constant)


TAIL = "{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.mark.parametrize(
    ("template", "constant"),
    [
        ("{% for m in messages %}{{ m.content }}{% endfor %}" + TAIL, True),
        ("{{ bos }}{% for m in messages %}{{ m.content }}{% endfor %}" + TAIL + "{{ bos }}", True),
        ("{% for m in messages %}{% set last = m %}{% endfor %}{{ messages[0].role }}" + TAIL, False),
        ("{% set a = messages[0].role %}{% for m in messages %}{% endfor %}{{ a }}" + TAIL, False),
        ("{% for m in messages %}{{ add_generation_prompt }}{% endfor %}", False),
        ("{% if add_generation_prompt %}{% endif %}{% for m in messages %}{% endfor %}", False),
        ("{% for m in messages %}{% endfor %}{{ strftime_now('%S') }}" + TAIL, False),
        ("{% macro f() %}{% endmacro %}{% for m in messages %}{% endfor %}" + TAIL, False),
        ("{% for m in messages[1:] %}{{ m.content }}{% endfor %}" + TAIL, False),
        ("{% for m in messages %}{% endfor %}{% for m in messages %}{% endfor %}" + TAIL, False),
    ],
)
def test_which_tails_are_the_same_for_all_conversations(template, constant):
    assert Program(template).has_constant_tail == constant


def test_places_by_hand():
    conversation = Conversation(Program(ONE_AFTER_THE_OTHER["an end instead of a header"]), {}, CHAT[1:3])
    text, places = conversation.watched()
    assert text == "<user>Hi<end>\n<assistant>Hello there<end>\n<eos>"
    assert places(1) == {"opened": 15, "start": 25, "header": "assistant>", "end": len(text)}


def test_the_number_of_renderings_does_not_grow_with_the_turns(monkeypatch):
    program, texts = Program(CHATML), []
    text = program.text
    monkeypatch.setattr(program, "text", lambda *args: texts.append(text(*args)) or texts[-1])
    monkeypatch.setattr(template_program, "compiled", lambda _: program)
    item = {"messages": json.dumps(CHAT[1:] * 10), "generate": False, "turns": [1, 3, 5, 57, 59]}
    reply = template_program.answer(CHATML, {}, item)
    assert len(texts) == 2 and reply["text"] == texts[0]
    assert all(
        reply["text"][turn["start"] :].startswith(("Hello there</s>", "[assistant] It is</s>", "</s>"))
        for turn in reply["turns"]
    )


def test_the_budget_is_of_one_rendering_not_of_all_turns_of_a_conversation(monkeypatch):
    """Three renderings a turn of a long conversation may take longer than one template is given."""
    late = []
    before = signal.signal(signal.SIGPROF, lambda *_: late.append(time.process_time()))
    monkeypatch.setattr(template_program, "CPU_SECONDS", 0.2)
    messages = [{"role": ("user", "assistant")[n % 2], "content": "x" * 500} for n in range(200)]
    item = {"messages": json.dumps(messages), "generate": False, "turns": list(range(1, 200, 2))}
    text = (
        "{% for m in messages %}{{ m.content }}{% for c in m.content %}{% endfor %}{% endfor %}"
        "{{ messages[-1].role }}"
    )
    started = time.process_time()
    try:
        reply = template_program.answer(text, {}, item)
    finally:
        signal.signal(signal.SIGPROF, before)
    assert len(reply["turns"]) == 100 and not late
    assert time.process_time() - started > 0.2  # else the budget was not put to the test


def test_common_length_by_characters():
    for left, right, expected in (("", "a", 0), ("abc", "abd", 2), ("abc", "abc", 3), ("ab", "abc", 2)):
        assert common_length(left, right) == common_length(right, left) == expected
    assert common_length("x" * 1000 + "a" + "y" * 9, "x" * 1000 + "b" + "y" * 9) == 1000


# A batch of conversations in one exchange.


@pytest.fixture(scope="module")
def tokenizer():
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    return PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>")


PICKY = (
    "{{ bos_token }}{% for m in messages %}{% if m.content == 'refuse' %}{{ raise_exception('no') }}"
    "{% endif %}{% if m.content == 'spin' %}{% for a in range(99999) %}{% for b in range(9999) %}{% endfor %}"
    "{% endfor %}{% endif %}{{ m.content }}{{ name }}{% endfor %}{% if add_generation_prompt %}>{% endif %}"
)


def job(content, number, **fields):
    messages = [{"role": "user", "content": content}]
    return RenderJob(template=PICKY, messages=messages, where=f"row {number}", **fields)


def test_a_batch_is_one_exchange_and_an_error_is_its_rows_alone(tokenizer, monkeypatch):
    sent, run = [], template_renderer._renderer.run
    monkeypatch.setattr(template_renderer._renderer, "run", lambda *a: sent.append(a) or run(*a))
    jobs = [
        job("a", 1),
        job("refuse", 2),
        job("b", 3, generate=True),
        job(b"", 4),
        job("c", 5, options={"name": "you"}),
    ]
    texts = list(render_chats(tokenizer, jobs))
    assert len(sent) == 1
    assert [text if isinstance(text, DataError) else text.text for text in texts] == [
        "<s>a",
        texts[1],
        "<s>b>",
        texts[3],
        "<s>cyou",
    ]
    with raises(DataError, "refused: row 2: the chat template refuses these messages: no"):
        raise texts[1]
    with raises(DataError, "wrong-row: row 4: these messages cannot be passed to a chat template"):
        raise texts[3]


def test_a_row_that_uses_up_the_budget_is_found_in_its_batch(tokenizer):
    texts = list(render_chats(tokenizer, [job("a", 1), job("spin", 2), job("b", 3)]))
    assert (texts[0].text, texts[2].text) == ("<s>a", "<s>b")
    with raises(DataError, "deadline: row 2: rendering with the chat template was stopped"):
        raise texts[1]


def test_a_template_that_never_ends_is_tried_no_more_once_it_is_known(tokenizer, monkeypatch):
    sent, run = [], template_renderer._renderer.run
    monkeypatch.setattr(template_renderer._renderer, "run", lambda *a: sent.append(a) or run(*a))
    results = render_chats(tokenizer, [job("spin", number) for number in range(1, 100)])
    with raises(DataError, "deadline: row 1"):
        raise next(results)
    assert len(sent) == 2  # all of them, and the first alone


def test_long_conversations_go_in_several_exchanges(tokenizer, monkeypatch):
    monkeypatch.setattr(template_renderer, "_BATCH_CHARACTERS", 100)
    batches = list(template_renderer._batches(tokenizer, [job("x" * 60, n) for n in range(3)]))
    assert [len(batch) for batch in batches] == [1, 1, 1]
    assert len(list(render_chats(tokenizer, [job("x" * 60, n) for n in range(3)]))) == 3
