"""The embedded benchmarks, made on the user's machine: a small CLIP or T5 and its task experts.

Run ``python -m featcal_fusionbench.benchmark [image|text]``. Nothing is imported here, so that
importing the package stays cheap and FusionBench is only loaded after the transformers shim is in
place.
"""
