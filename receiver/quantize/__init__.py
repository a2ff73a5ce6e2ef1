"""Schemes that turn checkpoint tensors into the tensors an engine holds.

Importing this package does not import torch; ``make_scheme`` does.
"""

from receiver.quantize.base import Scheme, TensorSpec, make_scheme, register_scheme, scheme_names

__all__ = ["Scheme", "TensorSpec", "make_scheme", "register_scheme", "scheme_names"]
