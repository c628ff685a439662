"""The plain state of the disk tier: what lies where, what waits, who asks. No I/O, no clock."""
