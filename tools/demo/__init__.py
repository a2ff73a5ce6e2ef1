"""A small language model, trained and served for real, to show the product at work."""
