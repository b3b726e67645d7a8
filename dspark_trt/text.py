"""Text to token ids and back, and chats to text. Needs only `tokenizers` and `jinja2`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import jinja2
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from tokenizers import Tokenizer

from dspark_trt.errors import ManifestError, RequestError
from dspark_trt.templates.chat_template import ChatTemplate

TOKENIZER_FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
SETTINGS_FILE = "text.json"

Message = Mapping[str, Any]
_END_MARK = "\N{INVISIBLE SEPARATOR}\N{WORD JOINER}\N{INVISIBLE SEPARATOR}"  # behind a message that is continued


class TextSettings(BaseModel):
    """text.json: what tokenizer.json and the template do not hold themselves."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    special_tokens: dict[str, str | list[str]] = Field(
        default_factory=dict
    )  # bos_token, eos_token, ... for the template
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)  # defaults of every render, e.g. enable_thinking


class TextCodec:
    """The tokenizer and the chat template of one build."""

    def __init__(self, tokenizer: Tokenizer, settings: TextSettings, template: str | None) -> None:
        """`template` is Jinja source, None where the model has no chat template. Raises jinja2.TemplateSyntaxError."""
        tokenizer.no_truncation()  # some tokenizer.json files still hold the limits of a training run
        tokenizer.no_padding()
        self._tokenizer = tokenizer
        self._settings = settings
        self._template = None if template is None else ChatTemplate(template)

    @classmethod
    def load(cls, folder: Path) -> TextCodec:
        """Open what the build wrote. Raises ManifestError when a file is missing or damaged."""
        template = folder / TEMPLATE_FILE
        try:
            settings = TextSettings.model_validate_json((folder / SETTINGS_FILE).read_text(encoding="utf-8"))
            tokenizer = Tokenizer.from_str((folder / TOKENIZER_FILE).read_text(encoding="utf-8"))
            return cls(tokenizer, settings, template.read_text(encoding="utf-8") if template.is_file() else None)
        except (OSError, ValidationError, jinja2.TemplateSyntaxError) as error:
            raise ManifestError(f"{folder}: the tokenizer cannot be opened ({error}); run the build again") from None
        except Exception as error:  # tokenizers raises plain Exception
            raise ManifestError(f"{folder / TOKENIZER_FILE} cannot be read ({error}); run the build again") from None

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @cached_property
    def vocab_size(self) -> int:
        """One more than the highest id that stands for text.
        The model's own vocabulary may be larger (padding rows)."""
        return 1 + max(self._tokenizer.get_vocab(with_added_tokens=True).values())

    def encode(self, text: str, *, add_special_tokens: bool | None = None) -> list[int]:
        """The ids of a plain prompt, with the special tokens that the tokenizer itself adds (a leading BOS, mostly).

        `add_special_tokens` None: unless the text begins with them already, as a chat that a client rendered itself
        does.
        """
        if add_special_tokens is None:
            add_special_tokens = not self._begins_with_bos(text)
        return self._ids(text, add_special_tokens=add_special_tokens)

    def _begins_with_bos(self, text: str) -> bool:
        bos = self._settings.special_tokens.get("bos_token")
        return isinstance(bos, str) and bool(bos) and text.startswith(bos)

    def special_token_id(self, text: str) -> int | None:
        """The id of a special token that is written so; None for any other text. A decoded answer never shows it."""
        return self._special_token_ids.get(text)

    @cached_property
    def _special_token_ids(self) -> dict[str, int]:
        added = self._tokenizer.get_added_tokens_decoder()
        return {token.content: token_id for token_id, token in added.items() if token.special}

    def encode_words(self, words: Sequence[str]) -> tuple[tuple[int, ...], ...]:
        """Every token sequence that a word can begin as:
        at the start of a text, and behind a space; without duplicates.

        An empty word is none.
        """
        spellings = [spelling for word in words if word for spelling in (word, f" {word.lstrip()}")]
        sequences = (tuple(self._ids(text, add_special_tokens=False)) for text in spellings)
        return tuple(dict.fromkeys(sequence for sequence in sequences if sequence))

    def _ids(self, text: str, *, add_special_tokens: bool) -> list[int]:
        try:
            return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)
        except TypeError:  # a string with half a surrogate pair, from JSON or from bytes that are not UTF-8
            raise RequestError("the text is not valid Unicode; send it as UTF-8") from None
        except BaseException as error:
            raise _no_panic(error, "the tokenizer does not accept this text; shorten it") from None

    def render_chat(self, messages: Sequence[Message], /, **kwargs: Any) -> str:
        """Messages ({"role": ..., "content": ...}) as the text that the model was trained on.

        `kwargs` go to the template and override the stored ones; `add_generation_prompt` is true unless they say
        otherwise. With `continue_final_message` the text ends inside of the last message, which the model goes on with.
        Raises RequestError when there is no template, or when the template refuses the messages.
        """
        if self._template is None:
            raise RequestError("this model has no chat template; send a plain prompt")
        if not messages or not all(isinstance(message, Mapping) for message in messages):
            raise RequestError("messages: expected a non-empty list of objects with role and content")
        if "messages" in kwargs:
            raise RequestError("chat_template_kwargs: 'messages' is the chat itself; leave it out")
        is_continued = bool(kwargs.pop("continue_final_message", False))
        if is_continued and kwargs.get("add_generation_prompt"):
            raise RequestError(
                "continue_final_message, add_generation_prompt: expected one of them; a turn is continued or begun"
            )
        chat = [_as_templates_expect(message) for message in messages]
        if is_continued:
            kwargs["add_generation_prompt"] = False
            chat[-1]["content"] = f"{chat[-1]['content']}{_END_MARK}"
        variables = {
            "tools": None,  # templates ask `tools is not none`, which an undefined name would answer with yes
            "documents": None,
            "add_generation_prompt": True,
            **self._settings.special_tokens,
            **self._settings.chat_template_kwargs,
            **kwargs,
            "messages": chat,
        }
        try:
            text = self._template.render(variables)
        except Exception as error:  # what a template raises depends on the template
            raise RequestError(f"the chat template does not accept these messages: {error}") from None
        if not is_continued:
            return text
        before, mark, _ = text.rpartition(_END_MARK)
        if not mark:
            raise RequestError("continue_final_message: the chat template does not show the text of the last message")
        return before

    def encode_chat(self, messages: Sequence[Message], /, **kwargs: Any) -> list[int]:
        """The ids of a rendered chat; the template writes BOS itself, so none is added."""
        return self._ids(self.render_chat(messages, **kwargs), add_special_tokens=False)

    def encode_prompt(self, text: str) -> list[int]:
        """One user turn of a chat where the model has a template, else plain text."""
        return self.encode(text) if self._template is None else self.encode_chat([{"role": "user", "content": text}])

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """The text of `ids`; an incomplete UTF-8 character at an end becomes U+FFFD, an id that is no token nothing."""
        try:
            return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))
        except OverflowError:
            raise RequestError("token ids: expected integers in 0..2^32-1") from None
        except BaseException as error:
            raise _no_panic(error, "the tokenizer does not accept these token ids") from None


