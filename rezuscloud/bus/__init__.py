"""What is new: the child nats-server and the client that publishes and hears of changes."""
