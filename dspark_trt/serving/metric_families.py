"""Every metric that is served, by its family: what it means, its labels, its buckets.

In Prometheus units: seconds, tokens, ratios.
"""

from __future__ import annotations

from collections.abc import Callable

from dspark_trt.runtime.metrics import LoopTotals

_LATENCY_S = [0.005, 0.01, 0.02, 0.04, 0.08, 0.15, 0.3, 0.6, 1.2, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0]
_STEP_S = [0.001, 0.002, 0.005, 0.01, 0.02, 0.035, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0, 5.0]
_TOKENS = [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 2048.0, 4096.0, 8192.0, 16384.0, 32768.0]
_ERRORS = [0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.0]
_LENGTHS = [0.0, 0.5, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0, 12.0, 16.0]

# (family, help, labels, value of the totals): brought up to date a few times a second
LOOP_COUNTERS: tuple[tuple[str, str, dict[str, str], Callable[[LoopTotals], float]], ...] = (
    ("dspark_steps_total", "Steps of the decoding loop that had work", {}, lambda totals: totals.num_steps),
    ("dspark_tokens_total", "Tokens handed out", {}, lambda totals: totals.num_tokens_emitted),
    ("dspark_prefill_tokens_total", "Prompt tokens read", {}, lambda totals: totals.num_prefill_tokens),
    (
        "dspark_prompt_tokens_reused_total",
        "Prompt tokens that were not read, since another request's K/V were reused",
        {},
        lambda totals: totals.num_prompt_tokens_reused,
    ),
    (
        "dspark_preemptions_total",
        "Requests that gave up their K/V pages for an older one and were read again",
        {},
        lambda totals: totals.num_preempted,
    ),
    ("dspark_drafts_total", "Draft tokens", {"state": "proposed"}, lambda totals: totals.num_drafts_proposed),
    ("dspark_drafts_total", "Draft tokens", {"state": "verified"}, lambda totals: totals.num_drafts_verified),
    ("dspark_drafts_total", "Draft tokens", {"state": "accepted"}, lambda totals: totals.num_drafts_accepted),
    (
        "dspark_drafts_total",
        "Draft tokens",
        {"state": "pruned"},
        lambda totals: totals.num_drafts_proposed - totals.num_drafts_verified,
    ),
    (
        "dspark_steps_without_drafts_total",
        "Steps in which requests decoded and the drafter drafted for none",
        {},
        lambda totals: totals.num_steps_not_drafting,
    ),
    (
        "dspark_request_steps_without_drafts_total",
        "Requests that decoded in a step and that the drafter did not draft for, summed over steps",
        {},
        lambda totals: totals.num_requests_not_drafting,
    ),
    (
        "dspark_request_steps_with_lookup_total",
        "Requests whose drafts were copied from their own text, summed over steps",
        {},
        lambda totals: totals.num_requests_looking_up,
    ),
)
COUNTERS = {
    "dspark_requests_total": "Requests that ended, by outcome",
    "dspark_drafts_per_position_total": "Drafts of finished requests by their position in the block",
    "dspark_step_part_seconds_total": "Time of steps by what it was spent on",
    "dspark_step_price_seconds_total": (
        "Time of the steps that were priced: as the step table and its corrections say, and as measured"
    ),
    "dspark_requests_without_drafts_total": "Requests that ended without one verified draft",
}
HISTOGRAMS = {
    "dspark_step_seconds": ("Time of a step of the decoding loop", _STEP_S),
    "dspark_batch_tokens": ("Packed tokens of a step: prompts, anchors and drafts", _TOKENS),
    "dspark_step_price_error_ratio": ("|Predicted / measured - 1| of the steps that were priced", _ERRORS),
    "dspark_verify_len": ("Mean number of drafts verified for a request in a step", _LENGTHS),
    "dspark_queue_seconds": ("Time from arrival to a row", _LATENCY_S),
    "dspark_time_to_first_token_seconds": ("Time from arrival to the first token", _LATENCY_S),
    "dspark_time_per_output_token_seconds": ("Mean time between two tokens of a request", _LATENCY_S),
    "dspark_longest_gap_seconds": ("Longest time between two responses of a request", _LATENCY_S),
    "dspark_request_seconds": ("Time from arrival to the last token", _LATENCY_S),
    "dspark_prompt_tokens": ("Tokens of a prompt", _TOKENS),
    "dspark_output_tokens": ("Tokens of an answer", _TOKENS),
    "dspark_accepted_len": ("Mean tokens that a verification step gave to a request", _LENGTHS),
}
GAUGES = {
    "dspark_requests_running": "Requests that have a row",
    "dspark_requests_waiting": "Requests that wait for a row",
    "dspark_max_requests": "Requests that can be decoded at once",
    "dspark_kv_used_ratio": "Share of the KV positions that hold tokens",
    "dspark_step_table_age_seconds": "Age of the measurement that the scheduler prices steps with",
}
