"""Plain tools that know nothing of RezusCloud: child processes, supervised tasks, redaction."""
