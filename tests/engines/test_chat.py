"""Chat templates, which are programs from elsewhere."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from mooncaked.engines.reference.chat import ChatTemplate, read_hf_template
from mooncaked.errors import InvalidRequest, ModelInvalid
from tests.engines.tiny_model import TEMPLATE, write_hf

HELLO = [{"role": "user", "content": "Hello"}]


def render(source: str | None, messages: list[dict[str, str]] = HELLO) -> str:
    return ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}, "model").render(messages)


def test_the_prompt_ends_where_the_answer_begins() -> None:
    assert render(TEMPLATE) == "<|im_start|>user\nHello<|im_end|>\n<|im_start|>assistant\n"


def test_what_templates_use() -> None:
    assert render("{{ bos_token }}{{ messages | tojson }}") == '<s>[{"role": "user", "content": "Hello"}]'
    assert render("{% for m in messages %}{% break %}x{% endfor %}y") == "y"
    assert len(render("{{ strftime_now('%Y') }}")) == 4


def test_blocks_leave_no_white_space_behind() -> None:
    assert render("{% if true %}\n  {% if true %}\nx\n  {% endif %}\n{% endif %}\n") == "x\n"


def test_a_template_may_refuse_messages() -> None:
    with pytest.raises(InvalidRequest, match="roles must alternate"):
        render("{{ raise_exception('roles must alternate') }}")


def test_a_model_without_a_template_has_no_chat() -> None:
    with pytest.raises(InvalidRequest, match="no chat template"):
        render(None)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update({'role': 'x'}) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ range(10**9) | list }}",
        "{{ 1 / 0 }}",
        "{{ messages[5].content.x.y }}",
        "{{ none.x() }}",
    ],
)
def test_a_template_stays_in_its_box(source: str) -> None:
    with pytest.raises(InvalidRequest):
        render(source)


def test_text_that_is_no_template_makes_no_model() -> None:
    with pytest.raises(ModelInvalid, match="chat template"):
        ChatTemplate("{% for %}", {}, "model")


def test_where_directories_keep_it(tmp_path: Path) -> None:
    path = write_hf(tmp_path / "m")
    assert read_hf_template(path) == TEMPLATE
    named = [{"name": "tools", "template": "no"}, {"name": "default", "template": "yes"}]
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert read_hf_template(path) == "yes"
    (path / "chat_template.jinja").write_text("file")
    assert read_hf_template(path) == "file"
    (path / "chat_template.jinja").unlink()
    (path / "tokenizer_config.json").unlink()
    assert read_hf_template(path) is None
