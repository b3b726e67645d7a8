"""A soak: a real server under full load for minutes, with clients that leave, bad requests and a killed process.

    python perf/soak.py build/smollm2                                # ten minutes
    python perf/soak.py build/smollm2 --seconds 60 --report soak.md

Every answer is held against what the same build decodes offline without drafts; a token that is lost, wrong or out of
order, a stream that hangs or fails without the kill being the reason, and memory, rows, descriptors or shared memory
that grow, each fail it (exit code 4).
"""

from __future__ import annotations

import argparse
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from soak_cases import make_cases
from soak_clients import PATIENCE_S
from soak_load import Load, ask, work
from soak_report import SoakResult, write_report
from soak_server import BACK, FAILED, SoakServer, soak_server
from soak_watch import Growth, Watch, growth_at_rest, memory_growth

from dspark_trt.building.finished import read_finished
from dspark_trt.errors import DSparkError
from dspark_trt.server.summary import footprint

_BACK_TIMEOUT_S = 120.0
_SETTLE_S = 20.0
_LONG_S = 300.0  # of load, in which KV memory is taken early and must not grow later
_MAX_LISTED = 20


def soak(
    build_dir: Path,
    *,
    seconds: float = 600.0,
    concurrency: int | None = None,
    num_cases: int = 40,
    patience_s: float = PATIENCE_S,
    progress: Callable[[str], None] = lambda message: None,
) -> SoakResult:
    """Load a server of the build for `seconds`, the time in which it is started again left out.

    Args:
        concurrency: clients, each with one request at a time; None: half as many again as there are rows.
        patience_s: without a piece for so long, in the server's queue or behind it, a stream counts as hanging.
        progress: called with what is being done.

    Raises as `load_deployment`, and EngineBuildError when the server does not come up.
    """
    recipe = read_finished(build_dir)[0].recipe
    concurrency = concurrency or recipe.max_requests * 3 // 2
    progress(f"decoding {num_cases} answers offline")
    cases = make_cases(build_dir, num_cases)
    with soak_server(build_dir, patience_s) as server:
        load = Load(server, cases, recipe.engine_model_name, is_long=seconds >= _LONG_S, patience_s=patience_s)
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
            ended_at = time.monotonic()
        loaded_s = time.monotonic() - began_at - (load.back_at - load.killed_at)
        left = _await_rest(server)
        progress(f"outcomes as the server counted them since then: {server.outcomes()}")
        for _, line in server.events(FAILED)[1:]:
            load.fail(f"it failed without being killed: {line}")
        second_life = [sample for sample in watch.samples if load.back_at + 1 < sample.at < ended_at]
        fresh = 0.0 if load.is_long else _kv_bytes_of_rows(build_dir, load)
        memory = memory_growth(second_life, {f"model {recipe.engine_model_name}": fresh})
        growth = [*memory, *growth_at_rest(at_rest, server.tree.sample()), *left]
        running = [sample.num_running for sample in watch.samples if sample.num_running is not None]
    return SoakResult(
        build=build_dir.name,
        loaded_s=loaded_s,
        concurrency=concurrency,
        num_rows=recipe.max_requests,
        num_cases=len(cases),
        outage_s=load.back_at - load.killed_at,
        counts=load.counts,
        num_tokens=load.num_tokens,
        first_piece_s=load.first_piece_s,
        running=running,
        growth=growth,
        failures=[*load.failures, *(f"{each.what} grew" for each in growth if not each.is_acceptable)],
    )


def _kv_bytes_of_rows(build_dir: Path, load: Load) -> float:
    """KV memory is taken as positions are filled the first time; a short soak may end before all rows are."""
    found = footprint(build_dir)
    longest = len(load.longest.prompt_ids) + load.longest.max_tokens
    return found.kv_bytes * longest / found.limits.max_seq_len


def _warm_up(load: Load) -> None:
    """One request each way, so that what is made at the first one is there."""
    case = min(load.cases, key=lambda case: len(case.token_ids))
    for way, client in load.clients().items():
        ask(load, way, client, case, None)
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
def _clients(load: Load, count: int) -> Iterator[None]:
    """They end with their last answers."""
    threads = [threading.Thread(target=work, args=(load, seed), daemon=True) for seed in range(count)]
    for thread in threads:
        thread.start()
    try:
        yield
    finally:
        load.stopping.set()
        for thread in threads:
            thread.join()


def _await_return(load: Load) -> float:
    """When the server and the front end before it answer again."""
    deadline = time.monotonic() + _BACK_TIMEOUT_S
    assert load.killed_at is not None, "called after the kill"
    while not (load.server.events(BACK, load.killed_at) and load.server.is_healthy()):
        if time.monotonic() > deadline or load.server.process.poll() is not None:
            raise DSparkError(f"the server did not come back within {_BACK_TIMEOUT_S:g} s after the kill")
        time.sleep(0.05)
    return time.monotonic()


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
    parser.add_argument("--concurrency", type=int, help="clients  [default: half as many again as rows]")
    parser.add_argument(
        "--patience",
        type=float,
        default=PATIENCE_S,
        help="seconds without a piece after which a stream hangs; more where other work has the machine  "
        f"[default: {PATIENCE_S:g}]",
    )
    parser.add_argument("--report", type=Path, help="also write the report (Markdown) to this file")
    options = parser.parse_args(arguments)
    result = soak(
        options.build,
        seconds=options.seconds,
        concurrency=options.concurrency,
        patience_s=options.patience,
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
