"""`plan`: which documents make a step, and its totals. `run`: forward, backward, clip and update of one plan."""
