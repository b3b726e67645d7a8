"""First step of the ensemble: text, or a chat, to token ids. What it does is in `dspark_trt.serving.preprocess`.

It keeps no state, so several instances may answer at once: one long text does not hold up the others.
"""

import json

import triton_python_backend_utils as pb

from dspark_trt.errors import RequestError
from dspark_trt.log import attach
from dspark_trt.packaging.model_repo import build_directory_of
from dspark_trt.serving.failures import describe_failure
from dspark_trt.serving.preprocess import Preprocessor
from dspark_trt.serving.triton_log import TritonLogHandler


class TritonPythonModel:
    def initialize(self, args):
        attach(TritonLogHandler(pb.Logger))
        self._preprocessor = Preprocessor.load(build_directory_of(args))

    def execute(self, requests):
        return [self._answer(request) for request in requests]

    def _answer(self, request):
        try:
            tensors = {tensor.name(): tensor.as_numpy() for tensor in request.inputs()}
            outputs = self._preprocessor.run(tensors, json.loads(request.parameters() or "{}"))
            return pb.InferenceResponse([pb.Tensor(name, array) for name, array in outputs.items()])
        except RequestError as error:
            return pb.InferenceResponse(error=pb.TritonError(str(error), pb.TritonError.INVALID_ARG))
        except BaseException as error:  # a panic of native code is no Exception
            message = describe_failure("preprocessing failed", error)
            return pb.InferenceResponse(error=pb.TritonError(message, pb.TritonError.INTERNAL))
