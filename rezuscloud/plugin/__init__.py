"""The contract with guests. Plugins import from here and from nowhere else in RezusCloud."""
