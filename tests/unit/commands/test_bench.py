"""`bench` on a tiny build: what is measured, in which order, and what the report says of it."""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from xml.etree import ElementTree

import pytest
from typer.testing import CliRunner

from dspark_trt.cli import app
from dspark_trt.commands.bench_against import Server
from dspark_trt.commands.bench_load import BenchPrompt, Load, Measured, Part, run_load
from dspark_trt.commands.bench_report import check_report_path
from dspark_trt.commands.bench_run import Plan, make_loads, measure, trace_of
from dspark_trt.commands.bench_statistics import (
    best_at_speed,
    errors_by_mode,
    median_interval,
    summarize,
    summarize_windows,
)
from dspark_trt.contract.scheduler import parse_scheduler
from dspark_trt.errors import EnvironmentMissingError, RecipeError
from tests.support.toy_engines import LIMITS, ToyDrafter, ToyLanguage, ToyTarget, make_loop

LANGUAGE = ToyLanguage(vocab_size=12)
PROMPTS = tuple(BenchPrompt("ab", (1, 2 + at), "chat") for at in range(3))
LOAD = Load("mixed", 3, 5, 12, PROMPTS)
MEASURED = Measured("off", "mixed", 1, 0, 10.0, 10.0, 5.0, 0.0, 1.0, 1.0, 1.0, 0.0)


def test_closed_loop_keeps_the_requests_in_flight_and_leaves_the_loop_empty() -> None:
    loop = make_loop(ToyTarget(LANGUAGE, LIMITS), ToyDrafter(LANGUAGE, LIMITS, gamma=4), parse_scheduler("fixed:3"))
    seen = []
    step = loop.step
    loop.step = lambda: (seen.append(loop.num_running + loop.num_queued), step())[1]  # type: ignore[method-assign]
    result = run_load(loop, "fixed:3", LOAD, 0)
    assert set(seen[:-1]) == {3}
    assert not loop.has_work
    assert result.tokens_per_s > 0
    assert result.mean_verify_len is not None
    assert 0 < result.mean_verify_len <= 3
    assert result.accepted_len is not None
    assert 1 < result.accepted_len <= 4
    assert result.steps_not_drafting is not None
    assert result.steps_not_drafting < 1


def test_off_drafts_nothing() -> None:
    loop = make_loop(ToyTarget(LANGUAGE, LIMITS), ToyDrafter(LANGUAGE, LIMITS, gamma=4), parse_scheduler("off"))
    result = run_load(loop, "off", LOAD, 0)
    assert (result.mean_verify_len, result.accepted_len, result.steps_not_drafting) == (0, 1, 1)


def test_repeats_are_interleaved_and_their_order_rotates() -> None:
    calls: list[tuple[int, str]] = []

    def runner(name: str) -> object:
        return lambda load, repeat: (calls.append((repeat, name)), replace(MEASURED, mode=name, repeat=repeat))[1]

    runners = {name: runner(name) for name in "abc"}
    measure(runners, [LOAD], Plan(("a",), (3,), ("mixed",), repeats=3, max_tokens=4))  # type: ignore[arg-type]
    counted = [(repeat, name) for repeat, name in calls if repeat >= 0]
    assert counted == [(0, "a"), (0, "b"), (0, "c"), (1, "b"), (1, "c"), (1, "a"), (2, "c"), (2, "a"), (2, "b")]


def test_ratio_to_off_is_paired_by_repeat() -> None:
    """A machine that slows down between repeats takes both along."""
    results = []
    for repeat, speed in enumerate((100.0, 10.0, 1.0)):
        results += [replace(MEASURED, repeat=repeat, tokens_per_s=speed)]
        results += [replace(MEASURED, mode="auto", repeat=repeat, tokens_per_s=1.2 * speed)]
    _, auto = summarize(results, ["off", "auto"])
    assert auto.ratio_to_off is not None
    assert (auto.ratio_to_off.low, auto.ratio_to_off.high) == pytest.approx((1.2, 1.2))


def test_interval_is_of_order_statistics_and_says_what_it_covers() -> None:
    five = median_interval([5, 1, 3, 2, 4])
    assert (five.low, five.median, five.high, five.coverage) == (1, 3, 5, 1 - 2 / 32)
    eight = median_interval(range(8))
    assert (eight.low, eight.high) == (1, 6)
    assert eight.coverage == pytest.approx(1 - 2 * 9 / 256)
    assert median_interval([2.0]).coverage == 0


