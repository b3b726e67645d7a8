"""What the front end is told: by a person (FrontEndOptions), and by `serve` to its child process (FrontEndSettings)."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict

from dspark_trt.building.finished import read_finished
from dspark_trt.checkpoints.spec_json import read_draft_source
from dspark_trt.errors import RecipeError
from dspark_trt.serving.limits import MAX_JSON_BYTES, max_prompt_bytes

MAX_JSON_DEPTH = 64
MAX_CHOICES = 32  # of one request: n for each prompt
MAX_HEADER_BYTES = 32 * 1024
MAX_CONNECTIONS = 1024
HEADER_TIMEOUT_S = 10.0  # from the first byte of a request, or of a connection, to the end of its headers
BODY_TIMEOUT_S = 30.0
SEND_TIMEOUT_S = 60.0  # that a client takes to read what is sent; then it counts as gone
DEFAULT_TIMEOUT_S = 3600.0
_ESCAPED = 6  # bytes of JSON for one of text, at most
_KEY_CHARACTERS = range(8, 513)


@dataclass(frozen=True, slots=True)
class FrontEndOptions:
    """How the front end is reached. A port of 0 takes any free one."""

    port: int = 9000
    address: str = "127.0.0.1"
    model_name: str | None = None  # what clients call the model; None: the name of the build's folder
    api_key_file: Path | None = None  # one key a line; None: no key is asked for
    tls_certificate: Path | None = None  # PEM, with its chain
    tls_key: Path | None = None


def front_end_options(
    port: int | None,
    model_name: str | None,
    api_key_file: Path | None,
    tls_certificate: Path | None,
    tls_key: Path | None,
) -> FrontEndOptions | None:
    """What the command line says; None without a port. Raises RecipeError for options that then mean nothing."""
    others = {
        "--served-model-name": model_name,
        "--api-key-file": api_key_file,
        "--tls-certificate": tls_certificate,
        "--tls-key": tls_key,
    }
    if port is not None:
        return FrontEndOptions(port, "127.0.0.1", model_name, api_key_file, tls_certificate, tls_key)
    if given := [name for name, value in others.items() if value is not None]:
        raise RecipeError(
            f"{', '.join(given)}: expected with --openai-port only; add it, for example --openai-port 9000"
        )
    return None


class FrontEndSettings(BaseModel):
    """All that the child process needs; it reads this as JSON from its standard input."""

    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())

    grpc_address: str
    metrics_url: str
    model_name: str
    engine_model_name: str
    tokenizer_folder: Path
    max_seq_len: int
    gamma: int
    default_timeout_s: float  # of a request without `timeout_ms`
    api_keys: tuple[str, ...] = ()
    tls_certificate: Path | None = None
    tls_key: Path | None = None

    @property
    def max_body_bytes(self) -> int:
        """Whatever the engines could use fits, however its text is escaped."""
        return _ESCAPED * max_prompt_bytes(self.max_seq_len) + 4 * MAX_JSON_BYTES


def make_settings(
    build_dir: Path, options: FrontEndOptions, *, grpc_address: str, metrics_url: str, default_timeout_s: float
) -> FrontEndSettings:
    """The settings for one build. Raises ManifestError for an unfinished one, RecipeError for files that do not do."""
    if (options.tls_certificate is None) != (options.tls_key is None):
        raise RecipeError("--tls-certificate, --tls-key: expected both or neither, found one; give the other one too")
    for name, path in (("--tls-certificate", options.tls_certificate), ("--tls-key", options.tls_key)):
        if path is not None and not path.is_file():
            raise RecipeError(f"{name}: expected a PEM file, found none at {path}")
    summary, stages = read_finished(build_dir)
    checkpoints = build_dir.resolve() / "checkpoints"
    return FrontEndSettings(
        grpc_address=grpc_address,
        metrics_url=metrics_url,
        default_timeout_s=default_timeout_s,
        model_name=options.model_name or build_dir.resolve().name,
        engine_model_name=summary.recipe.engine_model_name,
        tokenizer_folder=checkpoints / "tokenizer",
        max_seq_len=int(stages["graphs"].settings["limits"]["max_seq_len"]),
        gamma=read_draft_source(build_dir).gamma,
        api_keys=() if options.api_key_file is None else read_api_keys(options.api_key_file),
        tls_certificate=options.tls_certificate,
        tls_key=options.tls_key,
    )


def read_api_keys(path: Path) -> tuple[str, ...]:
    """The keys of a file, one a line, # for comments. Where there are several, one can be replaced by another."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError(f"--api-key-file: cannot read {path} ({error}); give a text file, one key a line") from None
    keys = tuple(line for line in lines if line and not line.startswith("#"))
    if not keys:
        raise RecipeError(f"--api-key-file: expected one key a line in {path}, found none")
    for number, key in enumerate(keys, 1):
        if len(key) not in _KEY_CHARACTERS or not key.isascii() or not key.isprintable() or " " in key:
            raise RecipeError(
                f"--api-key-file: key {number} of {path}: expected {_KEY_CHARACTERS.start} to {_KEY_CHARACTERS[-1]} "
                f"printable ASCII characters without spaces, found {len(key)}; make one: openssl rand -hex 32"
            )
    return keys
