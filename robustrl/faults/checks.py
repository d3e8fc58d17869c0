"""What the fields of faults and schedules are checked with: each value is taken, in its plain form, or refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgspec

from ..core.thresholds import MOST_SECONDS, plain_number
from ..errors import ConfigError, no_such

MOST_STEPS = 10**9
"""As many as a job's configuration allows."""
MOST_SEED = 2**63 - 1


class Checked(msgspec.Struct, frozen=True):
    """``_number`` and the others take the field's value, and put its plain form in its place."""

    @property
    def name(self) -> str:
        return str(self.__struct_config__.tag)

    def _number(self, field: str, *, least: float = 0.0, most: float = MOST_SECONDS, what: str = "a finite number of seconds") -> None:
        value = self._plain(field)
        if type(value) not in (int, float) or not least <= value <= most:
            raise self._wrong(field, value, f"must be {what}, at least {least:g} and at most {most:.10g}")

    def _whole(self, field: str, allowed: str, *, least: int, most: int, none: bool = False) -> None:
        value = self._plain(field)
        if value is None and none:
            return
        if type(value) is not int or not least <= value <= most:
            raise self._wrong(field, value, f"must be {allowed}, from {least} on and at most {most}")

    def _flags(self, *fields: str) -> None:
        for field in fields:
            if type(value := getattr(self, field)) is not bool:
                raise self._wrong(field, value, "must be True or False")

    def _texts(self, **allowed: str) -> None:
        for field, what in allowed.items():
            if not isinstance(value := getattr(self, field), str):
                raise self._wrong(field, value, f"must be {what}, as text")
            msgspec.structs.force_setattr(self, field, str(value))

    def _plain(self, field: str) -> Any:
        value = plain_number(getattr(self, field))
        msgspec.structs.force_setattr(self, field, value)
        return value

    def _wrong(self, field: str, value: object, allowed: str) -> ConfigError:
        return ConfigError(f"{self.name}.{field}", value, allowed)


def named(values: Any, key: str, kinds: Mapping[str, type], example: str) -> str:
    """The kind that plain ``values`` name. Raises ConfigError."""
    if not isinstance(values, Mapping):
        raise ConfigError(key, values, f"must be its settings by name, e.g. {example}")
    name = values.get(key)
    if not isinstance(name, str) or name not in kinds:
        raise ConfigError(key, name, f"must be one of {', '.join(kinds)}")
    return str(name)


def settings_of(values: Mapping[str, Any], kind: type[Checked], name: str) -> dict[str, Any]:
    """Plain ``values`` without the name of their kind. Raises ConfigError for one that is no setting of it."""
    fields, tag = kind.__struct_fields__, str(kind.__struct_config__.tag_field)
    given = plain_values({field: value for field, value in values.items() if field != tag}, name)
    for field, value in given.items():
        if field not in fields:
            raise ConfigError(f"{name}.{field}", value, no_such(str(field), fields))
    return given


def made_of(kind: type[Any], given: Mapping[str, Any]) -> Any:
    """What is missing is refused in the words of the field's own check."""
    needed = {field.name: None for field in msgspec.structs.fields(kind) if field.required}
    return kind(**needed | dict(given))


def placed(make: Callable[[Any], Any], values: Any, place: str) -> Any:
    """``make(values)``; what it refuses is refused with the place where it was found."""
    try:
        return make(values)
    except ConfigError as error:
        raise ConfigError(f"{place}: {error.field}", error.value, error.allowed) from None


def plain_values(values: Mapping[str, Any], name: str) -> dict[str, Any]:
    """As they would be read from a file. Raises ConfigError for what no file could hold."""
    plain = {}
    for field, value in values.items():
        try:
            plain[field] = msgspec.to_builtins(value, enc_hook=_own_number)
        except TypeError:
            allowed = "must be made of plain values: numbers, texts, lists and settings by name"
            raise ConfigError(f"{name}.{field}", value, allowed) from None
    return plain


def _own_number(value: Any) -> Any:
    if (plain := plain_number(value)) is value:
        raise TypeError(type(value).__name__)
    return plain
