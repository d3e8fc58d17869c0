"""How a picture travels: a keyframe, and the difference of the present picture from it. Pure.

A difference is a JSON merge patch (RFC 7396): nested objects by key, null for what is gone, all else replaced. It is always against the
keyframe, never against the last difference, so whoever has the keyframe and any later difference has the whole picture: pages reload, join
late and miss messages without a protocol. A new keyframe comes when differences have grown so much that it is the cheaper one.
"""

from __future__ import annotations

from typing import Any

import msgspec

_SCALE = 4096
"""Bytes. A difference may grow to the geometric mean of this and the keyframe, which keeps what is sent in all near its least."""
_encode = msgspec.json.Encoder().encode


def difference(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    """The merge patch that makes ``new`` of ``old``. Empty: they are equal."""
    patch: dict[str, Any] = {key: None for key in old if key not in new and old[key] is not None}
    for key, value in new.items():
        before = old.get(key)
        if isinstance(value, dict) and isinstance(before, dict):
            if inner := difference(before, value):
                patch[key] = inner
        elif value != before or type(value) is not type(before):
            patch[key] = value
    return patch


def merged(old: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    """What the pages do, for tests."""
    new = dict(old)
    for key, value in patch.items():
        if value is None:
            new.pop(key, None)
        elif isinstance(value, dict):
            before = new.get(key)
            new[key] = merged(before if isinstance(before, dict) else {}, value)
        else:
            new[key] = value
    return new


class Channel:
    """One view's picture on its way. ``full`` and ``delta``, both JSON texts, are what a page needs, at any time."""

    def __init__(self) -> None:
        self.full, self.delta = "{}", "{}"
        self._key = self._number = self._room = 0
        self._picture: dict[str, Any] = {}
        self._patch: dict[str, Any] = {}
        self._speed, self._now = 1.0, 0.0

    def push(self, picture: dict[str, Any], now: float, speed: float) -> str:
        """Takes the present picture; says what has to be sent: ``full`` (and delta), ``delta``, or nothing."""
        patch = difference(self._picture, picture)
        still = speed > 0 or round(now, 3) == self._now  # where time stands still, only a message says that it was wound
        same = self._key > 0 and patch == self._patch and speed == self._speed and still
        encoded = b"{}" if same else _encode(patch)
        renew = not self._key or len(encoded) > self._room
        if renew:
            full = _encode({"key": self._key + 1, "picture": picture})
            self._key, self._picture, patch, self.full = self._key + 1, picture, {}, full.decode()
            self._room = int((_SCALE * len(full)) ** 0.5)
        self._patch, self._speed, self._now, self._number = patch, speed, round(now, 3), self._number + 1
        message = {"key": self._key, "n": self._number, "now": self._now, "speed": speed, "patch": patch}
        self.delta = _encode(message).decode()
        return "full" if renew else "" if same else "delta"
