"""What people look at: the views of a job, in a notebook and in a browser. Each reads a run's events and never asks a role.

Empty until the step that brings the live views.
"""
