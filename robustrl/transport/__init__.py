"""The UCX weight plane: serve, pull, relay and check weight versions; and vLLM's weight-transfer backend ``ucx``.

Weights are neither encrypted nor signed on their way: both ends prove that they know the job's secret, and checksums guard against
damage, not against somebody who can alter packets. Run it on a network that you trust.
"""
