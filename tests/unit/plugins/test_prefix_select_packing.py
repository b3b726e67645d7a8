"""The packed tensors of PrefixSelect are the inputs that the target graph takes, as the engines make them on the host.

The number of padded queries differs (gamma + 1 here, the longest query there), and where padding points: anywhere, says
`bindings`.
"""

from __future__ import annotations

import numpy as np
import pytest
from dspark_trt_plugins.prefix_select.form import PrefixSelectForm
from dspark_trt_plugins.prefix_select.reference import prefix_select

from dspark_trt.contract import bindings
from dspark_trt.engines.row_groups import positions, row_group
from tests.support.prefix_select_cases import random_step

GAMMA = 7


@pytest.mark.parametrize("seed", range(10))
def test_packed_tensors_equal_those_that_an_engine_makes_from_the_lengths(seed: int) -> None:
    form = PrefixSelectForm(GAMMA)
    inputs = random_step(form, 1 + 3 * seed, seed)
    found = prefix_select(form, inputs)
    past, lengths = inputs["past_lengths"], found["verify_len"] + 1
    group = row_group(inputs["block_rows"], past, lengths)
    num_tokens, rows = int(found["num_tokens"][0]), slice(group.first_row, group.first_row + group.num_rows)
    np.testing.assert_array_equal(found["positions"][:num_tokens], positions(past, lengths))
    np.testing.assert_array_equal(found["decode.past_lengths"][rows], group.past_lengths)
    np.testing.assert_array_equal(found["decode.query_lengths"][rows], group.query_lengths)
    for row, length in enumerate(group.query_lengths):
        np.testing.assert_array_equal(
            found["decode.tokens"][rows][row, :length], group.tokens[row, :length], err_msg=f"row {row}"
        )
    # a token's attention output stands where the row group put its query
    padded_indices = found["padded_indices"][:num_tokens]
    np.testing.assert_array_equal(found["decode.tokens"].reshape(-1)[padded_indices], np.arange(num_tokens))
    assert found["decode.query_lengths"].sum() == num_tokens


def test_output_names_are_those_of_the_target_graph() -> None:
    outputs = PrefixSelectForm(GAMMA).output_names
    names = (bindings.group_tokens, bindings.group_past_lengths, bindings.group_query_lengths)
    group = {name(bindings.DECODE) for name in names}
    assert group | {bindings.TOKEN_IDS, bindings.POSITIONS} <= set(outputs)


def test_inputs_that_the_draft_graph_has_too_are_named_as_there() -> None:
    inputs = set(PrefixSelectForm(GAMMA).input_names)
    shared = {bindings.ANCHOR_IDS, bindings.PAST_LENGTHS, bindings.BLOCK_ROWS, bindings.ROW_REQUESTS}
    assert shared | {bindings.ROW_QUERY_LENGTHS, bindings.DRAFT_IDS, bindings.CONFIDENCE_LOGITS} <= inputs
