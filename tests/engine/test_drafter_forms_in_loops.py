"""Greedy tokens stay the target's own, whatever form the drafter has and whatever a step costs: mode auto, where blocks
are short, long or not drafted at all."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dspark_trt.contract.drafter_form import DrafterForm
from dspark_trt.contract.protocol import DraftBatch, DraftOutput, IngestBatch
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.engines.onnxruntime.engines import OnnxRuntimeDraftEngine
from dspark_trt.runtime.request import GenerationRequest, SamplingParams
from dspark_trt.steptable.table import StepTable
from tests.engine.test_onnxruntime_drafter import LIMITS, pair
from tests.support.conversations import open_pair
from tests.support.toy_engines import make_loop, run

GAMMA = 7
IDS = np.arange(1, 97, 2)
FORMS = {
    "whole": DrafterForm(),
    "draft vocabulary": DrafterForm(draft_vocab=IDS),
    "int8": DrafterForm("int8"),
    "top-n": DrafterForm(markov_top_n=5),
    "all of them": DrafterForm("int8", IDS, 5),
}


def step_table(slot_ms: float) -> StepTable:
    """Extra tokens are cheap, and a slot of a block costs slot_ms."""
    slots = (1, 2, 3, 4, GAMMA)
    return StepTable(
        num_requests=(1, 4),
        extra_tokens=(0, 60),
        step_ms=(((10.0, 12.0), (12.0, 14.0)),),
        num_slots=slots,
        draft_ms=((tuple(slot_ms * n for n in slots),) * 2,),
    )


CHEAP, DEAR = step_table(0.01), step_table(50.0)


class Watched:
    """A drafter, and how many slots its blocks had."""

    def __init__(self, engine: OnnxRuntimeDraftEngine) -> None:
        self._engine = engine
        self.num_slots: list[int] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)

    def draft(self, batch: DraftBatch, ingest: IngestBatch | None = None) -> DraftOutput:
        self.num_slots.append(batch.uniforms.shape[1])
        return self._engine.draft(batch, ingest)


def requests(**more: Any) -> list[GenerationRequest]:
    lengths = [(3, None), (11, None), (1, 2), (20, None), (6, 1), (2, None), (9, 0)]  # prompt tokens, max_verify_len
    return [
        GenerationRequest(
            request_id=str(number),
            prompt_ids=tuple((7 * number + 3 * at) % 97 for at in range(length)),
            sampling=SamplingParams(**{"temperature": 0.0, "max_tokens": 40, "seed": number} | more),
            max_verify_len=most,
        )
        for number, (length, most) in enumerate(lengths)
    ]


@pytest.mark.parametrize("form", FORMS)
def test_greedy_tokens_are_those_of_plain_decoding(form: str, tmp_path: Path) -> None:
    target, engine = open_pair(*pair(tmp_path, gamma=GAMMA), tmp_path / "graphs", limits=LIMITS, form=FORMS[form])
    plain: Any = run(make_loop(target, None, SchedulerConfig("off")), requests())  # type: ignore[arg-type]
    num_blocks = {}
    for name, table in {"cheap": CHEAP, "dear": DEAR}.items():
        drafter: Any = Watched(engine)
        outputs = run(make_loop(target, drafter, SchedulerConfig("auto"), table=table), requests())  # type: ignore[arg-type]
        assert {key: each.token_ids for key, each in outputs.items()} == {
            key: each.token_ids for key, each in plain.items()
        }
        num_blocks[name] = len(drafter.num_slots)
    assert num_blocks["cheap"] > 3 * num_blocks["dear"]


@pytest.mark.parametrize("verify_len", range(1, GAMMA + 1))
def test_greedy_tokens_with_blocks_of_every_length(verify_len: int, tmp_path: Path) -> None:
    target, engine = open_pair(
        *pair(tmp_path, gamma=GAMMA), tmp_path / "graphs", limits=LIMITS, form=FORMS["all of them"]
    )
    plain: Any = run(make_loop(target, None, SchedulerConfig("off")), requests())  # type: ignore[arg-type]
    drafter: Any = Watched(engine)
    config = SchedulerConfig("fixed", verify_len=verify_len)
    outputs = run(make_loop(target, drafter, config), requests())  # type: ignore[arg-type]
    assert {key: each.token_ids for key, each in outputs.items()} == {
        key: each.token_ids for key, each in plain.items()
    }
    assert max(drafter.num_slots) == verify_len


def test_requests_that_sample_end_as_they_should_with_a_draft_vocabulary(tmp_path: Path) -> None:
    target, engine = open_pair(
        *pair(tmp_path, gamma=GAMMA), tmp_path / "graphs", limits=LIMITS, form=FORMS["all of them"]
    )
    drafter: Any = Watched(engine)
    loop = make_loop(target, drafter, SchedulerConfig("fixed"))  # type: ignore[arg-type]
    outputs = run(loop, requests(temperature=0.9))
    assert all(len(each.token_ids) == 40 for each in outputs.values())
    even = [token for each in outputs.values() for token in each.token_ids if token % 2 == 0]
    assert even, "tokens that the drafter cannot propose come from the target alone"
