"""The cellar: what is true. All SQL lives here."""
