"""A soak: a real server under full load for minutes, with clients that leave, bad requests and a killed process.

    python perf/soak.py build/smollm2                                # ten minutes
    python perf/soak.py build/smollm2 --seconds 60 --report soak.md

Every answer is held against what the same build decodes offline without drafts; a token that is lost, wrong or out of
order, a stream that hangs or fails without the kill being the reason, and memory, slots, descriptors or shared memory
that grow, each fail it (exit code 4).
"""

from __future__ import annotations

import argparse
import itertools
import random
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from soak_cases import Case, make_cases
from soak_clients import BrokenStreamError, Checker, Client, GrpcClient, OpenAiClient, WrongAnswerError
from soak_report import SoakResult, write_report
from soak_server import BACK, FAILED, SoakServer, soak_server
from soak_watch import Growth, Watch, growth_at_rest, memory_growth

from dspark_trt.building.finished import read_finished
from dspark_trt.errors import DSparkError
from dspark_trt.packaging.signature import ENSEMBLE

CANCEL_EVERY, BAD_EVERY = 20, 100  # requests: 5 % and 1 %
_BACK_TIMEOUT_S = 120.0
_RECONNECT_S = 5.0  # after the server is back a client's connection may still be the old one
_PAUSE_S = 0.5  # of a client whose request failed
_SETTLE_S = 20.0
_MAX_LISTED = 20


@dataclass
class _Load:
    """What the clients share. Counters are kept under the lock."""

    server: SoakServer
    cases: Sequence[Case]
    engine_model: str
    stopping: threading.Event = field(default_factory=threading.Event)
    numbers: Iterator[int] = field(default_factory=itertools.count)
    lock: threading.Lock = field(default_factory=threading.Lock)
    counts: Counter[tuple[str, str]] = field(default_factory=Counter)  # (way, outcome)
    num_tokens: int = 0
    first_piece_s: list[float] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    killed_at: float | None = None
    back_at: float | None = None

    def count(self, way: str, outcome: str, num_tokens: int = 0) -> None:
        with self.lock:
            self.counts[way, outcome] += 1
            self.num_tokens += num_tokens

    def fail(self, message: str) -> None:
        with self.lock:
            self.failures.append(message)

    def is_excused(self, began_at: float) -> bool:
        """Whether a request that began then may have ended by the kill."""
        if self.killed_at is None:
            return False
        return self.back_at is None or began_at < self.back_at + _RECONNECT_S

    def clients(self) -> dict[str, Client]:
        address = self.server.grpc_address
        return {
            "gRPC, ensemble": GrpcClient(address, ENSEMBLE, takes_ids=False),
            "gRPC, engine model": GrpcClient(address, self.engine_model, takes_ids=True),
            "OpenAI, completions": OpenAiClient(self.server.openai_url),
        }


def _work(load: _Load, seed: int) -> None:
    chosen = random.Random(seed)
    clients = load.clients()
    while not load.stopping.is_set():
        number = next(load.numbers)
        way = chosen.choice(list(clients))
        client, case = clients[way], chosen.choice(load.cases)
        began_at = time.monotonic()
        try:
            if number % BAD_EVERY == BAD_EVERY // 10:
                _be_refused(load, way, client, case)
            else:
                max_pieces = chosen.randrange(4) if number % CANCEL_EVERY == CANCEL_EVERY // 2 + 1 else None
                _ask(load, way, client, case, max_pieces)
        except WrongAnswerError as error:
            load.fail(f"{way}: {error}")
            client.leave()
        except BrokenStreamError as error:
            if load.is_excused(began_at):
                load.count(way, "ended by the kill")
            else:
                load.fail(f"{way}: a request of {case.max_tokens} tokens failed: {error}")
            load.stopping.wait(_PAUSE_S)
        except Exception as error:  # of the client itself: it must not pass for a quiet end
            load.fail(f"{way}: {type(error).__name__}: {error}")
            client.leave()
    for client in clients.values():
        client.leave()


def _ask(load: _Load, way: str, client: Client, case: Case, max_pieces: int | None) -> None:
    """One request; its client leaves after `max_pieces`."""
    checker, began_at = Checker(case), time.monotonic()
    for num_pieces, piece in enumerate(client.stream(client.fields(case)), 1):
        if num_pieces == 1:
            load.first_piece_s.append(time.monotonic() - began_at)
        checker.add(piece)
        if max_pieces is not None and num_pieces > max_pieces and not piece.finish_reason:
            client.leave()
            load.count(way, "cancelled")
            return
    load.count(way, "answered", len(case.token_ids))


def _be_refused(load: _Load, way: str, client: Client, case: Case) -> None:
    fields: dict[str, Any] = client.fields(case)
    bad = fields["temperature"] * 0 - 1 if isinstance(fields["temperature"], np.ndarray) else -1.0
    try:
        for _ in client.stream({**fields, "temperature": bad}):
            raise WrongAnswerError("a request with temperature -1 was answered")
    except BrokenStreamError as error:
        if "temperature" not in str(error):
            raise
    load.count(way, "refused")


