"""Last step of the ensemble: the text as clients read it. It also tells the engine model of cancelled requests: Triton
marks only the step of an ensemble that comes next as cancelled, never the one that runs. So the engine model sends a
ping for a request that waits for a row or for its one response; a ping ends here and no client sees it, which is why
this model is decoupled: any other would have to answer.

Keep one instance and no dynamic batching: two instances answer out of order, and a batcher answers cancelled requests
itself, before this code sees them.
"""

from collections import deque

import numpy as np
import triton_python_backend_utils as pb

from dspark_trt.packaging.model_repo import model_parameters
from dspark_trt.serving.failures import describe_failure
from dspark_trt.serving.postprocess import handle_of, is_ping, postprocess

_MAX_REMEMBERED = 1024  # handles whose stop request was sent
_FINAL = pb.TRITONSERVER_RESPONSE_COMPLETE_FINAL


class TritonPythonModel:
    def initialize(self, args):
        self._engine_model_name = model_parameters(args)["engine_model_name"]
        self._stopped = deque(maxlen=_MAX_REMEMBERED)

    def execute(self, requests):
        for request in requests:
            sender = request.get_response_sender()
            outputs = []  # held until they are sent, as in the engine model
            try:
                response = self._answer(request, outputs)
            except BaseException as error:
                message = describe_failure("postprocessing failed", error)
                response = pb.InferenceResponse(error=pb.TritonError(message, pb.TritonError.INTERNAL))
            if response is None:
                sender.send(flags=_FINAL)
            else:
                sender.send(response, flags=_FINAL)

    def _answer(self, request, outputs):
        tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
        if request.is_cancelled():
            self._stop(handle_of(tensors))
            return pb.InferenceResponse(error=pb.TritonError("the request was cancelled", pb.TritonError.CANCELLED))
        if is_ping(tensors):
            return None
        outputs.extend(pb.Tensor(name, array) for name, array in postprocess(tensors).items())
        return pb.InferenceResponse(outputs)

    def _stop(self, handle):
        if handle in self._stopped:
            return
        self._stopped.append(handle)
        unused = np.ones((1, 1), np.int32)
        stop = pb.InferenceRequest(
            model_name=self._engine_model_name,
            requested_output_names=[],
            inputs=[
                pb.Tensor("stop", np.array([[True]])),
                pb.Tensor("stop_handle", np.array([[handle]], np.int64)),
                *(pb.Tensor(name, unused) for name in ("input_ids", "input_lengths", "request_output_len")),
            ],
        )
        for response in stop.exec(decoupled=True):
            if response.has_error():
                pb.Logger.log_error(f"request {handle} could not be stopped: {response.error().message()}")
