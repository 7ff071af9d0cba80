"""Prompts into tokens: as transformers does it, and the same again turn by turn."""

from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dora_rl.tasks.encoding import Encoder
from dora_rl.tasks.errors import TaskError
from dora_rl.tasks.prompts import Prompt
from dora_rl.tasks.settings import TaskSettings
from dora_rl.tasks.templates import load_template
from tests.tasks.models import CHATML, make_directory

LLAMA_LIKE = """
{{- bos_token }}
{%- if not date is defined %}{%- set date = "today" %}{%- endif %}
{%- set ns = namespace(system='') %}
{%- for message in messages %}
    {%- if message.role == 'system' %}
        {%- set ns.system = message.content | trim %}
        {%- continue %}
    {%- endif %}
    {{- '<|start|>' ~ message.role ~ ': ' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content | trim + '<|end|>' }}{%- endgeneration %}
    {%- else %}
        {{- message.content | trim + '<|end|>' }}
    {%- endif %}
{%- endfor %}
{{- {'system': ns.system, 'date': date} | tojson }}
{%- if add_generation_prompt %}{{ '<|start|>assistant: ' }}{% endif %}
"""
STRICT = """{% for message in messages %}
{% if message.role not in ('user', 'assistant') %}
{{ raise_exception('no ' + message.role) }}
{% endif %}
{{ message.content }}<|end|>
{% endfor %}"""
TEXT = st.text(alphabet=st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20)


