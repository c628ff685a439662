"""Pool: the pages of this node, their slots, and who may write where."""
