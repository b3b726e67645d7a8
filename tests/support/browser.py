"""Headless Chromium: what a page holds once its scripts have run."""

from __future__ import annotations

import shutil
import subprocess
import tempfile

NAMES = ("chromium", "chromium-browser", "google-chrome", "chromium-headless-shell")
_VIRTUAL_MS = 5000  # that its timers see; requests are waited for


def page_of(url: str, *options: str) -> str:
    """The document as the browser has it. `options`: of the browser, for example a file for a picture of the page."""
    browser = next((found for name in NAMES if (found := shutil.which(name))), None)
    assert browser is not None, "no Chromium: run `make test-packages`, or put one of these on PATH: " + ", ".join(
        NAMES
    )
    with tempfile.TemporaryDirectory() as folder:
        command = [
            browser,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--user-data-dir={folder}",
        ]
        command += ["--no-proxy-server", "--disable-background-networking", f"--virtual-time-budget={_VIRTUAL_MS}"]
        run = subprocess.run(
            [*command, *options, "--dump-dom", url], capture_output=True, text=True, timeout=120, check=True
        )
    return run.stdout
