"""Pool: the pages of this node, their slots, and the reservations of clients."""
