"""The engine model behind its thin `model.py`: opens the build, reads requests, hands them to the worker."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import count
from pathlib import Path
from typing import Any, Protocol

from dspark_trt.contract.scheduler import parse_scheduler
from dspark_trt.deployment import load_deployment
from dspark_trt.errors import RequestError
from dspark_trt.serving.adapter import ResponseWriter, read_request, read_stop
from dspark_trt.serving.failures import Failure, describe_failure
from dspark_trt.serving.fields import Tensors
from dspark_trt.serving.metrics import ServingMetrics
from dspark_trt.serving.worker import Reply, Ticket, Worker


class EngineReply(Reply, Protocol):
    """The way back to one client of the engine model."""

    def finish(self) -> None:
        """Answer without a response."""
        ...


class EngineModel:
    """One engine model: its engines and its worker."""

    def __init__(self, build_dir: Path, *, scheduler: str, metric_family: Any, model_name: str) -> None:
        """Raises ManifestError, EnvironmentMissingError and EngineBuildError as `load_deployment` does; RecipeError."""
        config = parse_scheduler(scheduler)
        self._deployment = load_deployment(build_dir)
        self._handles = count(1)
        metrics = ServingMetrics(metric_family, model_name)
        self._worker = Worker(lambda: self._deployment.make_loop(config), metrics.after_step)

    def accept(self, tensors: Tensors, parameters: Iterable[str], client_id: str, reply: EngineReply) -> None:
        """Queue a request, or obey a stop request; whatever is wrong with it is answered to it alone.

        Nothing of `tensors` is kept: Triton frees them.
        """
        try:
            command = read_stop(tensors, client_id)
            if command is None:
                self._worker.submit(self._ticket(tensors, parameters, client_id, reply))
            else:
                self._worker.stop(command)
                reply.finish()
        except RequestError as error:
            reply.fail(Failure.INVALID_ARG, str(error))
        except Exception as error:
            reply.fail(Failure.INTERNAL, describe_failure("a request could not be read", error))

    def _ticket(self, tensors: Tensors, parameters: Iterable[str], client_id: str, reply: Reply) -> Ticket:
        decode = self._deployment.codec.decode
        request = read_request(
            tensors,
            parameters,
            handle=next(self._handles),
            client_id=client_id,
            decode=decode,
            make_sampling=self._deployment.sampling_params,
        )
        return Ticket(request, ResponseWriter(request, decode), reply)

    def close(self) -> None:
        self._worker.close()
