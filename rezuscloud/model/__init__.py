"""Plain data: what resources look like. Imports nothing of ours and does no I/O."""
