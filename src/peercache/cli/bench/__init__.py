"""`peercache bench`: how fast pages move, beside what the machine itself can do."""
