"""The build recipe: everything that decides what `dspark-trt build` makes, resolved before the first stage runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from dspark_trt.contract.precision import Precision
from dspark_trt.errors import RecipeError

Backend = Literal["auto", "onnxruntime", "tensorrt", "tensorrt_rtx"]


class BuildRecipe(BaseModel):
    """One target, one drafter and the limits of the engines. Unknown keys are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    target: str  # Hugging Face folder or hub id, or a GGUF file
    drafter: str  # Hugging Face folder or hub id
    target_revision: str | None = None
    drafter_revision: str | None = None
    backend: Backend = "auto"
    precision: Precision | None = None  # None: fp32 on onnxruntime, bf16 on tensorrt and tensorrt_rtx
    compute_capabilities: tuple[int, ...] = ()  # tensorrt_rtx: SM to compile for, e.g. 89; empty: the GPU here
    max_slots: int = Field(default=32, ge=1, le=1024)
    max_seq_len: int | None = Field(default=None, ge=16)  # None: 4096, or the target's own limit where that is less
    max_batch_tokens: int = Field(default=512, ge=16)
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    engine_model_name: Literal["dspark", "tensorrt_llm"] = "dspark"
    num_threads: int | None = Field(default=None, ge=1, le=256)  # None: the cores this process may use
    markov_top_n: int = Field(default=0, ge=0)  # a slot's drafts come from its so many largest base logits; 0: from all

    @field_validator("*", mode="before")
    @classmethod
    def _true_is_no_number(cls, value: Any) -> Any:
        if any(isinstance(item, bool) for item in (value if isinstance(value, list) else [value])):
            raise ValueError("expected no truth value")
        return value

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


def load_recipe(path: Path | None, overrides: dict[str, Any]) -> BuildRecipe:
    """Read a YAML recipe (optional) and lay command-line options over it; options that are None do not count.

    Raises RecipeError that names the key, what was found and what is accepted.
    """
    values: dict[str, Any] = {}
    if path is not None:
        try:
            loaded = yaml.safe_load(path.read_text(encoding="utf-8"))
        except FileNotFoundError:
            raise RecipeError(f"recipe {path} does not exist; give --recipe an existing YAML file") from None
        except OSError as error:
            raise RecipeError(f"recipe {path} cannot be read ({error.strerror}); give --recipe a YAML file") from None
        except (UnicodeDecodeError, yaml.YAMLError) as error:
            raise RecipeError(f"recipe {path} is not valid YAML: {error}") from None
        if loaded is not None and not isinstance(loaded, dict):
            raise RecipeError(f"recipe {path}: expected a mapping of keys, found {type(loaded).__name__}")
        values |= loaded or {}
    values |= {key: value for key, value in overrides.items() if value is not None}
    try:
        return BuildRecipe.model_validate(values)
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(str(part) for part in first["loc"]) or "recipe"
        accepted = ", ".join(BuildRecipe.model_fields)
        hint = f" (known keys: {accepted})" if first["type"] == "extra_forbidden" else ""
        raise RecipeError(
            f"{key}: {first['msg'].removeprefix('Value error, ')}, found {first.get('input')!r}{hint}"
        ) from None
