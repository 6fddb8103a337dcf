"""The annexe: `rezusctl`. It talks HTTP to a server and imports nothing heavy, so that it starts at once."""
