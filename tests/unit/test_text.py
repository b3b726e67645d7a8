"""The text codec: ids and renders equal to transformers', and every failure in words a client can read."""

from __future__ import annotations

import json
from datetime import datetime
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from dspark_trt.checkpoints.tokenizer import write_tokenizer
from dspark_trt.errors import ManifestError, RequestError
from dspark_trt.text import TextCodec, TextSettings
from tests.support.factories import write_target

CHAT = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "It's 12345 and 3.14\n\n  <b>&amp; 東京 🦊"},
    {"role": "assistant", "content": "Fine.", "tool_calls": None},
    {"role": "user", "content": ""},
]
TEXTS = [
    "",
    "a",
    " a",
    "  two  spaces ",
    "line\nline\n\n",
    "\ttab\r\n",
    "naïve café",
    "東京タワー",
    "🦊👩‍👩‍👧",
    "It's 12345 and 3.14",
]
THINKING = (
    "{%- if tools is not none %}{{ tools | tojson }}{% endif %}"
    "{% for message in messages %}\n    {% if message.role == 'user' %}\n"
    "[{{ message.content | trim }}]{% continue %}\n    {% endif %}\n"
    "{% generation %}({{ message.content }}){% endgeneration %}{% endfor %}"
    "{{ bos_token }}{{ {'b': '<é>', 'a': 1} | tojson }}{{ strftime_now('%Y') }}"
    "{% if add_generation_prompt %}>{% if not enable_thinking | default(true) %}no{% endif %}{% endif %}"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_target(tmp_path_factory.mktemp("target"), vocab_size=320, tokenizer=True)


@pytest.fixture(scope="module")
def codec(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> TextCodec:
    destination = tmp_path_factory.mktemp("build") / "tokenizer"
    write_tokenizer(str(folder), destination)
    return TextCodec.load(destination)


def codec_of(tokenizer: Tokenizer, template: str, **settings: object) -> TextCodec:
    return TextCodec(tokenizer, TextSettings.model_validate(settings), template)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@pytest.mark.parametrize("text", TEXTS)
def test_ids_are_those_of_transformers(folder: Path, codec: TextCodec, text: str) -> None:
    from transformers import AutoTokenizer

    assert codec.encode(text) == AutoTokenizer.from_pretrained(folder)(text)["input_ids"]


@given(text=st.text())
@settings(max_examples=200, deadline=None)
def test_decode_undoes_encode(codec: TextCodec, text: str) -> None:
    assert codec.decode(codec.encode(text), skip_special_tokens=False) == text


@pytest.mark.parametrize("options", [{}, {"add_generation_prompt": False}, {"enable_thinking": False}])
def test_chat_renders_and_encodes_as_in_transformers(folder: Path, codec: TextCodec, options: dict) -> None:
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(folder)
    expected = {"add_generation_prompt": True} | options
    assert codec.render_chat(CHAT, **options) == reference.apply_chat_template(CHAT, tokenize=False, **expected)
    assert codec.encode_chat(CHAT, **options) == reference.apply_chat_template(CHAT, **expected)["input_ids"]


@pytest.mark.parametrize("options", [{}, {"enable_thinking": False}, {"tools": [{"name": "f"}]}])
def test_template_helpers_and_whitespace_are_those_of_transformers(
    folder: Path, tokenizer: Tokenizer, options: dict
) -> None:
    from transformers import AutoTokenizer

    codec = codec_of(tokenizer, THINKING, special_tokens={"bos_token": "<s>"})
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        CHAT, chat_template=THINKING, tokenize=False, add_generation_prompt=True, **options
    )
    assert codec.render_chat(CHAT, **options) == expected
    assert str(datetime.now().year) in expected
    assert '{"b": "<é>", "a": 1}' in expected


def test_stored_template_arguments_hold_until_a_call_overrides_them(tmp_path: Path, folder: Path) -> None:
    write_tokenizer(str(folder), tmp_path / "t", chat_template_kwargs={"enable_thinking": False})
    codec = TextCodec.load(tmp_path / "t")
    assert codec.render_chat(CHAT).endswith("<think>\n\n</think>\n\n")
    assert codec.render_chat(CHAT, enable_thinking=True).endswith("<|im_start|>assistant\n")


def test_rendered_chat_gets_no_second_bos(tokenizer: Tokenizer) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer = Tokenizer.from_str(tokenizer.to_str())
    tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    codec = codec_of(tokenizer, "{{ bos_token }}{{ messages[0].content }}", special_tokens={"bos_token": "<s>"})
    assert codec.encode("a")[0] == 1
    assert codec.encode_chat([{"role": "user", "content": "a"}]) == codec.encode("a")


def test_truncation_and_padding_in_tokenizer_json_are_switched_off(tokenizer: Tokenizer) -> None:
    limited = Tokenizer.from_str(tokenizer.to_str())
    limited.enable_truncation(3)
    limited.enable_padding(length=64)
    text = "the quick brown fox jumps"
    assert TextCodec(limited, TextSettings(), None).encode(text) == tokenizer.encode(text).ids


def test_ids_may_be_numpy_integers(codec: TextCodec) -> None:
    assert codec.decode(np.array(codec.encode("the fox"))) == "the fox"


def test_special_tokens_are_left_out_of_the_text_on_request(codec: TextCodec) -> None:
    ids = codec.encode_chat([{"role": "user", "content": "a"}])
    assert codec.decode(ids) == "user\na\nassistant\n"
    assert codec.decode(ids, skip_special_tokens=False) == "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n"


def test_ids_of_padding_rows_decode_to_nothing(codec: TextCodec) -> None:
    assert codec.vocab_size == 320
    assert codec.decode([*codec.encode("a"), codec.vocab_size, codec.vocab_size + 7]) == "a"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.name.first }}", "undefined|no attribute"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
    ],
)
def test_what_a_template_raises_reaches_the_client_as_a_request_error(
    tokenizer: Tokenizer, template: str, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        codec_of(tokenizer, template).render_chat([{"role": "user", "content": "a"}])


@pytest.mark.parametrize("messages", [[], ["hello"], [{"role": "user", "content": "a"}, None]])
def test_messages_of_another_shape_are_refused(codec: TextCodec, messages: list) -> None:
    with pytest.raises(RequestError, match="non-empty list of objects"):
        codec.render_chat(messages)


def test_chat_without_a_template_is_refused(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="no chat template"):
        TextCodec(tokenizer, TextSettings(), None).encode_chat(CHAT)


@pytest.mark.parametrize("file", ["tokenizer.json", "text.json", "chat_template.jinja"])
def test_damaged_build_folder_asks_for_a_new_build(tmp_path: Path, folder: Path, file: str) -> None:
    write_tokenizer(str(folder), tmp_path / "t")
    (tmp_path / "t" / file).write_text("{% if")
    with pytest.raises(ManifestError, match="run the build again"):
        TextCodec.load(tmp_path / "t")


def test_unknown_key_of_text_json_is_refused(tmp_path: Path, folder: Path) -> None:
    write_tokenizer(str(folder), tmp_path / "t")
    path = tmp_path / "t" / "text.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"extra": 1}))
    with pytest.raises(ManifestError, match="extra"):
        TextCodec.load(tmp_path / "t")


def test_codec_needs_neither_torch_nor_transformers() -> None:
    import subprocess
    import sys

    program = (
        "import sys, dspark_trt.text, dspark_trt.checkpoints.target, dspark_trt.checkpoints.tokenizer;"
        "print([name for name in ('torch', 'transformers', 'onnxruntime', 'tensorrt') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_text_that_is_not_unicode_is_refused_in_words(codec: TextCodec) -> None:
    half_a_pair = "\ud83e"
    for encode in (codec.encode, lambda text: codec.encode_chat([{"role": "user", "content": text}])):
        with pytest.raises(RequestError, match="not valid Unicode"):
            encode(half_a_pair)
    with pytest.raises(RequestError, match="not valid Unicode"):
        codec.encode_words([half_a_pair])


def test_template_variables_cannot_replace_the_chat(codec: TextCodec) -> None:
    with pytest.raises(RequestError, match="chat_template_kwargs: 'messages'"):
        codec.encode_chat(CHAT, **{"messages": []})


def test_empty_bad_word_bans_nothing(codec: TextCodec) -> None:
    assert codec.encode_words([""]) == ()


SHOWS_ALL = (
    "{% for m in messages %}[{{ m.role }}|{{ m.content }}|{{ m.reasoning_content }}|"
    "{% for call in m.tool_calls or [] %}{{ (call.function or call).arguments | tojson }}{% endfor %}]{% endfor %}"
    "{% if add_generation_prompt %}>{% endif %}"
)


def shown(tokenizer: Tokenizer, *messages: dict, **kwargs: object) -> str:
    return codec_of(tokenizer, SHOWS_ALL).render_chat(messages, **kwargs)


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({"city": "Köln"}, '{"city": "Köln"}'),
        ('{"city": "Köln"}', '{"city": "Köln"}'),
        ("{}", "{}"),
        ("no JSON", '"no JSON"'),
        ("[1]", '"[1]"'),
        ("[" * 100_000, '"' + "[" * 100_000 + '"'),
    ],
)
@pytest.mark.parametrize("is_nested", [True, False])
def test_arguments_of_tool_calls_may_be_json_text(
    tokenizer: Tokenizer, arguments: object, expected: str, is_nested: bool
) -> None:
    call = {"name": "weather", "arguments": arguments}
    calls = [{"type": "function", "function": call} if is_nested else call]
    message = {"role": "assistant", "content": "", "tool_calls": calls}
    assert shown(tokenizer, message) == f"[assistant|||{expected}]>"
    assert calls[0].get("arguments", arguments) == arguments, "the client's message stays as it is"