def soak(
    build_dir: Path,
    *,
    seconds: float = 600.0,
    concurrency: int | None = None,
    num_cases: int = 40,
    progress: Callable[[str], None] = lambda message: None,
) -> SoakResult:
    """Load a server of the build for `seconds`, the time in which it is started again left out.

    Args:
        concurrency: clients, each with one request at a time; None: half as many again as there are slots.
        progress: called with what is being done.

    Raises as `load_deployment`, and EngineBuildError when the server does not come up.
    """
    recipe = read_finished(build_dir)[0].recipe
    concurrency = concurrency or recipe.max_slots * 3 // 2
    progress(f"decoding {num_cases} answers offline")
    cases = make_cases(build_dir, num_cases)
    with soak_server(build_dir) as server:
        load = _Load(server, cases, recipe.engine_model_name)
        _warm_up(load)
        at_rest = server.tree.sample()
        began_at = time.monotonic()
        with _watched(server) as watch, _clients(load, concurrency):
            progress(f"{concurrency} clients for {seconds / 2:g} s")
            time.sleep(seconds / 2)
            load.killed_at = server.kill_engine_stub()
            progress("the process that decodes is killed")
            load.back_at = _await_return(load)
            progress(f"back after {load.back_at - load.killed_at:.1f} s; {seconds / 2:g} s more")
            time.sleep(seconds / 2)
        loaded_s = time.monotonic() - began_at - (load.back_at - load.killed_at)
        left = _await_rest(server)
        for _, line in server.events(FAILED)[1:]:
            load.fail(f"it failed without being killed: {line}")
        second_life = [sample for sample in watch.samples if sample.at > load.back_at + 1]
        growth = [*memory_growth(second_life), *growth_at_rest(at_rest, server.tree.sample()), *left]
        running = [sample.num_running for sample in watch.samples if sample.num_running is not None]
    return SoakResult(
        build=build_dir.name,
        loaded_s=loaded_s,
        concurrency=concurrency,
        num_slots=recipe.max_slots,
        num_cases=len(cases),
        outage_s=load.back_at - load.killed_at,
        counts=load.counts,
        num_tokens=load.num_tokens,
        first_piece_s=load.first_piece_s,
        running=running,
        growth=growth,
        failures=[*load.failures, *(f"{each.what} grew" for each in growth if not each.is_acceptable)],
    )


def _warm_up(load: _Load) -> None:
    """One request each way, so that what is made at the first one is there."""
    case = min(load.cases, key=lambda case: len(case.token_ids))
    for way, client in load.clients().items():
        _ask(load, way, client, case, None)
        client.leave()
    load.counts.clear()
    load.num_tokens = 0
    load.first_piece_s.clear()


@contextmanager
def _watched(server: SoakServer) -> Iterator[Watch]:
    watch = Watch(server.tree, server.num_running)
    watch.start()
    try:
        yield watch
    finally:
        watch.end()


@contextmanager
def _clients(load: _Load, count: int) -> Iterator[None]:
    """They end with their last answers."""
    threads = [threading.Thread(target=_work, args=(load, seed), daemon=True) for seed in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        load.stopping.set()
        for thread in threads:
            thread.join()


def _await_return(load: _Load) -> float:
    deadline = time.monotonic() + _BACK_TIMEOUT_S
    assert load.killed_at is not None, "called after the kill"
    while not (events := load.server.events(BACK, load.killed_at)):
        if time.monotonic() > deadline or load.server.process.poll() is not None:
            raise DSparkError(f"the server did not come back within {_BACK_TIMEOUT_S:g} s after the kill")
        time.sleep(0.05)
    return events[0][0]


def _await_rest(server: SoakServer) -> list[Growth]:
    """What must be nothing once nobody asks any more; metrics are a moment late."""
    names = ("dspark_requests_running", "dspark_requests_waiting", "dspark_kv_used_ratio")
    deadline = time.monotonic() + _SETTLE_S
    while True:
        found = server.metrics() or {}
        left = [Growth(name, 0.0, found.get(name, float("nan")), found.get(name) == 0.0) for name in names]
        if all(each.is_acceptable for each in left) or time.monotonic() > deadline:
            return left
        time.sleep(0.2)


def main(arguments: Sequence[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path, help="build directory")
    parser.add_argument("--seconds", type=float, default=600.0, help="of load  [default: 600]")
    parser.add_argument("--concurrency", type=int, help="clients  [default: half as many again as slots]")
    parser.add_argument("--report", type=Path, help="also write the report (Markdown) to this file")
    options = parser.parse_args(arguments)
    result = soak(
        options.build,
        seconds=options.seconds,
        concurrency=options.concurrency,
        progress=lambda message: print(message, file=sys.stderr, flush=True),
    )
    text = write_report(result)
    print(text)
    if options.report:
        options.report.write_text(text)
    for failure in result.failures[:_MAX_LISTED]:
        print(f"failed: {failure}", file=sys.stderr)
    return 4 if result.failures else 0


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends the server too, as Ctrl-C does
    try:
        sys.exit(main(sys.argv[1:]))
    except DSparkError as error:
        sys.exit(f"error: {error}")
    except KeyboardInterrupt:
        sys.exit("interrupted")
