"""Fields of `generate` as tensors: a value of another type or number is refused by the field's name."""

from __future__ import annotations

from typing import Any

import pytest

from dspark_trt.server.openai.errors import ApiError
from dspark_trt.server.openai.generate import read_fields


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"max_tokens": []}, "max_tokens: expected an integer of 32 bits, found []"),
        ({"text_input": []}, "text_input: expected a string, found []"),
        ({"temperature": [0.0, 1.0]}, "temperature: expected a number, found"),
        ({"stream": 1}, "stream: expected true or false, found 1"),
        ({"stop_words": [["a"]]}, "stop_words: expected at most"),
        ({"\ud800": 1}, "unknown field '\\ud800'"),
    ],
)
def test_value_that_triton_would_refuse_in_words_of_its_own(fields: dict[str, Any], message: str) -> None:
    """Triton's words are no words for a client: they became an internal error."""
    with pytest.raises(ApiError) as refused:
        read_fields({"text_input": "a", **fields}, streams=True)
    assert refused.value.status == 400
    assert refused.value.message.startswith(message)


def test_list_of_several_values_may_be_empty() -> None:
    assert read_fields({"stop_words": []}, streams=False)["stop_words"].shape == (1, 0)
