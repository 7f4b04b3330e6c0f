"""The demo: a real small model, two tasks, one command, no account and no GPU."""
