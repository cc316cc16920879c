"""Ways to move blocks between nodes, behind one `Transport` protocol."""