def test_parts_of_a_run_are_of_the_same_tokens_and_tell_what_it_did_then() -> None:
    loop = make_loop(ToyTarget(LANGUAGE, LIMITS), ToyDrafter(LANGUAGE, LIMITS, gamma=4), parse_scheduler("fixed:3"))
    result = run_load(loop, "fixed:3", replace(LOAD, num_requests=20, num_windows=4), 0)
    assert len(result.parts) == 4
    assert result.mean_verify_len is not None
    lengths = [part.mean_verify_len for part in result.parts]
    assert min(lengths) <= result.mean_verify_len <= max(lengths)
    assert all(0 < part.steps_drafting <= 1 and part.tokens_per_s > 0 for part in result.parts)
    slowest, fastest = (pick(part.tokens_per_s for part in result.parts) for pick in (min, max))
    assert slowest <= result.tokens_per_s <= fastest


def test_requests_of_a_trace_turn_in_the_middle_and_never_turn_back() -> None:
    prompts = [BenchPrompt(kind, (1, 2), kind) for kind in ("code", "chat", "code")]
    plan = Plan(("off",), (1, 4), ("mixed",), repeats=1, max_tokens=8, trace=trace_of("code-to-chat"))
    for load in make_loads(plan, prompts, 64):
        kinds = [
            prompt.kind for prompt, _ in zip(load.prompts, range(load.num_requests + load.concurrency), strict=True)
        ]
        half = load.num_requests // 2
        assert kinds == ["code"] * half + ["chat"] * (half + load.concurrency)
        assert (load.kind, load.num_windows) == ("code-to-chat", 8)
    with pytest.raises(RecipeError, match=r"--trace: expected mixed or some of \['chat', 'code'\], found 'poem'"):
        make_loads(replace(plan, trace=("code", "poem")), prompts, 64)
    with pytest.raises(RecipeError, match="such as code-to-chat, found 'code'"):
        trace_of("code")


def test_windows_are_compared_with_off_in_the_same_repeat_and_part() -> None:
    results = []
    for repeat, speed in enumerate((100.0, 10.0, 1.0)):
        plain = (Part(speed, 0.0, 0.0), Part(2 * speed, 0.0, 0.0))
        results += [replace(MEASURED, repeat=repeat, parts=plain)]
        drafting = (Part(1.5 * speed, 3.0, 1.0), Part(2 * speed, 0.5, 0.2))
        results += [replace(MEASURED, mode="auto", repeat=repeat, parts=drafting)]
    found = summarize_windows(results, ["off", "auto"])
    assert [(each.mode, each.window) for each in found] == [("off", 1), ("off", 2), ("auto", 1), ("auto", 2)]
    assert [each.ratio_to_off for each in found] == pytest.approx([1, 1, 1.5, 1])
    assert [each.mean_verify_len for each in found] == [0, 0, 3, 0.5]
    assert summarize_windows([MEASURED], ["off"]) == []


def test_best_load_is_the_one_of_most_throughput_that_keeps_the_speed_of_a_user() -> None:
    cells = {("off", 1): (30, 30), ("off", 8): (100, 14), ("auto", 1): (36, 36), ("auto", 8): (105, 15)}
    results = [
        replace(MEASURED, mode=mode, concurrency=count, tokens_per_s=float(total), user_tokens_per_s=float(user))
        for (mode, count), (total, user) in cells.items()
    ]
    summaries = summarize(results, ["off", "auto"])
    kept = {
        floor: [(each.mode, each.concurrency) for each in best_at_speed(summaries, floor)] for floor in (14.5, 20, 40)
    }
    assert kept == {14.5: [("auto", 8), ("off", 1)], 20: [("auto", 1), ("off", 1)], 40: []}


def test_errors_of_prices_are_told_by_mode_over_all_loads() -> None:
    results = [replace(MEASURED, concurrency=count, price_errors=(0.01 * count,) * 3) for count in (1, 2, 9)]
    results += [replace(MEASURED, mode="auto", prefill_price_errors=(0.5,)), replace(MEASURED, mode="fixed")]
    found = errors_by_mode(results, ["off", "auto", "fixed"])
    assert found["off"] == (pytest.approx((0.02, 0.09)), None)
    assert found["auto"] == (None, (0.5, 0.5))
    assert "fixed" not in found


