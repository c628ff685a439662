"""`peercache doctor`: what this host offers, what is wrong with it, and the line that fixes it."""
