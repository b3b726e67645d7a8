"""What a client may ask of /v1/chat/completions and /v1/completions. Unknown fields are refused by name.

Fields of OpenAI's that change nothing here are taken without effect; those that ask for what is not supported are
refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from dspark_trt.runtime.request import MAX_LOG_PROBS, MAX_SALT_CHARACTERS
from dspark_trt.server.openai.settings import MAX_CHOICES
from dspark_trt.serving.limits import (
    MAX_BAD_WORD_CHARACTERS,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIASES,
    MAX_PRIORITY,
    MAX_STOP_WORD_CHARACTERS,
    MAX_STOP_WORDS,
    MAX_TIMEOUT_MS,
    MIN_PRIORITY,
)

MAX_INT32 = 2**31 - 1
_MAX_UINT64 = 2**64 - 1
_DEFAULT_COMPLETION_TOKENS = 16  # OpenAI's

StopWord = Annotated[str, Field(max_length=MAX_STOP_WORD_CHARACTERS)]
BadWord = Annotated[str, Field(min_length=1, max_length=MAX_BAD_WORD_CHARACTERS)]
TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
NumAlternatives = Annotated[int, Field(ge=0, le=MAX_LOG_PROBS)]
Count = Annotated[int, Field(ge=0, le=MAX_INT32)]


class _Strict(BaseModel):
    # strict: "8" is no number and 1 is no truth value, as for OpenAI; an integer is taken where a fraction may stand
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class StreamOptions(_Strict):
    include_usage: bool = False
    include_obfuscation: bool | None = None  # without effect


class ResponseFormat(_Strict):
    type: Literal["text"]  # others need guided decoding


class GenerationFields(_Strict):
    """What both kinds of request have."""

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_CHOICES)] = 1
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    seed: int | None = None
    stop: Annotated[list[StopWord], Field(max_length=MAX_STOP_WORDS)] | None = None  # one word may stand alone
    logit_bias: Annotated[dict[str, float], Field(max_length=MAX_LOGIT_BIASES)] | None = None
    # without effect
    user: str | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    # not OpenAI's
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: Count | None = None
    repetition_penalty: float | None = None
    bad_words: Annotated[list[BadWord], Field(max_length=MAX_BAD_WORDS)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_WORDS)] | None = None
    ignore_eos: bool = False
    skip_special_tokens: bool | None = None
    add_special_tokens: bool | None = None
    draft: bool | None = None
    max_verify_len: Count | None = None
    timeout_ms: Annotated[int, Field(ge=0, le=MAX_TIMEOUT_MS)] | None = None
    cache_salt: Annotated[str, Field(max_length=MAX_SALT_CHARACTERS)] | None = None
    priority: Annotated[int, Field(ge=MIN_PRIORITY, le=MAX_PRIORITY)] | None = None

    @field_validator("stop", mode="before")
    @classmethod
    def _one_word_is_a_list(cls, stop: Any) -> Any:
        return [stop] if isinstance(stop, str) else stop

    @field_validator("seed")
    @classmethod
    def _seed_is_one(cls, seed: int | None) -> int | None:
        if seed is not None and not -(2**63) <= seed <= _MAX_UINT64:
            raise ValueError("expected an integer of 64 bits")
        return seed

    @model_validator(mode="after")
    def _only_streams_have_stream_options(self) -> GenerationFields:
        if self.stream_options is not None and not self.stream:
            raise ValueError("stream_options: expected with stream = true only")
        return self

    @property
    def stop_words(self) -> tuple[str, ...]:
        """Empty ones are what clients send for "none"."""
        return tuple(word for word in self.stop or () if word)

    @property
    def includes_usage(self) -> bool:
        return self.stream_options is not None and self.stream_options.include_usage


class ChatRequest(GenerationFields):
    messages: list[dict[str, Any]]
    max_completion_tokens: Annotated[int, Field(ge=1, le=MAX_INT32)] | None = None
    logprobs: bool | None = None
    top_logprobs: NumAlternatives | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    response_format: ResponseFormat | None = None
    parallel_tool_calls: bool | None = None  # without effect: what the model writes is handed on as it is
    chat_template_kwargs: dict[str, Any] | None = None

    @field_validator("tool_choice", mode="before")
    @classmethod
    def _no_tool_is_forced(cls, choice: Any) -> Any:
        if choice is not None and choice not in ("auto", "none"):
            raise ValueError("expected auto or none; forcing a tool needs guided decoding, which is not supported")
        return choice

    @field_validator("response_format", mode="before")
    @classmethod
    def _format_is_text(cls, value: Any) -> Any:
        if isinstance(value, dict) and value.get("type") != "text":
            raise ValueError("expected the type text; others need guided decoding, which is not supported")
        return value

    @model_validator(mode="after")
    def _alternatives_come_with_log_probs(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs: expected with logprobs = true only")
        return self

    @property
    def limit(self) -> int:
        """Tokens to generate, at most; the engine cuts it to what is left of max_seq_len."""
        return self.max_completion_tokens or self.max_tokens or MAX_INT32

    @property
    def num_log_probs(self) -> int | None:
        """Alternatives to each token; None: no log probabilities."""
        return (self.top_logprobs or 0) if self.logprobs else None


class CompletionRequest(GenerationFields):
    prompt: str | list[str] | list[TokenId] | list[list[TokenId]]
    logprobs: NumAlternatives | None = None
    echo: bool = False
    best_of: int | None = None
    suffix: None = None  # only its absence is known

    @field_validator("prompt", mode="wrap")
    @classmethod
    def _says_what_a_prompt_is(cls, prompt: Any, read: ValidatorFunctionWrapHandler) -> Any:
        try:
            return read(prompt)
        except ValidationError:  # which would speak of the first of four possibilities only
            raise ValueError("expected a text, a list of texts, token ids, or a list of lists of token ids") from None

    @field_validator("prompt")
    @classmethod
    def _there_is_a_prompt(cls, prompt: Any) -> Any:
        if not prompt or (isinstance(prompt, list) and not isinstance(prompt[0], int) and not all(prompt)):
            raise ValueError("the prompt is empty; send some text")
        return prompt

    @model_validator(mode="after")
    def _counts_fit(self) -> CompletionRequest:
        if self.best_of is not None and self.best_of != self.n:
            raise ValueError(f"best_of: expected n = {self.n}; answers are not ranked")
        if len(self.prompts) * self.n > MAX_CHOICES:
            raise ValueError(
                f"n: expected at most {MAX_CHOICES} answers in one request, found {len(self.prompts)} x {self.n}"
            )
        if self.echo and self.logprobs is not None:
            raise ValueError("echo: expected without logprobs; those of a prompt are not computed")
        return self

    @property
    def prompts(self) -> list[str | list[int]]:
        if isinstance(self.prompt, str):
            return [self.prompt]
        if isinstance(self.prompt[0], int):
            return [[token for token in self.prompt if isinstance(token, int)]]
        return [item for item in self.prompt if not isinstance(item, int)]

    @property
    def limit(self) -> int:
        return self.max_tokens or _DEFAULT_COMPLETION_TOKENS

    @property
    def num_log_probs(self) -> int | None:
        """Alternatives to each token; None: no log probabilities."""
        return self.logprobs
