"""One file a verb, or a family of verbs."""
