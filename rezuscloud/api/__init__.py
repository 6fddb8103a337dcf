"""The window for machines: JSON over HTTP."""
