"""Decode prompts in one process, without a server: open a build, make a loop, step it.

python examples/generate.py build/smollm2 "Why is the sky blue?" "What is a transistor?"
"""

from __future__ import annotations

import sys
from pathlib import Path

from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.deployment import load_deployment
from dspark_trt.runtime.request import GenerationRequest


def main(build: Path, questions: list[str]) -> None:
    deployment = load_deployment(build)
    loop = deployment.make_loop(SchedulerConfig(mode="early_stop"))
    for number, question in enumerate(questions):
        prompt_ids = deployment.codec.encode_chat([{"role": "user", "content": question}])
        sampling = deployment.sampling_params(max_tokens=48, temperature=0.7, top_p=0.9, seed=number)
        loop.submit(GenerationRequest(request_id=str(number), prompt_ids=tuple(prompt_ids), sampling=sampling))

    answers = dict.fromkeys(map(str, range(len(questions))), "")
    while loop.has_work:  # one iteration over all requests: draft, schedule, verify, accept, emit
        for emission in loop.step():
            answers[emission.request_id] += emission.text
            if emission.statistics is not None:
                length = emission.statistics.accepted_len
                print(f"[{questions[int(emission.request_id)]}] accepted_len {length:.2f}")
                print(answers[emission.request_id].strip(), end="\n\n")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
