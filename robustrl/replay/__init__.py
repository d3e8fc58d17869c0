"""Recorded runs: read, replayed, and held against other detectors."""
