"""What is trained and how: tasks, rewards, GRPO, the learner and the bundled tiny model. Knows nothing of roles' processes or of Ray.

Importing this package, ``tasks``, ``rewards``, ``models`` and ``trajectory`` is light; torch comes with ``grpo`` and ``learner``.
"""