def _no_panic(error: BaseException, message: str) -> BaseException:
    """A panic of the tokenizer's native code, which is no Exception, as a refusal; any other error as it is."""
    return RequestError(message) if type(error).__name__ == "PanicException" else error


def _as_templates_expect(message: Message) -> dict[str, Any]:
    """Clients and templates differ in how they write the same message.

    Templates read arguments of a tool call as an object, OpenAI's API has them as JSON text; a null content is an empty
    text; reasoning goes by two names. Other keys that are null are left out.
    """
    plain = {key: value for key, value in message.items() if value is not None}
    plain.setdefault("content", "")
    reasoning = plain.get("reasoning_content", plain.get("reasoning"))
    if reasoning is not None:
        plain |= {"reasoning_content": reasoning, "reasoning": reasoning}
    if isinstance(calls := plain.get("tool_calls"), list):
        plain["tool_calls"] = [_with_object_arguments(call) for call in calls]
    return plain


def _with_object_arguments(call: Any) -> Any:
    if not isinstance(call, Mapping):
        return call
    if isinstance(function := call.get("function"), Mapping):
        return {**call, "function": _with_object_arguments(function)}
    try:
        arguments = json.loads(call.get("arguments", ""))
    except (TypeError, ValueError, RecursionError):  # an object already, or a text that is none
        return call
    return {**call, "arguments": arguments} if isinstance(arguments, dict) else call
