"""Sweeps: experiments as configs, the cells of their tables, and the runs that make those."""
