"""The hallway: identity, errors and streams between sockets and the desk."""
