"""Starts the front end beside `serve`, in a process of its own: no request can touch the one that supervises."""

from __future__ import annotations

import contextlib
import importlib.util
import socket
import ssl
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.error import HTTPError

from dspark_trt.errors import EngineBuildError, EnvironmentMissingError, RecipeError
from dspark_trt.machine.address import family_of, in_url
from dspark_trt.machine.packages import install_extra
from dspark_trt.server.environment import front_end_environment
from dspark_trt.server.openai.settings import DEFAULT_TIMEOUT_S, FrontEndOptions, FrontEndSettings, make_settings
from dspark_trt.server.prober import Prober

_START_TIMEOUT_S = 60.0
_STOP_TIMEOUT_S = 10.0
_POLL_S = 0.05
_MIN_LIFE_S = 2.0  # between two starts: a front end that cannot live does not keep the machine busy
_PROBE_INTERVAL_S, _PROBE_TIMEOUT_S = 5.0, 60.0  # without an answer for so long it counts as hung
_BACKLOG = 512
_PACKAGES = ("fastapi", "uvicorn", "tritonclient")


class FrontEndProcess:
    """One front end; its socket outlives its process, so that clients wait while it is started again."""

    def __init__(
        self,
        settings: FrontEndSettings,
        listener: socket.socket,
        *,
        probe_interval_s: float = _PROBE_INTERVAL_S,
        probe_timeout_s: float = _PROBE_TIMEOUT_S,
    ) -> None:
        self._settings = settings
        self._listener = listener
        self._probing = probe_interval_s, probe_timeout_s
        self._process: subprocess.Popen[bytes] | None = None
        self._prober: Prober | None = None
        self._started_at = 0.0

    @property
    def url(self) -> str:
        host, port = self._listener.getsockname()[:2]
        return f"{'https' if self._settings.tls_certificate else 'http'}://{in_url(host)}:{port}"

    @property
    def model_name(self) -> str:
        return self._settings.model_name

    def start(self) -> None:
        """Returns when it answers. Raises EngineBuildError when it does not."""
        self._started_at = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "dspark_trt.server.openai", str(self._listener.fileno())],
            stdin=subprocess.PIPE,
            env=front_end_environment(),
            pass_fds=[self._listener.fileno()],
            start_new_session=True,  # a terminal's signals are for `serve`
        )
        assert self._process.stdin is not None, "a pipe was asked for"
        with contextlib.suppress(BrokenPipeError):  # it ended already: said below
            self._process.stdin.write(self._settings.model_dump_json().encode() + b"\n")
            self._process.stdin.flush()  # and stays open: its end is the child's
        deadline = time.monotonic() + _START_TIMEOUT_S
        while not self._answers():
            if self.has_died() or time.monotonic() > deadline:
                raise EngineBuildError(f"the front end at {self.url} does not answer; its messages are above")
            time.sleep(_POLL_S)
        self._prober = Prober(self._probe, *self._probing)

    def restart(self) -> None:
        """Start it again on the same socket, a while after the last start. Raises EngineBuildError as `start` does."""
        if self._process is not None:
            self._process.kill()  # one that hangs would not end by itself
        time.sleep(max(0.0, self._started_at + _MIN_LIFE_S - time.monotonic()))
        self.stop()
        try:
            self.start()
        except EngineBuildError:
            self.stop()
            raise

    def fault(self) -> str | None:
        """Why it can no longer serve; None while it can. Cheap: to be asked several times a second."""
        if self.has_died():
            return "its process ended"
        assert self._prober is not None, "a front end that was started is probed"
        return self._prober.fault()

    def has_died(self) -> bool:
        return self._process is None or self._process.poll() is not None

    def stop(self) -> None:
        """End the process; running requests get a few seconds. Safe to call twice."""
        if self._prober is not None:
            self._prober.close()
            self._prober = None
        if self._process is None:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        assert self._process.stdin is not None, "a pipe was asked for"
        self._process.stdin.close()
        self._process = None

    def _answers(self) -> bool:
        with contextlib.suppress(OSError):
            return self._ask(timeout_s=1.0) == 200
        return False

    def _probe(self) -> None:
        """Raises OSError when it does not answer. That it is full is an answer."""
        with contextlib.suppress(HTTPError):
            self._ask(timeout_s=self._probing[1])

    def _ask(self, timeout_s: float) -> int:
        context = ssl.create_default_context()
        context.check_hostname, context.verify_mode = False, ssl.CERT_NONE  # our own process, on this machine
        opener = urllib.request.build_opener(
            urllib.request.ProxyHandler({}), urllib.request.HTTPSHandler(context=context)
        )
        host = "[::1]" if self._listener.family == socket.AF_INET6 else "127.0.0.1"
        address = self._listener.getsockname()
        connect = host if address[0] in ("0.0.0.0", "::") else self.url.split("://")[1].rpartition(":")[0]
        url = f"{self.url.split('://')[0]}://{connect}:{address[1]}/v2/health/live"
        with opener.open(url, timeout=timeout_s) as answer:
            return int(answer.status)


@contextlib.contextmanager
def start_front_end(
    build_dir: Path,
    options: FrontEndOptions,
    *,
    grpc_address: str,
    metrics_url: str,
    default_timeout_s: float = DEFAULT_TIMEOUT_S,
    **probing: float,
) -> Iterator[FrontEndProcess]:
    """A front end that answers, for a server at `grpc_address`. Leaving the block ends it. `probing`: see
    `FrontEndProcess`.

    Raises EnvironmentMissingError when its packages are not installed, RecipeError for a port in use and for files that
    do not do, ManifestError for an unfinished build, EngineBuildError when it does not start.
    """
    check_packages()
    settings = make_settings(
        build_dir, options, grpc_address=grpc_address, metrics_url=metrics_url, default_timeout_s=default_timeout_s
    )
    with listen(options) as listener:
        front_end = FrontEndProcess(settings, listener, **probing)
        try:
            front_end.start()
            yield front_end
        finally:
            front_end.stop()


def check_front_end(build_dir: Path, options: FrontEndOptions) -> None:
    """Find what would keep a front end from starting before a server is started. Raises as `start_front_end`."""
    check_packages()
    make_settings(build_dir, options, grpc_address="", metrics_url="", default_timeout_s=DEFAULT_TIMEOUT_S)
    listen(options).close()


def check_packages() -> None:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    if missing:
        raise EnvironmentMissingError(
            f"--openai-port needs the packages {', '.join(missing)}, which are not installed; install them: "
            f"{install_extra('openai')}"
        )


def listen(options: FrontEndOptions) -> socket.socket:
    """Raises RecipeError for an address or a port that cannot be listened on."""
    try:
        family = family_of(options.address)
        return socket.create_server((options.address, options.port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        raise RecipeError(
            f"--openai-port: cannot listen on {options.address} port {options.port} ({error}); end what uses it, or "
            "choose another port (0: any free one)"
        ) from None
