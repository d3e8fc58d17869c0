"""Who a page belongs to, by the token that it was opened with. Pure.

Tokens are compared in constant time. A page without a valid token may look where the server allows that, and do nothing.
"""

from __future__ import annotations

import hmac
import ipaddress
import secrets
from dataclasses import dataclass, field

from robustrl.errors import ConfigError

from .commands import Right
from .words import cut, person

_PLACEHOLDERS = ("name", "yourname", "your name", "<name>", "name_here")


def _token() -> str:
    return secrets.token_urlsafe(18)


@dataclass(frozen=True)
class Access:
    """``open``: whoever reaches the address may look without a token."""

    open: bool
    instructor: str = field(default_factory=_token)
    student: str = field(default_factory=_token)
    viewer: str = field(default_factory=_token)

    @classmethod
    def at(cls, address: str, **tokens: str) -> Access:
        """Open on this machine's own address, closed on every other. Raises ConfigError for tokens that are short or the same."""
        access = cls(is_local(address), **{name: value for name, value in tokens.items() if value})
        for name in ("instructor", "student", "viewer"):
            value = getattr(access, name)
            if len(value) < 12 or not value.isascii():
                raise ConfigError(f"{name} token", "...", "must have at least 12 characters, ASCII ones")
        if len({access.instructor, access.student, access.viewer}) < 3:
            raise ConfigError("tokens", "...", "must differ from each other")
        return access

    def right(self, token: str) -> Right | None:
        """None: this page may not even look."""
        given = token.encode(errors="replace")
        found = {name: hmac.compare_digest(given, getattr(self, name).encode()) for name in ("instructor", "student", "viewer")}
        if found["instructor"]:
            return Right.INSTRUCTOR
        if found["student"]:
            return Right.STUDENT
        return Right.READ if found["viewer"] or (self.open and not token) else None


def is_local(address: str) -> bool:
    """Whether only this machine reaches it."""
    if address == "localhost":
        return True
    try:
        return ipaddress.ip_address(address).is_loopback
    except ValueError:
        return False


def in_url(address: str) -> str:
    """As it stands before a port: an IPv6 address in brackets, in the one spelling in which a browser names its origin."""
    try:
        return f"[{ipaddress.IPv6Address(address).compressed}]"
    except ValueError:
        return address


def student_name(arguments: dict[str, list[bytes]]) -> str:
    """Under which a student's faults stand. Empty: none was given, or what stood in its place in a printed address."""
    name = argument(arguments, "name", 40).strip()
    return "" if person(name) in ("", *_PLACEHOLDERS) else name


def argument(arguments: dict[str, list[bytes]], name: str, limit: int = 200) -> str:
    """Of a page's query; empty if it is missing."""
    values = arguments.get(name) or [b""]
    return cut(values[0][: 4 * limit].decode(errors="replace"), limit)
