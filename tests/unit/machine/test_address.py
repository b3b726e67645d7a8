"""What `--address` takes, and how each endpoint is told."""

from __future__ import annotations

import pytest

from dspark_trt.errors import RecipeError
from dspark_trt.machine.address import in_url, resolve_address


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("localhost", "127.0.0.1"),
        ("127.0.0.1", "127.0.0.1"),
        ("0.0.0.0", "0.0.0.0"),
        ("::1", "::1"),
        ("[::1]", "::1"),
        ("::", "::"),
        ("0:0:0:0:0:0:0:1", "::1"),
        ("::ffff:127.0.0.1", "127.0.0.1"),
        ("2001:db8::00:1", "2001:db8::1"),
    ],
)
def test_address_becomes_a_number_in_its_shortest_form(text: str, address: str) -> None:
    assert resolve_address(text) == address


@pytest.mark.parametrize("text", ["no.such.host.invalid", "1.2.3.4.5", ":::1", "x" * 300, "fe80::1"])
def test_what_no_endpoint_can_bind_to_is_refused(text: str) -> None:
    with pytest.raises(RecipeError, match=r"--address .*give "):
        resolve_address(text)


def test_a_refusal_names_the_option_that_was_given() -> None:
    with pytest.raises(RecipeError, match=r"^--metrics-address no.such.host.invalid: "):
        resolve_address("no.such.host.invalid", "--metrics-address")


def test_ipv6_stands_in_brackets_before_a_port() -> None:
    assert (in_url("::1"), in_url("127.0.0.1")) == ("[::1]", "127.0.0.1")
