"""`dspark-trt serve`: the options; what is done about them is in the room `server`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from dspark_trt.commands.options import BuildFolder, command
from dspark_trt.commands.scheduler_choice import SchedulerText, scheduler_config

if TYPE_CHECKING:
    from dspark_trt.server.serve import TritonServer


@command()
def serve(
    folder: BuildFolder,
    http_port: Annotated[int, typer.Option(help="HTTP endpoint; 0: any free one.")] = 8000,
    grpc_port: Annotated[int, typer.Option(help="gRPC endpoint; 0: any free one.")] = 8001,
    metrics_port: Annotated[int, typer.Option(help="Prometheus metrics; 0: any free one.")] = 8002,
    address: Annotated[str, typer.Option(help="Address or name that all of them bind to.")] = "127.0.0.1",
    scheduler: SchedulerText = None,
) -> None:
    """Serve a build with Triton Inference Server until interrupted."""
    from dspark_trt.building.finished import check_servable
    from dspark_trt.commands import report
    from dspark_trt.machine.address import resolve_address
    from dspark_trt.server.serve import ServeOptions
    from dspark_trt.server.serve import serve as run_server

    check_servable(folder, scheduler_config(scheduler))
    options = ServeOptions(http_port, grpc_port, metrics_port, resolve_address(address), scheduler)

    def on_ready(server: TritonServer) -> None:
        report.print_line(f"ready: {server.http_url} (HTTP), {server.grpc_address} (gRPC), {server.metrics_url}")

    run_server(folder, options, on_ready)
