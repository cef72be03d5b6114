"""What a run takes from its process and its disks; it knows nothing of what a run does."""
