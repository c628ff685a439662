"""Files that earlier builds wrote, and the script that records new ones."""
