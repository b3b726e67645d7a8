"""The folder of one server: its repository, an empty place to run in, the socket of its engine model; a watchdog."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

from dspark_trt.packaging.model_repo import overlay_model_repo
from dspark_trt.server import watchdog
from dspark_trt.server.options import ServeOptions
from dspark_trt.steptable.table import StepTable


class RunFolder:
    """A private folder that goes away with `close`, or with the watchdog where this process is killed."""

    def __init__(
        self, build_dir: Path, options: ServeOptions, shared_memory_prefix: str, step_table: StepTable | None = None
    ) -> None:
        """`step_table`: to price steps by, in place of the build's own.

        Raises ManifestError when the build has no model repository.
        """
        self._folder = tempfile.TemporaryDirectory(prefix="dspark-trt-")
        self.path = Path(self._folder.name)
        self.repository, self.empty = self.path / "repository", self.path / "empty"
        self.control_socket = self.path / "engine"
        for folder in (self.repository, self.empty):
            folder.mkdir()
        table = self.path / "step_table.json"
        if step_table is not None:
            step_table.save(table)
        limits = {name: value for name, value in asdict(options.admission).items() if value is not None}
        try:
            overlay_model_repo(
                build_dir,
                self.repository,
                scheduler=options.scheduler,
                admission=json.dumps(limits),
                control_socket=str(self.control_socket),
                step_table="" if step_table is None else str(table),
                prefix_cache="" if options.prefix_cache is None else "on" if options.prefix_cache else "off",
            )
        except BaseException:
            self._folder.cleanup()
            raise
        self._watchdog = subprocess.Popen(
            [sys.executable, "-I", watchdog.__file__, shared_memory_prefix, str(self.path)],
            stdin=subprocess.PIPE,
            start_new_session=True,
        )

    def close(self) -> None:
        self._watchdog.communicate(b"done\n")
        self._folder.cleanup()
