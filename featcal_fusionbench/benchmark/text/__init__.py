"""The embedded text benchmark: a small T5 and six task experts, made on the user's machine."""
