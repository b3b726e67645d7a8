"""The address that a server binds to, as every one of its endpoints understands it."""

from __future__ import annotations

import ipaddress
import socket

from dspark_trt.errors import RecipeError


def resolve_address(text: str) -> str:
    """The IPv4 address in numbers. A name given to Triton's HTTP endpoint as it is would bind to 255.255.255.255.

    Raises RecipeError for IPv6, which Triton's endpoints spell in three ways, and for a name that is unknown here.
    """
    try:
        is_ipv6 = ipaddress.ip_address(text.strip("[]")).version == 6
    except ValueError:
        is_ipv6 = False
    if is_ipv6:
        raise RecipeError(
            f"--address {text}: expected an IPv4 address or a name that has one, found IPv6; bind to 127.0.0.1 and "
            f"put a proxy "
            "before it, or to 0.0.0.0"
        )
    try:
        return str(socket.getaddrinfo(text, None, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except (OSError, UnicodeError) as error:
        raise RecipeError(
            f"--address {text}: no IPv4 address is known for it ({error}); give one such as 127.0.0.1, or 0.0.0.0 "
            f"for all"
        ) from None
