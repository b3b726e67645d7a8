"""The engine model behind its thin `model.py`: opens the build, reads requests, hands them to the worker."""

from __future__ import annotations

import secrets
import time
from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, Protocol

from dspark_trt.building.manifest import read_manifest
from dspark_trt.contract.scheduler import parse_scheduler
from dspark_trt.deployment import load_deployment
from dspark_trt.errors import RequestError
from dspark_trt.packaging.signature import PACKED
from dspark_trt.runtime.request import validate
from dspark_trt.serving.adapter import read_request, read_stop, with_client_names
from dspark_trt.serving.control import Command, ControlServer
from dspark_trt.serving.failures import Failure, describe_failure
from dspark_trt.serving.fields import Tensors
from dspark_trt.serving.limits import AdmissionLimits
from dspark_trt.serving.metrics import ServingMetrics
from dspark_trt.serving.responses import ResponseWriter
from dspark_trt.serving.ticket import Reply, Ticket
from dspark_trt.serving.worker import STOPPING, Worker

MAX_HANDLE = 2**63 - 1  # of an INT64 tensor


class EngineReply(Reply, Protocol):
    """The way back to one client of the engine model."""

    def finish(self) -> None:
        """Answer without a response."""
        ...


class EngineModel:
    """One engine model: its engines and its worker."""

    def __init__(
        self,
        build_dir: Path,
        *,
        scheduler: str,
        limits: AdmissionLimits,
        metric_family: Any,
        model_name: str,
        control_socket: Path | None = None,
        step_table: Path | None = None,
        prefix_cache: bool | None = None,
    ) -> None:
        """`prefix_cache`: None: as the build says.

        Raises ManifestError, EnvironmentMissingError and EngineBuildError as `load_deployment` does; RecipeError."""
        config = parse_scheduler(scheduler)
        self._deployment = load_deployment(build_dir, step_table=step_table)
        self._limits = limits
        prefix_cache = self._deployment.recipe.prefix_cache if prefix_cache is None else prefix_cache
        engine_limits = self._deployment.target.limits
        self._worker = Worker(
            lambda: self._deployment.make_loop(config, max_stretch=limits.max_stretch, prefix_cache=prefix_cache),
            max_requests=engine_limits.max_requests,
            limits=limits,
            observer=ServingMetrics(
                metric_family,
                model_name,
                max_requests=engine_limits.max_requests,
                max_seq_len=engine_limits.max_seq_len,
                gamma=self._deployment.gamma,
                table_made_at=self._table_made_at(build_dir),
            ),
        )
        self._control = control_socket and ControlServer(control_socket, self._obey)

    def _table_made_at(self, build_dir: Path) -> datetime:
        told = self._deployment.step_table.provenance.get("measured_at")  # tables of older builds do not tell
        return datetime.fromisoformat(told or read_manifest(build_dir / "steptable").created)

    def accept(
        self, tensors: Tensors, parameters: Iterable[str], wanted: Iterable[str], client_id: str, reply: EngineReply
    ) -> None:
        """Queue a request, or obey a stop request; whatever is wrong with it is answered to it alone.

        Nothing of `tensors` is kept: Triton frees them. All checks are made here, beside the loop's thread.
        """
        try:
            command = read_stop(tensors, client_id, lambda refusal: _answer_stop(reply, refusal))
            if command is not None:
                self._worker.stop(command)
            elif self._worker.is_draining:
                reply.fail(Failure.UNAVAILABLE, STOPPING)
            else:
                self._worker.submit(self._ticket(tensors, parameters, frozenset(wanted), client_id, reply))
        except RequestError as error:
            reply.fail(Failure.INVALID_ARG, str(error))
        except BaseException as error:
            reply.fail(Failure.INTERNAL, describe_failure("a request could not be read", error))

    def _ticket(
        self, tensors: Tensors, parameters: Iterable[str], wanted: frozenset[str], client_id: str, reply: Reply
    ) -> Ticket:
        arrived_at = time.monotonic()
        request = read_request(
            tensors,
            parameters,
            handle=1 + secrets.randbelow(MAX_HANDLE),  # whoever cannot guess it cannot end the request
            client_id=client_id,
            decode=self._deployment.codec.decode,
            make_sampling=self._deployment.sampling_params,
            is_in_ensemble=PACKED.name in wanted and "output_ids" not in wanted,
            max_tokens=self._limits.max_tokens,
        )
        target = self._deployment.target
        try:
            validate(request.generation_request, vocab_size=target.vocab_size, max_seq_len=target.limits.max_seq_len)
        except RequestError as error:
            raise with_client_names(error) from None
        return Ticket(
            request,
            ResponseWriter(request, self._deployment.codec.decode, wanted),
            reply,
            arrived_at=arrived_at,
            ends_at=arrived_at + (request.timeout_s or self._limits.default_timeout_s),
        )

    def _obey(self, command: Command) -> Mapping[str, Any]:
        if command["command"] == "drain":
            self._worker.drain(float(command["seconds"]))
        return {"num_open": self._worker.num_open}

    def close(self) -> None:
        self._worker.close()
        if self._control:
            self._control.close()


def _answer_stop(reply: EngineReply, refusal: str | None) -> None:
    if refusal is None:
        reply.finish()
    else:
        reply.fail(Failure.INVALID_ARG, refusal)
