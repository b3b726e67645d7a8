"""The address that a server binds to, as every one of its endpoints understands it."""

from __future__ import annotations

import ipaddress
import socket

from dspark_trt.errors import RecipeError


def resolve_address(text: str, option: str = "--address") -> str:
    """The address in numbers, IPv4 where a name has both. Triton's HTTP endpoint takes a name for 255.255.255.255.

    `option`: what a person gave it to. Raises RecipeError for a name that is unknown here, and for an address of one
    link, such as fe80::1%eth0.
    """
    try:
        found = socket.getaddrinfo(text.strip("[]"), None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise RecipeError(
            f"{option} {text}: no address is known for it ({error}); give one such as 127.0.0.1 or ::1, or 0.0.0.0 or "
            ":: for all"
        ) from None
    addresses = [ipaddress.ip_address(str(entry[4][0])) for entry in found]
    first = next((address for address in addresses if address.version == 4), addresses[0])
    if isinstance(first, ipaddress.IPv6Address):
        if first.scope_id is not None or first.is_link_local:
            raise RecipeError(
                f"{option} {text}: expected an address that does not depend on a link, which Triton cannot be told; "
                "give another address of this machine, or :: for all"
            )
        first = first.ipv4_mapped or first
    return str(first)


def is_ipv6(address: str) -> bool:
    """Of an address in numbers."""
    return ":" in address


def in_url(address: str) -> str:
    """An address in numbers as it stands before a port."""
    return f"[{address}]" if is_ipv6(address) else address


def family_of(address: str) -> socket.AddressFamily:
    return socket.AF_INET6 if is_ipv6(address) else socket.AF_INET
