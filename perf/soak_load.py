"""What the clients of a soak do, one request after the other until they are stopped, and what they share."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from soak_cases import Case
from soak_clients import PATIENCE_S, BrokenStreamError, Checker, Client, GrpcClient, OpenAiClient, WrongAnswerError
from soak_server import SoakServer

from dspark_trt.packaging.signature import ENSEMBLE

CANCEL_EVERY, BAD_EVERY = 20, 100  # requests: 5 % and 1 %
_PAUSE_S = 1.0  # of a client whose request failed


@dataclass
class Load:
    """What the clients share. Counters are kept under the lock."""

    server: SoakServer
    cases: Sequence[Case]
    engine_model: str
    is_long: bool
    patience_s: float = PATIENCE_S
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

    @property
    def life(self) -> int:
        """Of the server: 0 before the kill, 1 once it is back."""
        return 0 if self.back_at is None else 1

    @property
    def longest(self) -> Case:
        return max(self.cases, key=lambda case: len(case.prompt_ids) + case.max_tokens)

    def is_out(self, began_in: int) -> bool:
        """Whether a request that began in that life of the server may have ended by the kill."""
        return self.killed_at is not None and began_in == 0

    def clients(self) -> dict[str, Client]:
        address = self.server.grpc_address
        return {
            "gRPC, ensemble": GrpcClient(address, ENSEMBLE, takes_ids=False, patience_s=self.patience_s),
            "gRPC, engine model": GrpcClient(address, self.engine_model, takes_ids=True, patience_s=self.patience_s),
            "OpenAI, completions": OpenAiClient(self.server.openai_url, self.patience_s),
        }


def work(load: Load, seed: int) -> None:
    """Ask until it is told to stop. In a long soak the first request to a server that has just come up is the longest
    one, so that every row's KV memory is taken early, and what grows later is none of it."""
    chosen = random.Random(seed)
    clients: dict[str, Client] = {}
    number, life = next(load.numbers), -1
    while not load.stopping.is_set():
        is_first = life != load.life
        if is_first:  # connections of a server that is gone are no test of the next one
            for client in clients.values():
                client.leave()
            clients, life = load.clients(), load.life
        way = chosen.choice(list(clients))
        case = load.longest if is_first and load.is_long else chosen.choice(load.cases)
        client, began_in = clients[way], load.life
        try:
            if number % BAD_EVERY == BAD_EVERY // 10:
                _be_refused(load, way, client, case)
            else:
                max_pieces = chosen.randrange(4) if number % CANCEL_EVERY == CANCEL_EVERY // 2 + 1 else None
                ask(load, way, client, case, max_pieces)
            number = next(load.numbers)
        except WrongAnswerError as error:
            load.fail(f"{way}: {error}")
            client.leave()
        except BrokenStreamError as error:
            if load.is_out(began_in):
                load.count(way, "ended by the kill")
            else:
                load.fail(f"{way}: a request of {case.max_tokens} tokens failed: {error}")
            load.stopping.wait(_PAUSE_S)
        except Exception as error:  # of the client itself: it must not pass for a quiet end
            load.fail(f"{way}: {type(error).__name__}: {error}")
            client.leave()
    for client in clients.values():
        client.leave()


def ask(load: Load, way: str, client: Client, case: Case, max_pieces: int | None) -> None:
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


def _be_refused(load: Load, way: str, client: Client, case: Case) -> None:
    fields: dict[str, Any] = client.fields(case)
    bad = fields["temperature"] * 0 - 1 if isinstance(fields["temperature"], np.ndarray) else -1.0
    try:
        for _ in client.stream({**fields, "temperature": bad}):
            raise WrongAnswerError("a request with temperature -1 was answered")
    except BrokenStreamError as error:
        if "temperature" not in str(error):
            raise
    load.count(way, "refused")
