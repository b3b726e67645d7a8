"""What the int8 form of a target costs in output, and which of its activations cost it.

    python perf/int8_target.py build/downloads/SmolLM2-135M-Instruct.Q4_1.gguf
    python perf/int8_target.py TARGET --calls     # milliseconds of a call, and memory

On packaged prompts: how far eight bits in each activation alone take the logits from those of sixteen bits everywhere;
then, against the float32 form and on prompts that are held out, the form that the build's rule chooses, beside eight
and sixteen bits everywhere. Prints Markdown.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import numpy as np

from dspark_trt.building.activation_bits import (
    NUM_PROMPTS,
    Distance,
    Reference,
    choose,
    prompts,
)
from dspark_trt.checkpoints.layout import target_shapes
from dspark_trt.checkpoints.target import read_target
from dspark_trt.checkpoints.tokenizer import write_tokenizer
from dspark_trt.contract.precision import Precision
from dspark_trt.contract.protocol import EngineLimits, TargetBatch
from dspark_trt.engines.onnxruntime.engines import OnnxRuntimeSettings, OnnxRuntimeTargetEngine
from dspark_trt.engines.onnxruntime.switched import SwitchedTargetEngine
from dspark_trt.graphs.quantize import low_step
from dspark_trt.graphs.target import write_switched_graph, write_target_graph
from dspark_trt.text import TextCodec

LIMITS = EngineLimits(max_requests=32, max_seq_len=512, max_batch_tokens=256)
ROW_COUNTS = (1, 8, 32)
CONTEXT_TOKENS = 256
NUM_CALLS = 15
_EVERYWHERE = "int8, 16 bits everywhere"


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


def accuracy(source: str, num_threads: int | None, num_held_out: int) -> None:
    """Print what was measured of groups, then distances of forms."""
    settings, target = OnnxRuntimeSettings(num_threads=num_threads), read_target(source)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_tokenizer(source, folder / "tokenizer")
        encode = TextCodec.load(folder / "tokenizer").encode_prompt
        for name in ("exact", "switched"):
            (folder / name).mkdir()
        write(source, folder / "exact", "fp32")
        exact = OnnxRuntimeTargetEngine(folder / "exact", settings)
        fit = Reference(prompts(encode, "fit"), exact)
        held_out = Reference(prompts(encode, "held_out", num_prompts=num_held_out), exact)
        del exact
        layers = write_switched_graph(target, folder / "switched", limits=LIMITS, gamma=1)
        engine = SwitchedTargetEngine(folder / "switched", len(layers), settings)
        choice = choose(layers, engine, fit)
        print("| activation | KL of eight bits in it alone | bits chosen |\n|---|---|---|")
        for name, added in sorted(choice.added_kl.items(), key=lambda item: -item[1]):
            print(f"| {name} | {added:+.5f} | {16 if name in choice.wide else 8} |")
        print("\n| form, held-out prompts | layers of 16 bits | KL | 99 % | top-1 agreement |\n|---|---|---|---|---|")
        forms = {
            "8 bits everywhere": np.zeros(len(layers), bool),
            "16 bits everywhere": np.ones(len(layers), bool),
            "chosen": np.isin(layers, choice.wide_inputs),
        }
        for name, is_wide in forms.items():
            engine.low_steps = np.where(is_wide, low_step(), 0).astype(np.float32)
            found = held_out.distance(engine)
            print(f"| {name} | {is_wide.sum()} of {len(layers)} | {_of(found)} |", flush=True)
        print(f"\n{found.num_tokens} positions")


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
        found[f"ms_{count}"] = _median_ms(partial(engine.forward, batch))
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
    precisions: dict[str, Precision] = {
        "fp32": "fp32",
        "int8, 8 bits everywhere": "int8",
        _EVERYWHERE: "int8",
        "int4": "int4",
    }
    with tempfile.TemporaryDirectory() as scratch:
        for name, precision in precisions.items():
            place = Path(scratch) / precision
            place.mkdir(exist_ok=True)
            write(source, place, precision, weight_names(source) if name == _EVERYWHERE else ())
            command = [sys.executable, __file__, str(place), "--opened"]
            if num_threads is not None:
                command += ["--threads", str(num_threads)]
            found = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
            times = " | ".join(f"{found[f'ms_{count}']:.1f}" for count in ROW_COUNTS)
            print(f"| {name} | {times} | {found['megabytes']:.0f} |", flush=True)


def weight_names(source: str) -> list[str]:
    """Every weight of the target."""
    return list(target_shapes(read_target(source).spec))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", help="a checkpoint")
    parser.add_argument("--calls", action="store_true", help="time calls and look at memory instead")
    parser.add_argument("--opened", action="store_true", help="TARGET is a folder of graphs; time it, print JSON")
    parser.add_argument("--held-out", type=int, default=5 * NUM_PROMPTS, help="prompts that forms are compared on")
    parser.add_argument("--threads", type=int, help="of the engine; default: every core")
    given = parser.parse_args()
    if given.opened:
        print(json.dumps(calls(Path(given.target), given.threads)))
    elif given.calls:
        costs(given.target, given.threads)
    else:
        accuracy(given.target, given.threads, given.held_out)


if __name__ == "__main__":
    main()
