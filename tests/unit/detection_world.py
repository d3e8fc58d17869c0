"""A job in virtual time, healthy or not, that writes the log which a real one would write: for tests of detection.

Everything is seeded and nothing waits: a minute of a job of ten roles takes a few milliseconds. To use it:

    world = World(Shape.draw(random.Random(7)), seed=7, thresholds=Thresholds.lab())
    world.plan(Fault("freeze", "trainer-0", at=12.0, phase="train"))
    world.run(40.0)
    world.injected      [(time, fault)]: what was really hit, and when
    world.verdicts      what was said, in order (robustrl.core.events.Verdict)
    world.entries       the log

Or as data: `Scenario` says what is done, what must be said, about whom and by when; `run_scenario` gives what was wrong, as sentences.

The job: rollouts generate a batch of trajectories (some with tool turns), then the trainer ranks train on it: advantage, train
(micro-batches), optimizer (all ranks meet there), snapshot, publish; the rollouts pull the new version while they go on. Batch b may be
generated once step b - 1 - staleness is committed. Management roles have a loop that turns. On node-0: host and management; node-1: trainer
ranks and state keeper; node-2 and node-3: rollouts. Each node has a node_agent with a clock of its own that looks at its roles every 0.1 s,
with jitter, through the same `Sampler` as the real one. Words between processes take a few milliseconds. All is ready at about 3 s.

Faults (`Fault(kind, role, at, seconds, phase, size, step, after)`; ``seconds``: how long, None for ever; ``phase``: wait until the role is
in it):

    kill         its process dies                       exit        the same, by itself, with status 0
    exception    the role says what went wrong, exits   non_finite  a loss that is no number (trainer), then exit
    freeze       SIGSTOP; also for "host", "supervisor", "node_agent-0"
    wedge        the work loop is stuck in Python, the process is alive and busy (trainer: in its learner, no more marks)
    hang         the work waits for something that does not come: idle, the control loop turns
    dry          a rollout's loop turns and answers, but makes no tokens
    slow         ``size`` times slower                  lag         the event loop is blocked ``seconds`` (management)
    node_loss    role: a node; all on it ends, the host learns it a little later
    late_start   role: is never ready (at=0 only)       peer_gone   another role loses its UCX connection to this one
    lost_group   the rollout manager loses a trajectory for good
    late_word    words about the life before this one arrive only now: its exit, a broken connection, an error, an answer

and what is benign:

    long_phase   the next ``phase`` (advantage, optimizer, snapshot, publish, train) of a rank takes ``seconds`` more
    long_token   a rollout needs ``seconds`` for its next token, its loop turns meanwhile
    compile      the first engine step, or first micro-batch, takes ``seconds`` more (at=0 only); the loop of a rollout does not turn
    slow_tool    tools take ``seconds``                 slow_pull   the next pull takes ``seconds`` more
    idle         a rollout gets no work                 pause       by the user
    slow_disk    the next checkpoint of the state keeper takes ``seconds`` more
    offset       role: a node; its clock is ``size`` seconds off (at=0 only)
    starved      role: a node agent that looks only every ``size`` seconds

A world with ``restarts`` starts a role anew, with the next incarnation, after it was called failed (a trainer rank: all ranks).
"""

from __future__ import annotations

from world_job import World
from world_scenario import Must, Scenario, run_scenario
from world_shape import Fault, Shape

__all__ = ["Fault", "Must", "Scenario", "Shape", "World", "run_scenario"]
