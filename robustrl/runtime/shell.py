"""The Ray actor of every role: a process with one role in it, whose place another role can take while the process goes on.

That is how a warm standby, or a rollout, becomes a trainer: what was imported and built stays. Every call says which life of which role it
is meant for; one for a life that has left this process is answered with `NotHere`, as if that life had died.
"""

from __future__ import annotations

import asyncio
import importlib
from typing import Any

from ..core.roles import RoleId
from .role import NotHere, Role, RoleSpec


class Shell:
    def __init__(self, spec: RoleSpec) -> None:
        self._role = _make(spec)

    async def identity(self) -> dict[str, Any]:
        """Who this process is; see Role."""
        return await self._role.identity()

    async def lifetime(self) -> None:
        """Never returns: whoever awaits it learns at once that the process ended."""
        await asyncio.Event().wait()

    async def invoke(self, role: str, incarnation: int, method: str, *args: Any, **kwargs: Any) -> Any:
        """A call to this life of this role. Raises NotHere, or what the method raises."""
        spec = self._role.spec
        if (spec.role, spec.incarnation) != (role, incarnation):
            raise NotHere(role, incarnation, spec.role)
        return await getattr(self._role, method)(*args, **kwargs)

    async def take_over(self, spec: RoleSpec) -> dict[str, Any]:
        """The role that is here ends, and the one of ``spec`` begins with what it leaves behind. Returns the identity."""
        left = await self._role.retire()
        self._role = await asyncio.to_thread(_make, spec)
        self._role.inherited = left
        return await self._role.identity()


def shell_of(spec: RoleSpec) -> type[Shell]:
    """For this kind of role: Ray shows the class's name as that of the process."""
    return type(RoleId.parse(spec.role).kind.value.title().replace("_", ""), (Shell,), {})


def _make(spec: RoleSpec) -> Role:
    kind = RoleId.parse(spec.role).kind.value
    role: Role = getattr(importlib.import_module(f"{__package__}.{kind}"), kind.title().replace("_", ""))(spec)
    return role
