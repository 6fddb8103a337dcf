"""Owns how a command of the server fails: exit code 1 and one message that says what to do."""

import asyncclick as click


class Failure(click.ClickException):
    """Ends the command with exit code 1."""
