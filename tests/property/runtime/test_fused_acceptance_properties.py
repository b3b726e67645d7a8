"""All slots at once give what slot after slot gives: the same tokens of the same random words."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark_trt.runtime.acceptance import Acceptance, accept
from dspark_trt.runtime.drafting import DraftBlock, DraftVocabulary
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from dspark_trt.runtime.state import new_state
from dspark_trt.runtime.verification import Segment
from tests.property.runtime.test_sampling_properties import EOS, LOGITS, PARAMS, TOKENS, VOCAB_SIZE
from tests.support.fused_acceptance import accept_fused
from tests.support.toy_engines import letters

GAMMA = 3
DRAFT_IDS = np.array([0, 1, 4, 5, 9])
REQUESTS = st.fixed_dictionaries(
    {
        "params": PARAMS,
        "num_log_probs": st.sampled_from([None, 0, 2, 20]),
        "prompt": st.lists(TOKENS, min_size=1, max_size=5),
        "generated": st.lists(TOKENS, max_size=4),
        "drafts": st.lists(st.integers(0, len(DRAFT_IDS) - 1), max_size=GAMMA),
        "logits": st.lists(LOGITS, min_size=(GAMMA + 1) * VOCAB_SIZE, max_size=(GAMMA + 1) * VOCAB_SIZE),
        "noise": st.lists(LOGITS.map(lambda x: x / 8), min_size=GAMMA * VOCAB_SIZE, max_size=GAMMA * VOCAB_SIZE),
        "is_drawn": st.booleans(),
        "poison": st.sampled_from([None, None, None, "target", "draft"]),
    }
)


def make_step(requests: list[dict[str, Any]], *, has_vocabulary: bool) -> tuple[list[Segment], np.ndarray, DraftBlock]:
    segments, temperatures, first = [], [], 0
    logits, draft_logits = [], []
    for index, each in enumerate(requests):
        values = {name: getattr(each["params"], name) for name in SamplingParams.__dataclass_fields__}
        params = SamplingParams(**values | {"seed": index, "num_log_probs": each["num_log_probs"], "max_tokens": 60})
        request = GenerationRequest(request_id="", prompt_ids=tuple(each["prompt"]), sampling=params)
        state = new_state(request, max_seq_len=100, eos_token_ids=(EOS,), decode=letters)
        for token in each["generated"]:
            state.processors.push(token)
        state.draw_words(GAMMA + 1)
        drafts = DRAFT_IDS[each["drafts"]].tolist()
        rows = np.array(each["logits"], np.float32).reshape(GAMMA + 1, VOCAB_SIZE)
        drawn_from = rows[:GAMMA] + np.array(each["noise"], np.float32).reshape(GAMMA, VOCAB_SIZE)
        if each["poison"] == "target":
            rows[len(drafts) // 2, 3] = np.nan
        if each["poison"] == "draft":
            drawn_from[0, 1] = np.nan
        draft_logits.append(drawn_from[:, DRAFT_IDS] if has_vocabulary else drawn_from)
        logits.append(rows[: len(drafts) + 1])
        temperatures.append(params.temperature if each["is_drawn"] else 0.0)
        segments.append(Segment(state, first, len(drafts) + 1, first, drafts, index, GAMMA))
        first += len(drafts) + 1
    draft_ids = [[*segment.draft_ids, *[0] * (GAMMA - len(segment.draft_ids))] for segment in segments]
    block = DraftBlock(
        draft_ids=np.array(draft_ids),
        draft_logits=np.array(draft_logits),
        temperatures=np.array(temperatures, np.float32),
        confidence_logits=np.zeros((len(requests), GAMMA), np.float32),
        num_usable=np.full(len(requests), GAMMA),
        vocabulary=DraftVocabulary.of(DRAFT_IDS, VOCAB_SIZE) if has_vocabulary else None,
    )
    return segments, np.concatenate(logits), block


def told(result: Acceptance) -> tuple[Any, ...]:
    top_ids = [[token for token, _ in top] for top in result.top_log_probs]
    return result.token_ids, result.num_accepted_drafts, result.error, top_ids


@settings(max_examples=120, derandomize=True, deadline=None)
@given(requests=st.lists(REQUESTS, min_size=1, max_size=3), has_vocabulary=st.booleans())
def test_all_slots_at_once_give_what_slot_after_slot_gives(
    requests: list[dict[str, Any]], has_vocabulary: bool
) -> None:
    expected = accept(*make_step(requests, has_vocabulary=has_vocabulary))
    segments, logits, block = make_step(requests, has_vocabulary=has_vocabulary)
    before = logits.copy()
    found = accept_fused(segments, logits, block)
    assert [told(result) for result in found] == [told(result) for result in expected]
    for one, other in zip(found, expected, strict=True):
        np.testing.assert_allclose(one.log_probs, other.log_probs, atol=1e-5)
        flat = [[value for top in each.top_log_probs for _, value in top] for each in (one, other)]
        np.testing.assert_allclose(*flat, atol=1e-5)
    np.testing.assert_array_equal(logits, before)
