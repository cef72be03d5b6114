"""What users' data may look like, and which inputs are drawn from it."""
