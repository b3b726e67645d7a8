"""Time all plugins on this GPU against a straightforward torch implementation and against the time their bytes take.

    python perf/plugin_microbench.py --output perf/results/plugins_h200.json

The byte floor is what has to move through device memory at least (the tables in plugins/*/README.md), over the
bandwidth of a large copy measured in the same run; where a weight fits the L2 cache a kernel can be faster than this
floor. Both sides run as CUDA graphs, so that neither pays for Python; torch is timed without a graph too. Needs torch
for CUDA, triton and cuda-bindings. Exit status 3: no GPU.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from attention_cases import attention_floor_bytes, attention_inputs, torch_row_attention
from dspark_trt_plugins.markov_head.form import W1, W2
from dspark_trt_plugins.markov_head.launches import MarkovHeadOperation
from dspark_trt_plugins.named_forms import NAMED_FORMS
from dspark_trt_plugins.operation import ELEMENT_BYTES, Operation
from dspark_trt_plugins.prefix_select.form import PrefixSelectForm
from dspark_trt_plugins.prefix_select.launches import PrefixSelectOperation
from dspark_trt_plugins.row_attention.launches import RowAttentionOperation
from torch_plugins import Tensors, torch_markov_head, torch_prefix_select

HEAD_FORMS = ("smollm2-135m", "qwen3-8b", "qwen3-8b-bfloat16-logits", "qwen3-8b-top-2048", "qwen3-8b-rnn")
SELECT_FORMS = ("prefix-select",)
ATTENTION_FORMS = ("row-attention-qwen3-8b", "row-attention-smollm2-135m")
PROMPT_FORMS = ("row-attention-qwen3-8b-prompts",)  # one chunk of a whole step
CHUNK_FORMS = ("row-attention-qwen3-8b-long-chunk",)  # the end of a prompt, behind a long context
LIVE_POSITIONS = (256, 1024, 4096)  # of a capacity of 4096
LIVE_POSITIONS_OF_PROMPTS = (512, 4096)
LIVE_POSITIONS_OF_CHUNKS = (16384,)
NUM_REQUESTS = (1, 8, 32, 64)
COPY_BYTES = 2**31
WARMUP_RUNS, TIMED_RUNS = 5, 30


@dataclass(frozen=True, slots=True)
class Row:
    form: str
    num_live: int  # cache positions of attention; else 0
    num_requests: int
    kernel_us: float
    torch_us: float
    torch_without_graph_us: float
    floor_us: float


def floor_bytes(operation: Operation, num_requests: int, num_live: int = 0) -> int:
    """Bytes that one call has to move: inputs and outputs once, W2 once a slot, of caches what is live."""
    if isinstance(operation, RowAttentionOperation):
        return attention_floor_bytes(operation, num_requests, num_live)
    if isinstance(operation, PrefixSelectOperation):
        extents = {"R": num_requests, "B": num_requests, "T": _num_packed(operation.form, num_requests)}
        return sum(tensor.num_bytes(extents) for tensor in (*operation.inputs, *operation.outputs))
    assert isinstance(operation, MarkovHeadOperation)
    form, extents = operation.form, {"R": num_requests}
    lookups = (W1, W2)
    total = sum(
        tensor.num_bytes(extents) for tensor in (*operation.inputs, *operation.outputs) if tensor.name not in lookups
    )
    rows_of_w2 = num_requests * form.top_n if form.top_n else form.vocab_size
    row_bytes = form.markov_rank * ELEMENT_BYTES[form.weight_type]
    return total + form.gamma * row_bytes * (rows_of_w2 + num_requests)


def example_inputs(operation: Operation, num_requests: int, device: str, num_live: int = 0) -> Tensors:
    """Random inputs of a step; half of all drafts can be admitted."""
    if isinstance(operation, RowAttentionOperation):
        return attention_inputs(operation, num_requests, num_live, device)
    if isinstance(operation, PrefixSelectOperation):
        return _select_inputs(operation, num_requests, device)
    torch.manual_seed(0)
    tensors = {}
    for tensor in operation.inputs:
        shape, element_type = tensor.shape_in({"R": num_requests}), getattr(torch, tensor.element_type)
        if tensor.name == "anchor_ids":
            tensors[tensor.name] = torch.randint(1000, shape, device=device)
        elif tensor.name == "temperatures":
            tensors[tensor.name] = torch.tensor([0.0, 0.8], device=device).repeat(num_requests)[:num_requests]
        elif tensor.name == "uniforms":
            tensors[tensor.name] = torch.rand(shape, device=device)
        else:
            tensors[tensor.name] = (torch.randn(shape, device=device) * 0.5).to(element_type)
    return tensors


def _num_packed(form: PrefixSelectForm, num_requests: int) -> int:
    return num_requests + num_requests * form.gamma // 2


def _select_inputs(operation: PrefixSelectOperation, num_requests: int, device: str) -> Tensors:
    torch.manual_seed(0)
    gamma, rows = operation.form.gamma, torch.arange(num_requests, device=device)
    return {
        "confidence_logits": torch.randn(num_requests, gamma, device=device) + 1,
        "temperatures": torch.ones(gamma, device=device),
        "caps": torch.full((num_requests,), gamma, device=device),
        "is_forced": torch.zeros(num_requests, dtype=torch.int64, device=device),
        "anchor_ids": torch.randint(1000, (num_requests,), device=device),
        "draft_ids": torch.randint(1000, (num_requests, gamma), device=device),
        "past_lengths": torch.randint(1000, (num_requests,), device=device),
        "block_rows": rows,
        "row_requests": rows,
        "row_query_lengths": torch.ones(num_requests, dtype=torch.int64, device=device),
        "token_index": torch.arange(_num_packed(operation.form, num_requests), device=device),
        "num_admitted": torch.tensor([num_requests * gamma // 2], device=device),
    }


def median_us(run: Callable[[], Any]) -> float:
    """Median microseconds of one call on the device, by events."""
    times = []
    for index in range(WARMUP_RUNS + TIMED_RUNS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        run()
        end.record()
        end.synchronize()
        if index >= WARMUP_RUNS:
            times.append(1000 * begin.elapsed_time(end))
    return statistics.median(times)


def as_graph(run: Callable[[], Any]) -> Callable[[], None]:
    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    replay: Callable[[], None] = graph.replay
    return replay


def bytes_per_us() -> float:
    """Of a large copy on the device, counting bytes read and written."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    return 2 * COPY_BYTES / median_us(lambda: target.copy_(source))