def test_bench_of_a_trace_tells_its_parts_and_what_a_user_gets(output: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a", "kind": "chat"}\n{"prompt": "b", "kind": "code"}\n')
    names = [tmp_path / "report.html", tmp_path / "report.md"]
    options = ["--trace", "code-to-chat", "--modes", "off,fixed:2", "--concurrency", "2", "--repeats", "1"]
    options += ["--max-tokens", "6", "--min-user-speed", "1", "--prompts", str(prompts), "--json"]
    options += [part for name in names for part in ("--output", str(name))]
    result = CliRunner().invoke(app, ["bench", str(output), *options])
    assert result.exit_code == 0, result.output
    data = json.loads(result.stdout)
    assert len(data["windows"]) == 2 * 8
    assert {each["kind"] for each in data["summaries"]} == {"code-to-chat"}
    assert {each["mode"] for each in data["at_user_speed"]["best"]} == {"off", "fixed:2"}
    assert set(data["price_errors"]) == {"fixed:2"}, "steps of off need no price"
    assert len(re.findall(r"<svg", names[0].read_text())) == 4 + 3
    markdown = names[1].read_text()
    for heading in ("The turn, 2 in flight", "At least 1 tokens/s for a user", "Predicted against served step time"):
        assert f"## {heading}" in markdown
    refused = CliRunner().invoke(app, ["bench", str(output), "--trace", "code-to-chat", "--through-triton"])
    assert "--trace goes without" in str(refused.exception)


def test_bench_of_a_build_writes_reports(output: Path, tmp_path: Path) -> None:
    names = [tmp_path / f"report{ending}" for ending in (".md", ".html", ".json")]
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a", "kind": "chat"}\n{"prompt": "b", "kind": "code"}\n')
    options = ["--modes", "off,fixed:2,auto", "--concurrency", "1,2", "--repeats", "2", "--max-tokens", "6"]
    options += [part for name in names for part in ("--output", str(name))]
    result = CliRunner().invoke(app, ["bench", str(output), "--prompts", str(prompts), *options, "--json"])
    assert result.exit_code == 0, result.output
    data = json.loads(names[2].read_text())
    cells = {(each["kind"], each["concurrency"], each["mode"]) for each in data["summaries"]}
    assert len(cells) == 3 * 2 * 3  # mixed, chat, code
    priced = {each["mode"]: each["price_error"] for each in data["summaries"]}
    assert priced["auto"] is not None
    assert "| fixed:2 |" in names[0].read_text()
    html = names[1].read_text()
    assert "http" not in html.replace("http://www.w3.org/2000/svg", "")
    drawings = re.findall(r"<svg.*?</svg>", html)
    assert len(drawings) == 4
    for drawing in drawings:
        ElementTree.fromstring(drawing)


def test_report_of_an_unknown_kind_is_refused_before_anything_is_measured(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"\.md, \.html or \.json"):
        check_report_path(tmp_path / "report.pdf")
    with pytest.raises(RecipeError, match="does not exist"):
        check_report_path(tmp_path / "none" / "report.md")


@pytest.mark.parametrize("text", ["0", "1,x", ""])
def test_concurrency_that_is_no_number_is_refused(text: str, output: Path) -> None:
    result = CliRunner().invoke(app, ["bench", str(output), "--concurrency", text])
    assert isinstance(result.exception, RecipeError)


class _Chat(BaseHTTPRequestHandler):
    """A server that gives five tokens, of which three were accepted drafts of four."""

    def do_GET(self) -> None:
        self._send(json.dumps({"data": [{"id": "m"}]}))

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        first = {"choices": [{"delta": {"content": "a"}}]}
        details = {"accepted_prediction_tokens": 3, "rejected_prediction_tokens": 1}
        usage = {"choices": [], "usage": {"completion_tokens": 5, "completion_tokens_details": details}}
        self._send("".join(f"data: {json.dumps(event)}\n\n" for event in (first, usage)) + "data: [DONE]\n\n")

    def _send(self, text: str) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *arguments: object) -> None:
        pass


@contextmanager
def chat_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Chat)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def test_other_server_is_measured_by_its_own_count_of_tokens() -> None:
    with chat_server() as url:
        result = Server(url).run(LOAD, 0)
    assert result.mode == url
    assert result.tokens_per_s > 0
    assert result.accepted_len == 4  # one step of 3 drafts and a bonus behind the first token
    assert result.mean_verify_len == 4


def test_server_that_does_not_answer_is_an_environment_that_is_missing() -> None:
    with pytest.raises(EnvironmentMissingError, match="--against"):
        Server("http://127.0.0.1:9")
