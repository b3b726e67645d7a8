"""The build recipe: everything that decides what `dspark-trt build` makes, resolved before the first stage runs.

Its fields are the one declaration of the command's options: names, types, help texts and defaults; keys of recipe
files; and the table in docs/operations.md.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, ValidationInfo, field_validator

from dspark_trt.building.option import Option
from dspark_trt.contract.drafter_form import DrafterPrecision
from dspark_trt.contract.precision import Precision
from dspark_trt.contract.scheduler import parse_scheduler
from dspark_trt.errors import RecipeError, abridged, place

Backend = Literal["auto", "onnxruntime", "tensorrt", "tensorrt_rtx"]
WithoutModel = Literal["ngram", "lookahead"]  # drafters that are no model; a folder of that name is given as ./ngram


class BuildRecipe(BaseModel):
    """One target, one drafter and the limits of the engines. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str = Field(description="Hugging Face folder or hub id, or a GGUF file.")
    drafter: str = Field(
        description="Checkpoint (DSpark, DFlash, EAGLE-3, Medusa, PARD, or a smaller model of the target's "
        "vocabulary): Hugging Face folder or hub id, or a GGUF file; ngram: none, drafts are copied from each "
        "request's own text; lookahead: and from what the target said of drafts that it rejected."
    )
    target_revision: str | None = Field(default=None, description="Commit, tag or branch of the target's hub id.")
    drafter_revision: str | None = Field(default=None, description="Commit, tag or branch of the drafter's hub id.")
    backend: Backend = Field(
        default="auto", description="What compiles and runs the engines; auto: the best that is here."
    )
    precision: Annotated[Precision | None, Option(default="fp32; bf16 on a GPU")] = Field(
        default=None,
        description="Of the engines. onnxruntime: fp32, or 8- or 4-bit weights, opt-in; tensorrt and tensorrt_rtx: "
        "bf16, fp16.",
    )
    compute_capabilities: Annotated[
        tuple[int, ...], Option(default="the GPU here", flag="--compute-capability", metavar="SM")
    ] = Field(default=(), description="tensorrt_rtx: SM to compile for ahead of time, e.g. 89; several times.")
    max_requests: int = Field(
        default=32, ge=1, le=1024, description="Requests decoded at once; KV memory is taken for all of them."
    )
    max_seq_len: Annotated[int | None, Option(default="4096, or the target's limit")] = Field(
        default=None, ge=16, description="Prompt and generated tokens of a request."
    )
    max_batch_tokens: int = Field(
        default=512, ge=16, description="Packed tokens of a step: verification first, the rest is prefill."
    )
    scheduler: str = Field(
        default="auto",
        description="How verify lengths are chosen where `serve` and `generate` do not say: off, fixed, fixed:K, "
        "threshold:C, "
        "early_stop, lagged_budget or auto.",
    )
    lookup: Literal["auto", "off"] = Field(
        default="auto",
        description="Drafts copied from a request's own text where it repeats itself; auto: in scheduler mode auto, "
        "where they promise more than the drafter's.",
    )
    prefix_cache: Annotated[bool, Option(flag="--prefix-cache/--no-prefix-cache", default="prefix-cache")] = Field(
        default=True, description="Prompts begin where another request's K/V hold their first tokens."
    )
    lookup_drafts: int = Field(
        default=7, ge=2, le=16, description="Drafts of a step at most, with drafter ngram or lookahead."
    )
    num_drafts: Annotated[int | None, Option(default="what the drafter's checkpoint says, or 7")] = Field(
        default=None,
        ge=1,
        le=16,
        description="Drafts of a request in a step at most; of DSpark and DFlash the checkpoint's block decides.",
    )
    draft_vocab: Annotated[str | int, Option(metavar="auto|all|N")] = Field(
        default="auto",
        description="Token ids that the drafter proposes: all, the N most frequent, or what measures best.",
    )
    drafter_precision: Annotated[DrafterPrecision | None, Option(default="auto")] = Field(
        default=None, description="Of the drafter's weights, on onnxruntime; auto: what measures best."
    )
    markov_top_n: Annotated[int | None, Option(default="auto", metavar="N|auto")] = Field(
        default=None,
        ge=0,
        description="Draft from the N largest base logits of a slot; 0: from all; auto: what measures best.",
    )
    calibration: Annotated[Path | None, Option(default="measured")] = Field(
        default=None,
        description="Calibration to use in place of measuring one: a build's calibration.json, or temperatures as "
        "TensorRT-LLM, SGLang or vllm-ascend read them.",
    )
    chat_template_kwargs: Annotated[
        dict[str, Any], Option(default='Qwen3: {"enable_thinking": false}', metavar="JSON")
    ] = Field(default_factory=dict, description="Object handed to the chat template.")
    engine_model_name: Literal["dspark", "tensorrt_llm"] = Field(
        default="dspark", description="Name of the engine model in Triton; TensorRT-LLM's clients expect tensorrt_llm."
    )
    num_threads: Annotated[int | None, Option(default="the cores here")] = Field(
        default=None, ge=1, le=256, description="onnxruntime: threads of an engine."
    )
    cuda_graphs: Literal["auto", "off"] = Field(
        default="auto",
        description="tensorrt and tensorrt_rtx: steps that only decode are recorded as CUDA graphs; off: never.",
    )

    @property
    def has_drafter_model(self) -> bool:
        """Whether a model drafts; without one, drafts are copied from each request's own text."""
        return self.without_model is None

    @property
    def without_model(self) -> WithoutModel | None:
        """What drafts where no model does."""
        return next((name for name in get_args(WithoutModel) if name == self.drafter), None)

    @property
    def uses_cuda_graphs(self) -> bool:
        """Whether engines on a GPU may record CUDA graphs."""
        return self.cuda_graphs != "off"

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any, info: ValidationInfo) -> Any:
        if info.field_name != "prefix_cache" and any(
            isinstance(item, bool) for item in (value if isinstance(value, list) else [value])
        ):
            raise ValueError("expected no truth value")
        return value

    @field_validator("precision", "drafter_precision", "markov_top_n", "max_seq_len", "num_threads", mode="before")
    @classmethod
    def _auto_is_none(cls, value: Any) -> Any:
        return None if value == "auto" else value

    @field_validator("compute_capabilities", mode="before")
    @classmethod
    def _several(cls, value: Any) -> Any:
        if not isinstance(value, (list, tuple)):
            raise ValueError("expected a list of SMs such as [89]")
        return value

    @field_validator("compute_capabilities")
    @classmethod
    def _once_each(cls, value: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(sorted(set(value)))

    @field_validator("scheduler")
    @classmethod
    def _known_scheduler(cls, value: str) -> str:
        try:
            parse_scheduler(value)
        except RecipeError as error:
            raise ValueError(str(error).removeprefix("scheduler").lstrip(": ")) from None
        return value

    @field_validator("draft_vocab", mode="before")
    @classmethod
    def _known_draft_vocab(cls, value: Any) -> Any:
        if isinstance(value, str) and value.isdecimal():
            value = int(value)
        if value not in ("auto", "all") and not (isinstance(value, int) and value >= 1):
            raise ValueError("expected auto, all or a number of tokens >= 1")
        return value

    @field_validator("calibration")
    @classmethod
    def _from_home(cls, value: Path | None) -> Path | None:
        return None if value is None else value.expanduser().absolute()


def load_recipe(path: Path | None, overrides: dict[str, Any]) -> BuildRecipe:
    """Read a YAML recipe (optional) and lay command-line options over it; options that are None do not count.

    Raises RecipeError that names the key, what was found and what is accepted.
    """
    values = _read_yaml(path) if path is not None else {}
    values |= {key: value for key, value in overrides.items() if value is not None}
    try:
        return BuildRecipe.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = place(first["loc"]) or "recipe"
        if first["type"] == "missing":
            raise RecipeError(f"{key}: Field required; give --{key} or, in a --recipe file, {key}: …") from None
        accepted = ", ".join(BuildRecipe.model_fields)
        hint = f" (known keys: {accepted})" if first["type"] == "extra_forbidden" else ""
        raise RecipeError(
            f"{key}: {first['msg'].removeprefix('Value error, ')}, found {abridged(first.get('input'))}{hint}"
        ) from None


class _RecipeLoader(yaml.SafeLoader):
    """YAML whose truth values are true and false alone, as in YAML 1.2: `off` is a word, and a value of several keys.

    No aliases: a few lines of aliases of aliases stand for more than a memory holds.
    """

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            raise yaml.YAMLError("it has an alias; write out what *NAME stands for")
        node: yaml.Node | None = super().compose_node(parent, index)
        return node


_BOOL = "tag:yaml.org,2002:bool"
_RecipeLoader.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in resolvers if tag != _BOOL]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
_RecipeLoader.add_implicit_resolver(_BOOL, re.compile(r"^(?:true|True|TRUE|false|False|FALSE)$"), list("tTfF"))


def _read_yaml(path: Path) -> dict[str, Any]:
    try:
        loaded = yaml.load(path.read_text(encoding="utf-8"), _RecipeLoader)
    except FileNotFoundError:
        raise RecipeError(f"recipe {path} does not exist; give --recipe an existing YAML file") from None
    except OSError as error:
        raise RecipeError(f"recipe {path} cannot be read ({error.strerror}); give --recipe a YAML file") from None
    except (ValueError, RecursionError, yaml.YAMLError) as error:  # ValueError: no text, or a number of 5000 digits
        raise RecipeError(f"recipe {path} is not valid YAML: {error}") from None
    if loaded is not None and not isinstance(loaded, dict):
        raise RecipeError(f"recipe {path}: expected a mapping of keys, found {type(loaded).__name__}")
    return loaded or {}
