"""A real tritonserver on the demonstration build, and what the same build answers in this process."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from dspark_trt.commands.generation import generate
from dspark_trt.contract.scheduler import SchedulerConfig
from dspark_trt.deployment import Deployment
from dspark_trt.server.options import ServeOptions
from dspark_trt.server.supervisor import TritonServer

TIED_LOG_PROB_GAP = 1e-3  # below it two engines of different batches may choose differently


@pytest.fixture(scope="session")
def server(demo_build: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[TritonServer]:
    log_file = tmp_path_factory.mktemp("tritonserver") / "log"
    with TritonServer(demo_build, ServeOptions(0, 0, 0, log_file=log_file)) as running:
        yield running


@dataclass(frozen=True)
class Answer:
    text: str
    token_ids: list[int]
    num_prompt_tokens: int
    log_probs: list[float]
    top_log_probs: list[list[tuple[int, float]]]  # of each token the two most probable ones


class InProcess:
    """Greedy answers of the same build without a server and without drafts."""

    def __init__(self, deployment: Deployment) -> None:
        self._deployment = deployment

    def answers(self, prompts: list[str], max_tokens: int, *, chat: bool = False) -> list[Answer]:
        codec = self._deployment.codec
        ids = [
            codec.encode_chat([{"role": "user", "content": prompt}]) if chat else codec.encode(prompt)
            for prompt in prompts
        ]
        sampling = self._deployment.sampling_params(temperature=0.0, max_tokens=max_tokens, num_log_probs=2)
        results = generate(self._deployment, ids, sampling, SchedulerConfig("off"))
        for prompt, result in zip(prompts, results, strict=True):
            gaps = [first[1] - second[1] for first, second in result["top_log_probs"]]
            assert min(gaps) > TIED_LOG_PROB_GAP, f"choose another prompt than {prompt!r}: two tokens are tied in it"
        return [
            Answer(
                result["text"],
                result["token_ids"],
                result["num_prompt_tokens"],
                result["log_probs"],
                result["top_log_probs"],
            )
            for result in results
        ]

    def answer(self, prompt: str, max_tokens: int, *, chat: bool = False) -> Answer:
        return self.answers([prompt], max_tokens, chat=chat)[0]


@pytest.fixture(scope="session")
def in_process(demo: Deployment) -> InProcess:
    return InProcess(demo)
