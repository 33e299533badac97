"""Speculative decoding: acceptance rules, drafters and the step that joins them."""
