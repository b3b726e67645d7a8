"""config.pbtxt: the text is what Triton's own protobuf reads back, and the ensemble's wiring holds together."""

from __future__ import annotations

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from dspark_trt.packaging.model_configs import model_configs
from dspark_trt.packaging.pbtxt import TritonTensor, read_parameter
from dspark_trt.packaging.signature import ENSEMBLE, POSTPROCESSING, PREPROCESSING

NAMES = ("ensemble", "preprocessing", "dspark", "postprocessing")


def parse(text: str) -> model_config_pb2.ModelConfig:
    return text_format.Parse(text, model_config_pb2.ModelConfig())


@pytest.fixture(scope="module")
def configs() -> dict[str, model_config_pb2.ModelConfig]:
    written = model_configs("dspark", build_directory="../..", scheduler="early_stop")
    return {config.name: parse(config.text()) for config in written}


def test_every_tensor_survives_the_way_through_tritons_protobuf() -> None:
    for config in model_configs("dspark", build_directory="../..", scheduler="early_stop"):
        parsed = parse(config.text())
        for tensors, read in ((config.inputs, parsed.input), (config.outputs, parsed.output)):
            assert [
                TritonTensor(
                    tensor.name,
                    model_config_pb2.DataType.Name(tensor.data_type).removeprefix("TYPE_"),
                    tuple(tensor.dims),
                    getattr(tensor, "optional", False),
                )
                for tensor in read
            ] == list(tensors)


def test_what_keeps_order_has_one_instance_and_what_may_answer_nothing_is_decoupled(
    configs: dict[str, model_config_pb2.ModelConfig],
) -> None:
    assert tuple(configs) == NAMES
    assert [name for name in NAMES if configs[name].model_transaction_policy.decoupled] == ["dspark", "postprocessing"]
    for name in NAMES[1:]:
        assert configs[name].backend == "python"
        num_instances = [group.count for group in configs[name].instance_group]
        assert num_instances == [2 if name == PREPROCESSING else 1], "two instances answer out of order"
        assert not configs[name].HasField("dynamic_batching"), "a batcher hides cancellation from postprocessing"
    assert configs[ENSEMBLE].platform == "ensemble"


def test_ensemble_maps_join_tensors_of_equal_type_and_shape(
    configs: dict[str, model_config_pb2.ModelConfig],
) -> None:
    ensemble = configs[ENSEMBLE]
    known = {tensor.name: (tensor.data_type, tuple(tensor.dims)) for tensor in ensemble.input}
    consumed = set()
    for step in ensemble.ensemble_scheduling.step:
        model = configs[step.model_name]
        inputs = {tensor.name: tensor for tensor in model.input}
        outputs = {tensor.name: tensor for tensor in model.output}
        for inner, outer in step.input_map.items():
            assert (inputs[inner].data_type, tuple(inputs[inner].dims)) == known[outer], f"{step.model_name}.{inner}"
            consumed.add(outer)
        required = {name for name, tensor in inputs.items() if not tensor.optional}
        assert required <= set(step.input_map)
        known |= {
            outer: (outputs[inner].data_type, tuple(outputs[inner].dims)) for inner, outer in step.output_map.items()
        }
    for tensor in ensemble.input:
        assert tensor.name in consumed, f"Triton does not load an ensemble whose input {tensor.name} no step reads"
    for tensor in ensemble.output:
        assert known[tensor.name] == (tensor.data_type, tuple(tensor.dims))


def test_ensemble_has_the_fields_that_clients_of_tensorrt_llm_send_and_read(
    configs: dict[str, model_config_pb2.ModelConfig],
) -> None:
    ensemble = configs[ENSEMBLE]
    optional = {tensor.name: tensor.optional for tensor in ensemble.input}
    assert all(optional.values()), "Triton answers a request that lacks a required input with silence"
    end_to_end_client = (
        "text_input max_tokens stream beam_width temperature num_return_sequences stop_words bad_words end_id pad_id "
        "repetition_penalty presence_penalty frequency_penalty exclude_input_in_output return_log_probs top_k top_p "
        "length_penalty seed"
    )
    genai_perf = "text_input max_tokens exclude_input_in_output stream min_length"
    openai_frontend = (
        "text_input stream max_tokens stop_words top_p frequency_penalty presence_penalty seed temperature "
        "return_num_input_tokens return_num_output_tokens exclude_input_in_output"
    )
    for client in (end_to_end_client, genai_perf, openai_frontend):
        assert set(client.split()) <= set(optional)
    read = "text_output cum_log_probs output_log_probs batch_index sequence_index num_input_tokens num_output_tokens"
    assert set(read.split()) <= {tensor.name for tensor in ensemble.output}


def test_engine_model_takes_tensorrt_llms_name() -> None:
    written = model_configs("tensorrt_llm", build_directory="../..", scheduler="off")
    configs = {config.name: parse(config.text()) for config in written}
    assert [step.model_name for step in configs[ENSEMBLE].ensemble_scheduling.step] == [
        PREPROCESSING,
        "tensorrt_llm",
        POSTPROCESSING,
    ]
    assert configs[POSTPROCESSING].parameters["engine_model_name"].string_value == "tensorrt_llm"
    assert configs["tensorrt_llm"].parameters["scheduler"].string_value == "off"


def test_read_parameter_gives_back_what_was_written() -> None:
    scheduler = 'a "quoted" \\ value'
    engine = model_configs("dspark", build_directory="../..", scheduler=scheduler)[2].text()
    assert read_parameter(engine, "scheduler") == parse(engine).parameters["scheduler"].string_value == scheduler
    with pytest.raises(ValueError, match="'schedule'"):
        read_parameter(engine, "schedule")
