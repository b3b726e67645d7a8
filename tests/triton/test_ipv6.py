"""Every endpoint on an IPv6 address, which each of them spells in its own way."""

from __future__ import annotations

import urllib.request
from pathlib import Path

import openai
import pytest
import tritonclient.grpc

from dspark_trt.errors import RecipeError
from dspark_trt.server.http_calls import generate
from dspark_trt.server.openai.process import start_front_end
from dspark_trt.server.openai.settings import FrontEndOptions
from dspark_trt.server.options import ServeOptions
from dspark_trt.server.supervisor import TritonServer

pytestmark = pytest.mark.triton


def test_every_endpoint_answers_on_the_loopback_of_ipv6(tiny_build: Path, tmp_path: Path) -> None:
    options = ServeOptions(0, 0, 0, address="::1", log_file=tmp_path / "log")
    if not Path("/proc/net/if_inet6").is_file():  # a container without IPv6
        with pytest.raises(RecipeError, match="cannot listen on ::1"):
            TritonServer(tiny_build, options)
        return
    with TritonServer(tiny_build, options) as server:
        assert server.http_url.startswith("http://[::1]:")
        answer = generate(server.http_url, {"text_input": "the", "max_tokens": 2}, timeout_s=60)
        assert answer["text_output"]
        assert tritonclient.grpc.InferenceServerClient(server.grpc_address).is_server_ready()
        with urllib.request.urlopen(server.metrics_url, timeout=10) as metrics:
            assert b"dspark_" in metrics.read()
        places = {"grpc_address": server.grpc_address, "metrics_url": server.metrics_url}
        with start_front_end(tiny_build, FrontEndOptions(0, address="::1"), **places) as front_end:
            assert front_end.url.startswith("http://[::1]:")
            client = openai.OpenAI(base_url=f"{front_end.url}/v1", api_key="none", max_retries=0)
            (model,) = client.models.list()
            assert client.completions.create(model=model.id, prompt="the", max_tokens=2).choices[0].text
