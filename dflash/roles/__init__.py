"""What each rank does: the loops of targets, drafters and a process in both roles, and what all of them share."""
