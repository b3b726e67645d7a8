"""A soak sees what it is for: a token that is lost, wrong or out of order, an early end, growth."""

from __future__ import annotations

import json
import threading
from collections import Counter
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
import soak_clients
from soak_cases import Case
from soak_clients import Checker, OpenAiClient, Piece, WrongAnswerError
from soak_report import SoakResult, write_report
from soak_watch import MAX_GROWTH_BYTES, Growth, Sample, Usage, growth_at_rest, memory_growth

CASE = Case("1 2 3", (1, 2, 3), 4, (4, 5, 6, 7), "4 5 6 7", "length")
PIECES = [
    Piece("4 ", (4,), 1, ""),
    Piece("5 6 ", (5, 6), 2, ""),
    Piece("7", (7,), 1, "length"),
]
MIB = 2**20


def check(pieces: list[Piece]) -> None:
    checker = Checker(CASE)
    for piece in pieces:
        checker.add(piece)


def test_right_answer_passes_with_and_without_token_ids() -> None:
    check(PIECES)
    check([replace(piece, token_ids=None) for piece in PIECES])


@pytest.mark.parametrize("with_ids", [True, False])
@pytest.mark.parametrize(
    "pieces",
    [
        [PIECES[1], PIECES[0], PIECES[2]],
        [PIECES[0], PIECES[2]],
        [PIECES[0], PIECES[0], PIECES[1], PIECES[2]],
        [replace(PIECES[0], text="8 ", token_ids=(8,)), *PIECES[1:]],
        [*PIECES[:2], replace(PIECES[2], finish_reason="stop")],
        [PIECES[0], replace(PIECES[1], finish_reason="length")],
        [*PIECES[:2], replace(PIECES[2], num_tokens=2)],
    ],
    ids=["reordered", "lost", "twice", "wrong", "another reason", "ended early", "miscounted"],
)
def test_fault_is_seen(pieces: list[Piece], with_ids: bool) -> None:
    with pytest.raises(WrongAnswerError):
        check([piece if with_ids else replace(piece, token_ids=None) for piece in pieces])


class OneAnswer(BaseHTTPRequestHandler):
    """Answers each request of a kept connection; `opened` counts the connections."""

    protocol_version = "HTTP/1.1"
    opened = 0

    def setup(self) -> None:
        type(self).opened += 1
        super().setup()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        choice = {"text": CASE.text, "finish_reason": "length"}
        events = [{"choices": [choice]}, {"choices": [], "usage": {"completion_tokens": 4}}]
        body = "".join(f"data: {json.dumps(event)}\n\n" for event in events).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        pass


def test_connection_that_a_server_may_have_closed_by_now_is_not_used_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine minutes lie between two requests of one client, and a front end keeps connections for one."""
    with ThreadingHTTPServer(("127.0.0.1", 0), OneAnswer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        client = OpenAiClient(f"http://127.0.0.1:{server.server_address[1]}", patience_s=10)
        for kept_s, opened in ((60.0, 1), (60.0, 1), (0.0, 2)):
            monkeypatch.setattr(soak_clients, "_KEPT_S", kept_s)
            assert [piece.num_tokens for piece in client.stream(client.fields(CASE))] == [None, 4]
            assert OneAnswer.opened == opened
        client.leave()
        server.shutdown()


def samples(sizes: list[int]) -> list[Sample]:
    return [Sample(float(at), {"serve": Usage(1, size, 10, 4)}, 4 * MIB, 4, 1.0) for at, size in enumerate(sizes)]


def test_steady_growth_of_memory_is_seen_and_warming_up_is_none() -> None:
    (warming, _) = memory_growth(samples([0, 40 * MIB, *([100 * MIB] * 6)]))
    assert warming.is_acceptable
    (leaking, _) = memory_growth(samples([100 * MIB + at * MAX_GROWTH_BYTES // 2 for at in range(8)]))
    assert not leaking.is_acceptable
    (filling, _) = memory_growth(
        samples([100 * MIB + at * MAX_GROWTH_BYTES // 2 for at in range(8)]), {"serve": 64 * MIB}
    )
    assert filling.is_acceptable


def test_descriptors_and_processes_that_stay_are_seen() -> None:
    before = samples([MIB])[0]
    after = replace(before, usage={"serve": Usage(2, MIB, 100, 4)}, num_shared_memory_regions=8)
    grown = {growth.what for growth in growth_at_rest(before, after) if not growth.is_acceptable}
    assert grown == {"processes, serve", "descriptors, serve", "shared memory regions"}


def test_report_says_what_failed() -> None:
    counts = Counter({("gRPC, ensemble", "answered"): 3, ("OpenAI, completions", "refused"): 1})
    growth = [Growth("resident memory, serve", 100 * MIB, 200 * MIB, False)]
    failures = ["resident memory, serve grew"]
    text = write_report(SoakResult("smollm2", 2.0, 6, 4, 40, 5.0, counts, 300, [0.1, 0.2], [4.0], growth, failures))
    assert text.startswith("# Soak of smollm2: failed\n")
    assert "4 requests, 300 tokens in whole answers (150/s)" in text
    assert "| gRPC, ensemble | 3 | 0 | 0 | 0 |" in text
    assert "| resident memory, serve | 100.0 MiB | 200.0 MiB | grew |" in text