def test_a_null_or_missing_content_is_an_empty_text(tokenizer: Tokenizer) -> None:
    assert (
        shown(tokenizer, {"role": "assistant", "content": None}, {"role": "assistant"})
        == "[assistant|||][assistant|||]>"
    )


@pytest.mark.parametrize("key", ["reasoning", "reasoning_content"])
def test_reasoning_goes_by_either_name(tokenizer: Tokenizer, key: str) -> None:
    assert shown(tokenizer, {"role": "assistant", "content": "4", key: "2 + 2"}) == "[assistant|4|2 + 2|]>"


def test_a_final_message_is_continued(tokenizer: Tokenizer) -> None:
    chat = [{"role": "user", "content": "Say abc"}, {"role": "assistant", "content": "ab "}]
    found = shown(tokenizer, *chat, continue_final_message=True)
    assert found == "[user|Say abc||][assistant|ab "
    assert shown(tokenizer, *chat, continue_final_message=False).endswith("[assistant|ab ||]>")


def test_a_final_message_is_continued_as_in_transformers(folder: Path, codec: TextCodec) -> None:
    from transformers import AutoTokenizer

    chat = [*CHAT[:2], {"role": "assistant", "content": "Fine, 123"}]
    expected = AutoTokenizer.from_pretrained(folder).apply_chat_template(
        chat, tokenize=False, continue_final_message=True
    )
    assert codec.render_chat(chat, continue_final_message=True) == expected


def test_a_turn_is_either_continued_or_begun(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="continue_final_message, add_generation_prompt: expected one of them"):
        shown(tokenizer, CHAT[0], continue_final_message=True, add_generation_prompt=True)


def test_a_template_that_hides_the_final_message_cannot_continue_it(tokenizer: Tokenizer) -> None:
    with pytest.raises(RequestError, match="does not show the text of the last message"):
        codec_of(tokenizer, "nothing").render_chat(CHAT[:1], continue_final_message=True)
