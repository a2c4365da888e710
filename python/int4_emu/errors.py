"""The two error types of the package beside ValueError and TypeError."""

from __future__ import annotations


class CheckpointError(ValueError):
    """A checkpoint, its configuration or one of its tensors is missing, contradictory or unsafe."""


class BackendError(RuntimeError):
    """No backend can serve the request; the message holds every candidate's reason."""
