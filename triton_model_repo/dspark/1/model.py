"""The engine model: decoupled, `execute` only enqueues. What it does is in `dspark_trt.serving`.

Inputs and outputs: config.pbtxt beside this folder. A streaming request gets one response per decoding step, any other
exactly one; a request with `stop` gets an empty one. The last response is marked final.
"""

import json
from pathlib import Path

import triton_python_backend_utils as pb

from dspark_trt.log import attach
from dspark_trt.packaging.model_repo import build_directory_of, model_parameters
from dspark_trt.serving.engine_model import EngineModel
from dspark_trt.serving.limits import AdmissionLimits
from dspark_trt.serving.triton_log import TritonLogHandler


class TritonPythonModel:
    def initialize(self, args):
        attach(TritonLogHandler(pb.Logger))
        parameters = model_parameters(args)
        self._model = EngineModel(
            build_directory_of(args),
            scheduler=parameters["scheduler"],
            limits=AdmissionLimits(**json.loads(parameters["admission"])),
            metric_family=pb.MetricFamily,
            model_name=args["model_name"],
            control_socket=Path(parameters["control_socket"]) if parameters["control_socket"] else None,
            step_table=Path(parameters["step_table"]) if parameters.get("step_table") else None,
            prefix_cache={"on": True, "off": False}.get(parameters.get("prefix_cache")),
        )

    def execute(self, requests):
        for request in requests:
            reply = _Reply(request.get_response_sender())
            tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            parameters = json.loads(request.parameters() or "{}")
            self._model.accept(tensors, parameters, request.requested_output_names(), request.request_id(), reply)

    def finalize(self):
        self._model.close()


class _Reply:
    def __init__(self, sender):
        self._sender = sender

    def send(self, tensors, *, is_last):
        # Held until the call is back: it drops outputs that nobody asked for without the interpreter's lock, and where
        # that
        # is the last reference to an array the stub frees it so (a segmentation fault under CPython 3.12).
        outputs = [pb.Tensor(name, array) for name, array in tensors.items()]
        response = pb.InferenceResponse(outputs)
        self._sender.send(response, flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL if is_last else 0)

    def fail(self, failure, message):
        error = pb.TritonError(message, getattr(pb.TritonError, failure.triton_code))
        self._sender.send(pb.InferenceResponse(error=error), flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def finish(self):
        self._sender.send(flags=pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL)

    def is_cancelled(self):
        return self._sender.is_cancelled()
