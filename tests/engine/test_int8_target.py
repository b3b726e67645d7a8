"""A target in int8: every logit of a token depends on the tokens before it and on nothing else, bit for bit.

So its greedy output is independent of the schedule, as that of float32 is. What is held here is what can differ between
schedules: other requests in the batch and their order, how many drafts are verified, how a prompt is cut into chunks,
and which of the two attention calls a row is in.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from dspark_trt.contract.drafter_form import DrafterForm
from dspark_trt.contract.protocol import EngineLimits, TargetBatch
from dspark_trt.contract.scheduler import SchedulerConfig
from tests.engine.test_drafter_forms_in_loops import CHEAP, DEAR, GAMMA, requests
from tests.engine.test_onnxruntime_drafter import LIMITS as LOOP_LIMITS
from tests.engine.test_onnxruntime_drafter import pair
from tests.support.conversations import open_pair, open_target
from tests.support.factories import write_target
from tests.support.toy_engines import make_loop, run

LIMITS = EngineLimits(max_requests=6, max_seq_len=512, max_batch_tokens=448)
VOCABULARY = 97
LENGTH = 330  # beyond one block of the sums over keys, 256
WIDE = ("layers.0.mlp.down_proj.weight", "layers.1.self_attn.q_proj.weight", "lm_head.weight")
# number of tokens in each call of the same request, and of requests beside it
CUTS = {
    "token by token": ([320] + [1] * 10, 0),
    "token by token, in company": ([320] + [1] * 10, 3),
    "two tokens a call": ([320] + [2] * 5, 2),
    "eight drafts": ([321, 9], 1),
    "in chunks": ([100, 1, 100, 64, 55, 8, 2], 2),
    "at once": ([330], 4),
}


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    folder = tmp_path_factory.mktemp(request.param)
    source = write_target(
        folder / "target", family=request.param, layers=2, hidden=96, intermediate=200, heads=6, head_dim=64
    )
    return open_target(source, folder / "graphs", taps=(0, 1), limits=LIMITS, precision="int8", wide_inputs=WIDE)


def outputs(engine: Any, cuts: list[int], num_others: int, *, is_decoding: bool) -> tuple[NDArray[Any], NDArray[Any]]:
    """Logits and taps of the last ten tokens of one request, whose calls have so many tokens each."""
    random = np.random.default_rng(5)
    tokens = np.random.default_rng(1).integers(0, VOCABULARY, LENGTH)
    logits, taps, past = [], [], 0
    row = num_others // 2  # others stand before it and behind
    for count in cuts:
        rows = [row, *(other for other in range(num_others + 1) if other != row)]
        counts = [count, *random.integers(1, 12, num_others).tolist()]
        order = random.permutation(len(rows))
        own_begin = sum(counts[each] for each in order[: int(np.flatnonzero(order == 0)[0])])
        queries = [tokens[past : past + count]] + [random.integers(0, VOCABULARY, each) for each in counts[1:]]
        depths = [past, *random.integers(0, 60, num_others).tolist()]
        batch = TargetBatch(
            token_ids=np.concatenate([queries[each] for each in order]),
            rows=np.array(rows)[order],
            past_lengths=np.array(depths)[order],
            query_lengths=np.array(counts)[order],
            num_decode=len(rows) if is_decoding else int(random.integers(0, len(rows) + 1)),
            logit_rows=np.arange(sum(counts)),
        )
        output = engine.forward(batch)
        logits.append(output.logits[own_begin : own_begin + count].copy())
        taps.append(output.taps[own_begin : own_begin + count].copy())
        past += count
    assert past == LENGTH
    return np.concatenate(logits)[-10:], np.concatenate(taps)[-10:]


@pytest.mark.parametrize("is_decoding", [True, False], ids=["decode group", "either group"])
@pytest.mark.parametrize("cut", CUTS)
def test_logits_and_taps_are_bit_for_bit_the_same_in_any_schedule(engine: Any, cut: str, is_decoding: bool) -> None:
    expected = outputs(engine, *CUTS["token by token"], is_decoding=True)
    found = outputs(engine, *CUTS[cut], is_decoding=is_decoding)
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("drafter", ["fp32", "int8"])
def test_greedy_tokens_are_the_same_in_every_mode(drafter: Any, tmp_path: Path) -> None:
    form = DrafterForm(drafter)
    target, engine = open_pair(
        *pair(tmp_path, gamma=GAMMA), tmp_path / "graphs", limits=LOOP_LIMITS, precision="int8", form=form
    )
    plain: Any = run(make_loop(target, None, SchedulerConfig("off")), requests())  # type: ignore[arg-type]
    modes = {
        "alone": (SchedulerConfig("off"), CHEAP),
        **{f"fixed:{count}": (SchedulerConfig("fixed", verify_len=count), CHEAP) for count in (1, 4, GAMMA)},
        "early_stop": (SchedulerConfig("early_stop"), CHEAP),
        "lagged_budget": (SchedulerConfig("lagged_budget"), CHEAP),
        "auto, cheap drafts": (SchedulerConfig("auto"), CHEAP),
        "auto, dear drafts": (SchedulerConfig("auto"), DEAR),
    }
    for name, (config, table) in modes.items():
        groups = [[each] for each in requests()] if name == "alone" else [requests()]
        found: dict[str, Any] = {}
        for group in groups:
            found |= run(make_loop(target, engine, config, table=table), group)  # type: ignore[arg-type]
        assert {key: each.token_ids for key, each in found.items()} == {
            key: each.token_ids for key, each in plain.items()
        }, name
