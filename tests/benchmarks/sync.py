"""How fast a version reaches the rollouts, and what a death in the middle costs: UCX pulls beside gloo, a Ray store and ucx_perftest.

First the table that says why weights move point to point: a receiver is killed in the middle of a sync. Then the fan-out through relays
against a star, then the throughput of one pull. Ratios are between figures of one row, measured in turns; seconds are medians.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Sequence

from tests.benchmarks._report import Bench, Row
from tests.benchmarks._sync_ours import Fleet
from tests.benchmarks._sync_peers import GLOO_SECONDS, SETTINGS, Gloo, RayStore, perftest

RECEIVERS = (2, 4, 8)
MIB = 2**20
SMALL, LARGE = 128 * MIB, 512 * MIB
"""Bytes of a copy in the fan-out, and in the other rows: half way must not be over before it is noticed."""
REPEATS = 5
WARM_UP = 2
"""Rounds: a puller lands in two buffers in turns, and the first touch of a page costs more than its copy."""
_ROWS = [*(f"death-{count}" for count in RECEIVERS), *(f"fanout-{count}" for count in RECEIVERS), "shm", "tcp"]


def spread(values: list[float]) -> dict[str, float]:
    return {"median": statistics.median(values), "min": min(values), "max": max(values)}


def times(other: list[float], ours: list[float]) -> float:
    """Ratio of the medians; less than a millisecond counts as one."""
    return max(1e-3, statistics.median(other)) / max(1e-3, statistics.median(ours))


def struck(sync: Callable[[], float], sync_with_death: Callable[[int, float], float | None], victim: int) -> float:
    """Seconds from the death of a receiver (0 is the first) half way until the survivors hold the version.

    Half way is by the time of an undisturbed sync, the third, as a puller has two buffers. If the sync is over by then nobody dies, and the
    next try strikes after half of that time.
    """
    half = [sync() for _ in range(3)][-1] / 2
    while (seconds := sync_with_death(victim, half)) is None:
        half /= 2
    return seconds


def death(receivers: int) -> Row:
    """A receiver, each time another one, is killed half way (by the time of an undisturbed sync); seconds from then until all survivors
    hold the version."""
    ours, gloo, store = [], [], []
    for trial in range(REPEATS):
        victim = trial % receivers
        with Fleet("shm", LARGE, receivers, relay=True) as fleet:
            ours.append(struck(lambda: fleet.sync()["seconds"], fleet.sync_with_death, victim))
        with Gloo(LARGE, receivers) as group:
            gloo.append(struck(group.broadcast, group.broadcast_with_death, victim))
        with RayStore(LARGE, receivers) as ray_store:
            store.append(struck(ray_store.sync, ray_store.sync_with_death, victim))
    return {"receivers": receivers, "bytes": LARGE, "ucx_s": spread(ours), "gloo_s": spread(gloo), "ray_s": spread(store),
            "gloo_timeout_s": GLOO_SECONDS,
            "gloo_over_ucx": times(gloo, ours), "ray_over_ucx": times(store, ours)}


def fanout(receivers: int) -> Row:
    """One source to all: through relays, and all from the source at once; in turns."""
    with Fleet("shm", SMALL, receivers, relay=True) as fleet:
        fleet.sync()
        both = [(fleet.sync(), fleet.sync(star=True)) for _ in range(REPEATS)]
    relays, star = zip(*both, strict=True)
    return {"receivers": receivers, "bytes": SMALL, "relays_s": spread([one["seconds"] for one in relays]),
            "star_s": spread([one["seconds"] for one in star]), "copies_sent": max(one["copies"] for one in relays),
            "star_copies_sent": max(one["copies"] for one in star)}


def one_pull(transport: str) -> Row:
    """GiB/s of one receiver's pull of 512 MiB and of what it is compared with: all in turns, as the machine's speed changes by the minute.

    Ratios are medians over the rounds of the ratio within a round.
    """
    gib = LARGE / 2**30
    settings = SETTINGS[transport]
    rates: dict[str, list[float]] = {}
    cpu: dict[str, list[float]] = {"source_cpu": [], "puller_cpu": []}
    with RayStore(LARGE, 1) as store, Gloo(LARGE, 1) as group, Fleet(transport, LARGE, 1, checked=False) as raw, \
            Fleet(transport, LARGE, 1) as checked, Fleet(transport, LARGE, 1, tensors=200) as model:
        for number in range(WARM_UP + REPEATS):
            found = {name: perftest(values, 64 * MIB, LARGE // (64 * MIB)) for name, values in settings.items()}
            syncs = {"raw": raw.sync(), "checked": checked.sync(), "model": model.sync()}
            found |= {name: gib / sync["seconds"] for name, sync in syncs.items()}
            found |= {"gloo": gib / group.broadcast(), "ray": gib / store.sync()}
            if number >= WARM_UP:
                for name, rate in found.items():
                    rates.setdefault(name, []).append(rate)
                for name, values in cpu.items():
                    values.append(syncs["checked"][name] / gib)
    best = max(settings, key=lambda name: statistics.median(rates[name]))

    def ratio(name: str, other: str) -> float:
        return statistics.median(mine / theirs for mine, theirs in zip(rates[name], rates[other], strict=True))

    return {
        "transport": transport, "bytes": LARGE, "perftest": spread(rates[best]), "perftest_settings": best,
        **{name: spread(rates[name]) for name in ("raw", "checked", "model", "gloo", "ray")},
        "raw_over_perftest": ratio("raw", best), "checked_over_perftest": ratio("checked", best),
        "checked_over_gloo": ratio("checked", "gloo"), "checked_over_ray": ratio("checked", "ray"), "raw_over_gloo": ratio("raw", "gloo"),
        **{f"{name}_s_per_gib": statistics.median(values) for name, values in cpu.items()},
    }


def measure(row: str) -> Row:
    kind, _, count = row.partition("-")
    return death(int(count)) if kind == "death" else fanout(int(count)) if kind == "fanout" else one_pull(row)


def judge(bench: Bench) -> None:
    for transport, raw, checked in (("shm", 0.9, 0.5), ("tcp", 0.75, 0.6)):
        bench.target(f"{transport}: raw pull over the best ucx_perftest", ">=", raw, [transport], _only("raw_over_perftest"))
        for peer, goal in (("perftest", checked), ("gloo", 2.0), ("ray", 1.0)):
            name = f"{transport}: checked and committed pull over {peer}"
            bench.target(name, ">=", goal, [transport], _only(f"checked_over_{peer}"))
    bench.target("copies that the source sends to eight receivers", "<=", 2.0, ["fanout-8"], _only("copies_sent"))
    for count in RECEIVERS:
        name = f"time from a death until {count - 1} survivors hold the version, gloo over ours"
        bench.target(name, ">=", 1.0, [f"death-{count}"], _only("gloo_over_ucx"))


def _only(key: str) -> Callable[[list[Row]], float]:
    return lambda rows: rows[0][key]


def main(argv: Sequence[str]) -> int:
    return Bench("sync", _ROWS, measure).run(argv, judge)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
