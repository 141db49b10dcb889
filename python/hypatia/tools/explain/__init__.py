"""A model explained: what was rewritten, why it is right, what it costs; as text, JSON or one HTML page."""

from .report import Report
from .run import explain

__all__ = ["Report", "explain"]
