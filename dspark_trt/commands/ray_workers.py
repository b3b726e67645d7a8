"""Numbered lines worked off by the machines of a Ray cluster, each with engines of its own on one and the same build.

Lines go out in shards; each result comes back as its line ends. What a worker that dies had not finished goes to
another one, in smaller shards, until a line that stands alone has ended several workers: that one is a failed line.
No line has two results.
"""

from __future__ import annotations

import importlib
import logging
import socket
from collections import Counter, deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark_trt.commands.prompt_file import PromptLine
from dspark_trt.engines.settings import read_engine_settings
from dspark_trt.errors import DSparkError, EngineBuildError, EnvironmentMissingError
from dspark_trt.machine.packages import install_extra

logger = logging.getLogger(__name__)

LineWorker = Callable[[Sequence[PromptLine]], Iterator[dict[str, Any]]]  # one result for each line, with its number
Decode = Callable[[Sequence[tuple[int, str]]], Iterator[dict[str, Any]]]

MAX_DEATHS = 3  # of a worker without a result between them, and of workers with one and the same prompt
_SHARDS_OF_WORKER = 4  # at least, so that all of them end at about the same time
_MAX_SHARD = 256  # prompts
_KNOCK_TIMEOUT_S = 10.0


class Worker:
    """The actor: one process of the cluster with the engines of a build."""

    def __init__(self, opens: Callable[[], LineWorker]) -> None:
        """`opens` is sent to the worker, so it must be known by its name there."""
        self._opens = opens
        self._work_off: LineWorker | None = None

    def open(self) -> None:
        """Raises as `opens`."""
        self._work_off = self._opens()

    def run(self, lines: Sequence[PromptLine]) -> Iterator[dict[str, Any]]:
        assert self._work_off is not None, "opened first"
        yield from self._work_off(lines)


@dataclass(slots=True, eq=False)
class _Member:
    """One place in the cluster for a worker, and what the worker there is doing."""

    node_id: str
    actor: Any = None
    pending: Any = None  # what is waited for: that it opens, or its next result
    shard: dict[int, PromptLine] | None = None  # by number, those that have no result yet; None: it opens
    num_deaths: int = 0  # since the last result

    @property
    def is_idle(self) -> bool:
        return self.pending is None


@contextmanager
def ray_cluster(address: str, folder: Path, opens: Callable[[], LineWorker]) -> Iterator[Decode]:
    """What works off lines, by number and text, on the nodes of a cluster: a worker on each node, or for each GPU of
    it. It gives one result for each line, as it comes.

    The build `folder` must be at the same path on all nodes. `opens` is called once in each worker.

    Raises EnvironmentMissingError without the package `ray`, a cluster, or a node that can take a worker;
    EngineBuildError, while it works, when no worker lives long enough.
    """
    on_gpu = read_engine_settings(folder).backend != "onnxruntime"
    ray = _connected(address)
    try:
        members = [_Member(node_id) for node_id in _places(ray, on_gpu=on_gpu)]
        if not members:
            wanted = "GPUs" if on_gpu else "CPUs"
            raise EnvironmentMissingError(f"--ray {address}: no node of this cluster has {wanted}; add one")
        resources = {"num_gpus": 1} if on_gpu else {"num_cpus": 1}
        actor_class = ray.remote(max_restarts=0, **resources)(Worker)

        def start(member: _Member) -> None:
            affinity = ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(member.node_id, soft=False)
            member.actor = actor_class.options(scheduling_strategy=affinity).remote(opens)
            member.pending, member.shard = member.actor.open.remote(), None

        yield lambda lines: _Cluster(ray, members, start).results(_numbered_among_equals(lines))
    finally:
        ray.shutdown()


