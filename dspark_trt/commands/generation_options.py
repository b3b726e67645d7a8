"""What `generate`, `chat` and a line of a prompt file may say about one generation; and a request made of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from dspark_trt.building.option import Option
from dspark_trt.errors import RequestError, abridged, place

if TYPE_CHECKING:
    from dspark_trt.deployment import Deployment
    from dspark_trt.runtime.request import SamplingParams

_CHECKPOINTS = Option(default="the checkpoint's")


class GenerationOptions(BaseModel):
    """The options of one generation. Ranges are checked where a request enters the runtime, once for every client."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    max_tokens: int = Field(default=128, description="Tokens to generate, at most.")
    min_tokens: int = Field(default=0, description="No end before so many tokens.")
    temperature: Annotated[float | None, _CHECKPOINTS] = Field(default=None, description="0: greedy.")
    top_k: Annotated[int | None, _CHECKPOINTS] = Field(default=None, description="0: off.")
    top_p: Annotated[float | None, _CHECKPOINTS] = Field(default=None, description="1: off.")
    min_p: Annotated[float | None, _CHECKPOINTS] = Field(default=None, description="0: off.")
    seed: Annotated[int | None, Option(default="a random one")] = Field(
        default=None, description="Same seed and same verify lengths: same output."
    )
    repetition_penalty: Annotated[float | None, _CHECKPOINTS] = Field(default=None, description="1: off.")
    presence_penalty: float = Field(default=0.0, description="0: off.")
    frequency_penalty: float = Field(default=0.0, description="0: off.")
    stop: tuple[str, ...] = Field(default=(), description="Stop string; several times.")
    bad_words: Annotated[tuple[str, ...], Option(flag="--bad-word")] = Field(
        default=(), description="Word never to produce; several times."
    )
    logit_bias: Annotated[tuple[str, ...], Option(metavar="TOKEN_ID=BIAS")] = Field(
        default=(), description="Added to the logit of a token; several times."
    )
    log_probs: Annotated[int | None, Option(default="none")] = Field(
        default=None, description="Log probabilities, with so many alternatives."
    )
    ignore_eos: bool = Field(default=False, description="Go on behind the end of the text.")
    draft: Annotated[bool, Option(flag="--draft/--no-draft", default="draft")] = Field(
        default=True, description="Without drafts: plain decoding, --max-verify-len 0."
    )
    max_verify_len: Annotated[int | None, Option(default="as the scheduler says")] = Field(
        default=None, description="Drafts verified in one step, at most."
    )
    system: str | None = Field(default=None, description="System message; needs a chat template.")
    chat_template_kwargs: Annotated[dict[str, Any], Option(default="the build's", metavar="JSON")] = Field(
        default_factory=dict, description="Object over the build's own, for the chat template."
    )

    @model_validator(mode="after")
    def _one_way_to_say_it(self) -> Self:
        if not self.draft and self.max_verify_len:
            raise ValueError("no draft and a max_verify_len above 0 exclude each other; give one of them")
        return self

    @property
    def verify_limit(self) -> int | None:
        """Drafts verified in one step at most; None: no limit of this request's own."""
        return self.max_verify_len if self.draft else 0

    def sampling_params(self, deployment: Deployment) -> SamplingParams:
        """Raises RequestError for a bias that is none."""
        return deployment.sampling_params(
            **{name: getattr(self, name) for name in _SAME_NAMES},
            stop_strings=self.stop,
            bad_words=deployment.codec.encode_words(self.bad_words),
            logit_bias=parse_logit_bias(self.logit_bias),
            num_log_probs=self.log_probs,
        )


_SAME_NAMES = (
    *("max_tokens", "min_tokens", "temperature", "top_k", "top_p", "min_p", "seed"),
    *("repetition_penalty", "presence_penalty", "frequency_penalty", "ignore_eos"),
)


def generation_options(given: Mapping[str, Any]) -> GenerationOptions:
    """Raises RequestError that names the field, what was found and what is accepted."""
    try:
        return GenerationOptions.model_validate(given)
    except ValidationError as error:
        first = error.errors()[0]
        field, message = place(first["loc"]), first["msg"].removeprefix("Value error, ")
        if first["type"] == "extra_forbidden":
            known = ", ".join(GenerationOptions.model_fields)
            raise RequestError(f"{field}: is no field of a request; known: {known}") from None
        found = f", found {abridged(first['input'])}" if field else ""
        raise RequestError(f"{field or 'draft'}: {message}{found}") from None


def parse_logit_bias(entries: tuple[str, ...]) -> dict[int, float]:
    """`TOKEN_ID=BIAS` entries. Raises RequestError that names the entry."""
    biases = {}
    for entry in entries:
        token, _, bias = entry.partition("=")
        try:
            biases[int(token)] = float(bias)
        except ValueError:
            raise RequestError(f"logit_bias: expected TOKEN_ID=BIAS, e.g. 42=-100, found {abridged(entry)}") from None
    return biases
