"""deploy/nginx.conf as a whole configuration for one process without rights, with the addresses of a test."""

from __future__ import annotations

import subprocess
import time
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

_AROUND = """\
daemon off;
worker_processes 1;
pid {folder}/pid;
error_log stderr;
events {{ worker_connections 512; }}
http {{
    access_log off;
    client_body_temp_path {folder}/body;
    proxy_temp_path {folder}/proxy;
    fastcgi_temp_path {folder}/fastcgi;
    uwsgi_temp_path {folder}/uwsgi;
    scgi_temp_path {folder}/scgi;
    include {folder}/site.conf;
}}
"""


def configured(site: Path, folder: Path, replaced: Mapping[str, str]) -> Path:
    """The configuration's file. Each text of `replaced` must stand in `site`."""
    text = site.read_text()
    for old, new in replaced.items():
        assert old in text, old
        text = text.replace(old, new)
    (folder / "site.conf").write_text(text)
    path = folder / "nginx.conf"
    path.write_text(_AROUND.format(folder=folder))
    return path


@contextmanager
def running(nginx: Path, folder: Path, configuration: Path, health_url: str) -> Iterator[subprocess.Popen[bytes]]:
    """nginx, from the first answer that comes through it on."""
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen([nginx, "-p", folder, "-c", configuration], stderr=log)
    try:
        deadline = time.monotonic() + 20
        while not _answers(health_url):
            assert process.poll() is None, (folder / "log").read_text()
            assert time.monotonic() < deadline, (folder / "log").read_text()
            time.sleep(0.05)
        yield process
    finally:
        process.terminate()
        process.wait(10)


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=10) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False
