"""The embedded image benchmark: a small CLIP, seven task experts, made on the user's machine.

Run ``python -m featcal_fusionbench.benchmark``. Nothing is imported here, so that importing the
package stays cheap and FusionBench is only loaded after the transformers shim is in place.
"""
