"""Recorded runs read again: other detectors on the same signals."""
