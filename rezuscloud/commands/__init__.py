"""The server's own verbs: serve, render, rebuild, plugins."""
