"""Rollout engines behind one small interface (base.py): ``vllm``, the real one, and ``torch``, a plain reference loop."""
