"""Turns a torch step into a `Program`: AOTAutograd's forward and backward graphs, lowered, merged and timed."""
