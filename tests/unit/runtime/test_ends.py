"""A request ends where it would end without drafts: max_tokens, EOS, stop tokens, stop strings, the row."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from dspark_trt.contract.protocol import EngineLimits
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.runtime.request import SamplingParams
from tests.support.loops import GAMMA, LANGUAGE, OFF, decode_alone, modes, request
from tests.support.runtime_reference import next_token_probs
from tests.support.toy_engines import FLAT, LIMITS, ToyLanguage, letters


@modes
@pytest.mark.parametrize("max_tokens", range(1, 10))
def test_max_tokens_is_met_exactly(config: SchedulerConfig, max_tokens: int) -> None:
    """D28: a perfect drafter would run past the end; the verified prefix is capped before it is drafted."""
    output = decode_alone(request("a", max_tokens=max_tokens), config, skill=1.0)
    assert output.token_ids == decode_alone(request("a", max_tokens=30), OFF).token_ids[:max_tokens]
    assert output.last.finish_reason == "length"
    assert output.text == letters(output.token_ids)


@modes
@pytest.mark.parametrize("slot", range(GAMMA + 1))
def test_eos_ends_the_request_at_every_slot_of_a_block(config: SchedulerConfig, slot: int) -> None:
    """D28: the first token comes from the prompt, so token 1 + slot is slot `slot` of a perfect drafter's block."""
    plain = decode_alone(request("a", [4, 9]), OFF).token_ids
    eos = 15
    bias = [*plain[: 1 + slot], eos]

    class Scripted(ToyLanguage):
        def logits(self, context: Any) -> np.ndarray:
            row = np.zeros(self.vocab_size, dtype=np.float32)
            row[bias[min(len(context) - 2, len(bias) - 1)]] = 9.0
            return row

    output = decode_alone(
        request("a", [4, 9]), config, skill=1.0, language=Scripted(16), eos_token_ids=[eos], table=FLAT
    )
    assert output.token_ids == bias, "EOS is the last token id"
    assert output.text == letters(bias[:-1]), "and has no text"
    assert output.last.finish_reason == "stop"
    assert 1 + sum(output.last.statistics.accepted_lens) == len(bias)


def test_eos_in_place_of_the_first_token_ends_the_request_at_once() -> None:
    first = decode_alone(request("a"), OFF).token_ids[0]
    output = decode_alone(request("a"), SchedulerConfig("fixed"), eos_token_ids=[first])
    assert (output.token_ids, output.text, output.last.finish_reason) == ([first], "", "stop")
    assert output.last.statistics.num_steps == 0


def test_stop_token_ids_end_like_eos_and_ignore_eos_spares_eos_only() -> None:
    plain = decode_alone(request("a"), OFF).token_ids
    position = next(at for at in range(2, 20) if plain[at] not in plain[:at])
    stopped = decode_alone(request("a", stop_token_ids=(plain[position],), ignore_eos=True), SchedulerConfig("fixed"))
    assert stopped.token_ids == plain[: position + 1]
    ignored = decode_alone(request("a", ignore_eos=True), SchedulerConfig("fixed"), eos_token_ids=[plain[position]])
    assert ignored.token_ids == plain


@modes
def test_min_tokens_masks_eos_and_leaves_the_rest_of_the_distribution(config: SchedulerConfig) -> None:
    eos = decode_alone(request("a"), OFF).token_ids[0]
    params = {"min_tokens": 6, "max_tokens": 12}
    output = decode_alone(request("a", **params), config, eos_token_ids=[eos])
    generated: list[int] = []
    while len(generated) < 12 and eos not in generated:
        logits = LANGUAGE.logits([1, 2, 3, *generated])
        probs = next_token_probs(logits, [1, 2, 3], generated, SamplingParams(**params), [eos])
        generated.append(int(probs.argmax()))
    assert output.token_ids == generated
    assert eos not in output.token_ids[:6]


@modes
@pytest.mark.parametrize("k", range(10))
def test_a_prompt_of_capacity_minus_k_generates_k_plus_one_tokens(config: SchedulerConfig, k: int) -> None:
    """D12, D13: the last token generated needs no position in the row."""
    prompt = [(7 * at) % 16 for at in range(LIMITS.max_seq_len - k)]
    output = decode_alone(request("a", prompt, max_tokens=100), config, skill=1.0)
    assert len(output.token_ids) == k + 1
    assert output.last.finish_reason == "length"
    larger = EngineLimits(max_requests=4, max_seq_len=256, max_batch_tokens=64)
    assert output.token_ids == decode_alone(request("a", prompt, max_tokens=k + 1), OFF, limits=larger).token_ids


@modes
@pytest.mark.parametrize("length", [1, 2, 3, 5])
def test_a_stop_string_over_several_drafts_leaves_no_extra_ids_or_log_probs(
    config: SchedulerConfig, length: int
) -> None:
    """D29: one token is one letter, so a stop string of several letters spans drafts of one block."""
    plain = letters(decode_alone(request("a"), OFF).token_ids)
    stop = plain[6 : 6 + length]
    end = plain.index(stop) + len(stop)
    output = decode_alone(request("a", stop_strings=(stop,), num_log_probs=0), config, skill=1.0)
    assert output.text == plain[: end - len(stop)]
    assert letters(output.token_ids) == plain[:end]
    assert len(output.log_probs) == len(output.token_ids)
    assert output.last.finish_reason == "stop"
    included = decode_alone(request("a", stop_strings=(stop,), include_stop_string=True), config, skill=1.0)
    assert included.text == plain[:end]


def test_text_waits_for_whole_characters() -> None:
    def decode(ids: Any) -> str:
        return bytes(0xC3 if token % 2 else 0xA9 for token in ids).decode("utf-8", errors="replace")

    output = decode_alone(request("a"), SchedulerConfig("fixed"), decode=decode)
    assert output.text == decode(output.token_ids)