class _Cluster:
    """Hands shards to members and takes what comes back."""

    def __init__(self, ray: Any, members: list[_Member], start: Callable[[_Member], None]) -> None:
        self._ray, self._members, self._start = ray, members, start
        self._shards: deque[list[PromptLine]] = deque()
        self._deaths: Counter[int] = Counter()  # of workers that had this line alone

    def results(self, lines: Sequence[PromptLine]) -> Iterator[dict[str, Any]]:
        """One result for each of the lines, as it comes. Raises EngineBuildError when no worker is left."""
        size = min(max(len(lines) // (_SHARDS_OF_WORKER * len(self._members)), 1), _MAX_SHARD)
        self._shards.extend(list(lines[at : at + size]) for at in range(0, len(lines), size))
        while self._shards or any(member.shard for member in self._members):
            self._assign()
            waiting = {member.pending: member for member in self._members if not member.is_idle}
            ready, _ = self._ray.wait(list(waiting), num_returns=1)
            yield from self._take(waiting[ready[0]])

    def _assign(self) -> None:
        num_starting = sum(member.pending is not None and member.shard is None for member in self._members)
        for member in self._members:
            if not member.is_idle or len(self._shards) <= num_starting:
                continue
            if member.actor is None:
                self._start(member)
                num_starting += 1
            else:
                shard = self._shards.popleft()
                member.shard = {line.number: line for line in shard}
                member.pending = member.actor.run.options(num_returns="streaming").remote(shard)

    def _take(self, member: _Member) -> Iterator[dict[str, Any]]:
        try:
            if member.shard is None:
                self._ray.get(member.pending)
                member.pending = None
                return
            result = self._ray.get(next(member.pending))
        except StopIteration:
            assert not member.shard, "a worker answers every line of its shard"
            member.pending = None
            return
        except self._ray.exceptions.RayError as error:
            yield from self._bury(member, error)
            return
        member.num_deaths = 0
        del member.shard[result["line"]]
        yield result

    def _bury(self, member: _Member, error: Exception) -> Iterator[dict[str, Any]]:
        """Give what the worker had to others; its place is free for another one, unless nothing lives there."""
        logger.warning("a worker on node %s ended: %s", member.node_id, _first_line(error))
        left = list((member.shard or {}).values())
        self._ray.kill(member.actor)
        member.actor, member.pending, member.shard = None, None, None
        member.num_deaths += 1
        if len(left) == 1:
            number = left[0].number
            self._deaths[number] += 1
            if self._deaths[number] == MAX_DEATHS:
                left = []
                yield {"line": number, "error": f"{MAX_DEATHS} workers ended while they decoded this prompt"}
        half = (len(left) + 1) // 2
        self._shards.extend(part for part in (left[:half], left[half:]) if part)
        if member.num_deaths < MAX_DEATHS and not isinstance(_cause(error), DSparkError):
            return
        self._members.remove(member)
        if not self._members and self._shards:
            raise EngineBuildError(
                f"no worker of the Ray cluster is left; the last one, on node {member.node_id}, ended with: "
                f"{_first_line(error)}. What is finished is in the file: the same command goes on from there"
            )


def _connected(address: str) -> Any:
    try:
        ray = importlib.import_module("ray")
        importlib.import_module("ray.util.scheduling_strategies")
    except ImportError:
        raise EnvironmentMissingError(
            f"--ray needs the package ray, which is not installed; install it here and on every node: "
            f"{install_extra('ray')}"
        ) from None
    try:
        _knock(address)  # Ray itself tries for minutes
        ray.init(address=address, logging_level=logging.WARNING, log_to_driver=False)
    except (OSError, ValueError, RuntimeError, ray.exceptions.RayError) as error:
        raise EnvironmentMissingError(
            f"--ray {address}: cannot connect ({_first_line(error)}); expected HOST:PORT of a Ray cluster that this "
            "machine is a node of, or auto; start one: ray start --head"
        ) from None
    return ray


def _knock(address: str) -> None:
    """Raises OSError or ValueError when nothing listens there."""
    if address == "auto":
        return
    host, _, port = address.rpartition(":")
    socket.create_connection((host.strip("[]"), int(port)), timeout=_KNOCK_TIMEOUT_S).close()


def _places(ray: Any, *, on_gpu: bool) -> Iterator[str]:
    """Node ids, one for each worker to be."""
    for node in ray.nodes():
        if node["Alive"]:
            resources = node["Resources"]
            count = int(resources.get("GPU", 0)) if on_gpu else min(int(resources.get("CPU", 0)), 1)
            yield from [node["NodeID"]] * count


def _numbered_among_equals(lines: Sequence[tuple[int, str]]) -> list[PromptLine]:
    """Equal lines draw differently, as in one process: whichever worker decodes them."""
    seen: Counter[str] = Counter()
    numbered = []
    for number, text in lines:
        numbered.append(PromptLine(number, text, seen[text.strip()]))
        seen[text.strip()] += 1
    return numbered


def _cause(error: Exception) -> BaseException:
    """What was raised in the worker, where it was an exception of its own."""
    return getattr(error, "cause", None) or error


def _first_line(error: Exception) -> str:
    text = str(_cause(error)).strip()
    return text.splitlines()[0] if text else type(error).__name__
