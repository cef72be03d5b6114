"""What ``method=`` selects in FusionBench: the methods, and what they share.

They know FusionBench and no formulas.
"""
