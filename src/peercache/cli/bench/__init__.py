"""`peercache bench`: how fast pages move, compared with what the machine can do."""
