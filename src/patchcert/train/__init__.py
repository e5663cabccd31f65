"""Training against a threat: strategies for worst-case margins, schedules, and the one loop around them."""
