"""Training against a threat: strategies that give worst-case margins, schedules, and the one loop around them."""
