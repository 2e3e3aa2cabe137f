"""Learning from groups: advantages, packing, objective, optimizer and the update itself."""
