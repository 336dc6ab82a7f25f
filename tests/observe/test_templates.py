"""A chat template gives in its child process what transformers gives in this one."""

import datetime
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from raising import raises
from transformers import AutoTokenizer

from lockstep.errors import DataError
from lockstep.observe.template_renderer import Renderer, RenderJob, render_chat
from lockstep.processes import child

CHAT = [
    {"role": "system", "content": "Be <brief> & \u00fcber \U0001f600"},
    {"role": "user", "content": "1 + 1?\n", "extra": {"a": [1, 2.5, None, True]}},
    {"role": "assistant", "content": "2", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1}}}]},
    {"role": "user", "content": "sure?"},
    {"role": "assistant", "content": "yes"},
]
TEMPLATES = [
    "{% for m in messages %}{{ bos_token }}{{ m.role }}: {{ m['content'] | trim }}{{ eos_token }}\n"
    "{% endfor %}\n",
    "{{ messages[1].extra | tojson }}{{ messages | tojson(indent=2) }}{{ tools }}{{ documents is none }}",
    "  {%- for m in messages[::-1] if m.role != 'system' %}\n    {% if loop.index0 > 1 %}{% break %}"
    "{% endif %}\n"
    "  {{ m.content }}\n  {% endfor %}\n\n",
    "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + m.content | length %}"
    "{% endfor %}{{ ns.n }}{{ strftime_now('%Y') }}{{ name is defined }}{{ name }}",
    "{% for m in messages %}{{ m.role }}{% if m.role == 'assistant' %}{% generation %} {{ m.content }}!"
    "{% endgeneration %}{% endif %}\n{% endfor %}{% if add_generation_prompt %}go{% endif %}",
    "{% macro f(x) %}<{{ x }}>{% endmacro %}{{ f(messages[0].content) }}"
    "{{ messages[0].content.split(' ')[-1] }}"
    "{{ messages[2].tool_calls[0].function.arguments.items() | list }}{{ dict(a=1) }}",
]


@pytest.mark.parametrize("generate", [False, True])
@pytest.mark.parametrize("template", TEMPLATES)
def test_the_text_is_that_of_transformers(template, generate, tiny_tokenizer):
    options = {"name": "you", "enable_thinking": False}
    job = RenderJob(template=template, messages=CHAT, generate=generate, options=options, where="row 1")
    ours = render_chat(tiny_tokenizer, job)
    theirs = tiny_tokenizer.apply_chat_template(
        CHAT, chat_template=template, tokenize=False, add_generation_prompt=generate, **options
    )
    assert ours.text == theirs
    if "generation %}" in template:
        assert [ours.text[a:b] for a, b in ours.spans] == [" 2!", " yes!"]
        assert str(datetime.datetime.now().year) not in ours.text


@pytest.fixture(scope="module")
def tiny_tokenizer(tmp_path_factory):
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    raw = Tokenizer(models.WordLevel({"<s>": 0, "</s>": 1}, unk_token="<s>"))
    folder = tmp_path_factory.mktemp("tokenizer")
    PreTrainedTokenizerFast(tokenizer_object=raw, bos_token="<s>", eos_token="</s>").save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder)


def job(**variables):
    shared = json.dumps(["{{ x }}", variables], ensure_ascii=False)
    item = {"shared": 0, "messages": "[]", "generate": False, "turns": []}
    return {"shared": [shared], "items": [item]}


def test_a_child_that_does_not_read_is_late_as_one_that_does_not_reply(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A stopped process, and a job that no pipe holds."""
    monkeypatch.setattr(child, "END_SECONDS", 0.5)
    renderer = Renderer(seconds=0.5)
    assert Renderer(seconds=60).run(job(x=""), "row 1")["replies"][0]["text"] == ""
    renderer._process = stopped = renderer._start()
    os.killpg(stopped.pid, signal.SIGSTOP)  # also the one that stands over it
    with raises(DataError, "deadline: row 1"):
        renderer.run(job(x="y" * 2**22), "row 1")
    assert stopped.closed and stopped.poll() == -signal.SIGKILL


FORK = """
import json, os, sys
from lockstep.observe.template_renderer import _renderer
def rendered(text):
    shared = json.dumps(["{{ x }}", {"x": text}])
    item = {"shared": 0, "messages": "[]", "generate": False, "turns": []}
    reply = _renderer.run({"shared": [shared], "items": [item]}, "row 1")
    return reply["replies"][0]["text"], _renderer._process.pid
first = rendered("first")
if fork := os.fork():
    assert os.waitpid(fork, 0)[1] == 0
    assert rendered("again") == ("again", first[1])
else:
    text, process = rendered("fork")
    assert text == "fork" and process != first[1]
"""


def test_a_fork_has_a_renderer_of_its_own_and_leaves_the_other_alone() -> None:
    ended = subprocess.run(
        [sys.executable, "-W", "error", "-c", FORK], capture_output=True, text=True, timeout=60
    )
    assert (ended.returncode, ended.stderr) == (0, "")


def test_the_child_gets_no_variables_of_ours_that_it_does_not_need(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    renderer = Renderer()
    renderer.run(job(), "row 1")
    given = Path(f"/proc/{renderer._process.pid}/environ").read_bytes()
    assert b"TZ=Asia/Tokyo" in given and b"HF_TOKEN" not in given
    renderer._process.end()


def test_text_beyond_the_first_plane_and_halves_of_it_survive_the_way() -> None:
    text = "\u00fc\u4e2d\U0001f600 \ud83d"
    assert Renderer().run(job(x=text), "row 1")["replies"][0]["text"] == text
