"""Measurements behind the format's choices and the figures in the documentation."""
