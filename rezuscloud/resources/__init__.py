"""The desk: which kinds exist, the one door through which they change, and the watch over those changes."""
