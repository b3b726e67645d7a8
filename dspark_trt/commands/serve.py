"""`dspark-trt serve`: the options; what is done about them is in the room `server`."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dspark_trt.commands.options import BuildFolder, command
from dspark_trt.commands.scheduler_choice import SchedulerText, scheduler_config
from dspark_trt.server.options import LogFormat, ServeOptions, StepTableChoice
from dspark_trt.serving.limits import AdmissionLimits

if TYPE_CHECKING:
    from dspark_trt.server.serve import TritonServer

DEFAULTS = ServeOptions()


@command()
def serve(
    folder: BuildFolder,
    http_port: Annotated[int, typer.Option(help="HTTP endpoint; 0: any free one.")] = DEFAULTS.http_port,
    grpc_port: Annotated[int, typer.Option(help="gRPC endpoint; 0: any free one.")] = DEFAULTS.grpc_port,
    metrics_port: Annotated[int, typer.Option(help="Prometheus metrics; 0: any free one.")] = DEFAULTS.metrics_port,
    address: Annotated[
        str,
        typer.Option(
            help="Address or name that HTTP, gRPC and OpenAI's API bind to; before tritonserver 2.59.1 only the last."
        ),
    ] = DEFAULTS.address,
    metrics_address: Annotated[
        str, typer.Option(help="Address or name that the metrics port binds to, from tritonserver 2.59.1 on.")
    ] = DEFAULTS.metrics_address,
    openai_port: Annotated[
        int | None, typer.Option(help="OpenAI's API and a live page, for example 9000; 0: any free one.")
    ] = None,
    served_model_name: Annotated[
        str | None, typer.Option(help="OpenAI's API: name of the model  [default: the build's folder]")
    ] = None,
    api_key_file: Annotated[Path | None, typer.Option(help="OpenAI's API: keys that are let in, one a line.")] = None,
    tls_certificate: Annotated[Path | None, typer.Option(help="OpenAI's API: PEM file with the chain.")] = None,
    tls_key: Annotated[Path | None, typer.Option(help="OpenAI's API: PEM file.")] = None,
    scheduler: SchedulerText = None,
    prefix_cache: Annotated[
        bool | None,
        typer.Option(
            "--prefix-cache/--no-prefix-cache",
            help="Reuse what another request computed of the same beginning  [default: the build's]",
            show_default=False,
        ),
    ] = None,
    max_queued: Annotated[
        int | None,
        typer.Option(help="Requests that may wait for a row; more are refused  [default: 16 for each row]"),
    ] = None,
    max_queue_time: Annotated[
        float, typer.Option(help="Seconds that a request may wait for a row.")
    ] = DEFAULTS.admission.max_queue_s,
    request_timeout: Annotated[
        float, typer.Option(help="Seconds from a request's arrival to its last token, unless it has a timeout_ms.")
    ] = DEFAULTS.admission.default_timeout_s,
    max_tokens_limit: Annotated[
        int | None, typer.Option(help="A larger max_tokens is cut to it  [default: what a row holds]")
    ] = None,
    max_stretch: Annotated[
        float,
        typer.Option(help="A step that reads prompts beside answers takes at most so many times a plain one; from 1."),
    ] = DEFAULTS.admission.max_stretch,
    drain_time: Annotated[
        float, typer.Option(help="Seconds that running requests have when it is stopped.")
    ] = DEFAULTS.drain_s,
    log_format: Annotated[
        LogFormat, typer.Option(help="Of the server's log, on standard error.")
    ] = DEFAULTS.log_format,
    step_table: Annotated[
        StepTableChoice,
        typer.Option(help="A table of another machine, thread count or version: measured again first, or kept."),
    ] = DEFAULTS.step_table,
    step_table_budget: Annotated[
        float, typer.Option(min=1, metavar="SECONDS", help="That measuring it again may take, about.")
    ] = DEFAULTS.step_table_budget_s,
) -> None:
    """Serve a build with Triton Inference Server until interrupted; a second interrupt does not wait for requests."""
    from dspark_trt.building.finished import check_servable
    from dspark_trt.machine.address import resolve_address
    from dspark_trt.server.openai.settings import front_end_options
    from dspark_trt.server.serve import serve as run_server
    from dspark_trt.server.server_log import as_event, say
    from dspark_trt.server.step_table import step_table_for
    from dspark_trt.server.summary import check_memory, summarise

    front_end = front_end_options(openai_port, served_model_name, api_key_file, tls_certificate, tls_key)
    check_servable(folder, scheduler_config(scheduler))
    check_memory(folder)
    options = ServeOptions(
        http_port,
        grpc_port,
        metrics_port,
        resolve_address(address),
        resolve_address(metrics_address, "--metrics-address"),
        scheduler,
        prefix_cache,
        admission=AdmissionLimits(
            max_queued_requests=max_queued,
            max_queue_s=max_queue_time,
            default_timeout_s=request_timeout,
            max_tokens=max_tokens_limit,
            max_stretch=max_stretch,
        ),
        drain_s=drain_time,
        logs_routine=logging.getLogger("dspark_trt").isEnabledFor(logging.INFO),
        log_format=log_format,
        step_table=step_table,
        step_table_budget_s=step_table_budget,
    )

    def on_ready(server: TritonServer) -> None:
        where = {"http_url": server.http_url, "grpc_address": server.grpc_address, "metrics_url": server.metrics_url}
        say(f"{summarise(folder, options, **where)}\nready: {server.http_url}", sys.stdout)

    def on_event(message: str) -> None:
        say(json.dumps(as_event(message)) if log_format == "json" else message)

    table = step_table_for(folder, options, on_event)
    run_server(folder, options, on_ready, on_event, front_end, table)
