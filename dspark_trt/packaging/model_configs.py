"""The configurations of the four Triton models, and how the ensemble joins them."""

from __future__ import annotations

from dspark_trt.packaging.pbtxt import ANY, EnsembleStep, ModelConfig, TritonTensor
from dspark_trt.packaging.signature import (
    ENGINE_FIELDS,
    ENGINE_ONLY_INPUTS,
    ENGINE_OUTPUTS,
    ENSEMBLE,
    PACKED,
    POSTPROCESSING,
    PREPROCESSING,
    PREPROCESSING_FIELDS,
    PREPROCESSING_OUTPUTS,
    PUBLIC_OUTPUTS,
    Field,
)

# Not read, but as long as max_tokens or a text is there, Triton runs this step, and it can say what is missing.
_PREPROCESSING_TRIGGER = Field("max_tokens", "INT32", step_name="REQUEST_OUTPUT_LEN")

_POSTPROCESSING_INPUTS = (
    TritonTensor("TEXT", "STRING"),
    TritonTensor("HANDLE", "INT64"),
    TritonTensor("NUMBERS", "FP64", (ANY,)),
    TritonTensor("LOG_PROBS", "FP32", (ANY, ANY)),
    TritonTensor("FINISH_REASON", "STRING"),
)
# without a batch dimension where clients read output[0]
_POSTPROCESSING_OUTPUTS = (TritonTensor("OUTPUT", "STRING", (ANY,)), *PUBLIC_OUTPUTS)


def model_configs(
    engine_model_name: str,
    *,
    build_directory: str,
    scheduler: str,
    admission: str = "{}",
    control_socket: str = "",
    step_table: str = "",
    prefix_cache: str = "",
) -> tuple[ModelConfig, ...]:
    """The four models. `build_directory` is absolute or relative to a model's folder; `scheduler` as in
    `parse_scheduler`; `admission` the AdmissionLimits that differ from the defaults, as JSON; `control_socket` where a
    supervisor asks; `step_table` a file to price steps by in place of the build's own; `prefix_cache` "on" or "off" in
    place of what the build says.
    """
    engine = ModelConfig(
        name=engine_model_name,
        inputs=(
            TritonTensor("input_ids", "INT32", (ANY,)),
            TritonTensor("input_lengths", "INT32"),
            *(field.step_tensor() for field in ENGINE_FIELDS),
            TritonTensor("bad_words_list", "INT32", (2, ANY), is_optional=True),
            *ENGINE_ONLY_INPUTS,
        ),
        outputs=(*ENGINE_OUTPUTS, PACKED),
        is_decoupled=True,
        parameters={
            "build_directory": build_directory,
            "scheduler": scheduler,
            "admission": admission,
            "control_socket": control_socket,
            "step_table": step_table,
            "prefix_cache": prefix_cache,
        },
    )
    preprocessing = ModelConfig(
        name=PREPROCESSING,
        inputs=tuple(field.step_tensor() for field in (*PREPROCESSING_FIELDS, _PREPROCESSING_TRIGGER)),
        outputs=PREPROCESSING_OUTPUTS,
        num_instances=2,  # one may have a long text
        parameters={"build_directory": build_directory},
    )
    postprocessing = ModelConfig(
        name=POSTPROCESSING,
        inputs=_POSTPROCESSING_INPUTS,
        outputs=_POSTPROCESSING_OUTPUTS,
        is_decoupled=True,  # a ping has no answer
        parameters={"engine_model_name": engine_model_name},
    )
    ensemble = ModelConfig(
        name=ENSEMBLE,
        inputs=tuple(field.ensemble_tensor() for field in (*PREPROCESSING_FIELDS, *ENGINE_FIELDS)),
        outputs=(TritonTensor("text_output", "STRING", (ANY,)), *PUBLIC_OUTPUTS),
        steps=(
            EnsembleStep(
                PREPROCESSING,
                input_map={
                    field.step_tensor().name: field.name for field in (*PREPROCESSING_FIELDS, _PREPROCESSING_TRIGGER)
                },
                output_map={tensor.name: f"_{tensor.name}" for tensor in PREPROCESSING_OUTPUTS},
            ),
            EnsembleStep(
                engine_model_name,
                input_map={
                    "input_ids": "_INPUT_ID",
                    "input_lengths": "_REQUEST_INPUT_LEN",
                    "bad_words_list": "_BAD_WORDS_IDS",
                    **{field.step_tensor().name: field.name for field in ENGINE_FIELDS},
                },
                output_map={
                    "text": "_TEXT",
                    "handle": "_HANDLE",
                    PACKED.name: "_NUMBERS",
                    "output_log_probs": "_LOG_PROBS",
                    "finish_reason": "_FINISH_REASON",
                },
            ),
            EnsembleStep(
                POSTPROCESSING,
                input_map={tensor.name: f"_{tensor.name}" for tensor in _POSTPROCESSING_INPUTS},
                output_map={"OUTPUT": "text_output", **{tensor.name: tensor.name for tensor in PUBLIC_OUTPUTS}},
            ),
        ),
    )
    return ensemble, preprocessing, engine, postprocessing
