"""When a fault was done, on the log's clock: its word is in the log later, and may come after that of its effect. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from . import events as ev


@dataclass
class FaultTimes:
    """Feed it each entry of a log in order."""

    _least_lag: dict[tuple[str, int], float] = field(default_factory=dict)
    """Emitter's life -> least seconds from its stamp to the log's (clock offset included): what is above that was spent on the way."""

    def feed(self, entry: ev.Entry) -> None:
        life, lag = (entry.source, entry.incarnation), entry.t - entry.at
        if lag < self._least_lag.get(life, float("inf")):
            self._least_lag[life] = lag

    def done(self, entry: ev.Entry, event: ev.FaultInjected) -> float:
        """When what the entry tells of was done, by the injector's proof. The entry has been fed."""
        late = entry.t - entry.at - self._least_lag[entry.source, entry.incarnation]
        return entry.t - late - float(event.proof.get("ago", 0.0))
