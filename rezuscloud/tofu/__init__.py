"""The OpenTofu workshop: renders its input, runs it, and reads what it leaves behind."""