def prompt(content: Any) -> Prompt:
    if isinstance(content, str):
        return Prompt(position=0, text=content)
    return Prompt(position=0, messages=tuple(content))


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def assistant(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def reference(directory: Path) -> tokenizers.Tokenizer:
    return tokenizers.Tokenizer.from_file(str(directory / "tokenizer.json"))


def text_of(directory: Path, tokens: list[int]) -> str:
    return str(reference(directory).decode(tokens, skip_special_tokens=False))


@pytest.mark.parametrize("template", [CHATML, LLAMA_LIKE])
def test_templates_render_as_in_transformers(tmp_path: Path, template: str) -> None:
    from transformers import PreTrainedTokenizerFast

    directory = make_directory(tmp_path, template=template, begin=True)
    theirs = PreTrainedTokenizerFast(
        tokenizer_file=str(directory / "tokenizer.json"), bos_token="<|begin|>", eos_token="<|end|>"
    )
    chat = [
        {"role": "system", "content": " be brief "},
        user("hello 🦊 <b>\n\n"),
        assistant(" hi\n"),
        user("naïve?"),
    ]
    encoder = Encoder(directory, TaskSettings())
    for messages in (chat, chat[1:], chat[:2]):
        wanted = theirs.apply_chat_template(
            messages, chat_template=template, add_generation_prompt=True, tokenize=True
        )["input_ids"]
        assert encoder.encode(prompt(messages)) == list(wanted)


def test_text_is_a_message_of_the_user(tmp_path: Path) -> None:
    directory = make_directory(tmp_path)
    encoder = Encoder(directory, TaskSettings())
    assert encoder.chat
    tokens = encoder.encode(prompt("hello"))
    assert tokens == encoder.encode(prompt([user("hello")]))
    assert text_of(directory, tokens) == "<|start|>user\nhello<|end|>\n<|start|>assistant\n"
    assert encoder.encode(prompt("other"), "hello") == tokens
    assert encoder.encode(prompt("other"), [user("hello")]) == tokens


def test_a_system_message_comes_first_unless_there_is_one(tmp_path: Path) -> None:
    directory = make_directory(tmp_path)
    encoder = Encoder(directory, TaskSettings(system="be brief"))
    begin = "<|start|>system\nbe brief<|end|>\n<|start|>user\n"
    assert text_of(directory, encoder.encode(prompt("x"))).startswith(begin)
    own = [{"role": "system", "content": "mine"}, user("x")]
    assert "brief" not in text_of(directory, encoder.encode(prompt(own)))


@pytest.mark.parametrize("begin", [False, True])
def test_without_a_template_text_is_text(tmp_path: Path, begin: bool) -> None:
    directory = make_directory(tmp_path, template=None, begin=begin)
    encoder = Encoder(directory, TaskSettings(system="be brief"))
    assert not encoder.chat
    wanted = ("<|begin|>" if begin else "") + "be brief\n\nhello"
    assert text_of(directory, encoder.encode(prompt("hello"))) == wanted
    assert text_of(directory, encoder.observation(" world")) == " world"
    with pytest.raises(TaskError, match=r"the prompts are messages, but no chat template"):
        encoder.encode(prompt([user("x")]))


@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(st.lists(st.tuples(TEXT, TEXT), min_size=1, max_size=3), TEXT)
def test_turns_add_up_to_the_whole_conversation(
    tmp_path: Path, turns: list[tuple[str, str]], first: str
) -> None:
    directory = tmp_path / "model"
    if not directory.exists():
        make_directory(directory)
    encoder = Encoder(directory, TaskSettings())
    inner = reference(directory)
    messages = [user(first)]
    tokens = encoder.encode(prompt(messages))
    for response, observation in turns:
        written = inner.encode(response, add_special_tokens=False).ids
        end = inner.token_to_id("<|end|>")
        messages += [assistant(response), user(observation)]
        ended = [*tokens, *written, end, *encoder.observation(observation)]
        cut_short = [*tokens, *written, *encoder.observation(observation, ended=False)]
        assert ended == cut_short
        tokens = ended
        assert tokens == encoder.encode(prompt(messages))


def test_an_observation_may_be_a_tools(tmp_path: Path) -> None:
    directory = make_directory(tmp_path)
    encoder = Encoder(directory, TaskSettings(observation_role="tool"))
    wanted = "\n<|start|>tool\n42<|end|>\n<|start|>assistant\n"
    assert text_of(directory, encoder.observation("42")) == wanted


def test_decoding_leaves_special_tokens_out(tmp_path: Path) -> None:
    directory = make_directory(tmp_path)
    tokens = reference(directory).encode("hello 🦊<|end|>").ids
    assert Encoder(directory, TaskSettings()).decode(tokens) == "hello 🦊"


def test_where_a_template_is_found(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    directory = make_directory(tmp_path, template=named)
    template = load_template(directory)
    assert template is not None and template.source == "yes"
    (directory / "chat_template.jinja").write_text("the file")
    template = load_template(directory)
    assert template is not None and template.source == "the file"


def test_chat_can_be_demanded_and_switched_off(tmp_path: Path) -> None:
    with_template = make_directory(tmp_path / "a")
    without = make_directory(tmp_path / "b", template=None)
    assert not Encoder(with_template, TaskSettings(chat="never")).chat
    with pytest.raises(TaskError, match=r"no chat template in `.*`. Add chat_template.jinja"):
        Encoder(without, TaskSettings(chat="always"))


def test_a_model_without_a_tokenizer(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"no tokenizer in `.*`: tokenizer.json is missing"):
        Encoder(tmp_path, TaskSettings())


def test_templates_that_refuse_or_are_broken(tmp_path: Path) -> None:
    encoder = Encoder(make_directory(tmp_path / "a", template=STRICT), TaskSettings(system="x"))
    with pytest.raises(TaskError, match=r"refuses messages of roles system, user: no system"):
        encoder.encode(prompt("x"))
    with pytest.raises(TaskError, match=r"is broken"):
        Encoder(make_directory(tmp_path / "b", template="{% if %}"), TaskSettings())
    forgetful = Encoder(make_directory(tmp_path / "c", template="{{ 'x' }}"), TaskSettings())
    with pytest.raises(TaskError, match=r"leaves out what the model said earlier"):
        forgetful.observation("x")
    silent = Encoder(make_directory(tmp_path / "d", template="{{ '' }}"), TaskSettings())
    with pytest.raises(TaskError, match=r"prompt 0 has no tokens"):
        silent.encode(prompt("x"))
    (tmp_path / "a" / "tokenizer_config.json").write_text("[")
    with pytest.raises(TaskError, match=r"cannot read `.*tokenizer_config.json`"):
        Encoder(tmp_path / "a", TaskSettings())


@pytest.mark.parametrize(
    "attack",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ self.__init__.__globals__ }}",
        "{{ raise_exception.__globals__ }}",
        "{% include '/etc/passwd' %}",
        "{{ range(10**9) | list }}",
    ],
)
def test_a_template_can_only_write_text(tmp_path: Path, attack: str) -> None:
    encoder = Encoder(make_directory(tmp_path, template=attack), TaskSettings())
    with pytest.raises(TaskError, match=r"refuses messages|has no tokens"):
        encoder.encode(prompt("x"))


def test_the_fingerprint_is_of_what_makes_tokens(tmp_path: Path) -> None:
    def fingerprint(name: str, template: str | None = CHATML, **how: Any) -> str:
        directory = make_directory(tmp_path / name, template=template)
        return Encoder(directory, TaskSettings(**how)).fingerprint

    first = fingerprint("a")
    assert first == fingerprint("b", shuffle=False)
    others = {
        fingerprint("c", template=None),
        fingerprint("d", system="x"),
        fingerprint("e", template=LLAMA_LIKE),
        fingerprint("f", observation_role="tool"),
    }
    assert len(others | {first}) == 5
