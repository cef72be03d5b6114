"""A pool's models: what their files and adapters hold, checked, and as mergers see them."""
