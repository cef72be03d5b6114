"""The embedded image benchmark: a small CLIP and seven task experts, made on the user's machine."""
