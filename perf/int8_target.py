"""What the int8 form of a target costs in output, and which of its activations cost it.

    python perf/int8_target.py build/downloads/SmolLM2-135M-Instruct.Q4_1.gguf
    python perf/int8_target.py TARGET --calls     # milliseconds of a call, and memory

Against the float32 form, on the packaged prompts that are held out: mean KL, 99th percentile and top-1 agreement of the
form with eight-bit activations everywhere, with sixteen bits where the build's rule asks for them, with sixteen
everywhere (what is left then is the rounding of the weights), and with sixteen in one kind of layer, or one decoder
layer, at a time. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from dspark_trt.building.target_form import MAX_ERROR, Distance, Survey, chosen_prompts
from dspark_trt.checkpoints.layout import target_shapes
from dspark_trt.checkpoints.target import read_target
from dspark_trt.checkpoints.tokenizer import write_tokenizer
from dspark_trt.contract.precision import Precision
from dspark_trt.contract.protocol import EngineLimits, TargetBatch
from dspark_trt.engines.onnxruntime.engines import OnnxRuntimeSettings, OnnxRuntimeTargetEngine
from dspark_trt.graphs.target import write_target_graph
from dspark_trt.text import TextCodec

LIMITS = EngineLimits(max_requests=32, max_seq_len=512, max_batch_tokens=256)
ROW_COUNTS = (1, 8, 32)
CONTEXT_TOKENS = 256
NUM_CALLS = 15
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\.weight")
_EVERYWHERE = "sixteen bits everywhere"


def write(source: str, folder: Path, precision: Precision, wide_inputs: Iterable[str] = ()) -> None:
    target = read_target(source)
    write_target_graph(
        target,
        folder,
        taps=(),
        limits=LIMITS,
        gamma=1,
        precision=precision,
        attention="gqa",
        wide_inputs=frozenset(wide_inputs),
    )


def kind(weight: str) -> str:
    match = _LAYER.fullmatch(weight)
    return "head" if match is None else match[2]


def kinds(weights: Iterable[str]) -> dict[str, list[str]]:
    """Weights by what they are, and by decoder layer."""
    found: dict[str, list[str]] = {}
    for weight in weights:
        found.setdefault(kind(weight), []).append(weight)
    for weight in weights:
        if match := _LAYER.fullmatch(weight):
            found.setdefault(f"layer {match[1]}", []).append(weight)
    return found


def accuracy(source: str, num_threads: int | None) -> None:
    """Print errors of layers, then distances of forms."""
    settings = OnnxRuntimeSettings(num_threads=num_threads)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_tokenizer(source, folder / "tokenizer")
        encode = TextCodec.load(folder / "tokenizer").encode_prompt
        (folder / "survey").mkdir()
        survey = Survey(read_target(source), folder / "survey", settings)
        errors = survey.errors(encode, chosen_prompts("fit"))
        print("| weight | relative error of eight bits |\n|---|---|")
        for weight, error in sorted(errors.items(), key=lambda item: -item[1])[:20]:
            print(f"| {weight} | {error:.3f} |")
        by_kind = {name: [errors[each] for each in weights] for name, weights in kinds(errors).items()}
        print("\n| kind | median | largest |\n|---|---|---|")
        for name, values in by_kind.items():
            print(f"| {name} | {statistics.median(values):.4f} | {max(values):.4f} |")
        forms = {
            "eight bits everywhere": [],
            f"the rule, above {MAX_ERROR}": [weight for weight, error in errors.items() if error > MAX_ERROR],
            _EVERYWHERE: list(errors),
            **{f"sixteen in {name}": weights for name, weights in kinds(errors).items()},
        }
        print("\n| form | layers of sixteen bits | KL | 99 % | top-1 agreement |\n|---|---|---|---|---|")
        for number, (name, wide_inputs) in enumerate(forms.items()):
            place = folder / str(number)
            place.mkdir()
            write(source, place, "int8", wide_inputs)
            found = survey.distance(OnnxRuntimeTargetEngine(place, settings), encode, chosen_prompts("held_out"))
            print(f"| {name} | {len(wide_inputs)} | {_of(found)} |", flush=True)
            for file in place.iterdir():
                file.unlink()


def _of(found: Distance) -> str:
    return f"{found.kl:.5f} | {found.kl_99:.4f} | {100 * found.top1_agreement:.2f} %"


def calls(graphs: Path, num_threads: int | None) -> dict[str, float]:
    """Median milliseconds of a plain step, and the process's memory behind them, in MB."""
    engine = OnnxRuntimeTargetEngine(graphs, OnnxRuntimeSettings(num_threads=num_threads))
    found: dict[str, float] = {}
    for count in ROW_COUNTS:
        rows = np.arange(count)
        past, one = np.full(count, CONTEXT_TOKENS), np.ones(count, np.int64)
        batch = TargetBatch(rows, rows, past, one, count, rows)
        found[f"ms_{count}"] = _median_ms(lambda batch=batch: engine.forward(batch))
    found["megabytes"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return found


def _median_ms(call: Callable[[], object]) -> float:
    times = []
    for _ in range(NUM_CALLS + 3):
        started = time.perf_counter()
        call()
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times[3:])


def costs(source: str, num_threads: int | None) -> None:
    """Print milliseconds of a call and memory of each precision, each in a process of its own."""
    print(f"| form | {' | '.join(f'ms at {count}' for count in ROW_COUNTS)} | peak MB |")
    print(f"|{'---|' * (len(ROW_COUNTS) + 2)}")
    precisions: dict[str, Precision] = {"fp32": "fp32", "int8": "int8", _EVERYWHERE: "int8", "int4": "int4"}
    with tempfile.TemporaryDirectory() as scratch:
        for name, precision in precisions.items():
            place = Path(scratch) / precision
            place.mkdir(exist_ok=True)
            write(source, place, precision, layout_names(source) if name == _EVERYWHERE else ())
            command = [sys.executable, __file__, str(place), "--opened"]
            if num_threads is not None:
                command += ["--threads", str(num_threads)]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            times = " | ".join(f"{found[f'ms_{count}']:.1f}" for count in ROW_COUNTS)
            print(f"| {name} | {times} | {found['megabytes']:.0f} |", flush=True)


def layout_names(source: str) -> list[str]:
    """Every weight of the target."""
    return list(target_shapes(read_target(source).spec))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="a checkpoint")
    parser.add_argument("--calls", action="store_true", help="time calls and look at memory instead")
    parser.add_argument("--opened", action="store_true", help="TARGET is a folder of graphs; time it, print JSON")
    parser.add_argument("--threads", type=int, help="of the engine; default: every core")
    given = parser.parse_args()
    if given.opened:
        print(json.dumps(calls(Path(given.target), given.threads)))
    elif given.calls:
        costs(given.target, given.threads)
    else:
        accuracy(given.target, given.threads)


if __name__ == "__main__":
    main()