def timed_calls() -> dict[str, list[tuple[int, int]]]:
    """Live positions (0: no attention) and numbers of requests that each form is timed with."""
    return {
        **{name: list(itertools.product((0,), NUM_REQUESTS)) for name in (*HEAD_FORMS, *SELECT_FORMS)},
        **{name: list(itertools.product(LIVE_POSITIONS, NUM_REQUESTS)) for name in ATTENTION_FORMS},
        **{name: list(itertools.product(LIVE_POSITIONS_OF_PROMPTS, (1,))) for name in PROMPT_FORMS},
        **{name: list(itertools.product(LIVE_POSITIONS_OF_CHUNKS, (1,))) for name in CHUNK_FORMS},
    }


def measure(bandwidth: float) -> Iterator[Row]:
    from dspark_trt_plugins.compile import compile_operation
    from dspark_trt_plugins.launch import TorchOperation

    major, minor = torch.cuda.get_device_capability()
    for name, calls in timed_calls().items():
        operation = NAMED_FORMS[name]
        run = TorchOperation(operation, compile_operation(operation, [10 * major + minor]))
        for num_live, num_requests in calls:
            inputs = example_inputs(operation, num_requests, "cuda", num_live)
            outputs = run(inputs)
            baseline = _baseline(operation, inputs)
            yield Row(
                form=name,
                num_live=num_live,
                num_requests=num_requests,
                kernel_us=median_us(as_graph(lambda run=run, i=inputs, o=outputs: run(i, o))),  # type: ignore[misc]
                torch_us=median_us(as_graph(baseline)),
                torch_without_graph_us=median_us(baseline),
                floor_us=floor_bytes(operation, num_requests, num_live) / bandwidth,
            )


def _baseline(operation: Operation, inputs: Tensors) -> Callable[[], Tensors]:
    if isinstance(operation, PrefixSelectOperation):
        return lambda: torch_prefix_select(operation.form, inputs)
    if isinstance(operation, RowAttentionOperation):
        return lambda: torch_row_attention(operation.form, inputs)
    assert isinstance(operation, MarkovHeadOperation)
    return lambda: torch_markov_head(operation.form, inputs)


def table(rows: list[Row]) -> str:
    columns = (
        f"{'form':28}{'live':>6}{'R':>4}{'kernel us':>12}{'torch us':>12}{'no graph us':>13}"
        f"{'floor us':>11}{'floor/kernel':>14}"
    )
    lines = [
        f"{row.form:28}{row.num_live or '':>6}{row.num_requests:4}{row.kernel_us:12.1f}{row.torch_us:12.1f}"
        f"{row.torch_without_graph_us:13.1f}{row.floor_us:11.2f}{row.floor_us / row.kernel_us:14.0%}"
        for row in rows
    ]
    return "\n".join([columns, *lines])


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="JSON file that gets the table")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print(
            "plugin_microbench: expected a CUDA GPU, found none; run it on a GPU host with torch for CUDA",
            file=sys.stderr,
        )
        return 3
    bandwidth = bytes_per_us()
    rows = list(measure(bandwidth))
    device = torch.cuda.get_device_name()
    print(f"{device}, copy {bandwidth / 1e6:.2f} TB/s, torch {torch.__version__}, median of {TIMED_RUNS} runs")
    print(table(rows))
    if options.output:
        fields = Row.__dataclass_fields__
        report = {
            "device": device,
            "copy_tb_per_s": bandwidth / 1e6,
            "torch": torch.__version__,
            "timed_runs": TIMED_RUNS,
            "rows": [{name: getattr(row, name) for name in fields} for row in rows],
        }
        options.output.parent.mkdir(parents=True, exist_ok=True)
        temporary = options.output.with_name(options.output.name + ".partial")
        temporary.write_text(json.dumps(report, indent=1) + "\n")
        temporary.replace(options.output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
