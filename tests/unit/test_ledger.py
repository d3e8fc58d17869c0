"""The ledger: started = consumed + dropped + in flight after every move, and no other move is possible."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from robustrl.core.ledger import Balance, Ledger, LedgerError, TrajectoryState


def test_the_way_of_a_trajectory() -> None:
    ledger = Ledger()
    ledger.start([1, 2, 3, 4])
    ledger.consume([2, 3])
    ledger.drop([4], "reward error")
    assert ledger.balance() == Balance(started=4, consumed=2, dropped={"reward error": 1}, in_flight=1)
    assert (ledger.started, ledger.consumed, ledger.dropped_by_reason, ledger.in_flight) == (4, 2, {"reward error": 1}, 1)
    assert ledger.open_ids() == [1]
    assert [ledger.state(i) for i in (1, 2, 4)] == [TrajectoryState.IN_FLIGHT, TrajectoryState.CONSUMED, TrajectoryState.DROPPED]


ILLEGAL = [
    (lambda ledger: ledger.start([5, 1]), "trajectory 1 cannot be in flight: it is in flight already"),
    (lambda ledger: ledger.start([2]), "trajectory 2 cannot be in flight: it is consumed already"),
    (lambda ledger: ledger.start([7, 7]), r"trajectories \[7\] would be in flight twice at once"),
    (lambda ledger: ledger.consume([1, 2]), "trajectory 2 cannot be consumed: it is consumed already"),
    (lambda ledger: ledger.consume([3]), "trajectory 3 cannot be consumed: it is dropped already"),
    (lambda ledger: ledger.consume([9]), "trajectory 9 cannot be consumed: it was never started"),
    (lambda ledger: ledger.consume([1, 1]), "twice at once"),
    (lambda ledger: ledger.drop([1, 2], "late"), "trajectory 2 cannot be dropped: it is consumed already"),
    (lambda ledger: ledger.drop([3], "late"), "trajectory 3 cannot be dropped: it is dropped already"),
    (lambda ledger: ledger.drop([9], "late"), "trajectory 9 cannot be dropped: it was never started"),
    (lambda ledger: ledger.state(9), "trajectory 9 was never started"),
]


@pytest.mark.parametrize(("move", "text"), ILLEGAL)
def test_an_illegal_move_raises_and_moves_nothing(move, text) -> None:
    ledger = Ledger()
    ledger.start([1, 2, 3])
    ledger.consume([2])
    ledger.drop([3], "early")
    before = ledger.balance()
    with pytest.raises(LedgerError, match=text):
        move(ledger)
    assert ledger.balance() == before and ledger.open_ids() == [1]


class Moves(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.ledger = Ledger()
        self.open: set[int] = set()
        self.ended: dict[int, str] = {}

    @rule(count=st.integers(0, 4))
    def start(self, count: int) -> None:
        ids = range(len(self.open) + len(self.ended), len(self.open) + len(self.ended) + count)
        self.ledger.start(ids)
        self.open.update(ids)

    @precondition(lambda self: self.open)
    @rule(data=st.data(), reason=st.sampled_from(["consumed", "late", "broken"]))
    def end(self, data: st.DataObject, reason: str) -> None:
        ids = data.draw(st.sets(st.sampled_from(sorted(self.open)), min_size=1))
        if reason == "consumed":
            self.ledger.consume(ids)
        else:
            self.ledger.drop(ids, reason)
        self.open -= ids
        self.ended.update(dict.fromkeys(ids, reason))

    @precondition(lambda self: self.ended)
    @rule(data=st.data())
    def end_again(self, data: st.DataObject) -> None:
        i = data.draw(st.sampled_from(sorted(self.ended)))
        for move in (lambda: self.ledger.consume([i]), lambda: self.ledger.drop([i], "again"), lambda: self.ledger.start([i])):
            with pytest.raises(LedgerError):
                move()

    @invariant()
    def balanced(self) -> None:
        balance = self.ledger.balance()
        assert balance.started == balance.consumed + sum(balance.dropped.values()) + balance.in_flight
        assert balance.in_flight == len(self.open) and set(self.ledger.open_ids()) == self.open
        reasons = list(self.ended.values())
        assert balance.consumed == reasons.count("consumed")
        assert balance.dropped == {reason: reasons.count(reason) for reason in set(reasons) - {"consumed"}}


TestMoves = Moves.TestCase
TestMoves.settings = settings(max_examples=30)
